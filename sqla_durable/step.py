"""What this library exists for: lock the run, check the fence, do the effect, write the receipt, commit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property, partial
from typing import Any, Final, Generic, TypeVar

from sqlalchemy import ColumnElement, Connection, Interval, Text, case, func, literal, null, select
from sqlalchemy import cast as sql_cast
from sqlalchemy.exc import DBAPIError

from sqla_durable import clock, fence, stop
from sqla_durable.codec import Codec
from sqla_durable.exc import DatabaseUnavailable, InputMismatch, ReceiptMismatch, StepFailed
from sqla_durable.failure import Failure
from sqla_durable.intent import Intents
from sqla_durable.lease import Lease
from sqla_durable.prepared import Prepared
from sqla_durable.receipt import (
    Effect,
    Receipt,
    ReceiptRows,
    StepOutcome,
    one,
    opening,
    parsed,
    receipt_of,
    recording,
    sealing,
)
from sqla_durable.rows import AnyRow, AnySelect, arguments
from sqla_durable.run import RunRows
from sqla_durable.session import StepSession, ended
from sqla_durable.sqlstate import (
    retry_conflicts,
    translate,
)
from sqla_durable.stop import Stop
from sqla_durable.store import Store
from sqla_durable.verdict import StepTransaction
from sqla_durable.waiting import Waits, timed_out

ValueT = TypeVar("ValueT")
_OPENED = "renew_at", "opened", "idle_limit"


def opens(runs: RunRows[Any], receipts: ReceiptRows) -> AnySelect:
    """Lock the run if the holder's fence is still the run's, open the step's receipt, and bound the idle time."""
    held = fence.held(runs, runs.lease_expires_at.label("lease_expires_at"))
    opened = opening(receipts, held).cte("opened")
    return select(
        *stop.told(held),
        (held.c.lease_expires_at - clock.interval(2 * runs.lifecycle.heartbeat)).label("renew_at"),
        select(func.count()).select_from(opened).scalar_subquery().label("opened"),
        *_idle_limit(runs),
    )


def records(runs: RunRows[Any], receipts: ReceiptRows) -> AnySelect:
    """Lock the run if the holder's fence is still the run's, and record a finished step: one fused statement."""
    held = fence.held(runs)
    recorded = recording(receipts, held).cte("recorded")
    return select(
        *stop.told(held),
        select(recorded.c[receipts.recorded_at.key]).scalar_subquery().label("recorded_at"),
    )


def _idle_limit(runs: RunRows[Any]) -> list[Any]:
    limit = runs.lifecycle.idle_limit
    return [null()] if limit is None else [idle_limit(limit)]


def idle_limit(limit: timedelta) -> ColumnElement[Any]:
    """Have PostgreSQL end this transaction where its connection is left idle for longer than that."""
    # Never longer than what the server or role already sets; 0 means no limit there.
    name = literal("idle_in_transaction_session_timeout", Text)
    current = func.current_setting(name, type_=Text)
    milliseconds = f"{max(1, int(limit.total_seconds() * 1000))}"
    tighter = sql_cast(current, Interval).between(clock.interval(limit * 0), clock.interval(limit))
    setting = case((tighter & (current != "0"), current), else_=milliseconds)
    return func.set_config(name, setting, literal(True)).label("idle_limit")  # noqa: FBT003


@dataclass(frozen=True, slots=True)
class Recorded(Generic[ValueT]):
    """A step that succeeded: its receipt, its result as a replay returns it, and whether the run has to stop now."""

    receipt: Receipt
    value: ValueT
    stop: Stop | None = None


@dataclass(frozen=True, slots=True)
class Written:
    """The receipt of a step that had already happened, whether it was there before, and whether the run has to stop."""

    receipt: Receipt
    before: bool
    stop: Stop | None


class Beside:
    """What a kind of step does in the transaction of its body, besides what every step does: here nothing."""

    effect = Effect.TRANSACTIONAL

    def opened(self, connection: Connection) -> None:
        """Before the body; what it raises rolls the transaction back."""

    def sealed(self, connection: Connection, result: str) -> None:
        """After the receipt was sealed with ``result``, and right before the commit."""


NOTHING_BESIDE: Final = Beside()


