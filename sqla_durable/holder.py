"""The holder of one run in one process: what it has learnt of the run's steps, and its writes."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar, cast

from sqlalchemy import Connection, Update

from sqla_durable import fence
from sqla_durable.codec import Codec
from sqla_durable.exc import (
    Cancelled,
    ConfigurationError,
    DurableError,
    LostLease,
    NestedStep,
    StepReused,
    UsageError,
)
from sqla_durable.failure import Failure
from sqla_durable.landing import Landings
from sqla_durable.lease import Lease
from sqla_durable.receipt import KEY_LENGTH, Effect, Receipt
from sqla_durable.rows import arguments
from sqla_durable.run import RunT
from sqla_durable.status import assignments
from sqla_durable.step import Recorded, Steps, replayed
from sqla_durable.store import Store

ValueT = TypeVar("ValueT")
_MOMENT = 0.05
_inside: ContextVar[_Body | None] = ContextVar("sqla_durable_step", default=None)


@dataclass(eq=False, slots=True)
class _Body:
    """A step's body while it runs; a task that it leaves behind keeps a copy of the context, and so of this."""

    holder: Holder[Any]
    step: str
    running: bool = True


class Holder(Generic[RunT]):
    """What :class:`.Run` and its asyncio twin are in front of.

    :param steps: the steps of the store that the run is in.
    :param landings: its landings.
    :param lease: what the claim handed out.
    :param make: returns the user's object as it was when claimed, detached; called on the first use.
    :param receipts: the receipts known at that time.
    :param cancel_requested: whether the run had been asked to be cancelled by then.
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
    ) -> None:
        self.steps = steps
        self.landings = landings
        self.store: Store[RunT] = steps.store
        self.lease = lease
        self._row: RunT | None = None
        self._make = make
        self._made = threading.Lock()
        self._landed: Mapping[Any, Any] = {}
        self.receipts = {receipt.step: receipt for receipt in receipts}
        self.batch: tuple[Holder[RunT], ...] = (self,)
        self.status: StrEnum = self.store.runs.lifecycle.running
        self.lost: DurableError | None = None
        self.ended = False
        self.failure: Failure | None = None
        self.left = False
        self.claimed_at = -math.inf
        self._ending = False
        self._used: set[str] = set()
        self._seen: set[str] = set()
        self.note_cancel(requested=cancel_requested)

    @property
    def row(self) -> RunT:
        """The user's object; once the run has ended, as it ended."""
        with self._made:
            if self._row is None:
                self._row = self._make()
                self.store.runs.show(self._row, self._landed)
            return self._row

    def known(self) -> tuple[Receipt, ...]:
        """Return the receipts known to this holder in the order they were recorded."""
        return tuple(sorted(self.receipts.values(), key=lambda receipt: (receipt.recorded_at, receipt.step)))

    # steps

    def transactional(self, key: str | int, codec: Codec[ValueT], body: Callable[[Any], ValueT]) -> ValueT:
        """See :meth:`.Run.step`."""

        def live(name: str) -> Recorded[ValueT]:
            with self._within(name):
                return self.steps.transactional(self.lease, name, body, codec)

        return self._step(key, Effect.TRANSACTIONAL, codec, live)

    def external(self, key: str | int, codec: Codec[ValueT], call: Callable[[], ValueT]) -> ValueT:
        """See :meth:`.Run.external`."""

        def live(name: str) -> Recorded[ValueT]:
            with self._within(name):
                value = call()
            text, result = codec.round_trip(value, name)
            recorded = self.steps.record(self.lease, name, Effect.EXTERNAL, result=text)
            if recorded.before:
                result = replayed(recorded.receipt, Effect.EXTERNAL, codec)
            return Recorded(recorded.receipt, result, recorded.cancel_requested)

        return self._step(key, Effect.EXTERNAL, codec, live)

    def _step(
        self, key: str | int, effect: Effect, codec: Codec[ValueT], live: Callable[[str], Recorded[ValueT]]
    ) -> ValueT:
        name = self._key(key)
        known = self.receipts.get(name)
        if known is not None and name not in self._seen:
            # A failed receipt is replayed once: a handler that retries in place gets as far as it did before.
            self._seen.add(name)
            value = replayed(known, effect, codec)
            self._used.add(name)
            return value
        self.refuse_lost()
        try:
            recorded = live(name)
        except DurableError as error:
            self.note(error)
            raise
        except Exception as error:
            self._record_failure(name, effect, error)
            raise
        self.receipts[name] = recorded.receipt
        self._used.add(name)
        self.note_cancel(requested=recorded.cancel_requested)
        return recorded.value

    def _record_failure(self, name: str, effect: Effect, error: Exception) -> None:
        try:
            receipt = self.steps.record(self.lease, name, effect, failure=Failure.of(error)).receipt
        except DurableError as ours:
            self.note(ours)
            raise ours from error
        self.receipts[name] = receipt
        self._seen.add(name)

    def refuse_nested(self, key: str | int) -> None:
        """Refuse a step that was started inside the body of another step of this run."""
        if (outer := self._body()) is not None:
            raise NestedStep(
                f"step {key!r} was started inside the body of step {outer.step!r}; its effect would commit with "
                "another receipt. Call it after that step, or do its work in the same body."
            )

    def _key(self, key: str | int) -> str:
        name = stored_key(key)
        self.refuse_nested(key)
        if name in self._used:
            raise StepReused(
                f"step {name!r} was used twice in this execution; each step needs a key of its own that is the same "
                "in every attempt, such as a position in the run's data."
            )
        return name

    @contextmanager
    def _within(self, name: str) -> Generator[None, None, None]:
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

    # the lease

    def was_just_claimed(self) -> bool:
        """Whether this process sent the claim a moment ago, so that to ask for the lease would be to ask twice.

        It decides nothing: whatever the holder writes is fenced all the same.
        """
        moment = min(_MOMENT, self.store.runs.lifecycle.lease.total_seconds() / 10)
        return time.monotonic() - self.claimed_at < moment

    def renew(self) -> None:
        """See :meth:`.Run.renew`."""
        self.refuse_lost()
        if self._body() is not None:
            return
        self.store.single(self.beat)
        self.refuse_lost()

    def beat(self, connection: Connection) -> bool:
        """Renew the lease, unless the run's row is locked; return whether the holder may no longer go on."""
        if self.lost is not None:
            return False
        row = self.store.beat.first(connection, self.store.parameters(self.lease))
        # A landing of this holder's own that has committed, but has not been answered yet, looks like a lost lease.
        if self.ended or self._ending:
            return False
        if row is None or not (row.held or row.renewed):
            self.note(self.store.lost(connection, self.lease))
        else:
            self.note_cancel(requested=row.cancel_requested_at is not None)
        return self.lost is not None

    def refuse_lost(self) -> None:
        """Raise what is known to have ended this holder's right to write."""
        if self.lost is not None:
            raise self.lost
        self.refuse_ended()

    def refuse_ended(self) -> None:
        """Refuse a handle whose run was landed or released through it."""
        if self.ended:
            raise UsageError(f"this run has ended as {self.status.value}; its handle is spent.")

    def note_cancel(self, *, requested: bool) -> None:
        """Note that the run was asked to be cancelled, if its lifecycle knows of that."""
        if requested and self.store.runs.lifecycle.cancelled is not None:
            self.note(self.store.cancelled(self.lease))

    def note(self, error: DurableError) -> None:
        """Note an error that ends this holder's right to write; a lost lease outweighs a cancel request."""
        ours = isinstance(error, LostLease | Cancelled) and error.lease == self.lease
        if ours and not isinstance(self.lost, LostLease):
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
        failure = error if isinstance(error, Failure) else Failure.of(error)
        self.land(self.store.runs.lifecycle.failed, values, failure)

    def cancel(self) -> None:
        """Land a run that was asked to be cancelled."""
        cancelled = self.store.runs.lifecycle.cancelled
        if cancelled is not None:
            self.land(cancelled, {})

    def land(self, to: StrEnum, values: Mapping[str, Any], failure: Failure | None = None) -> None:
        """Move the run to a terminal status, in one fenced statement."""
        changed = assignments(self.store.runs, self.store.runs.status, values, [self.store.runs.lifecycle.running])
        self._end(fence.land(self.store.runs, to, changed, failed=failure is not None), failure)

    def release(self, failure: Failure | None = None) -> None:
        """See :meth:`.Run.release`; with a failure, after its backoff."""
        lifecycle = self.store.runs.lifecycle
        if not lifecycle.releases:
            raise ConfigurationError(
                f"{lifecycle.machine!r} does not declare {lifecycle.running.value} -> {lifecycle.ready.value}, so a "
                "run cannot be released; it is left to its lease. Declare the edge in transitions=."
            )
        # One that failed is not due before its backoff.
        failed = failure is not None
        notify = self.store.notifies and not failed
        self._end(fence.release(self.store.runs, failed=failed, notify=notify), failure)

    def _land_in_group(self) -> bool:
        self._ending = True
        try:
            landed = self.landings.land(self.lease)
            if landed is not None:
                self._show(landed)
            return landed is not None
        finally:
            self._ending = False

    def _end(self, statement: Update, failure: Failure | None) -> None:
        error = {} if failure is None else {"error": json.dumps(failure.to_json())}
        key = self.store.runs.parameters(self.lease.identity)
        parameters = {**key, **arguments(fence=self.lease.fence, **error)}
        self._ending = True
        try:
            row = self.store.write(
                self.lease, lambda connection: connection.execute(statement, parameters).one_or_none()
            )
            self._show(row._mapping)
            self.failure = failure
        except (LostLease, Cancelled) as lost:
            self.note(lost)
            raise
        finally:
            self._ending = False

    def _show(self, landed: Mapping[Any, Any]) -> None:
        self.status = landed[self.store.runs.status]
        self.ended = True
        with self._made:
            self._landed = landed
            if self._row is not None:
                self.store.runs.show(self._row, landed)


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
