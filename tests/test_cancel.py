"""A cancel request: unfenced, its first instant kept, seen by the next step, and never overwritten by a completion."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, create_engine, update
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import (
    Cancelled,
    Ending,
    Lifecycle,
    LostLease,
    ReceiptMixin,
    RetryableError,
    Run,
    RunMixin,
    Runs,
    TransactionConflict,
    UsageError,
)
from sqla_durable.asyncio import AsyncRun, AsyncRuns
from tests.support import (
    Plan,
    PlanStatus,
    PlanStep,
    approved_plan,
    column,
    entries,
    eventually,
    let_lapse,
    plan_statuses,
    write_entry,
)
from tests.support_jobs import (
    OneShot,
    OneShotStep,
    Stoppable,
    StoppableStatus,
    StoppableStep,
    add_jobs,
    stoppable_statuses,
)
from tests.support_statements import statements


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep)


@pytest.fixture
def claimed(session_factory: sessionmaker[Session], plans: Runs[Plan]) -> Run[Plan]:
    run = plans.claim(approved_plan(session_factory))
    assert run is not None
    return run


def request(factory: sessionmaker[Session], plans: Runs[Plan], ident: object) -> bool:
    with factory.begin() as session:
        return plans.request_cancel(session, ident)


# asking


def test_a_ready_run_is_cancelled_at_once(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    assert request(session_factory, plans, ident) is True
    assert column(engine, ident, "status") is PlanStatus.CANCELLED
    assert column(engine, ident, "finished_at") >= column(engine, ident, "cancel_requested_at")


def test_a_loaded_object_shows_the_request(session_factory: sessionmaker[Session], plans: Runs[Plan]) -> None:
    ident = approved_plan(session_factory)
    with session_factory.begin() as session:
        plan = session.get_one(Plan, ident)
        assert plans.request_cancel(session, plan)
        assert plan.status is PlanStatus.CANCELLED
        assert plan.cancel_requested_at is not None


def test_a_running_run_is_only_asked_and_the_first_instant_is_kept(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], claimed: Run[Plan]
) -> None:
    ident = claimed.lease.identity[0]
    assert request(session_factory, plans, ident) is True
    first = column(engine, ident, "cancel_requested_at")
    assert request(session_factory, plans, ident) is True
    assert column(engine, ident, "cancel_requested_at") == first
    assert column(engine, ident, "status") is PlanStatus.EXECUTING


@pytest.mark.parametrize("land", [lambda run: run.finish(), lambda run: run.fail(ValueError())], ids=["done", "failed"])
def test_a_request_after_the_end_is_false_and_changes_nothing(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], claimed: Run[Plan], land: object
) -> None:
    assert callable(land)
    land(claimed)
    ident = claimed.lease.identity[0]
    status = column(engine, ident, "status")
    assert request(session_factory, plans, ident) is False
    assert column(engine, ident, "cancel_requested_at") is None
    assert column(engine, ident, "status") is status


def test_a_request_joins_the_callers_transaction(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    with session_factory() as session:
        assert plans.request_cancel(session, ident)
        session.rollback()
    assert column(engine, ident, "status") is PlanStatus.APPROVED


def test_a_request_for_what_does_not_exist_is_false(session_factory: sessionmaker[Session], plans: Runs[Plan]) -> None:
    assert request(session_factory, plans, uuid4()) is False


def test_a_lifecycle_without_a_cancelled_status_says_what_to_add(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    jobs: Runs[OneShot] = Runs(session_factory, OneShot, OneShotStep)
    with (
        session_factory() as session,
        statements(engine) as sent,
        pytest.raises(UsageError, match=r"cannot be cancelled; name Lifecycle\(cancelled=...\)"),
    ):
        jobs.request_cancel(session, 1)
    assert sent == []


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_request_that_meets_a_later_snapshot_tells_the_caller_to_retry(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], isolation: str
) -> None:
    ident = approved_plan(session_factory)
    keeping = create_engine(engine.url, isolation_level=isolation)
    try:
        with Session(keeping) as session:
            session.get_one(Plan, ident)
            assert plans.claim(ident) is not None
            with pytest.raises(TransactionConflict, match="retry the whole transaction"):
                Runs(sessionmaker(keeping), Plan, PlanStep).request_cancel(session, ident)
    finally:
        keeping.dispose()


# being asked


@pytest.mark.parametrize("verb", ["step", "external", "renew", "finish", "fail"])
def test_every_verb_of_a_holder_who_was_asked_to_cancel_says_so(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], claimed: Run[Plan], verb: str
) -> None:
    ident = claimed.lease.identity[0]
    assert request(session_factory, plans, ident)
    if verb == "external":
        assert claimed.external("sent", lambda: 1) == 1, "what has been sent is recorded"
    with pytest.raises(Cancelled, match=r"was asked to be cancelled; it can only land as cancelled now\."):
        {
            "step": lambda: claimed.step("only", write_entry, "a"),
            "external": lambda: claimed.external("more", lambda: pytest.fail("called though cancelled")),
            "renew": claimed.renew,
            "finish": claimed.finish,
            "fail": lambda: claimed.fail(ValueError("no stock")),
        }[verb]()
    assert entries(engine) == []
    assert column(engine, ident, "status") is PlanStatus.EXECUTING


def test_a_run_asked_between_two_steps_lands_cancelled_with_its_first_receipt(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)

    def carry_out(run: Run[Plan]) -> None:
        run.step("first", write_entry, "a")
        assert request(session_factory, plans, ident)
        run.step("second", write_entry, "b")

    outcome = plans.execute(ident, carry_out)
    assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.CANCELLED)
    assert [receipt.step for receipt in outcome.receipts] == ["first"]
    assert entries(engine) == ["a"]
    again = plans.execute(ident, lambda run: pytest.fail("a cancelled run ran"))
    assert again == outcome


@pytest.mark.parametrize("ending", ["returns", "raises", "swallows", "waits for a retry"])
@pytest.mark.parametrize("attempt", [1, 3])
def test_a_request_outweighs_whatever_the_handler_does_after_it(
    engine: Engine,
    session_factory: sessionmaker[Session],
    plans: Runs[Plan],
    ending: str,
    attempt: int,
) -> None:
    ident = approved_plan(session_factory)
    with session_factory.begin() as session:
        session.execute(update(Plan).values(attempts=attempt - 1))

    def carry_out(run: Run[Plan]) -> None:
        assert request(session_factory, plans, ident)
        if ending == "swallows":
            with pytest.raises(Cancelled):
                run.step("only", write_entry, "a")
        elif ending == "raises":
            raise ValueError("no stock")
        elif ending == "waits for a retry":
            raise RetryableError("not yet")

    outcome = plans.execute(ident, carry_out)
    assert outcome.status is PlanStatus.CANCELLED
    assert column(engine, ident, "status") is PlanStatus.CANCELLED
    assert entries(engine) == []


def test_a_lost_lease_outweighs_a_request(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)

    def carry_out(run: Run[Plan]) -> None:
        let_lapse(session_factory, ident)
        assert Runs(session_factory, Plan, PlanStep, owner="another").claim(ident) is not None
        assert request(session_factory, plans, ident)
        with pytest.raises(LostLease):
            run.step("only", write_entry, "a")

    assert plans.execute(ident, carry_out).ending is Ending.LOST_LEASE
    assert column(engine, ident, "status") is PlanStatus.EXECUTING


def test_a_request_on_a_reaped_run_cancels_it_and_its_holder_has_lost_it(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], claimed: Run[Plan]
) -> None:
    ident = claimed.lease.identity[0]
    let_lapse(session_factory, ident)
    assert plans.heal(ident)
    assert request(session_factory, plans, ident)
    assert column(engine, ident, "status") is PlanStatus.CANCELLED
    with pytest.raises(LostLease):
        claimed.step("only", write_entry, "a")


def test_a_run_released_with_a_pending_request_is_never_carried_out_again(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], claimed: Run[Plan]
) -> None:
    ident: UUID = claimed.lease.identity[0]
    assert request(session_factory, plans, ident)
    claimed.release()
    outcome = plans.execute(ident, lambda run: pytest.fail("a run that was asked to be cancelled was started"))
    assert outcome.status is PlanStatus.CANCELLED


def test_an_interrupted_run_with_a_pending_request_is_never_carried_out_again(
    session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)

    def interrupted(run: Run[Plan]) -> None:
        assert request(session_factory, plans, ident)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plans.execute(ident, interrupted)
    outcome = plans.execute(ident, lambda run: pytest.fail("a run that was asked to be cancelled was started"))
    assert outcome.status is PlanStatus.CANCELLED


@pytest.mark.parametrize("verb", ["execute", "claim", "claim_due"])
def test_a_ready_run_that_was_asked_but_could_not_be_cancelled_at_once_is_claimed_only_to_be_cancelled(
    engine: Engine, session_factory: sessionmaker[Session], verb: str
) -> None:
    jobs: Runs[Stoppable] = Runs(session_factory, Stoppable, StoppableStep)
    (ident,) = add_jobs(engine, Stoppable, 1)
    with session_factory.begin() as session:
        assert jobs.request_cancel(session, ident)
    target = {"execute": lambda: ident, "claim": lambda: jobs.claim(ident), "claim_due": lambda: jobs.claim_due(1)[0]}
    outcome = jobs.execute(target[verb](), lambda run: pytest.fail("a run that was asked to be cancelled was started"))
    assert (outcome.ending, outcome.status) == (Ending.LANDED, StoppableStatus.STOPPED)


def test_the_holder_of_a_run_that_was_asked_before_its_claim_sends_nothing(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    jobs: Runs[Stoppable] = Runs(session_factory, Stoppable, StoppableStep)
    (ident,) = add_jobs(engine, Stoppable, 1)
    with session_factory.begin() as session:
        assert jobs.request_cancel(session, ident)
    run = jobs.claim(ident)
    assert run is not None
    with pytest.raises(Cancelled):
        run.external("sent", lambda: pytest.fail("sent though cancelled"))


def test_a_run_that_was_asked_before_it_was_ready_lands_at_once_and_is_never_started(
    session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    with session_factory.begin() as session:
        plan = Plan()
        session.add(plan)
        session.flush()
        assert plans.request_cancel(session, plan)
        assert plan.status is PlanStatus.CANCELLED
        assert plan.finished_at is not None
        assert not plan_statuses.transition(session, plan, PlanStatus.APPROVED)
        ident = plan.id
    outcome = plans.execute(ident, lambda run: pytest.fail("a run that was asked to be cancelled was started"))
    assert outcome.status is PlanStatus.CANCELLED


def test_a_request_may_be_made_in_a_session_that_differs_from_the_helpers_by_its_isolation_only(
    engine: Engine, plans: Runs[Plan], claimed: Run[Plan]
) -> None:
    ident = claimed.lease.identity[0]
    with Session(engine.execution_options(isolation_level="SERIALIZABLE")) as session, session.begin():
        assert plans.request_cancel(session, ident)
    assert column(engine, ident, "cancel_requested_at") is not None


def test_a_run_that_was_asked_while_its_batch_waited_is_not_started(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    first, second = (approved_plan(session_factory) for _ in range(2))
    batch = {run.lease.identity[0]: run for run in plans.claim_due(2)}

    def carry_out(run: Run[Plan]) -> None:
        assert request(session_factory, plans, second)
        run.step("only", write_entry, "a")

    assert plans.execute(batch[first], carry_out).status is PlanStatus.EXECUTED
    outcome = plans.execute(batch[second], lambda run: pytest.fail("a run that was asked to be cancelled was started"))
    assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.CANCELLED)
    assert entries(engine) == ["a"]


@pytest.mark.parametrize("asked", ["before it lapsed", "after it lapsed"])
@pytest.mark.parametrize("verb", ["execute", "claim", "claim_due", "reap", "heal", "get"])
def test_a_dead_holders_run_that_was_asked_lands_without_its_body_being_run(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], claimed: Run[Plan], asked: str, verb: str
) -> None:
    ident = claimed.lease.identity[0]
    claimed.step("first", write_entry, "a")
    if asked == "before it lapsed":
        assert request(session_factory, plans, ident)
    let_lapse(session_factory, ident)
    if asked == "after it lapsed":
        assert request(session_factory, plans, ident)
    {
        "execute": lambda: plans.execute(ident, lambda run: pytest.fail("it was started")),
        "claim": lambda: plans.claim(ident),
        "claim_due": lambda: plans.claim_due(1),
        "reap": plans.reap,
        "heal": lambda: plans.heal(ident),
        "get": lambda: plans.get(ident),
    }[verb]()
    with Session(engine) as session:
        plan = session.get_one(Plan, ident)
        assert (plan.status, plan.attempts, plan.fence) == (PlanStatus.CANCELLED, 1, 1)
        assert (plan.lease_owner, plan.lease_expires_at) == (None, None)
        assert plan.finished_at is not None
    assert request(session_factory, plans, ident) is False
    assert entries(engine) == ["a"]


def test_a_request_needs_no_fence_and_moves_none(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], claimed: Run[Plan]
) -> None:
    ident = claimed.lease.identity[0]
    before = column(engine, ident, "lease_expires_at")
    assert request(session_factory, Runs(session_factory, Plan, PlanStep, owner="an operator"), ident)
    assert column(engine, ident, "fence") == 1
    assert column(engine, ident, "lease_owner") == claimed.lease.owner
    assert column(engine, ident, "lease_expires_at") == before


# by a heartbeat


def hasty() -> tuple[Any, Any]:
    """A run class whose heartbeats come three times a second."""

    class Base(DeclarativeBase):
        pass

    class Hasty(RunMixin, Base):
        __tablename__ = "hasty"
        __lifecycle__ = Lifecycle(
            stoppable_statuses,
            ready=StoppableStatus.READY,
            running=StoppableStatus.RUNNING,
            done=StoppableStatus.DONE,
            failed=StoppableStatus.FAILED,
            cancelled=StoppableStatus.STOPPED,
            lease=timedelta(seconds=1),
            requeue={StoppableStatus.STOPPED},
        )
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[StoppableStatus] = stoppable_statuses.column()

    class HastyStep(ReceiptMixin[Hasty], Base):
        __tablename__ = "hasty_step"

    return Hasty, HastyStep


def a_hasty_one(engine: Engine, run: type[Any]) -> int:
    run.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        row = run()
        session.add(row)
        session.flush()
        ident: int = row.id
        return ident


def test_a_holder_between_two_steps_learns_of_a_request_from_its_heartbeat(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    run_class, receipt = hasty()
    runs: Runs[Any] = Runs(session_factory, run_class, receipt)
    ident = a_hasty_one(engine, run_class)

    def carry_out(run: Run[Any]) -> None:
        with session_factory.begin() as session:
            assert runs.request_cancel(session, ident)
        eventually(lambda: run.holder.lost, "the heartbeat to notice")
        with statements(engine) as sent, pytest.raises(Cancelled):
            run.step("late", write_entry, "late")
        assert sent == []

    outcome = runs.execute(ident, carry_out)
    assert (outcome.ending, outcome.status) == (Ending.LANDED, StoppableStatus.STOPPED)
    assert entries(engine) == []


def test_an_asyncio_handler_that_waits_is_cancelled_by_the_heartbeat_and_its_run_lands(engine: Engine) -> None:
    run_class, receipt = hasty()
    ident = a_hasty_one(engine, run_class)
    seen: list[str] = []

    async def main() -> Any:
        through = create_async_engine(engine.url)
        factory = async_sessionmaker(through)
        runs: AsyncRuns[Any] = AsyncRuns(factory, run_class, receipt)

        async def carry_out(run: AsyncRun[Any]) -> None:
            async with factory.begin() as session:
                assert await runs.request_cancel(session, ident)
            try:
                await asyncio.sleep(20)
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise

        outcome = await runs.execute(ident, carry_out)
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        await through.dispose()
        return outcome

    outcome = asyncio.run(main())
    assert (outcome.ending, outcome.status, seen) == (Ending.LANDED, StoppableStatus.STOPPED, ["cancelled"])


def test_a_cancelled_run_that_is_requeued_is_asked_no_more(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    run_class, receipt = hasty()
    runs: Runs[Any] = Runs(session_factory, run_class, receipt)
    ident = a_hasty_one(engine, run_class)
    with session_factory.begin() as session:
        assert runs.request_cancel(session, ident)
    assert runs.execute(ident, lambda run: pytest.fail("it was started")).status is StoppableStatus.STOPPED
    assert runs.requeue(ident)
    assert runs.execute(ident, lambda run: None).status is StoppableStatus.DONE