class Steps:
    """The steps of one store's runs."""

    def __init__(self, store: Store[Any]) -> None:
        self.store = store

    def transactional(
        self,
        lease: Lease,
        key: str,
        body: Callable[[Any], ValueT],
        codec: Codec[ValueT],
        given: str | None = None,
        beside: Beside = NOTHING_BESIDE,
    ) -> Recorded[ValueT]:
        """Run a step's body in one transaction with its receipt, again where it conflicts with another transaction.

        :param given: the fingerprint of the step's input, to be recorded.
        :param beside: what else is done in that transaction.
        :raises LostLease: where the fence has moved on; the body is not called.
        """
        return retry_conflicts(lambda: self._attempt(lease, key, body, codec, given, beside))

    def _attempt(
        self,
        lease: Lease,
        key: str,
        body: Callable[[Any], ValueT],
        codec: Codec[ValueT],
        given: str | None,
        beside: Beside,
    ) -> Recorded[ValueT]:
        session = self.store.sessions.step()
        transaction: StepTransaction | None = None
        returned = False
        try:
            connection, transaction = self._begin(session)
            opened = self._open(connection, lease, key, given, beside.effect)
            if not opened.opened:
                return self._known(connection, lease, key, codec, beside.effect)
            beside.opened(connection)
            transaction.begun = True
            value = body(session.facade)
            returned = True
            transaction.refuse_ended()
            session.flush()
            text, result = codec.round_trip(value, key)
            sealed = partial(self._seal, transaction, connection, lease, key, text, opened.renew_at, given, beside)
            receipt = session.commit_step(sealed)
        except Exception as error:
            ours = translate(error) if transaction is None else transaction.verdict(error, returned=returned)
            if isinstance(ours, DatabaseUnavailable):
                session.drop_step()
            if ours is None:
                raise
            raise ours from error
        finally:
            session.close_step()
        return Recorded(receipt, result)

    def record(
        self,
        lease: Lease,
        key: str,
        effect: Effect,
        *,
        result: str | None = None,
        failure: Failure | None = None,
        given: str | None = None,
    ) -> Written:
        """Record a step that has already happened, in one statement.

        :param given: the fingerprint of the step's input.
        :return: the receipt, which is another holder's of the same lease if that recorded the step first.
        :raises LostLease: where the fence has moved on; nothing is recorded.
        """
        values = self._values(lease, key, effect, result=result, failure=failure, given=given)
        row = self.store.patiently(lambda: self.store.write(lease, lambda connection: self._record(connection, values)))
        told = stop.stop_of(self.store.runs, row)
        if row.recorded_at is None:
            known = self.read(lease, key)
            return Written(known, before=True, stop=told)
        receipt = self._receipt(lease, key, effect, row.recorded_at, result, failure, given)
        return Written(receipt, before=False, stop=told)

    def record_in(self, connection: Connection, lease: Lease, key: str, result: str) -> Receipt | None:
        """Record a step in the transaction of ``connection``; None where it has a receipt already."""
        values = self._values(lease, key, Effect.TRANSACTIONAL, result=result)
        row = self.store.held(connection, lease, lambda connection: self._record(connection, values))
        if row.recorded_at is None:
            return None
        return self._receipt(lease, key, Effect.TRANSACTIONAL, row.recorded_at, result, None)

    @cached_property
    def intents(self) -> Intents:
        """The receipts of operations."""
        return Intents(self.store)

    @cached_property
    def waits(self) -> Waits:
        """The receipts of signals and sleeps."""
        return Waits(self.store)

    # the parts of the sentence

    def _begin(self, session: StepSession) -> tuple[Connection, StepTransaction]:
        transaction = session.begin_step()
        connection = self.store.connection(session)
        session.bind_step(connection)
        return connection, StepTransaction(session, transaction, connection, self.guard)

    def _open(self, connection: Connection, lease: Lease, key: str, given: str | None, effect: Effect) -> AnyRow:
        parameters = self.store.parameters(lease, step=key, effect=effect.value, input_fingerprint=given)
        row = self.store.held(connection, lease, lambda connection: self.open.first(connection, parameters))
        if (told := stop.stop_of(self.store.runs, row)) is not None:
            raise self.store.stopped(lease, told)
        return row

    def _seal(
        self,
        transaction: StepTransaction,
        connection: Connection,
        lease: Lease,
        key: str,
        text: str,
        renew_at: Any,
        given: str | None,
        beside: Beside,
    ) -> Receipt:
        parameters = self.store.parameters(lease, step=key, result=text, renew_at=renew_at)
        try:
            row = self.seal.first(connection, parameters)
        except DBAPIError as error:
            raise transaction.unsealed(error) from error
        if row is None:
            raise ended("a statement of its own")
        beside.sealed(connection, text)
        if row.renewal_due:
            self.store.renew.first(connection, self.store.parameters(lease))
        return self._receipt(lease, key, beside.effect, row.recorded_at, text, None, given)

    def _known(
        self, connection: Connection, lease: Lease, key: str, codec: Codec[ValueT], effect: Effect
    ) -> Recorded[ValueT]:
        receipt = self._read(connection, lease, key)
        return Recorded(receipt, replayed(receipt, effect, codec))

    def read(self, lease: Lease, key: str) -> Receipt:
        """Read the receipt of a step that has one."""
        return self.store.single(lambda connection: self._read(connection, lease, key))

    def _record(self, connection: Connection, values: dict[str, Any]) -> AnyRow | None:
        return self.recording.first(connection, values)

    def _read(self, connection: Connection, lease: Lease, key: str) -> Receipt:
        key_of_run = self.store.runs.parameters(lease.identity)
        return receipt_of(connection.execute(self.reading, {**key_of_run, **arguments(step=key)}).one())

    def _values(
        self,
        lease: Lease,
        key: str,
        effect: Effect,
        *,
        result: str | None = None,
        failure: Failure | None = None,
        given: str | None = None,
    ) -> dict[str, Any]:
        outcome = StepOutcome.SUCCEEDED if failure is None else StepOutcome.FAILED
        error = None if failure is None else json.dumps(failure.to_json())
        values = {"step": key, "effect": effect.value, "input_fingerprint": given}
        return self.store.parameters(lease, **values, outcome=outcome.value, result=result, error=error)

    def _receipt(
        self,
        lease: Lease,
        key: str,
        effect: Effect,
        at: datetime,
        result: str | None,
        failure: Failure | None,
        given: str | None = None,
    ) -> Receipt:
        outcome = StepOutcome.SUCCEEDED if failure is None else StepOutcome.FAILED
        return Receipt(key, outcome, parsed(result), failure, effect, lease.fence, at, input_fingerprint=given)

    @cached_property
    def guard(self) -> str:
        """See :attr:`.ReceiptRows.guard`."""
        return self.store.receipts.guard

    @cached_property
    def open(self) -> Prepared:
        """See :func:`opens`."""
        runs = self.store.runs
        return self.store.prepare(opens(runs, self.store.receipts), *stop.names(runs), *_OPENED)

    @cached_property
    def seal(self) -> Prepared:
        """See :func:`.sealing`."""
        return self.store.prepare(sealing(self.store.receipts), "recorded_at", "renewal_due")

    @cached_property
    def recording(self) -> Prepared:
        """See :func:`records`."""
        runs = self.store.runs
        return self.store.prepare(records(runs, self.store.receipts), *stop.names(runs), "recorded_at")

    @cached_property
    def reading(self) -> AnySelect:
        """See :func:`.one`."""
        return one(self.store.receipts)


