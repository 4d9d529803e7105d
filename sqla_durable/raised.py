"""What the steps of one execution have raised, and what was decided about each error then."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from sqla_durable import policy
from sqla_durable.causes import chain, leaves
from sqla_durable.failure import Failure
from sqla_durable.retry import Retry

_REMEMBERED: Final = 100


class _Raised(NamedTuple):
    """What a step has raised in this execution, and what was decided about it then."""

    step: str
    error: BaseException
    verdict: policy.Verdict


class Raised:
    """Tells by which step an error was raised, and whether it is worth another attempt.

    :param retry: by what that is decided.
    """

    def __init__(self, retry: Retry) -> None:
        self.retry = retry
        self._raised: deque[_Raised] = deque(maxlen=_REMEMBERED)

    def decide(self, name: str, error: BaseException) -> policy.Verdict:
        """Decide whether what a step has raised is retryable, and note both; it is decided once."""
        for leaf in leaves(error):
            noted = self._noted(leaf)
            if noted is None or noted.step != name:
                verdict = policy.judge_one(self.retry, leaf)
                self._raised.appendleft(_Raised(name, leaf, verdict))
        return self.judge(error)

    def judge(self, error: BaseException) -> policy.Verdict:
        """Decide whether a failure is retryable; about one that a step has raised, as was decided then."""
        noted = {id(leaf): self._noted(leaf) for leaf in leaves(error)}
        return policy.judge(
            self.retry, error, {key: raised.verdict for key, raised in noted.items() if raised is not None}
        )

    def step_of(self, error: BaseException | Failure | None) -> str | None:
        """Return the key of the step that raised ``error``, or the nearest of what led to it."""
        if not isinstance(error, BaseException):
            return None
        return next((raised.step for link in chain(error) if (raised := self._noted(link)) is not None), None)

    def _noted(self, error: BaseException) -> _Raised | None:
        return next((raised for raised in self._raised if raised.error is error), None)
