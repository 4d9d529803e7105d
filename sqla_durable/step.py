"""What this library exists for: lock the run, check the fence, do the effect, write the receipt, commit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from typing import Any, Generic, TypeVar

from sqlalchemy import Connection, Interval, Text, case, func, literal, null, select
from sqlalchemy import cast as sql_cast
from sqlalchemy.exc import DBAPIError

from sqla_durable import clock
from sqla_durable.codec import Codec
from sqla_durable.exc import DatabaseUnavailable, InputMismatch, ReceiptMismatch, StepFailed
from sqla_durable.failure import Failure
from sqla_durable.fence import holding
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
from sqla_durable.store import Store
from sqla_durable.verdict import StepTransaction

ValueT = TypeVar("ValueT")
_OPENED = "cancel_requested", "renew_at", "opened", "idle_limit"


def opens(runs: RunRows[Any], receipts: ReceiptRows) -> AnySelect:
    """Lock the run if the holder's fence is still the run's, open the step's receipt, and bound the idle time."""
    held = (
        runs.lock(runs.matches(), holding(runs))
        .add_columns(runs.fence.label("fence"), runs.lease_expires_at.label("lease_expires_at"))
        .add_columns(runs.cancel_requested_at.label("cancel_requested_at"))
        .cte("held")
    )
    opened = opening(receipts, held).cte("opened")
    return select(
        held.c.cancel_requested_at.is_not(None).label("cancel_requested"),
        (held.c.lease_expires_at - clock.interval(2 * runs.lifecycle.heartbeat)).label("renew_at"),
        select(func.count()).select_from(opened).scalar_subquery().label("opened"),
        *_idle_limit(runs),
    )


def records(runs: RunRows[Any], receipts: ReceiptRows) -> AnySelect:
    """Lock the run if the holder's fence is still the run's, and record a finished step: one fused statement."""
    held = (
        runs.lock(runs.matches(), holding(runs))
        .add_columns(runs.fence.label("fence"), runs.cancel_requested_at.label("cancel_requested_at"))
        .cte("held")
    )
    recorded = recording(receipts, held).cte("recorded")
    return select(
        held.c.cancel_requested_at.is_not(None).label("cancel_requested"),
        select(recorded.c[receipts.recorded_at.key]).scalar_subquery().label("recorded_at"),
    )


def _idle_limit(runs: RunRows[Any]) -> list[Any]:
    limit = runs.lifecycle.idle_limit
    if limit is None:
        return [null()]
    # Never longer than what the server or role already sets; 0 means no limit there.
    name = literal("idle_in_transaction_session_timeout", Text)
    current = func.current_setting(name, type_=Text)
    milliseconds = f"{max(1, int(limit.total_seconds() * 1000))}"
    tighter = sql_cast(current, Interval).between(clock.interval(limit * 0), clock.interval(limit))
    setting = case((tighter & (current != "0"), current), else_=milliseconds)
    return [func.set_config(name, setting, literal(True)).label("idle_limit")]  # noqa: FBT003


@dataclass(frozen=True, slots=True)
class Recorded(Generic[ValueT]):
    """A step that succeeded: its receipt, and its result as a replay returns it."""

    receipt: Receipt
    value: ValueT
    cancel_requested: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """The receipt of a step that had already happened, whether it was there before, and whether a cancel is asked."""

    receipt: Receipt
    before: bool
    cancel_requested: bool


class Steps:
    """The steps of one store's runs."""

    def __init__(self, store: Store[Any]) -> None:
        self.store = store

    def transactional(
        self, lease: Lease, key: str, body: Callable[[Any], ValueT], codec: Codec[ValueT], given: str | None = None
    ) -> Recorded[ValueT]:
        """Run a step's body in one transaction with its receipt, again where it conflicts with another transaction.

        :param given: the fingerprint of the step's input, to be recorded.
        :raises LostLease: where the fence has moved on; the body is not called.
        """
        return retry_conflicts(lambda: self._attempt(lease, key, body, codec, given))

    def _attempt(
        self, lease: Lease, key: str, body: Callable[[Any], ValueT], codec: Codec[ValueT], given: str | None
    ) -> Recorded[ValueT]:
        session = self.store.sessions.step()
        transaction: StepTransaction | None = None
        returned = False
        try:
            connection, transaction = self._begin(session)
            opened = self._open(connection, lease, key, given)
            if not opened.opened:
                return self._known(connection, lease, key, codec)
            value = body(session.facade)
            returned = True
            transaction.refuse_ended()
            session.flush()
            text, result = codec.round_trip(value, key)
            sealed = partial(self._seal, transaction, connection, lease, key, text, opened.renew_at, given)
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
        if row.recorded_at is None:
            known = self.store.single(lambda connection: self._read(connection, lease, key))
            return Written(known, before=True, cancel_requested=row.cancel_requested)
        receipt = self._receipt(lease, key, effect, row.recorded_at, result, failure, given)
        return Written(receipt, before=False, cancel_requested=row.cancel_requested)

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

    # the parts of the sentence

    def _begin(self, session: StepSession) -> tuple[Connection, StepTransaction]:
        transaction = session.begin_step()
        connection = self.store.connection(session)
        session.bind_step(connection)
        return connection, StepTransaction(session, transaction, connection, self.guard)

    def _open(self, connection: Connection, lease: Lease, key: str, given: str | None) -> AnyRow:
        effect = Effect.TRANSACTIONAL.value
        parameters = self.store.parameters(lease, step=key, effect=effect, input_fingerprint=given)
        row = self.store.held(connection, lease, lambda connection: self.open.first(connection, parameters))
        if row.cancel_requested and self.store.runs.lifecycle.cancelled is not None:
            raise self.store.cancelled(lease)
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
    ) -> Receipt:
        parameters = self.store.parameters(lease, step=key, result=text, renew_at=renew_at)
        try:
            row = self.seal.first(connection, parameters)
        except DBAPIError as error:
            raise transaction.unsealed(error) from error
        if row is None:
            raise ended("a statement of its own")
        if row.renewal_due:
            self.store.renew.first(connection, self.store.parameters(lease))
        return self._receipt(lease, key, Effect.TRANSACTIONAL, row.recorded_at, text, None, given)

    def _known(self, connection: Connection, lease: Lease, key: str, codec: Codec[ValueT]) -> Recorded[ValueT]:
        receipt = self._read(connection, lease, key)
        return Recorded(receipt, replayed(receipt, Effect.TRANSACTIONAL, codec))

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
        return self.store.prepare(opens(self.store.runs, self.store.receipts), *_OPENED)

    @cached_property
    def seal(self) -> Prepared:
        """See :func:`.sealing`."""
        return self.store.prepare(sealing(self.store.receipts), "recorded_at", "renewal_due")

    @cached_property
    def recording(self) -> Prepared:
        """See :func:`records`."""
        return self.store.prepare(records(self.store.runs, self.store.receipts), "cancel_requested", "recorded_at")

    @cached_property
    def reading(self) -> AnySelect:
        """See :func:`.one`."""
        return one(self.store.receipts)


def replayed(receipt: Receipt, effect: Effect, codec: Codec[ValueT]) -> ValueT:
    """Return the result that a receipt holds.

    :raises StepFailed: where the step had failed.
    :raises ReceiptMismatch: where the receipt is of another kind of step.
    :raises ResultMismatch: where its result does not decode.
    """
    refuse_other_kind(receipt, effect)
    if receipt.failure is not None:
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
