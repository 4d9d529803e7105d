"""What a holder writes of signals and sleeps, each under its fence: a signal taken, or the run parked until one comes.

A run that found no signal may only be parked where none can be on its way. Whoever sends one locks the run's row ``FOR
KEY SHARE``, until the sender's transaction ends; the parking transaction locks it ``FOR UPDATE``, which waits for that,
and looks once more, in a statement of its own: what committed meanwhile is not in the snapshot of one that waited.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from sqlalchemy import (
    CTE,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    DateTime,
    Interval,
    String,
    Text,
    and_,
    case,
    exists,
    func,
    literal,
    not_,
    null,
    select,
    true,
    update,
)
from sqlalchemy import cast as sql_cast
from sqlalchemy.dialects.postgresql import JSONB

from sqla_durable import clock, fence, stop
from sqla_durable.deadline import OUT_OF_TIME
from sqla_durable.exc import SignalTimeout
from sqla_durable.failure import Failure
from sqla_durable.fence import holding
from sqla_durable.lease import Lease
from sqla_durable.prepared import Prepared
from sqla_durable.receipt import (
    Effect,
    Receipt,
    ReceiptRows,
    StepOutcome,
    from_held,
    input_fingerprint,
    insert_receipt,
    json_bound,
    parsed,
    recording,
    step_key,
)
from sqla_durable.rows import AnyRow, AnySelect, arguments, bound
from sqla_durable.run import RunRows
from sqla_durable.signal import SignalRows
from sqla_durable.store import Store

_TIMED_OUT = f"{SignalTimeout.__module__}.{SignalTimeout.__qualname__}"
_READ_COMMITTED = "READ COMMITTED"


def takes(runs: RunRows[Any], receipts: ReceiptRows, signals: SignalRows) -> AnySelect:
    """Lock the run if the holder's fence is still the run's, and take a signal as it was read, with a receipt.

    Nothing is taken by a run that someone asked to cancel, nor by a step that has its receipt.
    """
    held = fence.held(runs)
    found = _as_read(signals, _wanted(runs, held))
    values = {
        receipts.outcome: _outcome(StepOutcome.SUCCEEDED),
        receipts.result: found.c.payload,
        receipts.recorded_at: clock.stamp(),
        receipts.input_fingerprint: input_fingerprint(),
    }
    recorded = insert_receipt(receipts, found, values).cte("recorded")
    taken = _taking(signals, *signals.of_locked(found), signals.id == found.c.id, exists(select(recorded)))
    recorded_at = select(recorded.c[receipts.recorded_at.key]).scalar_subquery().label("recorded_at")
    return _told(held, recorded_at).add_cte(taken.returning(signals.id).cte("taken"))


def reads(signals: SignalRows) -> AnySelect:
    """Read a run's oldest signal of a name that no step has taken; the run's row is locked."""
    return _oldest(signals).with_for_update(of=signals.table)


def answers(signals: SignalRows) -> Any:
    """Take a signal with the reply to it; the run's row is locked."""
    answered = {signals.reply: json_bound("result"), signals.answered_at: clock.stamp()}
    taking = _taking(signals, *signals.of_run(), signals.id == bound("id", BigInteger())).values(answered)
    return taking.returning(signals.id)


def fails(runs: RunRows[Any], receipts: ReceiptRows, signals: SignalRows) -> AnySelect:
    """Lock the run likewise, and take a signal with the failure of what was called to answer it."""
    held = fence.held(runs)
    recorded = recording(receipts, held).cte("recorded")
    answered = {signals.error: json_bound("error"), signals.answered_at: clock.stamp()}
    one = signals.id == bound("id", BigInteger())
    taken = _taking(signals, *signals.of_locked(held), one, exists(select(recorded))).values(answered)
    recorded_at = select(recorded.c[receipts.recorded_at.key]).scalar_subquery().label("recorded_at")
    return _told(held, recorded_at).add_cte(taken.returning(signals.id).cte("taken"))


def times_out(runs: RunRows[Any], receipts: ReceiptRows) -> AnySelect:
    """Lock the run likewise, and record that no signal came in time."""
    held = fence.held(runs)
    recorded = recording(receipts, held).cte("recorded")
    return _told(held, select(recorded.c[receipts.recorded_at.key]).scalar_subquery().label("recorded_at"))


