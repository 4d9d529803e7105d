"""What becomes of runs without a living holder: reaped or healed, by precedence, and given another life."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, create_engine, func, select, text, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import (
    Lifecycle,
    LostLease,
    ReceiptMixin,
    RetryableError,
    Run,
    RunMixin,
    Runs,
    StatusMachine,
    StepFailed,
    UsageError,
)
from sqla_durable.fence import HISTORY
from sqla_durable.testing import lapse
from tests.support import (
    ROW_BY_ROW,
    Background,
    Plan,
    PlanStatus,
    PlanStep,
    approved_plan,
    column,
    entries,
    let_lapse,
    locked,
    wait_until_blocked,
    write_entry,
)
from tests.support_jobs import JobStatus, OneShot, OneShotStep, Patient, PatientStep, add_jobs


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep, owner="the holder")


def lapsed_plan(factory: sessionmaker[Session], plans: Runs[Plan], **values: Any) -> Run[Plan]:
    run = plans.claim(approved_plan(factory))
    assert run is not None
    ident = run.lease.identity[0]
    let_lapse(factory, ident)
    if values:
        with factory.begin() as session:
            session.execute(update(Plan).where(Plan.id == ident).values(**values))
    return run


def the_plan(engine: Engine, ident: object) -> Plan:
    with Session(engine, expire_on_commit=False) as session:
        return session.get_one(Plan, ident)


# lapsed, and what becomes of it


def test_a_lapsed_run_is_ready_again_and_says_why(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = lapsed_plan(session_factory, plans).lease.identity[0]
    assert plans.reap() == 1
    plan = the_plan(engine, ident)
    assert (plan.status, plan.fence, plan.attempts) == (PlanStatus.APPROVED, 1, 1)
    assert (plan.lease_expires_at, plan.lease_owner, plan.finished_at) == (None, "the holder", None)
    assert plan.error is not None
    assert plan.error["type"] == "LeaseLapsed"
    assert plan.error["message"].startswith("the lease of the holder lapsed at ")
    assert plan.error["message"].endswith(", in attempt 1")


def test_a_run_whose_lease_lasts_is_left_alone(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    assert plans.claim(ident) is not None
    assert plans.reap() == 0
    assert plans.heal(ident) is False
    assert column(engine, ident, "status") is PlanStatus.EXECUTING


@pytest.mark.parametrize("status", [PlanStatus.EXECUTED, PlanStatus.FAILED])
def test_an_ended_run_is_left_alone(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], status: PlanStatus
) -> None:
    run = lapsed_plan(session_factory, plans)
    run.finish() if status is PlanStatus.EXECUTED else run.fail(ValueError("no stock"))
    assert plans.heal(run.lease.identity[0]) is False
    assert plans.reap() == 0


def test_healing_what_does_not_exist_is_false(plans: Runs[Plan]) -> None:
    assert plans.heal(uuid4()) is False


def test_reading_a_run_heals_it(session_factory: sessionmaker[Session], plans: Runs[Plan]) -> None:
    ident = lapsed_plan(session_factory, plans).lease.identity[0]
    plan = plans.get(ident)
    assert plan is not None
    assert plan.status is PlanStatus.APPROVED
    assert plans.get(uuid4()) is None


def test_those_started_first_are_reaped_first_and_no_more_than_asked(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    idents = [lapsed_plan(session_factory, plans).lease.identity[0] for _ in range(4)]
    with engine.begin() as connection:
        for age, ident in zip((1, 3, 2, 4), idents, strict=True):
            started = func.now() - timedelta(hours=age)
            connection.execute(update(Plan).where(Plan.id == ident).values(started_at=started))
    assert plans.reap(2) == 2
    assert [column(engine, ident, "status") for ident in idents] == [
        PlanStatus.EXECUTING,
        PlanStatus.APPROVED,
        PlanStatus.EXECUTING,
        PlanStatus.APPROVED,
    ]
    assert plans.reap() == 2


def test_a_lifecycle_that_says_so_fails_a_lapsed_run_for_good(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    jobs: Runs[OneShot] = Runs(session_factory, OneShot, OneShotStep)
    (ident,) = add_jobs(engine, OneShot, 1)
    run = jobs.claim(ident)
    assert run is not None
    with session_factory.begin() as session:
        lapse(session, OneShot, ident)
    assert jobs.claim(ident) is None
    job = jobs.get(ident)
    assert job is not None
    assert (job.status, job.lease_owner, job.finished_at is None) == (JobStatus.FAILED, None, False)
    with pytest.raises(LostLease):
        run.finish()


def test_a_run_that_nobody_looked_at_for_its_backoff_is_claimed_as_soon_as_it_is_reaped(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    jobs: Runs[Patient] = Runs(session_factory, Patient, PatientStep)
    late, early = add_jobs(engine, Patient, 2)
    for ident, ago in ((late, timedelta(seconds=61)), (early, timedelta(seconds=30))):
        assert jobs.claim(ident) is not None
        with session_factory.begin() as session:
            session.execute(
                update(Patient).where(Patient.id == ident).values(lease_expires_at=func.clock_timestamp() - ago)
            )
    assert [run.lease.identity for run in jobs.claim_due(2)] == [(late,)]
    assert jobs.claim(early) is None
    early_plan = jobs.get(early)
    assert early_plan is not None
    assert early_plan.status is JobStatus.READY


SPENT, ASKED = {"attempts": 3}, {"cancel_requested_at": func.now()}


@pytest.mark.parametrize(
    ("values", "status"),
    [
        ({}, PlanStatus.APPROVED),
        ({"attempts": 2}, PlanStatus.APPROVED),
        (SPENT, PlanStatus.DEAD),
        (ASKED, PlanStatus.CANCELLED),
        ({**SPENT, **ASKED}, PlanStatus.CANCELLED),
    ],
    ids=["lapse", "one attempt left", "spent", "asked to cancel", "spent and asked to cancel"],
)
def test_a_cancel_request_outweighs_spent_attempts_and_those_a_lapse(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], values: Any, status: PlanStatus
) -> None:
    ident = lapsed_plan(session_factory, plans, **values).lease.identity[0]
    assert plans.heal(ident)
    plan = the_plan(engine, ident)
    assert plan.status is status
    assert (plan.finished_at is None) == (status is PlanStatus.APPROVED)
    assert (plan.lease_owner is None) == (status is not PlanStatus.APPROVED)


def test_a_run_that_loses_its_process_each_time_is_dead_after_its_last_attempt(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    starts = 0
    while plans.claim(ident) is not None:
        starts += 1
        let_lapse(session_factory, ident)
    plan = the_plan(engine, ident)
    assert (starts, plan.status, plan.attempts, plan.fence) == (3, PlanStatus.DEAD, 3, 3)
    assert plan.error is not None
    assert "in attempt 3" in plan.error["message"]
    assert [failure["attempt"] for failure in plan.failures] == [1, 2, 3]


# failures remembered


def test_a_runs_failures_are_remembered_up_to_twenty_without_their_tracebacks(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    for attempt in range(1, HISTORY + 4):
        with session_factory.begin() as session:
            session.execute(update(Plan).values(attempts=0))

        def fail(run: Run[Plan], attempt: int = attempt) -> None:
            raise RetryableError(f"attempt {attempt}")

        plans.execute(ident, fail, run_now=True)
    failures = column(engine, ident, "failures")
    assert HISTORY == 20
    assert [failure["message"] for failure in failures] == [f"attempt {n}" for n in range(4, HISTORY + 4)]
    assert {frozenset(failure) for failure in failures} == {frozenset({"attempt", "at", "step", "type", "message"})}
    assert "traceback" in column(engine, ident, "error")


# requeued


def fail_at_second_step(run: Run[Plan]) -> None:
    run.step("first", write_entry, "a")
    run.step("second", raise_out_of_stock)


def raise_out_of_stock(session: Session) -> None:
    raise ValueError("no stock")


def test_a_requeued_run_keeps_its_fence_and_successes_and_forgets_its_failed_receipts(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory, note="kept")
    assert plans.execute(ident, fail_at_second_step).status is PlanStatus.FAILED
    assert [receipt.step for receipt in plans.receipts(ident)] == ["first", "second"]
    assert plans.requeue(ident) is True
    plan = the_plan(engine, ident)
    assert (plan.status, plan.fence, plan.attempts, plan.note) == (PlanStatus.APPROVED, 1, 0, "kept")
    cleared = "lease_owner", "lease_expires_at", "cancel_requested_at", "error", "started_at", "finished_at"
    assert [getattr(plan, name) for name in cleared] == [None] * 6
    assert [failure["message"] for failure in plan.failures] == ["no stock"]
    assert [receipt.step for receipt in plans.receipts(ident)] == ["first"]

    def carry_out(run: Run[Plan]) -> None:
        run.step("first", write_entry, "again")
        run.step("second", write_entry, "b")

    outcome = plans.execute(ident, carry_out)
    assert outcome.status is PlanStatus.EXECUTED
    assert entries(engine) == ["a", "b"]
    assert column(engine, ident, "fence") == 2


def test_a_requeued_run_is_due_at_once(session_factory: sessionmaker[Session], plans: Runs[Plan]) -> None:
    ident = approved_plan(session_factory)
    plans.execute(ident, fail_at_second_step)
    with session_factory.begin() as session:
        session.execute(update(Plan).values(available_at=func.now() + timedelta(days=1)))
    assert plans.requeue(ident)
    assert plans.claim(ident) is not None


@pytest.mark.parametrize("verb", ["finish", "none", "claim"])
def test_only_a_run_in_a_status_named_for_it_is_requeued(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], verb: str
) -> None:
    ident = approved_plan(session_factory)
    if verb != "none":
        run = plans.claim(ident)
        assert run is not None
        if verb == "finish":
            run.finish()
    before = the_plan(engine, ident).status
    assert plans.requeue(ident) is False
    assert column(engine, ident, "status") is before


def test_a_run_that_is_not_requeued_keeps_its_failed_receipts(
    session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    run = plans.claim(ident := approved_plan(session_factory))
    assert run is not None
    with pytest.raises(ValueError, match="no stock"):
        run.step("only", raise_out_of_stock)
    run.release()
    assert plans.requeue(ident) is False
    again = plans.claim(ident)
    assert again is not None
    with pytest.raises(StepFailed):
        again.step("only", raise_out_of_stock)


def test_a_lifecycle_without_requeue_says_what_to_add(engine: Engine, session_factory: sessionmaker[Session]) -> None:
    jobs: Runs[OneShot] = Runs(session_factory, OneShot, OneShotStep)
    with pytest.raises(UsageError, match=r"names no status to requeue from; add Lifecycle\(requeue=\{...\}\)"):
        jobs.requeue(1)


def test_executing_an_ended_run_never_requeues_it(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    plans.execute(ident, fail_at_second_step)
    again = plans.execute(ident, lambda run: pytest.fail("an ended run ran"))
    assert (again.status, again.replayed) == (PlanStatus.FAILED, True)
    assert column(engine, ident, "fence") == 1


# what the user's columns see of it


def test_reaping_touches_no_column_of_the_users(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident: UUID = lapsed_plan(session_factory, plans, note="mine", actions=["a"]).lease.identity[0]
    assert plans.reap() == 1
    with engine.connect() as connection:
        assert connection.execute(select(Plan.note, Plan.actions).where(Plan.id == ident)).one() == ("mine", ["a"])
        assert connection.scalar(text("SELECT count(*) FROM plan")) == 1


# nothing but what has lapsed


@pytest.mark.past_guards
@pytest.mark.parametrize("status", [status for status in PlanStatus if status is not PlanStatus.EXECUTING])
def test_a_run_in_any_other_status_is_left_as_it_is(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], status: PlanStatus
) -> None:
    long_ago = func.now() - timedelta(days=9)
    times = dict.fromkeys(("available_at", "started_at", "finished_at", "cancel_requested_at"), long_ago)
    ident = approved_plan(session_factory)
    with session_factory.begin() as session:
        session.execute(update(Plan).values(status=status, attempts=9, fence=9, lease_owner="x", **times))
    before = row_of(engine, ident)
    assert plans.reap() == 0
    assert plans.heal(ident) is False
    assert row_of(engine, ident) == before


def test_a_lease_that_was_renewed_before_the_reaper_had_locked_the_row_lasts(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    """The reaper's snapshot is older than the renewal, which has committed by the time its row is looked at."""
    first, second = (lapsed_plan(session_factory, plans) for _ in range(2))
    with engine.begin() as connection:
        connection.execute(
            text(
                "CREATE FUNCTION hold_up() RETURNS trigger LANGUAGE plpgsql AS"
                " 'BEGIN PERFORM pg_advisory_xact_lock_shared(7303); RETURN NEW; END'"
            )
        )
        connection.execute(
            text(
                "CREATE TRIGGER hold_up BEFORE UPDATE ON plan FOR EACH ROW WHEN (NEW.status = 'approved')"
                " EXECUTE FUNCTION hold_up()"
            )
        )
    row_by_row = create_engine(engine.url, connect_args={"options": ROW_BY_ROW})
    reaper: Runs[Plan] = Runs(sessionmaker(row_by_row), Plan, PlanStep)
    with engine.connect() as gate, engine.connect() as renewal:
        gate.execute(text("SELECT pg_advisory_xact_lock(7303)"))
        fresh = {"lease_expires_at": func.clock_timestamp() + timedelta(minutes=1)}
        renewal.execute(update(Plan).where(Plan.id == second.lease.identity[0]).values(fresh))
        reaping = Background(reaper.reap)
        wait_until_blocked(engine)
        renewal.commit()
        gate.rollback()
        assert reaping.result() == 1
    row_by_row.dispose()
    assert column(engine, first.lease.identity[0], "status") is PlanStatus.APPROVED
    assert column(engine, second.lease.identity[0], "status") is PlanStatus.EXECUTING
    second.finish()


