"""The holder of one run in one process: what it has learnt of the run's steps, and its writes."""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Any, Final, Generic, NamedTuple, NoReturn, TypeVar, cast

from sqlalchemy import Connection, Update

from sqla_durable import fence, policy
from sqla_durable.causes import chain, leaves
from sqla_durable.changes import Changes, pause
from sqla_durable.codec import Codec
from sqla_durable.exc import (
    Cancelled,
    ConfigurationError,
    DurableError,
    HolderError,
    LostLease,
    NestedStep,
    ReceiptMismatch,
    RetryableError,
    SignalTimeout,
    StepFailed,
    StepReused,
    StepUnreached,
    Suspended,
    TimedOut,
    UsageError,
)
from sqla_durable.failure import Failure
from sqla_durable.fingerprint import of_call
from sqla_durable.idempotency import idempotency_key
from sqla_durable.landing import Landed, Landings
from sqla_durable.lease import Lease
from sqla_durable.receipt import KEY_LENGTH, Effect, Receipt
from sqla_durable.rows import AnyRow, arguments
from sqla_durable.run import RunT
from sqla_durable.status import assignments
from sqla_durable.step import Recorded, Steps, refuse_other_input, refuse_other_kind, replayed
from sqla_durable.stop import Stop, reasons
from sqla_durable.store import Store
from sqla_durable.waiting import Parked

ValueT = TypeVar("ValueT")
Given = tuple[Callable[..., object], tuple[object, ...], Mapping[str, object]]
"""What a step is called with: its function and the arguments, without a session or key of ours."""
_log = logging.getLogger("sqla_durable")
_MOMENT = 0.05
_REMEMBERED = 100
_WEIGHTS: Final[Mapping[type[DurableError], int]] = {LostLease: 4, Cancelled: 3, TimedOut: 2, DurableError: 1}
_inside: ContextVar[_Body | None] = ContextVar("sqla_durable_step", default=None)


@dataclass(eq=False, slots=True)
class _Body:
    """A step's body while it runs; a task that it leaves behind keeps a copy of the context, and so of this."""

    holder: Holder[Any]
    step: str
    running: bool = True


class _Raised(NamedTuple):
    """What a step has raised in this execution, and what was decided about it then."""

    step: str
    error: BaseException
    verdict: policy.Verdict