def locks(runs: RunRows[Any]) -> AnySelect:
    """Lock the run if the holder's fence is still the run's, when everybody who has sent a signal has committed."""
    return runs.lock(runs.matches(), holding(runs)).with_for_update(of=runs.table)


def looks(runs: RunRows[Any], receipts: ReceiptRows, signals: SignalRows) -> AnySelect:
    """Read the run's oldest signal of that name, and say whether the time to wait for it is over."""
    oldest = _oldest(signals).subquery("oldest")
    pending = receipts.is_waiting, receipts.in_outcome(StepOutcome.PENDING)
    overdue = exists().where(*receipts.of_run(), receipts.step == step_key(), *pending, receipts.until <= clock.stamp())
    looking = select(
        runs.cancel_requested_at.is_not(None).label("cancel_requested"),
        *(late.label(OUT_OF_TIME) for late in runs.out_of_time()),
        oldest.c.id,
        oldest.c.payload,
        overdue.label("overdue"),
        _outcome_of_step(receipts).label("outcome"),
    )
    return looking.select_from(runs.table.outerjoin(oldest, true())).where(runs.matches(), holding(runs))


def parks(runs: RunRows[Any], receipts: ReceiptRows) -> Any:
    """Hand the run back to wait for the signal, with a receipt of until when; the first attempt's instant stands."""
    held = fence.held(runs)
    kept = _keeping_until(receipts, held, clock.stamp() + bound("timeout", Interval()))
    until = kept.c.until.label(fence.UNTIL)
    return fence.wait(runs, select(*_locked(runs, held), until).select_from(held.join(kept, true())), for_signal=True)


def sleeps(runs: RunRows[Any], receipts: ReceiptRows) -> tuple[AnySelect, list[Column[Any]]]:
    """Lock the run likewise, and hand it back until an instant, unless that has passed: then the step has succeeded.

    The first attempt's instant stands, so that a run that was claimed early is handed back for the rest.

    :return: the statement, and those columns of the run that it returns last.
    """
    held = fence.held(runs)
    instant = func.coalesce(bound("until", DateTime(timezone=True)), clock.stamp() + bound("duration", Interval()))
    kept = _keeping_until(receipts, _wanted(runs, held), instant, settling=True)
    asleep = kept.c.outcome == literal(StepOutcome.PENDING.value, String)
    locking = select(*_locked(runs, held), kept.c.until.label(fence.UNTIL)).select_from(held.join(kept, asleep))
    parked = fence.wait(runs, locking, for_signal=False).cte("parked")
    columns = kept.c.outcome, kept.c.until, kept.c.recorded_at, *parked.c
    statement = _told(held, *columns).select_from(held.outerjoin(kept, true()).outerjoin(parked, true()))
    return statement, [runs.table.c[column.key] for column in parked.c]


def _keeping_until(receipts: ReceiptRows, held: CTE, instant: ColumnElement[Any], *, settling: bool = False) -> CTE:
    """Record until when the run waits; where that is recorded already, it stays.

    :param settling: whether the step has succeeded where that has passed.
    """
    asked = select(held, instant.label("until")).cte("asked").prefix_with("MATERIALIZED")
    ids = func.jsonb_build_object("until", asked.c.until, type_=JSONB)
    pending, succeeded = _outcome(StepOutcome.PENDING), _outcome(StepOutcome.SUCCEEDED)
    nothing = sql_cast(literal("null", Text), JSONB)

    def ended(until: ColumnElement[Any]) -> ColumnElement[bool]:
        return until <= clock.stamp() if settling else literal(False)  # noqa: FBT003

    values = {
        receipts.outcome: case((ended(asked.c.until), succeeded), else_=pending),
        receipts.result: case((ended(asked.c.until), nothing)),
        receipts.recorded_at: clock.stamp(),
        receipts.ids: ids,
        receipts.input_fingerprint: input_fingerprint(),
    }
    insert, named = from_held(receipts, asked, values)
    excluded = insert.excluded
    known = and_(receipts.is_waiting, receipts.in_outcome(StepOutcome.PENDING))
    over = and_(known, ended(receipts.until))
    replaced: dict[str, ColumnElement[Any]] = {
        **{column.key: excluded[column.key] for column in named if not column.primary_key},
        receipts.error.key: null(),
        receipts.ids.key: case((known, receipts.ids), else_=excluded[receipts.ids.key]),
        receipts.outcome.key: case((over, succeeded), (known, pending), else_=excluded[receipts.outcome.key]),
        receipts.result.key: case((over, nothing), (known, null()), else_=excluded[receipts.result.key]),
    }
    return (
        insert.on_conflict_do_update(
            index_elements=[*receipts.run_key, receipts.step], set_=replaced, where=receipts.may_be_overwritten
        )
        .returning(
            receipts.outcome.label("outcome"), receipts.until.label("until"), receipts.recorded_at.label("recorded_at")
        )
        .cte("kept")
    )