def test_a_locked_row_is_skipped_and_nobody_waits_for_it(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    held, free = (lapsed_plan(session_factory, plans).lease.identity[0] for _ in range(2))
    with locked(engine, held):
        assert Background(plans.reap).result() == 1
        assert Background(lambda: plans.heal(held)).result() is False
    assert column(engine, held, "status") is PlanStatus.EXECUTING
    assert column(engine, free, "status") is PlanStatus.APPROVED
    assert plans.heal(held) is True


class HeldStatus(StrEnum):
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    LOOKED_AT = "to be looked at"


def test_a_lapsed_run_goes_where_its_lifecycle_says_though_that_is_neither_ready_nor_an_end(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    machine = StatusMachine(
        HeldStatus,
        initial=HeldStatus.READY,
        transitions={
            HeldStatus.READY: {HeldStatus.RUNNING},
            HeldStatus.RUNNING: {HeldStatus.DONE, HeldStatus.FAILED, HeldStatus.LOOKED_AT},
            HeldStatus.LOOKED_AT: {HeldStatus.READY},
        },
    )

    class Base(DeclarativeBase):
        pass

    class Held(RunMixin, Base):
        __tablename__ = "held"
        __lifecycle__ = Lifecycle(
            machine,
            ready=HeldStatus.READY,
            running=HeldStatus.RUNNING,
            done=HeldStatus.DONE,
            failed=HeldStatus.FAILED,
            lapsed=HeldStatus.LOOKED_AT,
        )
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[HeldStatus] = machine.column()

    class HeldStep(ReceiptMixin[Held], Base):
        __tablename__ = "held_step"

    Base.metadata.create_all(engine)
    runs: Runs[Held] = Runs(session_factory, Held, HeldStep)
    with session_factory.begin() as session:
        session.add(Held(id=1))
    run = runs.claim(1)
    assert run is not None
    with session_factory.begin() as session:
        lapse(session, Held, 1)
    assert runs.claim(1) is None
    held = runs.get(1)
    assert held is not None
    assert (held.status, held.lease_owner, held.lease_expires_at) == (HeldStatus.LOOKED_AT, None, None)
    assert (held.finished_at, held.attempts, held.fence) == (None, 1, 1)
    assert held.error is not None
    assert held.error["type"] == "LeaseLapsed"
    with pytest.raises(LostLease):
        run.finish()
    with session_factory.begin() as session:
        assert machine.transition(session, (Held, 1), HeldStatus.READY)
    assert runs.claim(1) is not None


def row_of(engine: Engine, ident: UUID) -> Any:
    with engine.connect() as connection:
        return connection.execute(select(Plan.__table__).where(Plan.id == ident)).one()
