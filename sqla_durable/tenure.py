"""The hold of one process on one run: what it knows of its lease, how it keeps it, and how it gives it up."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final, Generic, NoReturn, TypeVar

from sqlalchemy import Connection, Update

from sqla_durable import fence, policy
from sqla_durable.exc import (
    Cancelled,
    ConfigurationError,
    DurableError,
    HolderError,
    LostLease,
    RetryableError,
    Suspended,
    TimedOut,
    UsageError,
)
from sqla_durable.failure import Failure
from sqla_durable.landing import Landed, Landings
from sqla_durable.lease import Lease
from sqla_durable.raised import Raised
from sqla_durable.rows import AnyRow, arguments
from sqla_durable.run import RunT
from sqla_durable.status import assignments
from sqla_durable.stop import Stop, reasons
from sqla_durable.store import Store
from sqla_durable.waiting import Parked

ValueT = TypeVar("ValueT")
_log = logging.getLogger("sqla_durable")
_MOMENT: Final = 0.05
_WEIGHTS: Final[Mapping[type[DurableError], int]] = {LostLease: 4, Cancelled: 3, TimedOut: 2, DurableError: 1}


class Tenure(Generic[RunT]):
    """What a holder of a run may still do, and its writes.

    :param store: the store that the run is in.
    :param landings: its landings.
    :param lease: what the claim handed out.
    :param make: returns the user's object as it was when claimed, detached; called on the first use.
    :param cancel_requested: whether the run had been asked to be cancelled by then.
    :param max_duration: how long its execution may last; what is left of it may be less, which the database says.
    """

    def __init__(
        self,
        store: Store[RunT],
        landings: Landings,
        lease: Lease,
        make: Callable[[], RunT],
        *,
        cancel_requested: bool,
        max_duration: timedelta | None,
    ) -> None:
        self.store = store
        self.landings = landings
        self.lease = lease
        self.raised = Raised(store.runs.lifecycle.retry)
        """What its steps have raised."""
        self._row: RunT | None = None
        self._make = make
        self._made = threading.Lock()
        self._landed: Mapping[Any, Any] = {}
        self.status: StrEnum = store.runs.lifecycle.running
        self.lost: DurableError | None = None
        self.ended = False
        self.failure: Failure | None = None
        self.output: str | None = None
        """The result of the whole run, as JSON, that a landing as done writes."""
        self.claimed_at = -math.inf
        self.ask_at = self._from_now(max_duration)
        """When to ask the database whether the run's deadline has passed, if not before; of :func:`time.monotonic`."""
        self._ending = False
        self.note_stop(reasons(store.runs, requested=cancel_requested, late=False))

    @property
    def row(self) -> RunT:
        """The user's object; once the run has ended, as it ended."""
        with self._made:
            if self._row is None:
                self._row = self._make()
            if self._landed:
                self.store.runs.show(self._row, self._landed)
                self._landed = {}
            return self._row

    # keeping it

    def was_just_claimed(self) -> bool:
        """Whether this process claimed or renewed it a moment ago, so that to ask for the lease would be to ask twice.

        It decides nothing: whatever the holder writes is fenced all the same.
        """
        moment = min(_MOMENT, self.store.runs.lifecycle.lease.total_seconds() / 10)
        return time.monotonic() - self.claimed_at < moment

    def renew(self) -> None:
        """See :meth:`.Run.renew`."""
        self.refuse_lost()
        sent = time.monotonic()
        self.store.single(self.beat)
        self.refuse_lost()
        self.claimed_at = sent

    def beat(self, connection: Connection) -> bool:
        """Renew the lease, unless the run's row is locked; return whether the holder has learnt that it may not go on.

        The lease of a run that is past its deadline is renewed as well, until the run is landed: see :meth:`overtake`.
        """
        before = self.lost
        if before is not None and not isinstance(before, TimedOut):
            return False
        row = self.store.beat.first(connection, self.store.parameters(self.lease))
        # A landing of this holder's own that has committed, but has not been answered yet, looks like a lost lease.
        if self.ended or self._ending:
            return False
        if row is None or not (row.held or row.renewed):
            self.note(self.store.lost(connection, self.lease))
        else:
            left: timedelta | None = None if self.store.runs.deadline is None else row.time_left
            late = left is not None and left <= timedelta(0)
            if not late:  # else the heartbeat asks when it would have, to land the run
                self.ask_at = self._from_now(left)
            self.note_stop(reasons(self.store.runs, requested=row.cancel_requested_at is not None, late=late))
        return _weight(self.lost) > _weight(before)

    def overtake(self, connection: Connection) -> bool:
        """Land a run that is past its deadline while its handler goes on, unless the row is locked; True if this did.

        It is for the heartbeat: a handler that blocks its thread or event loop would keep its run for ever. A step
        under way may end, and what it commits stands.
        """
        if self.ended or self._ending or not isinstance(self.lost, TimedOut):
            return False
        statement = fence.time_out(self.store.runs, skip_locked=True)
        row: AnyRow | None = connection.execute(statement, self._fenced()).one_or_none()
        if row is None:
            return False
        # Not shown on the user's object at once, which the handler's thread may be at.
        self._take_end(row._mapping)
        return True

    def _from_now(self, duration: timedelta | None) -> float | None:
        return None if duration is None else time.monotonic() + duration.total_seconds()

    def refuse_lost(self) -> None:
        """Raise what is known to have ended this holder's right to write."""
        if self.lost is not None:
            raise self.lost
        self.refuse_ended()

    def refuse_ended(self) -> None:
        """Refuse a handle whose run was landed or released through it."""
        if self.ended:
            raise UsageError(f"this run has ended as {self.status.value}; its handle is spent.")

    def note_stop(self, told: Stop | None) -> None:
        """Note what the run has to stop for, if it has."""
        if told is not None:
            self.note(self.store.stopped(self.lease, told))

    def note(self, error: DurableError) -> None:
        """Note an error that ends this holder's right to write, unless it has noted one that outweighs it."""
        if isinstance(error, HolderError) and error.lease == self.lease and _weight(error) >= _weight(self.lost):
            self.lost = error

    # giving it up

    def finish(self, values: Mapping[str, Any]) -> None:
        """See :meth:`.Run.finish`."""
        self.refuse_lost()
        if values or not self._land_in_group():
            self.land(self.store.runs.lifecycle.done, values)

    def fail(self, error: BaseException | Failure, values: Mapping[str, Any]) -> None:
        """See :meth:`.Run.fail`."""
        self.refuse_lost()
        self.land(self.store.runs.lifecycle.failed, values, error)

    def cancel(self) -> None:
        """Land a run that was asked to be cancelled."""
        cancelled = self.store.runs.lifecycle.cancelled
        if cancelled is not None:
            self.land(cancelled, {})

    def time_out(self) -> None:
        """Land a run that ran past its deadline, if its heartbeat has not.

        :raises TimedOut: where it cannot be landed so either: somebody has moved the deadline.
        """
        if self.ended:
            return
        try:
            self._end(fence.time_out(self.store.runs), None)
        except TimedOut:
            # The heartbeat has, and has not been answered yet.
            found: AnyRow | None = self.store.single(
                lambda connection: connection.execute(fence.found(self.store.runs), self._fenced()).one_or_none()
            )
            if found is None or found._mapping[self.store.runs.status] != self.store.runs.lifecycle.timed_out:
                raise
            self._show(found._mapping)

    def land(self, to: StrEnum, values: Mapping[str, Any], error: BaseException | Failure | None = None) -> None:
        """Move the run to a terminal status, in one fenced statement."""
        changed = assignments(self.store.runs, self.store.runs.status, values, [self.store.runs.lifecycle.running])
        self._end(fence.land(self.store.runs, to, changed, failed=error is not None), error)

    def release(self, error: BaseException | None = None, delay: timedelta | None = None) -> None:
        """See :meth:`.Run.release`; with an error, after its backoff or the delay."""
        self.refuse_unreleasable()
        failed = error is not None
        # One that failed is not due before its backoff.
        notify = self.store.notifies and not failed
        statement = fence.release(
            self.store.runs, self.raised.retry, failed=failed, delayed=delay is not None, notify=notify
        )
        self._end(statement, error, **({} if delay is None else {"delay": delay}))

    def park(self, delay: timedelta, what: str, error: Exception | None = None, *, progress: bool = True) -> NoReturn:
        """Hand the run back to wait for something outside, and raise what unwinds its handler.

        :param delay: after which the run is due again.
        :param what: what it waits for.
        :param error: recorded on the run, where that is why it waits.
        :param progress: whether it has made progress, so that its attempts are counted anew.
        """
        self.refuse_unreleasable()
        delay = policy.clamped(delay)
        self._end(fence.park(self.store.runs, failed=error is not None, progress=progress), error, delay=delay)
        self._unwind(f"waits for {what}; it is {self.status.value}, and due in {delay}", error)

    def park_by(self, parked: Callable[[], Parked | ValueT], what: str) -> ValueT:
        """Do the same by a write that may find that there is nothing to wait for; return what it returns then."""
        self._ending = True
        try:
            found = parked()
            if isinstance(found, Parked):
                self._show(found.changed)
        except (LostLease, Cancelled, TimedOut) as lost:
            self.note(lost)
            raise
        finally:
            self._ending = False
        if isinstance(found, Parked):
            self._unwind(f"waits for {what}; it is {self.status.value}, and due at {found.until:%Y-%m-%d %H:%M:%S%z}")
        return found

    def _unwind(self, what: str, error: Exception | None = None) -> NoReturn:
        """Raise what unwinds the handler of a run that was handed back."""
        lifecycle = self.store.runs.lifecycle
        if self.status == lifecycle.cancelled:
            unwinds: HolderError = self.store.stopped(self.lease, Stop.CANCELLED)
        elif self.status == lifecycle.timed_out:
            unwinds = self.store.stopped(self.lease, Stop.TIMED_OUT)
        else:
            unwinds = Suspended(f"{self.store.runs.entity.__name__} {self.lease.identity!r} {what}.", self.lease)
        self.note(unwinds)
        raise unwinds from error

    def refuse_unreleasable(self) -> None:
        """Refuse to hand back a run whose machine has no edge for it."""
        lifecycle = self.store.runs.lifecycle
        if not lifecycle.releases:
            raise ConfigurationError(
                f"{lifecycle.machine!r} does not declare {lifecycle.running.value} -> {lifecycle.ready.value}, so a "
                "run cannot be released; it is left to its lease. Declare the edge in transitions=."
            )

    def land_later(self, then: Callable[[RetryableError | None], Callable[[], None]]) -> None:
        """Land the run as done with the next group, if nobody has asked for anything else.

        :param then: called in whichever thread writes the group, with an error where it is not known whether the run
         has landed. Without one it may not have, either: where its row was not as expected, or is locked,
         :meth:`finish` is left to say so, or to wait. What it returns is called when the whole group has been told.
        """

        def answered(answer: Callable[[], Landed | None]) -> Callable[[], None]:
            unknown: RetryableError | None = None
            try:
                if (landed := answer()) is not None:
                    self._show(landed)
            except RetryableError as error:
                unknown = error
            except Exception:  # noqa: BLE001 - raised by a hook of the user's; finish() says what is the matter
                _log.warning("whether %r has landed could not be read", self.lease, exc_info=True)
            self._ending = False
            return then(unknown)

        self._ending = True
        self.landings.submit(self.lease, self.output, answered)

    def _land_in_group(self) -> bool:
        self._ending = True
        try:
            landed = self.landings.land(self.lease, self.output)
            if landed is not None:
                self._show(landed)
            return landed is not None
        finally:
            self._ending = False

    def _end(self, statement: Update, error: BaseException | Failure | None, **more: Any) -> None:
        failure = Failure.of(error) if isinstance(error, BaseException) else error
        if failure is not None:
            more |= {"error": json.dumps(failure.to_json()), "step": self.raised.step_of(error)}
        parameters = self._fenced(output=self.output, **more)
        self._ending = True
        try:
            row = self.store.write(
                self.lease, lambda connection: connection.execute(statement, parameters).one_or_none()
            )
            self.failure = failure
            self._show(row._mapping)
        except (LostLease, Cancelled, TimedOut) as lost:
            self.note(lost)
            raise
        finally:
            self._ending = False

    def _fenced(self, **more: Any) -> dict[str, Any]:
        return {**self.store.runs.parameters(self.lease.identity), **arguments(fence=self.lease.fence, **more)}

    def _show(self, landed: Mapping[Any, Any]) -> None:
        self._take_end(landed)
        if self._row is not None:
            _ = self.row

    def _take_end(self, landed: Mapping[Any, Any]) -> None:
        runs = self.store.runs
        self.status = landed[runs.status]
        if self.status == runs.lifecycle.timed_out and landed.get(runs.error) is not None:
            self.failure = Failure.from_json(landed[runs.error])
        with self._made:
            self._landed = landed
        self.ended = True


def _weight(error: DurableError | None) -> int:
    """What outweighs what, of the errors that end a holder's right to write."""
    if error is None:
        return 0
    return next(weight for kind, weight in _WEIGHTS.items() if isinstance(error, kind))