def _wanted(runs: RunRows[Any], held: CTE) -> CTE:
    """The held run unless it has to stop."""
    uncancelled = [] if runs.lifecycle.cancelled is None else [held.c.cancel_requested_at.is_(None)]
    conditions = [*uncancelled, *(not_(late) for late in stop.late(held))]
    return select(held).where(*conditions).cte("wanted") if conditions else held


def _locked(runs: RunRows[Any], held: CTE) -> list[ColumnElement[Any]]:
    """What :func:`.fence.wait` takes of the held run."""
    return [*(held.c[name] for name in runs.key_names), *stop.late(held)]


def _oldest(signals: SignalRows) -> AnySelect:
    """A run's oldest signal of a name that no step has taken."""
    columns = signals.id.label("id"), sql_cast(signals.payload, Text).label("payload")
    return select(*columns).where(*signals.of_run(), *_waiting(signals)).order_by(signals.id).limit(1)


def _as_read(signals: SignalRows, held: CTE) -> CTE:
    """The signal of the held run that was read, locked: another one of the same lease may have taken it meanwhile."""
    same = signals.id == bound("id", BigInteger()), signals.payload == json_bound("payload"), signals.step.is_(None)
    found: CTE = (
        select(held, signals.id.label("id"), signals.payload.label("payload"))
        .join(signals.table, and_(*signals.of_locked(held)))
        .where(*same)
        .with_for_update(of=signals.table)
        .cte("found")
        .prefix_with("MATERIALIZED")
    )
    return found


def _waiting(signals: SignalRows) -> tuple[ColumnElement[bool], ...]:
    return signals.name == bound("name", String()), signals.step.is_(None)


def _taking(signals: SignalRows, *conditions: ColumnElement[bool]) -> Any:
    """Mark a signal as taken by the step."""
    taken = update(signals.table).where(*conditions, signals.step.is_(None))
    return taken.values({**signals.untouched(), signals.step: step_key()})


def _outcome_of_step(receipts: ReceiptRows) -> ColumnElement[Any]:
    known = select(receipts.outcome).where(*receipts.of_run(), receipts.step == step_key())
    outcome: ColumnElement[Any] = known.scalar_subquery()
    return outcome


def _told(held: CTE, *columns: ColumnElement[Any]) -> AnySelect:
    return select(*stop.told(held), *columns)


def _outcome(outcome: StepOutcome) -> ColumnElement[str]:
    return literal(outcome.value, String)


def timed_out(receipt: Receipt) -> SignalTimeout | None:
    """Return what a receipt raises that says that no signal came in time."""
    if receipt.failure is None or receipt.effect is not Effect.SIGNAL or receipt.failure.type != _TIMED_OUT:
        return None
    return SignalTimeout(receipt.failure.message, receipt.step)


@dataclass(frozen=True, slots=True)
class Sent:
    """A signal that no step has taken.

    :param payload: as JSON text.
    """

    id: int
    payload: str


@dataclass(frozen=True, slots=True)
class Parked:
    """A run that was handed back to wait.

    :param changed: what the columns are that were changed.
    :param until: when it is due at the latest.
    """

    changed: Mapping[Any, Any]
    until: datetime


