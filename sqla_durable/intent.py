"""The receipt of an operation on its way: issued, then pending, then terminal; one fenced statement for each arrow."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cached_property
from typing import Any

from sqlalchemy import (
    CTE,
    BigInteger,
    Column,
    ColumnElement,
    String,
    and_,
    delete,
    literal,
    not_,
    or_,
    select,
    update,
)
from sqlalchemy.sql.dml import ReturningDelete, ReturningUpdate

from sqla_durable import clock, fence, stop
from sqla_durable.deadline import OUT_OF_TIME
from sqla_durable.failure import Failure
from sqla_durable.fence import holding, let_lapse
from sqla_durable.guarded_receipts import taking_back
from sqla_durable.lease import Lease
from sqla_durable.prepared import Prepared
from sqla_durable.receipt import (
    Effect,
    Receipt,
    ReceiptRows,
    StepOutcome,
    from_held,
    input_fingerprint,
    json_bound,
    one,
    parsed,
    receipt_of,
    step_key,
)
from sqla_durable.rows import AnyRow, AnySelect, arguments, bound
from sqla_durable.run import RunRows
from sqla_durable.stop import Stop
from sqla_durable.store import Store


def issues(runs: RunRows[Any], receipts: ReceiptRows) -> AnySelect:
    """Lock the run if the holder's fence is still the run's, and record the intent to issue an operation.

    A receipt that is there stays, whatever it says: who inserts the intent is the one to issue. Nothing is inserted
    for a run that has to stop.
    """
    held = fence.held(runs)
    values = {
        receipts.outcome: _outcome(StepOutcome.ISSUED),
        receipts.recorded_at: clock.stamp(),
        receipts.input_fingerprint: input_fingerprint(),
    }
    insert, _ = from_held(receipts, _wanted(runs, held), values)
    keys = [*receipts.run_key, receipts.step]
    return _told(held, insert.on_conflict_do_nothing(index_elements=keys).returning(receipts.recorded_at).cte("issued"))


def attaches(runs: RunRows[Any], receipts: ReceiptRows) -> AnySelect:
    """Attach the ids to the intent that was recorded under this very fence, whatever has become of the run since.

    This is the one write that a stale holder makes: it says what that holder issued while it held the run, and nobody
    else can know it. Also tells whether the run is still held.
    """
    attached = _attaching(receipts, receipts.fence == bound("fence", BigInteger())).cte("attached")
    held = or_(holding(runs), let_lapse(runs))
    return select(
        held.label("held"),
        runs.cancel_requested_at.is_not(None).label("cancel_requested"),
        *(late.label(OUT_OF_TIME) for late in runs.out_of_time()),
        select(attached.c[receipts.recorded_at.key]).scalar_subquery().label("recorded_at"),
    ).where(runs.matches())


def attaches_by_hand(receipts: ReceiptRows) -> ReturningUpdate[Any]:
    """Attach the ids that an operator has found at the service to an intent without any."""
    return _attaching(receipts)


def settles(runs: RunRows[Any], receipts: ReceiptRows) -> AnySelect:
    """Lock the run if the holder's fence is still the run's, and record how its pending operation has ended."""
    held = fence.held(runs)
    keys = [column == held.c[f"key_{position}"] for position, column in enumerate(receipts.run_key)]
    settled = (
        update(receipts.table)
        .where(*keys, receipts.step == step_key(), receipts.is_operation, receipts.in_outcome(StepOutcome.PENDING))
        .values(
            {
                **receipts.untouched(),
                receipts.outcome: bound("outcome", String()),
                receipts.result: json_bound("result"),
                receipts.error: json_bound("error"),
                receipts.fence: held.c.fence,
                receipts.recorded_at: clock.stamp(),
            }
        )
        .returning(receipts.recorded_at)
    )
    return _told(held, settled.cte("settled"))


def withdraws(runs: RunRows[Any], receipts: ReceiptRows) -> AnySelect:
    """Lock the run if the holder's fence is still the run's, and delete the intent that it recorded."""
    held = fence.held(runs, taking_back())
    own = [column == held.c[f"key_{position}"] for position, column in enumerate(receipts.run_key)]
    issued = receipts.step == step_key(), receipts.in_outcome(StepOutcome.ISSUED), receipts.fence == held.c.fence
    withdrawn = delete(receipts.table).where(*own, *issued).returning(receipts.recorded_at)
    return _told(held, withdrawn.cte("withdrawn"))


def never_issued(runs: RunRows[Any], receipts: ReceiptRows) -> ReturningDelete[Any]:
    """Delete the receipt of an operation that was issued or has failed, by an operator's word.

    Not while the run is running under the fence it was issued under: that holder may be about to issue.
    """
    found = (
        runs.lock(runs.matches())
        .add_columns(runs.fence.label("fence"), runs.in_status(runs.lifecycle.running).label("running"), taking_back())
        .cte("found")
    )
    keys = [column == found.c[f"key_{position}"] for position, column in enumerate(receipts.run_key)]
    refused = and_(found.c.running, found.c.fence == receipts.fence)
    outcome = receipts.in_outcome(StepOutcome.ISSUED, StepOutcome.FAILED)
    condition = *keys, receipts.step == step_key(), receipts.is_operation, outcome, not_(refused)
    return delete(receipts.table).where(*condition).returning(receipts.step)


def _wanted(runs: RunRows[Any], held: CTE) -> CTE:
    """The held run unless it has to stop."""
    asked = [] if runs.lifecycle.cancelled is None else [held.c.cancel_requested_at.is_(None)]
    going_on = *asked, *([] if runs.deadline is None else [not_(held.c[OUT_OF_TIME])])
    return select(held).where(*going_on).cte("wanted") if going_on else held


def _told(held: CTE, written: CTE) -> AnySelect:
    return select(
        *stop.told(held),
        select(next(iter(written.c))).scalar_subquery().label("recorded_at"),
    )


def _attaching(receipts: ReceiptRows, *conditions: ColumnElement[bool]) -> ReturningUpdate[Any]:
    issued = receipts.is_operation, receipts.in_outcome(StepOutcome.ISSUED), receipts.ids.is_(None)
    values: dict[Column[Any], Any] = {
        **receipts.untouched(),
        receipts.outcome: _outcome(StepOutcome.PENDING),
        receipts.ids: json_bound("ids"),
        receipts.recorded_at: clock.stamp(),
    }
    return (
        update(receipts.table)
        .where(*receipts.of_run(), receipts.step == step_key(), *issued, *conditions)
        .values(values)
        .returning(receipts.recorded_at)
    )


def _outcome(outcome: StepOutcome) -> ColumnElement[str]:
    return literal(outcome.value, String)


class Intents:
    """The receipts of one store's operations."""

    def __init__(self, store: Store[Any]) -> None:
        self.store = store

    def issue(self, lease: Lease, key: str, given: str | None = None) -> Receipt | None:
        """Record the intent to issue an operation; None where there is a receipt already.

        It is not repeated after an outage, where it may have been committed: an intent that is found cannot be told
        from that of another holder of the same lease.

        :param given: the fingerprint of the step's input, to be recorded.
        :raises LostLease: where the fence has moved on; nothing is recorded.
        :raises Cancelled: where someone asked for the run to be cancelled; nothing is recorded.
        :raises TimedOut: where it ran past its deadline; nothing is recorded.
        """
        effect = Effect.OPERATION
        parameters = self.store.parameters(lease, step=key, effect=effect.value, input_fingerprint=given)
        row = self.store.write(lease, lambda connection: self._issues.first(connection, parameters))
        if (told := stop.stop_of(self.store.runs, row)) is not None:
            raise self.store.stopped(lease, told)
        if row.recorded_at is None:
            return None
        at = row.recorded_at
        return Receipt(key, StepOutcome.ISSUED, None, None, effect, lease.fence, at, input_fingerprint=given)

    def attach(self, lease: Lease, issued: Receipt, ids: str) -> tuple[Receipt | None, AnyRow | None]:
        """Attach ids to this holder's own intent.

        :return: the receipt with them, or None where the intent is not there, or has ids already; and what the run
         looks like now, if it is there.
        """
        parameters = self.store.parameters(lease, step=issued.step, ids=ids)
        row = self.store.patiently(
            lambda: self.store.single(lambda connection: self._attaches.first(connection, parameters))
        )
        if row is None or row.recorded_at is None:
            return None, row
        attached = replace(issued, outcome=StepOutcome.PENDING, recorded_at=row.recorded_at, ids=parsed(ids))
        return attached, row

    def settle(
        self, lease: Lease, pending: Receipt, *, result: str | None = None, failure: Failure | None = None
    ) -> tuple[Receipt | None, Stop | None]:
        """Record how a pending operation has ended.

        :return: the terminal receipt, or None where it was not pending any more; and whether the run has to stop.
        :raises LostLease: where the fence has moved on; nothing is recorded.
        """
        outcome = StepOutcome.SUCCEEDED if failure is None else StepOutcome.FAILED
        error = None if failure is None else json.dumps(failure.to_json())
        parameters = self.store.parameters(lease, step=pending.step, outcome=outcome.value, result=result, error=error)
        row = self.store.patiently(
            lambda: self.store.write(lease, lambda connection: self._settles.first(connection, parameters))
        )
        told = stop.stop_of(self.store.runs, row)
        if row.recorded_at is None:
            return None, told
        settled = replace(
            pending,
            outcome=outcome,
            result=parsed(result),
            failure=failure,
            fence=lease.fence,
            recorded_at=row.recorded_at,
        )
        return settled, told

    def withdraw(self, lease: Lease, key: str) -> None:
        """Delete this holder's own intent, of which the service certainly knows nothing.

        :raises LostLease: where the fence has moved on; the intent stays.
        """
        parameters = self.store.parameters(lease, step=key)
        self.store.patiently(
            lambda: self.store.write(lease, lambda connection: self._withdraws.first(connection, parameters))
        )

    def read(self, lease: Lease, key: str) -> Receipt | None:
        """Read the receipt as it is now."""
        parameters = {**self.store.runs.parameters(lease.identity), **arguments(step=key)}
        row = self.store.single(lambda connection: connection.execute(self._one, parameters).one_or_none())
        return None if row is None else receipt_of(row)

    # statements

    @property
    def _told(self) -> tuple[str, ...]:
        return (*stop.names(self.store.runs), "recorded_at")

    @cached_property
    def _issues(self) -> Prepared:
        return self.store.prepare(issues(self.store.runs, self.store.receipts), *self._told)

    @cached_property
    def _attaches(self) -> Prepared:
        return self.store.prepare(attaches(self.store.runs, self.store.receipts), "held", *self._told)

    @cached_property
    def _settles(self) -> Prepared:
        return self.store.prepare(settles(self.store.runs, self.store.receipts), *self._told)

    @cached_property
    def _withdraws(self) -> Prepared:
        return self.store.prepare(withdraws(self.store.runs, self.store.receipts), *self._told)

    @cached_property
    def _one(self) -> AnySelect:
        return one(self.store.receipts)
