"""Operations of coroutine handlers: the same protocol, and a start that no heartbeat breaks off."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import (
    PENDING,
    Ending,
    NotIssued,
    OperationFailed,
    OperationUnknown,
    Outcome,
    Pending,
    Runs,
    StepOutcome,
    Suspended,
    UsageError,
)
from sqla_durable.asyncio import AsyncRun, AsyncRuns
from sqla_durable.testing import lapse
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, column, entries, eventually
from tests.support_async import carried_out, write_entry
from tests.support_jobs import Brief, BriefStep, add_jobs
from tests.support_service import KEY, Batch, Service, state

IDS = {"number": 1, "queue": ["main"]}
RESULT = {"rows": 3}
HOUR = timedelta(hours=1)


class AsyncService:
    """A service behind coroutines."""

    def __init__(self, service: Service) -> None:
        self.service = service

    async def start(self) -> Batch:
        await asyncio.sleep(0)
        return self.service.start()

    async def poll(self, batch: Batch) -> dict[str, int] | Pending:
        await asyncio.sleep(0)
        return self.service.poll(batch)

    async def carry_out(self, run: AsyncRun[Any]) -> dict[str, int]:
        return await run.operation(KEY, start=self.start, poll=self.poll, every=HOUR)


@pytest.fixture
def service(tmp_path: Path) -> AsyncService:
    return AsyncService(Service(tmp_path))


@pytest.fixture
def ident(session_factory: sessionmaker[Session]) -> UUID:
    return approved_plan(session_factory)


def execute(engine: Engine, ident: object, handler: Any) -> Outcome:
    outcome: Outcome = carried_out(engine, lambda plans: plans.execute(ident, handler, run_now=True))
    return outcome


def test_an_operation_is_issued_once_parked_polled_and_replayed(
    engine: Engine, session_factory: sessionmaker[Session], service: AsyncService, ident: UUID
) -> None:
    results: list[object] = []

    async def carry_out(run: AsyncRun[Plan]) -> None:
        await run.step("before", write_entry, "before")
        results.append(await service.carry_out(run))
        await run.step("after", write_entry, "after")

    for _ in range(2):
        outcome = execute(engine, ident, carry_out)
        assert (outcome.ending, outcome.status) == (Ending.SUSPENDED, PlanStatus.APPROVED)
        assert isinstance(outcome.exception, Suspended)
    service.service.finish(RESULT)
    outcome = execute(engine, ident, carry_out)
    assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.EXECUTED)
    assert results == [RESULT]
    assert entries(engine) == ["before", "after"]
    assert (service.service.issues, service.service.polls) == (1, 3)
    assert Runs(session_factory, Plan, PlanStep).receipts(ident) == outcome.receipts


def test_a_suspension_in_a_task_group_suspends_the_run(engine: Engine, service: AsyncService, ident: UUID) -> None:
    async def carry_out(run: AsyncRun[Plan]) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(service.carry_out(run))
            tasks.create_task(run.step("beside", write_entry, "beside"))

    outcome = execute(engine, ident, carry_out)
    assert outcome.ending is Ending.SUSPENDED
    assert entries(engine) in ([], ["beside"])


def test_a_coroutine_handler_that_swallows_the_suspension_cannot_land_as_done(
    engine: Engine, service: AsyncService, ident: UUID
) -> None:
    async def carry_out(run: AsyncRun[Plan]) -> None:
        await asyncio.gather(service.carry_out(run), return_exceptions=True)
        with pytest.raises(Suspended):
            await run.finish()

    assert execute(engine, ident, carry_out).ending is Ending.SUSPENDED


def test_what_start_and_poll_raise_means_the_same(engine: Engine, service: AsyncService, ident: UUID) -> None:
    answers: list[Exception] = [NotIssued("429"), ConnectionError("reset"), OperationFailed("rejected")]

    async def start() -> Batch:
        if isinstance(answers[0], NotIssued):
            raise answers.pop(0)
        return await service.start()

    async def poll(batch: Batch) -> int | Pending:
        raise answers.pop(0)

    async def carry_out(run: AsyncRun[Plan]) -> None:
        await run.operation(KEY, start=start, poll=poll)

    assert execute(engine, ident, carry_out).ending is Ending.INTERRUPTED
    assert state(engine, ident) is None
    outcome = execute(engine, ident, carry_out)
    assert outcome.ending is Ending.SUSPENDED
    assert outcome.failure is not None
    assert outcome.failure.type == "ConnectionError"
    outcome = execute(engine, ident, carry_out)
    assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.FAILED)
    assert outcome.receipts[0].outcome is StepOutcome.FAILED
    assert service.service.issues == 1


def test_a_cancelled_start_leaves_the_outcome_unknown(engine: Engine, service: AsyncService, ident: UUID) -> None:
    async def start() -> Batch:
        service.service.start()
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(10)
        pytest.fail("not cancelled")

    async def carry_out(run: AsyncRun[Plan]) -> None:
        await run.operation(KEY, start=start, poll=service.poll)

    with pytest.raises(asyncio.CancelledError):
        execute(engine, ident, carry_out)
    assert state(engine, ident) == ("issued", None, 1)
    assert column(engine, ident, "status") is PlanStatus.APPROVED
    assert isinstance(execute(engine, ident, service.carry_out).exception, OperationUnknown)
    assert service.service.issues == 1


def blocked(engine: Engine) -> set[Any]:
    """The statements of this database that wait for a lock, each with when it began."""
    query = text(
        "SELECT pid, query_start FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    )
    with engine.connect() as connection:
        return {tuple(row) for row in connection.execute(query)}


def test_a_cancellation_while_the_ids_are_recorded_does_not_lose_them(
    engine: Engine, service: AsyncService, ident: UUID
) -> None:
    async def main() -> None:
        async_engine = create_async_engine(engine.url)
        plans = AsyncRuns(async_sessionmaker(async_engine), Plan, PlanStep)
        with engine.connect() as connection:

            async def start() -> Batch:
                connection.execute(text("SELECT 1 FROM plan_step FOR UPDATE"))
                return await service.start()

            async def carry_out(run: AsyncRun[Plan]) -> None:
                await run.operation(KEY, start=start, poll=service.poll)

            executing = asyncio.create_task(plans.execute(ident, carry_out))
            before = await asyncio.to_thread(eventually, lambda: blocked(engine))
            executing.cancel()
            await asyncio.to_thread(eventually, lambda: executing.done() or blocked(engine) - before)
            connection.rollback()
            try:
                await executing
            finally:
                await async_engine.dispose()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert state(engine, ident) == ("pending", IDS, 1)
    assert service.service.polls == 0


def test_a_heartbeat_that_finds_the_lease_lost_does_not_break_a_start_off(
    engine: Engine, session_factory: sessionmaker[Session], service: AsyncService
) -> None:
    (ident,) = add_jobs(engine, Brief, 1)
    others = Runs(session_factory, Brief, BriefStep)

    async def main() -> Outcome:
        async_engine = create_async_engine(engine.url)
        factory: async_sessionmaker[AsyncSession] = async_sessionmaker(async_engine)
        jobs: AsyncRuns[Brief] = AsyncRuns(factory, Brief, BriefStep)

        async def carry_out(run: AsyncRun[Brief]) -> None:
            async def start() -> Batch:
                taken_over(engine, others, ident)
                await asyncio.to_thread(eventually, lambda: run.holder.lost)
                for _ in range(20):
                    await asyncio.sleep(0.01)
                return service.service.start()

            await run.operation(KEY, start=start, poll=service.poll)

        outcome = await jobs.execute(ident, carry_out)
        await async_engine.dispose()
        return outcome

    outcome = asyncio.run(main())
    assert outcome.ending is Ending.LOST_LEASE
    (receipt,) = others.receipts(ident)
    assert (receipt.outcome, receipt.ids) == (StepOutcome.PENDING, IDS)


def taken_over(engine: Engine, others: Runs[Brief], ident: int) -> None:
    def tried() -> bool:
        with Session(engine) as session, session.begin():
            lapse(session, Brief, ident)
        # Unless a heartbeat comes in between, by which the holder keeps its run.
        return others.heal(ident) and others.claim(ident) is not None

    eventually(tried, "a moment between two heartbeats")


def test_what_cannot_be_awaited_is_told_apart_from_a_service_that_is_away(
    engine: Engine, service: AsyncService, ident: UUID
) -> None:
    async def carry_out(run: AsyncRun[Plan]) -> None:
        await run.operation(KEY, start=service.start, poll=lambda batch: 1)  # type: ignore[arg-type, return-value]

    outcome = execute(engine, ident, carry_out)
    assert isinstance(outcome.exception, UsageError)
    assert outcome.status is PlanStatus.FAILED
    assert state(engine, ident) == ("pending", IDS, 1)


def test_an_operation_that_was_never_awaited_is_an_error(engine: Engine, service: AsyncService, ident: UUID) -> None:
    async def carry_out(run: AsyncRun[Plan]) -> None:
        run.operation(KEY, start=service.start, poll=service.poll)  # type: ignore[unused-coroutine]

    outcome = execute(engine, ident, carry_out)
    assert isinstance(outcome.exception, UsageError)
    assert service.service.issues == 0


def test_a_pending_answer_says_when(engine: Engine, service: AsyncService, ident: UUID) -> None:
    answers: list[int | Pending] = [PENDING, Pending(timedelta(0)), 5]

    async def poll(batch: Batch) -> int | Pending:
        return answers.pop(0)

    async def carry_out(run: AsyncRun[Plan]) -> None:
        await run.operation(KEY, start=service.start, poll=poll, every=timedelta(0))

    endings = [execute(engine, ident, carry_out).ending for _ in range(3)]
    assert endings == [Ending.SUSPENDED, Ending.SUSPENDED, Ending.LANDED]