class Holder(Generic[RunT]):
    """What :class:`.Run` and its asyncio twin are in front of.

    :param steps: the steps of the store that the run is in.
    :param landings: its landings.
    :param lease: what the claim handed out.
    :param make: returns the user's object as it was when claimed, detached; called on the first use.
    :param receipts: the receipts known at that time.
    :param cancel_requested: whether the run had been asked to be cancelled by then.
    :param created_at: when it was inserted, as the database has it.
    :param max_duration: how long its execution may last; what is left of it may be less, which the database says.
    """

    def __init__(
        self,
        steps: Steps,
        landings: Landings,
        lease: Lease,
        make: Callable[[], RunT],
        receipts: Iterable[Receipt],
        *,
        cancel_requested: bool,
        created_at: object,
        max_duration: timedelta | None = None,
    ) -> None:
        self.steps = steps
        self.landings = landings
        self.store: Store[RunT] = steps.store
        self.lease = lease
        self._row: RunT | None = None
        self._make = make
        self._made = threading.Lock()
        self._landed: Mapping[Any, Any] = {}
        self._created_at = created_at
        self.receipts = {receipt.step: receipt for receipt in receipts}
        self.batch: tuple[Holder[RunT], ...] = (self,)
        self.status: StrEnum = self.store.runs.lifecycle.running
        self.lost: DurableError | None = None
        self.ended = False
        self.failure: Failure | None = None
        self.retry = self.store.runs.lifecycle.retry
        self.output: str | None = None
        """The result of the whole run, as JSON, that a landing as done writes."""
        self.left = False
        self.limited = False
        """Whether it was claimed under a limit, so that its end may let another run be claimed."""
        self.claimed_at = -math.inf
        self.ask_at = self._from_now(max_duration)
        """When to ask the database whether the run's deadline has passed, if not before; of :func:`time.monotonic`."""
        self.issuing = False
        self.changes: Changes | None = None
        """What is done where code and receipts are at odds; None where neither is looked at for it."""
        self._mismatch: ReceiptMismatch | None = None
        self._stumbled = False
        self._ending = False
        self._reached: set[str] = set()
        self._used: set[str] = set()
        self._seen: set[str] = set()
        self._raised: deque[_Raised] = deque(maxlen=_REMEMBERED)
        self.note_stop(reasons(self.store.runs, requested=cancel_requested, late=False))

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

    def known(self) -> tuple[Receipt, ...]:
        """Return the receipts known to this holder in the order they were recorded."""
        return tuple(sorted(self.receipts.values(), key=lambda receipt: (receipt.recorded_at, receipt.step)))

    # steps

    def transactional(
        self, key: str | int, codec: Codec[ValueT], body: Callable[[Any], ValueT], given: Given | None = None
    ) -> ValueT:
        """See :meth:`.Run.step`."""

        def live(name: str, fingerprint: str | None) -> Recorded[ValueT]:
            with self.within(name):
                return self.steps.transactional(self.lease, name, body, codec, fingerprint)

        return self.step(key, Effect.TRANSACTIONAL, codec, live, given)

    def external(
        self, key: str | int, codec: Codec[ValueT], call: Callable[[], ValueT], given: Given | None = None
    ) -> ValueT:
        """See :meth:`.Run.external`."""
        return self._outside(key, Effect.EXTERNAL, codec, lambda _: call(), given)

    def keyed(
        self, key: str | int, codec: Codec[ValueT], call: Callable[[str], ValueT], given: Given | None = None
    ) -> ValueT:
        """See :meth:`.Run.keyed`."""
        return self._outside(key, Effect.KEYED, codec, lambda _: call(self.idempotency_key(key)), given)

    def idempotency_key(self, key: str | int) -> str:
        """See :meth:`.Run.idempotency_key`."""
        if not isinstance(self._created_at, datetime):
            raise UsageError(
                f"{self.store.runs.entity.__name__}.created_at is {self._created_at!r} on the claimed run, and an "
                "idempotency key is made of it; map it as a DateTime that is not deferred."
            )
        identity = self.store.key_values(self.lease.identity)
        name = stored_key(key)
        # A call under way when its step was renamed is made again with the key that it had then.
        first = name if self.changes is None else self.changes.first_key(name)
        return idempotency_key(self.store.name, identity, self._created_at, first)

    def _outside(
        self,
        key: str | int,
        effect: Effect,
        codec: Codec[ValueT],
        call: Callable[[str], ValueT],
        given: Given | None,
    ) -> ValueT:
        def live(name: str, fingerprint: str | None) -> Recorded[ValueT]:
            with self.within(name):
                value = call(name)
            return self._record(name, effect, codec, value, fingerprint)

        return self.step(key, effect, codec, live, given)

    def _record(
        self, name: str, effect: Effect, codec: Codec[ValueT], value: ValueT, given: str | None
    ) -> Recorded[ValueT]:
        text, result = codec.round_trip(value, name)
        recorded = self.steps.record(self.lease, name, effect, result=text, given=given)
        if recorded.before:
            result = replayed(recorded.receipt, effect, codec)
        return Recorded(recorded.receipt, result, recorded.stop)

    def step(
        self,
        key: str | int,
        effect: Effect,
        codec: Codec[ValueT],
        live: Callable[[str, str | None], Recorded[ValueT]],
        given: Given | None = None,
        record_failure: Callable[[str, Failure], Receipt] | None = None,
    ) -> ValueT:
        """Answer a step from its receipt, or carry it out.

        :param live: carries it out and records it, with the fingerprint of its input.
        :param given: what it is called with, where that is to be compared with what it was called with before.
        :param record_failure: records what ``live`` has raised, where that is final; by default as any step's.
        """
        name = self.take(key)
        with self.raising(name):
            known = self.answer(name)
            if known is not None and known.outcome.terminal:
                value = self.replay(known, effect, codec, given)
                self._used.add(name)
                return value
            if known is not None:
                self._refuse_other(known, effect, given)
            self.refuse_lost()
            fingerprint = self.fingerprint(given)  # the body may change what it is given
            if fingerprint is None and known is not None:
                fingerprint = known.input_fingerprint
            recorded = self._tried(name, effect, lambda: live(name, fingerprint), fingerprint, record_failure)
        self.succeeded(recorded.receipt, recorded.stop)
        return recorded.value

    def _tried(
        self,
        name: str,
        effect: Effect,
        live: Callable[[], Recorded[ValueT]],
        given: str | None,
        record_failure: Callable[[str, Failure], Receipt] | None = None,
    ) -> Recorded[ValueT]:
        """Return what a step has recorded, or record its failure, if that is final."""
        try:
            return live()
        except DurableError:
            raise
        except Exception as error:
            if not self.decide(name, error).retryable:
                record = record_failure or partial(self._failure_of_step, effect, given)
                self._record_failure(name, record, error)
            raise

    def settle(
        self,
        name: str,
        effect: Effect,
        codec: Codec[ValueT],
        called: Callable[[], ValueT],
        given: str | None,
    ) -> ValueT:
        """Record a call that has been made beside others; its key is not used up before all of them have succeeded.

        :param called: returns or raises what the call has.
        :param given: the fingerprint of what it was called with.
        """
        with self.raising(name):
            recorded = self._tried(name, effect, lambda: self._record(name, effect, codec, called(), given), given)
        self.receipts[name] = recorded.receipt
        self._seen.discard(name)
        self.note_stop(recorded.stop)
        return recorded.value

    def use_up(self, names: Iterable[str]) -> None:
        """Note that these steps have succeeded together."""
        self._used.update(names)

    def _record_failure(self, name: str, record: Callable[[str, Failure], Receipt], error: Exception) -> None:
        try:
            receipt = record(name, Failure.of(error))
        except DurableError as ours:
            raise ours from error
        self.failed(receipt)

    def _failure_of_step(self, effect: Effect, given: str | None, name: str, failure: Failure) -> Receipt:
        return self.steps.record(self.lease, name, effect, failure=failure, given=given).receipt

    def _refuse_other(self, known: Receipt, effect: Effect, given: Given | None) -> None:
        try:
            self.compare(known, effect, given)
        except ReceiptMismatch as error:
            self.mismatched(error)

    def failed(self, receipt: Receipt) -> None:
        """Note that a step has failed for good; in place it may be tried again."""
        self.receipts[receipt.step] = receipt
        self._seen.add(receipt.step)

    def succeeded(self, receipt: Receipt, told: Stop | None) -> None:
        """Note that a step has succeeded, so that its key is used up; and what the run has to stop for, if it has."""
        self.receipts[receipt.step] = receipt
        self._used.add(receipt.step)
        self.note_stop(told)

    def refuse_nested(self, key: str | int) -> None:
        """Refuse a step that was started inside the body of another step of this run."""
        if (outer := self._body()) is not None:
            raise NestedStep(
                f"step {key!r} was started inside the body of step {outer.step!r}; its effect would commit with "
                "another receipt. Call it after that step, or do its work in the same body."
            )

    def take(self, key: str | int) -> str:
        """Return a step's key as it is stored, having refused one that was used before in this execution.

        A step that has been renamed goes on under the key under which it has a receipt.
        """
        name = stored_key(key)
        self.refuse_nested(key)
        if self.changes is not None and self.changes.former:
            if (present := self.changes.renamed(name)) is not None:
                raise StepReused(
                    f"step {name!r} is declared as the former key of step {present!r}, whose receipt it would share; "
                    "give the one that is left a key of its own, or take it out of aliases."
                )
            name = self.changes.recorded_as(name, self.receipts)
        self._reached.add(name)
        if name in self._used:
            raise StepReused(
                f"step {name!r} was used twice in this execution; each step needs a key of its own that is the same "
                "in every attempt, such as a position in the run's data."
            )
        return name

    @contextmanager
    def within(self, name: str) -> Generator[None, None, None]:
        """Refuse other steps while the body of this one runs."""
        body = _Body(self, name)
        token = _inside.set(body)
        try:
            yield
        finally:
            body.running = False
            _inside.reset(token)

    def _body(self) -> _Body | None:
        body = _inside.get()
        return body if body is not None and body.holder is self and body.running else None

    # changed code

    def fingerprint(self, given: Given | None) -> str | None:
        """Return the fingerprint of what a step is called with, where it is to be recorded.

        Not of a step that follows one which has raised in this execution: a failure is not final, and where it does not
        come again the body takes another way, though its code is what it was.
        """
        return None if self.changes is None or given is None or self._stumbled else of_call(*given)

    def answer(self, name: str) -> Receipt | None:
        """Return the receipt that a step is answered from, if it has one.

        A failed receipt is replayed once: a handler that retries in place gets as far as it did before.
        """
        return None if name in self._seen else self.receipts.get(name)

    def replay(self, known: Receipt, effect: Effect, codec: Codec[ValueT], given: Given | None) -> ValueT:
        """Return the result that a receipt holds.

        :raises StepFailed: where the step had failed.
        :raises ReceiptMismatch: where the receipt is of another kind of step, was recorded for another input, or does
         not decode.
        :raises Suspended: where the run is left to a process with other code in such a case.
        """
        try:
            self.compare(known, effect, given)
            return replayed(known, effect, codec)
        except (StepFailed, SignalTimeout):
            self._seen.add(known.step)
            raise
        except ReceiptMismatch as error:
            self.mismatched(error)

    def compare(self, known: Receipt, effect: Effect, given: Given | None) -> None:
        """Refuse a receipt of another kind of step, or one that was recorded for another input."""
        refuse_other_kind(known, effect)
        if known.input_fingerprint is None or self.changes is None or self.changes.keeps or given is None:
            return
        refuse_other_input(known, of_call(*given))

    def refuse_unreached(self) -> None:
        """Refuse to land a run whose body has returned without reaching a step that has a receipt.

        :raises StepUnreached: where it has not; also where a receipt was at odds with the code, and the body went on.
        """
        if self.lost is not None or self.changes is None:
            return
        if self._mismatch is not None:
            raise self._mismatch
        unreached = [
            receipt.step
            for receipt in self.known()
            if receipt.input_fingerprint is not None and receipt.step not in self._reached
        ]
        if unreached and not self.changes.keeps:
            steps = ", ".join(map(repr, unreached))
            self.mismatched(
                StepUnreached(
                    f"step {steps} has a receipt and was not reached in this execution, so what it did is not what the "
                    "code does now. Reach it again; where it was renamed, say so with aliases; where it was taken out "
                    "on purpose, declare the function with on_mismatch."
                )
            )

    def mismatched(self, error: ReceiptMismatch) -> NoReturn:
        """Raise that code and receipts are at odds, or hand the run back to a process with other code."""
        if self.changes is not None and self.changes.parks:
            self.park(pause(), "a process whose code fits its receipts", error, progress=False)
        self._mismatch = error
        raise error

    # failures

    @contextmanager
    def raising(self, name: str) -> Generator[None, None, None]:
        """Note what a step raises: as this step's, and what ends this holder's right to write."""
        try:
            yield
        except Exception as error:
            self._stumbled = True
            self.decide(name, error)
            if isinstance(error, DurableError):
                self.note(error)
            raise

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

    # the lease

    def was_just_claimed(self) -> bool:
        """Whether this process claimed or renewed it a moment ago, so that to ask for the lease would be to ask twice.

        It decides nothing: whatever the holder writes is fenced all the same.
        """
        moment = min(_MOMENT, self.store.runs.lifecycle.lease.total_seconds() / 10)
        return time.monotonic() - self.claimed_at < moment

    def renew(self) -> None:
        """See :meth:`.Run.renew`."""
        self.refuse_lost()
        if self._body() is not None:
            return
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

    # landing

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
        statement = fence.release(self.store.runs, self.retry, failed=failed, delayed=delay is not None, notify=notify)
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
            more |= {"error": json.dumps(failure.to_json()), "step": self.step_of(error)}
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


def stored_key(key: str | int) -> str:
    """Return a step's key as it is stored.

    :raises UsageError: for a key that is not a str or int, is too long, or could be mistaken for another.
    """
    if isinstance(key, bool) or not isinstance(cast(object, key), str | int):
        raise UsageError(f"step key {key!r} is a {type(key).__name__}; a key is a str or an int.")
    # Of the plain type, as a member of an enumeration has a str() of its own.
    name = str.__str__(key) if isinstance(key, str) else int.__repr__(key)
    if isinstance(key, str) and (key.isdecimal() or (key[:1] == "-" and key[1:].isdecimal())):
        raise UsageError(f"step key {key!r} is digits only, which is how an int is stored; use the int {key}.")
    if not 0 < len(name) <= KEY_LENGTH or not name.isprintable():
        raise UsageError(f"step key {name!r}: from 1 to {KEY_LENGTH} printable characters.")
    return name