def replayed(receipt: Receipt, effect: Effect, codec: Codec[ValueT]) -> ValueT:
    """Return the result that a receipt holds.

    :raises StepFailed: where the step had failed.
    :raises SignalTimeout: where it was a wait that timed out.
    :raises ReceiptMismatch: where the receipt is of another kind of step.
    :raises ResultMismatch: where its result does not decode.
    """
    refuse_other_kind(receipt, effect)
    if receipt.failure is not None:
        if (timeout := timed_out(receipt)) is not None:
            raise timeout
        raise StepFailed(receipt.step, receipt.failure)
    return codec.decode(receipt.result, receipt.step)


def refuse_other_input(receipt: Receipt, given: str | None) -> None:
    """Refuse a receipt of a step that was called with another input.

    :param given: the fingerprint of the input that it is called with now; None to let it be.
    :raises InputMismatch: where it is one.
    """
    if given is not None and receipt.input_fingerprint not in {None, given}:
        raise InputMismatch(
            f"step {receipt.step!r} was recorded when it was called with another input. Give it what it was given "
            "then, the same in every attempt; where the code has changed on purpose, give the changed step a new key, "
            "or declare the function with on_mismatch."
        )


def refuse_other_kind(receipt: Receipt, effect: Effect) -> None:
    """Refuse a receipt of another kind of step.

    :raises ReceiptMismatch: where it is one.
    """
    if receipt.effect != effect:
        raise ReceiptMismatch(
            f"step {receipt.step!r} was recorded as {receipt.effect.value} and is now {effect.value}; a key belongs to "
            "one kind of step. Give the changed step a key of its own."
        )
