"""A wait for a lock is neither a refusal nor a lost lease, and what is stamped after it is not from before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Column, Engine, ForeignKey, Integer, MetaData, Table, event, func, insert, select, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Cancelled, Failure, RetryableError, Run, Runs
from sqla_durable.holder import Holder
from tests.support import (
    Background,
    Plan,
    PlanStatus,
    PlanStep,
    approved_plan,
    column,
    entries,
    let_lapse,
    locked,
    plan_statuses,
    wait_until_blocked,
    write_entry,
)

LEASE = Plan.__lifecycle__.lease


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep)


@pytest.fixture
def claimed(session_factory: sessionmaker[Session], plans: Runs[Plan]) -> Run[Plan]:
    run = plans.claim(approved_plan(session_factory))
    assert run is not None
    return run


@pytest.fixture
def quick(engine: Engine) -> Iterator[Engine]:
    """A second engine, on which a statement that waits for a lock fails instead."""

    def fail_rather_than_wait(connection: Any, _: object) -> None:
        connection.execute("SET lock_timeout = '100ms'")
        connection.commit()

    event.listen(engine, "connect", fail_rather_than_wait)
    engine.dispose()
    yield engine
    event.remove(engine, "connect", fail_rather_than_wait)


def database_clock(engine: Engine) -> datetime:
    with engine.connect() as connection:
        return connection.execute(select(func.clock_timestamp())).scalar_one()


def while_locked(engine: Engine, ident: UUID, call: Callable[[], Any]) -> tuple[datetime, Any]:
    """Make a call that waits for an unrelated lock; return when that lock was let go, and the result."""
    with locked(engine, ident):
        waiting = Background(call)
        wait_until_blocked(engine)
        unlocked = database_clock(engine)
    return unlocked, waiting.result()


# a short unrelated lock


def test_a_lock_on_a_ready_run_does_not_refuse_its_claim_and_the_lease_starts_after_the_wait(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    unlocked, run = while_locked(engine, ident, lambda: plans.claim(ident))
    assert run is not None
    assert column(engine, ident, "started_at") >= unlocked
    assert column(engine, ident, "lease_expires_at") >= unlocked + LEASE


def test_a_lock_on_a_lapsed_run_does_not_refuse_its_claim(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], claimed: Run[Plan]
) -> None:
    ident = claimed.lease.identity[0]
    let_lapse(session_factory, ident)
    _, run = while_locked(engine, ident, lambda: plans.claim(ident))
    assert run is not None
    assert run.lease.fence == 2


def test_a_lock_is_not_a_lost_lease_to_a_step_and_its_receipt_and_renewal_are_stamped_after_the_wait(
    engine: Engine, session_factory: sessionmaker[Session], claimed: Run[Plan]
) -> None:
    ident = claimed.lease.identity[0]
    let_lapse(session_factory, ident)
    unlocked, result = while_locked(engine, ident, lambda: claimed.step("only", write_entry, "a"))
    assert result == "a"
    assert claimed.receipts[0].recorded_at >= unlocked
    assert column(engine, ident, "lease_expires_at") >= unlocked + LEASE


def test_a_lock_is_not_a_lost_lease_to_an_external_step(engine: Engine, claimed: Run[Plan]) -> None:
    ident = claimed.lease.identity[0]
    unlocked, result = while_locked(engine, ident, lambda: claimed.external("only", lambda: "sent"))
    assert result == "sent"
    assert claimed.receipts[0].recorded_at >= unlocked


@pytest.mark.parametrize(
    ("land", "status"),
    [
        (lambda run: run.finish(), PlanStatus.EXECUTED),
        (lambda run: run.fail(ValueError("no stock")), PlanStatus.FAILED),
    ],
    ids=["finish", "fail"],
)
def test_a_lock_is_not_a_lost_lease_to_a_landing_and_it_is_stamped_after_the_wait(
    engine: Engine, claimed: Run[Plan], land: Callable[[Run[Plan]], None], status: PlanStatus
) -> None:
    ident = claimed.lease.identity[0]
    unlocked, _ = while_locked(engine, ident, lambda: land(claimed))
    assert column(engine, ident, "status") is status
    assert column(engine, ident, "finished_at") >= unlocked


def test_a_run_that_goes_back_for_a_retry_waits_its_backoff_from_after_the_lock(
    engine: Engine, claimed: Run[Plan]
) -> None:
    ident = claimed.lease.identity[0]
    failure = Failure.of(RetryableError("not yet"))
    unlocked, _ = while_locked(engine, ident, lambda: claimed.holder.release(failure))
    assert column(engine, ident, "available_at") >= unlocked
    assert datetime.fromisoformat(column(engine, ident, "failures")[0]["at"]) >= unlocked


def test_a_lock_is_not_a_lost_lease_to_a_lease_that_is_taken_up_elsewhere(
    engine: Engine, plans: Runs[Plan], claimed: Run[Plan]
) -> None:
    ident = claimed.lease.identity[0]
    unlocked, _ = while_locked(engine, ident, lambda: plans.hold(claimed.lease))
    assert column(engine, ident, "lease_expires_at") >= unlocked + LEASE


def test_a_transition_waits_and_is_stamped_after_the_wait(
    engine: Engine, session_factory: sessionmaker[Session], claimed: Run[Plan]
) -> None:
    ident = claimed.lease.identity[0]

    def fail_it() -> bool:
        with session_factory.begin() as session:
            return plan_statuses.transition(session, (Plan, ident), PlanStatus.FAILED, from_=PlanStatus.EXECUTING)

    unlocked, won = while_locked(engine, ident, fail_it)
    assert won
    assert column(engine, ident, "finished_at") >= unlocked


def test_a_requeue_waits_and_is_due_from_after_the_wait(engine: Engine, plans: Runs[Plan], claimed: Run[Plan]) -> None:
    ident = claimed.lease.identity[0]
    claimed.fail(ValueError("no stock"))
    unlocked, won = while_locked(engine, ident, lambda: plans.requeue(ident))
    assert won
    assert column(engine, ident, "available_at") >= unlocked


def test_a_reaped_run_that_is_locked_is_resumed_after_the_wait(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], claimed: Run[Plan]
) -> None:
    ident = claimed.lease.identity[0]
    let_lapse(session_factory, ident)
    assert plans.heal(ident)
    unlocked, result = while_locked(engine, ident, lambda: claimed.step("only", write_entry, "a"))
    assert result == "a"
    assert column(engine, ident, "lease_expires_at") >= unlocked + LEASE


# what does not wait


def test_a_renewal_skips_a_locked_row_and_does_not_read_as_lost(
    engine: Engine, quick: Engine, claimed: Run[Plan]
) -> None:
    ident = claimed.lease.identity[0]
    before = column(engine, ident, "lease_expires_at")
    with locked(engine, ident):
        claimed.renew()
    assert column(engine, ident, "lease_expires_at") == before
    claimed.renew()
    assert column(engine, ident, "lease_expires_at") > before


def test_a_renewal_skips_a_locked_row_of_a_reaped_run_and_the_next_one_resumes_it(
    engine: Engine, quick: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], claimed: Run[Plan]
) -> None:
    ident = claimed.lease.identity[0]
    let_lapse(session_factory, ident)
    assert plans.heal(ident)
    with locked(engine, ident):
        claimed.renew()
    claimed.renew()
    assert column(engine, ident, "status") is PlanStatus.EXECUTING


def test_reapers_and_batch_claimers_skip_a_locked_row(
    engine: Engine, quick: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], claimed: Run[Plan]
) -> None:
    ident = claimed.lease.identity[0]
    let_lapse(session_factory, ident)
    ready, free = approved_plan(session_factory), approved_plan(session_factory)
    with locked(engine, ident), locked(engine, ready):
        assert not plans.heal(ident)
        assert plans.reap() == 0
        assert [run.lease.identity for run in plans.claim_due(10)] == [(free,)]


def test_a_step_does_not_block_the_insert_of_a_row_that_refers_to_the_run(
    engine: Engine, quick: Engine, claimed: Run[Plan]
) -> None:
    comment = Table("comment", MetaData(), Column("id", Integer, primary_key=True))
    comment.append_column(Column("plan_id", ForeignKey(Plan.__table__.c.id), nullable=False))
    comment.create(engine)
    ident = claimed.lease.identity[0]

    def body(session: Session) -> None:
        with quick.begin() as other:
            other.execute(insert(comment).values(plan_id=ident))

    claimed.step("only", body)
    with engine.connect() as connection:
        assert connection.scalar(select(func.count()).select_from(comment)) == 1


def test_a_renewal_within_a_step_returns_at_once_without_a_statement(
    engine: Engine, quick: Engine, claimed: Run[Plan]
) -> None:
    statements: list[str] = []

    def body(session: Session) -> int:
        event.listen(engine, "before_cursor_execute", lambda _, __, statement, *___: statements.append(statement))
        claimed.renew()
        return len(statements)

    assert claimed.step("only", body) == 0


# a step's own lock


def test_a_cancel_request_waits_for_a_running_step_and_the_next_step_sees_it(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], claimed: Run[Plan]
) -> None:
    ident = claimed.lease.identity[0]
    requested: list[Background] = []

    def request() -> bool:
        with session_factory.begin() as session:
            return plans.request_cancel(session, ident)

    def body(session: Session) -> str:
        requested.append(Background(request))
        wait_until_blocked(engine)
        return write_entry(session, "a")

    assert claimed.step("first", body) == "a"
    assert requested[0].result()
    assert column(engine, ident, "cancel_requested_at") >= claimed.receipts[0].recorded_at
    with pytest.raises(Cancelled):
        claimed.step("second", write_entry, "b")
    assert entries(engine) == ["a"]


def test_a_heartbeat_during_a_step_skips_its_row_and_the_end_of_the_step_renews(
    engine: Engine, quick: Engine, session_factory: sessionmaker[Session], claimed: Run[Plan]
) -> None:
    ident = claimed.lease.identity[0]
    let_lapse(session_factory, ident)
    holder: Holder[Plan] = claimed.holder

    def body(session: Session) -> None:
        with quick.connect() as connection:
            holder.beat(connection)
        assert holder.lost is None
        with quick.connect() as connection:
            assert connection.scalar(text("SELECT lease_expires_at < now() FROM plan"))

    claimed.step("only", body)
    assert column(engine, ident, "lease_expires_at") > database_clock(engine) + LEASE - timedelta(seconds=20)


def test_a_lapsed_run_is_not_taken_from_a_holder_who_is_in_a_step(
    engine: Engine, quick: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], claimed: Run[Plan]
) -> None:
    ident = claimed.lease.identity[0]
    let_lapse(session_factory, ident)

    def body(session: Session) -> str:
        assert not plans.heal(ident)
        assert plans.reap() == 0
        assert plans.claim_due(10) == []
        return write_entry(session, "a")

    assert claimed.step("only", body) == "a"
    assert plans.claim(ident) is None
    assert column(engine, ident, "fence") == 1