class Waits:
    """The receipts of one store's signals and sleeps."""

    def __init__(self, store: Store[Any]) -> None:
        self.store = store

    def look(self, lease: Lease, key: str, name: str) -> Sent | StepOutcome | None:
        """Read the oldest signal of a name; nothing is taken before its payload has been decoded.

        :return: None where there is no signal; where the step has its receipt already, how that ended.
        :raises LostLease: where the fence has moved on.
        :raises Cancelled: where the run has to stop, as for :class:`.TimedOut`.
        """
        parameters = self._looking(lease, key, name)
        row = self.store.write(lease, lambda connection: self._looks.first(connection, parameters))
        self._refuse_stopped(lease, row)
        if (succeeded := _succeeded(row.outcome)) is not None:
            return succeeded
        return None if row.id is None else Sent(row.id, row.payload)

    def take(self, lease: Lease, key: str, sent: Sent, given: str | None) -> Receipt | None:
        """Take a signal as it was read, with a receipt, in one statement.

        :param given: the fingerprint of what the step waits for, to be recorded.
        :return: None where it is not to be had any more, or the step has its receipt already.
        :raises LostLease: where the fence has moved on; nothing is taken.
        :raises Cancelled: where the run has to stop, as for :class:`.TimedOut`; nothing is taken.
        """
        values = {"step": key, "effect": Effect.SIGNAL.value, "id": sent.id, "payload": sent.payload}
        parameters = self.store.parameters(lease, **values, input_fingerprint=given)
        row = self.store.patiently(
            lambda: self.store.write(lease, lambda connection: self._takes.first(connection, parameters))
        )
        self._refuse_stopped(lease, row)
        if row.recorded_at is None:
            return None
        payload = parsed(sent.payload)
        ended = StepOutcome.SUCCEEDED, payload, None
        return Receipt(key, *ended, Effect.SIGNAL, lease.fence, row.recorded_at, input_fingerprint=given)

    def read(self, connection: Connection, lease: Lease, name: str) -> tuple[int, Any] | None:
        """Read the oldest signal of a name in a step's transaction: its id and payload."""
        row = self._reads.first(connection, self.store.parameters(lease, name=name))
        return None if row is None else (row.id, parsed(row.payload))

    def answer(self, connection: Connection, lease: Lease, key: str, signal: int, reply: str) -> None:
        """Take a signal in a step's transaction, with the reply to it."""
        self._answers.first(connection, self.store.parameters(lease, step=key, id=signal, result=reply))

    def fail(self, lease: Lease, key: str, signal: int, failure: Failure, given: str | None) -> Receipt | None:
        """Record that what was called to answer a signal has failed; None where the step has its receipt already.

        :raises LostLease: where the fence has moved on; nothing is recorded.
        """
        parameters = {**self._failed(lease, key, failure, given), **arguments(id=signal)}
        row = self.store.patiently(
            lambda: self.store.write(lease, lambda connection: self._fails.first(connection, parameters))
        )
        return None if row.recorded_at is None else _failure(lease, key, failure, given, row.recorded_at)

    def park(
        self, lease: Lease, key: str, name: str, timeout: timedelta | None, given: str | None
    ) -> Parked | Receipt | None:
        """Hand the run back to wait for a signal.

        :param given: as for :meth:`take`.
        :return: what the run is now; or the receipt that says that the time to wait is over; or None where there is a
         signal after all, or the step has its receipt already.
        :raises LostLease: where the fence has moved on; nothing is written.
        :raises Cancelled: where the run has to stop, as for :class:`.TimedOut`; nothing is written.
        """

        def work(_: object, connection: Connection) -> Parked | Receipt | None:
            parameters = {**self._looking(lease, key, name), **arguments(timeout=timeout, input_fingerprint=given)}
            self.store.held(connection, lease, lambda connection: self._locks.first(connection, parameters))
            seen: AnyRow = self._looks.first(connection, parameters)
            self._refuse_stopped(lease, seen)
            if seen.id is not None or _succeeded(seen.outcome):
                return None
            if seen.overdue:
                return self._time_out(connection, lease, key, name, given)
            row: AnyRow = connection.execute(self._parks, {**parameters, **self._key(lease)}).one()
            return Parked(row._mapping, row._mapping[self.store.runs.available_at])

        # A snapshot of the whole transaction would be from before the wait for the senders.
        return self.store.execute(work, isolation=_READ_COMMITTED)

    def sleep(
        self, lease: Lease, key: str, duration: timedelta | datetime, given: str | None
    ) -> Parked | Receipt | None:
        """Hand the run back until an instant; where that has passed, record it.

        :param given: the fingerprint of the step's input, to be recorded.
        :return: what the run is now; or the receipt that says that it has passed; or None where there is one already.
        :raises LostLease: where the fence has moved on; nothing is written.
        :raises Cancelled: where the run has to stop, as for :class:`.TimedOut`; nothing is written.
        """
        at = isinstance(duration, datetime)
        parameters = {
            **self._key(lease),
            **arguments(
                fence=lease.fence,
                step=key,
                effect=Effect.SLEEP.value,
                until=duration if at else None,
                duration=None if at else duration,
                input_fingerprint=given,
            ),
        }
        statement, columns = self._sleeps
        row = self.store.write(lease, lambda connection: connection.execute(statement, parameters).one_or_none())
        self._refuse_stopped(lease, row)
        if row.outcome is None:
            return None
        if row.outcome == StepOutcome.PENDING.value:
            return Parked(dict(zip(columns, row[-len(columns) :], strict=True)), row.until)
        ended = StepOutcome.SUCCEEDED, None, None
        return Receipt(key, *ended, Effect.SLEEP, lease.fence, row.recorded_at, input_fingerprint=given)

    # the parts

    def _looking(self, lease: Lease, key: str, name: str) -> dict[str, Any]:
        return self.store.parameters(lease, step=key, name=name, effect=Effect.SIGNAL.value)

    def _time_out(self, connection: Connection, lease: Lease, key: str, name: str, given: str | None) -> Receipt:
        run = f"{self.store.runs.entity.__name__} {lease.identity!r}"
        failure = Failure.of(SignalTimeout(f"{run}: no signal {name!r} came within the timeout of its wait.", key))
        row: AnyRow = self._times_out.first(connection, self._failed(lease, key, failure, given))
        return _failure(lease, key, failure, given, row.recorded_at)

    def _failed(self, lease: Lease, key: str, failure: Failure, given: str | None) -> dict[str, Any]:
        return self.store.parameters(
            lease,
            step=key,
            effect=Effect.SIGNAL.value,
            outcome=StepOutcome.FAILED.value,
            result=None,
            error=json.dumps(failure.to_json()),
            input_fingerprint=given,
        )

    def _refuse_stopped(self, lease: Lease, row: AnyRow) -> None:
        if (told := stop.stop_of(self.store.runs, row)) is not None:
            raise self.store.stopped(lease, told)

    def _key(self, lease: Lease) -> dict[str, Any]:
        """The run's key as a statement is executed with that is not prepared."""
        return self.store.runs.parameters(lease.identity)

    # statements

    @cached_property
    def _takes(self) -> Prepared:
        statement = takes(self.store.runs, self.store.receipts, self.store.signals)
        return self.store.prepare(statement, *stop.names(self.store.runs), "recorded_at")

    @cached_property
    def _reads(self) -> Prepared:
        return self.store.prepare(reads(self.store.signals), "id", "payload")

    @cached_property
    def _answers(self) -> Prepared:
        return self.store.prepare(answers(self.store.signals), "id")

    @cached_property
    def _fails(self) -> Prepared:
        statement = fails(self.store.runs, self.store.receipts, self.store.signals)
        return self.store.prepare(statement, *stop.names(self.store.runs), "recorded_at")

    @cached_property
    def _times_out(self) -> Prepared:
        statement = times_out(self.store.runs, self.store.receipts)
        return self.store.prepare(statement, *stop.names(self.store.runs), "recorded_at")

    @cached_property
    def _locks(self) -> Prepared:
        return self.store.prepare(locks(self.store.runs), *self.store.runs.key_names)

    @cached_property
    def _looks(self) -> Prepared:
        told = *stop.names(self.store.runs), "id", "payload", "overdue", "outcome"
        return self.store.prepare(looks(self.store.runs, self.store.receipts, self.store.signals), *told)

    @cached_property
    def _parks(self) -> Any:
        return parks(self.store.runs, self.store.receipts)

    @cached_property
    def _sleeps(self) -> tuple[AnySelect, list[Column[Any]]]:
        return sleeps(self.store.runs, self.store.receipts)


def _failure(lease: Lease, key: str, failure: Failure, given: str | None, at: datetime) -> Receipt:
    ended = StepOutcome.FAILED, None, failure
    return Receipt(key, *ended, Effect.SIGNAL, lease.fence, at, input_fingerprint=given)


def _succeeded(outcome: str | None) -> StepOutcome | None:
    return StepOutcome.SUCCEEDED if outcome == StepOutcome.SUCCEEDED.value else None
