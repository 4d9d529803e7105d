"""Carrying a run out: claim, handler, landing, and what truly happened."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

from sqlalchemy.exc import SQLAlchemyError

from sqla_durable.causes import leaves
from sqla_durable.exc import Cancelled, DurableError, LostLease, RetryableError, SchemaMismatch, Suspended, TimedOut
from sqla_durable.failure import Failure
from sqla_durable.holder import Holder
from sqla_durable.receipt import Receipt

_MIGRATING: Final = timedelta(seconds=5)


class Ending(StrEnum):
    """How a call of ``execute`` ended."""

    LANDED = "landed"
    """The run is in a terminal status, by this call or, where ``replayed``, before it."""
    LOST_LEASE = "lost lease"
    """The run was taken over while this call carried it out; nothing was written after that."""
    LOST_RACE = "lost race"
    """Another holder has the run; the handler was not called."""
    NOT_CLAIMABLE = "not claimable"
    """The run is not ready, or not due; the handler was not called."""
    INTERRUPTED = "interrupted"
    """The run is not finished and will be claimed again: it was released, or is left to its lease."""
    SUSPENDED = "suspended"
    """The run waits for something outside, such as an operation; it is ready, and due again later."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What truly happened in a call of ``execute``.

    A first run and a replay of it compare equal.

    :param ending: how the call ended.
    :param status: the run's status as last seen.
    :param receipts: the receipts of a landed run, in the order they were recorded; else those this call knows of.
    :param failure: what was recorded on the run as its error.
    :param replayed: whether the run had landed before, so that this call answered from its receipts.
    :param exception: what the handler raised in this call.
    """

    ending: Ending
    status: StrEnum
    receipts: tuple[Receipt, ...] = ()
    failure: Failure | None = None
    replayed: bool = field(default=False, compare=False)
    exception: BaseException | None = field(default=None, compare=False)


def carry_out(holder: Holder[Any], handler: Callable[[], object]) -> Outcome | None:
    """Call the handler of a claimed run and land the run according to how that went, unless it is to land as done.

    A lost lease outweighs a cancel request, that a deadline, that a suspension, and that the handler's own result.

    :return: what happened; None where all is well, and the run is yet to be landed: see :func:`finished`.
    :raises BaseException: an interruption (``KeyboardInterrupt``, ``SystemExit``, ``asyncio.CancelledError``) passes,
     after the run was released where it can be; no failure is recorded.
    """
    try:
        try:
            handler()
        except Exception as error:  # noqa: BLE001 - it is recorded on the run, whatever it is
            return _ended(holder, error)
        return finished(holder) if holder.ended or holder.lost is not None else None
    except BaseException as interruption:
        if isinstance(interruption, Exception):
            raise
        return _interrupted(holder, interruption)


def finished(holder: Holder[Any], unknown: RetryableError | None = None) -> Outcome:
    """Land a run whose handler has returned, unless that is done.

    :param unknown: why it is not known whether it is.
    """
    if unknown is not None and not holder.ended:
        return Outcome(Ending.INTERRUPTED, holder.status, holder.known(), exception=unknown)
    try:
        return _ended(holder, None)
    except BaseException as interruption:
        if isinstance(interruption, Exception):
            raise
        return _interrupted(holder, interruption)


def _interrupted(holder: Holder[Any], interruption: BaseException) -> Outcome:
    """Release an interrupted run, and pass the interruption on; one whose holder has lost it has ended."""
    if holder.lost is not None and not isinstance(holder.lost, Suspended):
        return _ended(holder, interruption)
    let_go(holder)
    raise interruption


def _ended(holder: Holder[Any], error: BaseException | None) -> Outcome:
    """Write how the handler ended, unless it has done so itself, or has met a fault of the schema, not its own."""
    try:
        for leaf in () if error is None else leaves(error):
            if isinstance(leaf, SchemaMismatch):
                raise leaf
        return _written(holder, error)
    except SchemaMismatch as mismatch:
        # Not due at once: this worker has yet to learn of it, and to stop.
        hand_back(holder, _MIGRATING, "a migration")
        return Outcome(Ending.INTERRUPTED, holder.status, holder.known(), exception=mismatch)


def _written(holder: Holder[Any], error: BaseException | None) -> Outcome:
    """Write how the handler ended, unless it has done so itself; the write may find the lease lost."""
    if holder.ended:
        return _outcome(holder, error)
    try:
        if holder.lost is not None:
            raise holder.lost
        if error is None:
            error = _finish(holder)
        elif (verdict := holder.raised.judge(error)).retryable:
            _back_off(holder, error, verdict.delay)
        else:
            holder.fail(error, {})
    except Cancelled:
        return _stopped(holder, holder.cancel, error)
    except TimedOut:
        return _timed_out(holder, error)
    except LostLease:
        return Outcome(Ending.LOST_LEASE, holder.status, holder.known(), None, exception=error)
    except RetryableError as unavailable:
        failure = None if error is None else Failure.of(error)
        return Outcome(Ending.INTERRUPTED, holder.status, holder.known(), failure, exception=error or unavailable)
    return _outcome(holder, error)


def _finish(holder: Holder[Any]) -> Exception | None:
    """Land the run as done; where the database refuses that, by a trigger for one, as failed with its reason."""
    try:
        holder.finish({})
    except DurableError:
        raise
    except Exception as refused:  # noqa: BLE001 - it is recorded on the run, whatever it is
        holder.fail(refused, {})
        return refused
    return None


def _outcome(holder: Holder[Any], error: BaseException | None) -> Outcome:
    landed = holder.status in holder.store.runs.lifecycle.machine.terminal
    waits = Ending.SUSPENDED if isinstance(holder.lost, Suspended) else Ending.INTERRUPTED
    ending = Ending.LANDED if landed else waits
    return Outcome(ending, holder.status, holder.known(), holder.failure, exception=error)


def _timed_out(holder: Holder[Any], error: BaseException | None) -> Outcome:
    try:
        return _stopped(holder, holder.time_out, error)
    except Cancelled:  # asked for in between
        return _stopped(holder, holder.cancel, error)
    except TimedOut as moved:
        return Outcome(Ending.INTERRUPTED, holder.status, holder.known(), exception=error or moved)


def _stopped(holder: Holder[Any], land: Callable[[], None], error: BaseException | None) -> Outcome:
    try:
        land()
    except LostLease:
        return Outcome(Ending.LOST_LEASE, holder.status, holder.known(), exception=error)
    except RetryableError as unavailable:
        return Outcome(Ending.INTERRUPTED, holder.status, holder.known(), exception=error or unavailable)
    return _outcome(holder, error)


def _back_off(holder: Holder[Any], error: BaseException, delay: timedelta | None) -> None:
    if holder.store.runs.lifecycle.releases:
        holder.release(error, delay)


def let_go(holder: Holder[Any]) -> None:
    """Release an interrupted run if that can be done; otherwise its lease runs out."""
    if holder.ended or not holder.store.runs.lifecycle.releases:
        return
    with suppress(DurableError, SQLAlchemyError):
        holder.release()


def hand_back(holder: Holder[Any], delay: timedelta = timedelta(0), waits_for: str = "a slot") -> None:
    """Hand a claimed run back: it is due at once, or after a while, and no attempt is counted."""
    holder.left = True
    with suppress(DurableError, SQLAlchemyError):
        holder.park(delay, waits_for, progress=False)
