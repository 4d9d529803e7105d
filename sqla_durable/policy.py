"""What an exception means for its run: to be tried again, and when, or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, cast

from sqla_durable.causes import leaves
from sqla_durable.exc import DurableError, RetryableError
from sqla_durable.retry import LONGEST, Retry, RetryPolicy


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a failure is retryable, and after which delay where that was named."""

    retryable: bool
    delay: timedelta | None = None


FINAL: Final = Verdict(retryable=False)
RETRYABLE: Final = Verdict(retryable=True)


def judge(retry: Retry, error: BaseException, known: Mapping[int, Verdict]) -> Verdict:
    """Decide about an exception by what is in it: a group is retryable where each of its leaves is.

    :param known: what was decided before, by the identity of the exception it was decided about.
    """
    verdicts = [known.get(id(leaf)) or judge_one(retry, leaf) for leaf in leaves(error)]
    if not all(verdict.retryable for verdict in verdicts):
        return FINAL
    return Verdict(
        retryable=True, delay=max((verdict.delay for verdict in verdicts if verdict.delay is not None), default=None)
    )


def judge_one(retry: Retry, error: BaseException) -> Verdict:
    """Decide about one exception.

    An error of ours that is not retryable stays so whatever ``on`` says: a lost lease, an error of use or a step's
    recorded failure would only be met again.
    """
    ours = isinstance(error, RetryableError)
    if not isinstance(error, Exception) or (isinstance(error, DurableError) and not ours):
        return FINAL
    kinds = retry.kinds
    said = _asked(cast(RetryPolicy, retry.on), error) if kinds is None else Verdict(isinstance(error, kinds))
    return RETRYABLE if ours and not said.retryable else said


def clamped(delay: timedelta) -> timedelta:
    """Return a delay that PostgreSQL can add to the present, and that does not lie in the past."""
    return min(max(delay, timedelta(0)), LONGEST)


def _asked(policy: RetryPolicy, error: Exception) -> Verdict:
    """Ask the user's callable; where it fails, the failure it was asked about is final and says so."""
    try:
        answer = cast(object, policy(error))
    except Exception as broken:  # noqa: BLE001 - it must not take the place of the failure it was asked about
        error.add_note(f"Retry(on={policy!r}) raised {type(broken).__qualname__}: {broken}; taken as final.")
        return FINAL
    if isinstance(answer, timedelta):
        return Verdict(retryable=True, delay=clamped(answer))
    if isinstance(answer, bool):
        return Verdict(answer)
    error.add_note(f"Retry(on={policy!r}) returned {answer!r}, not a bool or a timedelta; taken as final.")
    return FINAL
