"""The asyncio form: the same driver, and what tasks, cancellation, timeouts and several loops add."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import DateTime, Engine, create_engine, func, inspect, select, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import (
    ConfigurationError,
    Ending,
    ReceiptMixin,
    ResultError,
    RunMixin,
    Runs,
    TransactionEnded,
    UsageError,
)
from sqla_durable.asyncio import AsyncRun, AsyncRuns, transition
from tests.support import (
    Plan,
    PlanStatus,
    PlanStep,
    approved_plan,
    column,
    entries,
    plan_statuses,
)
from tests.support_async import RunsFacade, carried_out, receipts, sessions, write_entry
from tests.support_models import Driver, JobStatus, jobs, lifecycle, make_effects


class Base(DeclarativeBase):
    pass


class Job(RunMixin, Base):
    __tablename__ = "job"
    __lifecycle__ = lifecycle()
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[JobStatus] = jobs.column()
    updated_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True), onupdate=func.now())
    note: Mapped[str | None]


class JobStep(ReceiptMixin[Job], Base):
    __tablename__ = "job_step"


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.mark.parametrize("options", [{}, {"expire_on_commit": False, "autoflush": False}], ids=["plain", "options"])
@pytest.mark.parametrize("level", ["READ COMMITTED", "SERIALIZABLE"])
def test_every_verb_over_asyncio(empty_url: str, runner: asyncio.Runner, options: dict[str, Any], level: str) -> None:
    engine = create_engine(empty_url)
    Base.metadata.create_all(engine)
    make_effects(engine)
    async_engine = create_async_engine(empty_url, isolation_level=level)
    runs = RunsFacade(runner, async_engine, Job, JobStep, **options)
    Driver(runs, engine, sessionmaker(engine), Job, lambda status: Job(status=status)).every_verb()
    runner.run(async_engine.dispose())
    engine.dispose()


@pytest.fixture
def ident(session_factory: sessionmaker[Session]) -> Any:
    return approved_plan(session_factory)


# --- what a body may do, and errors of use

WAYS: dict[str, Callable[[AsyncSession], Awaitable[Any]]] = {
    "commit()": lambda session: session.commit(),
    "rollback()": lambda session: session.rollback(),
    "close()": lambda session: session.close(),
    "reset()": lambda session: session.reset(),
    "invalidate()": lambda session: session.invalidate(),
    "text COMMIT": lambda session: session.execute(text("COMMIT")),
    "text ROLLBACK": lambda session: session.execute(text("ROLLBACK")),
    "sync_session.commit()": lambda session: session.run_sync(lambda sync: sync.commit()),
}


async def in_async_with(session: AsyncSession) -> None:
    async with session:
        await session.execute(text("SELECT 1"))


async def in_async_with_begin(session: AsyncSession) -> None:
    async with session.begin():
        await session.execute(text("SELECT 1"))


WAYS |= {"async with session": in_async_with, "async with session.begin()": in_async_with_begin}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("swallowed", [False, True])
def test_a_body_that_ends_its_transaction_is_told_so_and_nothing_is_committed(
    engine: Engine, ident: Any, way: str, swallowed: bool
) -> None:
    async def body(session: AsyncSession) -> None:
        await write_entry(session, "before")
        try:
            await WAYS[way](session)
        except Exception:
            if not swallowed:
                raise

    async def carry_out(run: AsyncRun[Plan]) -> None:
        with pytest.raises(TransactionEnded):
            await run.step("only", body)
        assert entries(engine) == []
        assert await run.step("only", write_entry, "a") == "a"

    assert carried_out(engine, lambda plans: plans.execute(ident, carry_out)).exception is None
    assert entries(engine) == ["a"]


def test_savepoints_in_a_body(engine: Engine, ident: Any) -> None:
    async def body(session: AsyncSession) -> None:
        async with session.begin_nested():
            await write_entry(session, "kept")
        with suppress(ValueError):
            async with session.begin_nested():
                await write_entry(session, "undone")
                raise ValueError("no")

    carried_out(engine, lambda plans: plans.execute(ident, lambda run: run.step("only", body)))
    assert entries(engine) == ["kept"]


def sync_body(session: Any) -> str:
    return "not awaitable"


@pytest.mark.parametrize("fn", [sync_body, lambda session: None], ids=["function", "lambda"])
def test_a_function_where_a_coroutine_function_belongs_is_an_error_of_use(engine: Engine, ident: Any, fn: Any) -> None:
    async def carry_out(run: AsyncRun[Plan]) -> None:
        with pytest.raises(UsageError, match=r"(?i)await|coroutine|async"):
            await run.step("only", fn)
        with pytest.raises(UsageError, match=r"(?i)await|coroutine|async"):
            await run.external("only", fn, None)

    assert carried_out(engine, lambda plans: plans.execute(ident, carry_out)).exception is None
    assert receipts(engine, ident) == ()


def test_a_handler_that_is_no_coroutine_function_is_an_error_of_use(engine: Engine, ident: Any) -> None:
    async def scenario(plans: AsyncRuns[Plan]) -> None:
        handler: Any = lambda run: None  # noqa: E731
        try:
            outcome = await plans.execute(ident, handler)
        except UsageError:
            return
        assert isinstance(outcome.exception, UsageError)

    carried_out(engine, scenario)


def test_a_result_that_would_not_come_back_equal_is_refused(engine: Engine, ident: Any) -> None:
    async def body(session: AsyncSession):  # type: ignore[no-untyped-def]
        await write_entry(session, "never")
        return (1, 2)

    async def carry_out(run: AsyncRun[Plan]) -> None:
        with pytest.raises(ResultError):
            await run.step("only", body)

    carried_out(engine, lambda plans: plans.execute(ident, carry_out))
    assert entries(engine) == []


@pytest.mark.parametrize("given", ["sessionmaker", "AsyncSession", "engine"])
def test_what_is_not_an_async_sessionmaker_is_refused_at_once(engine: Engine, given: str) -> None:
    misuse: Any = {"sessionmaker": sessionmaker(engine), "AsyncSession": AsyncSession, "engine": engine}[given]
    with pytest.raises(ConfigurationError, match="async_sessionmaker"):
        AsyncRuns(misuse, Plan, PlanStep)


# --- no lazy load anywhere


def test_nothing_that_a_run_or_session_shows_afterwards_needs_a_lazy_load(empty_url: str) -> None:
    engine = create_engine(empty_url)
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add_all([Job(id=number, status=JobStatus.READY) for number in (1, 2)])
        session.commit()

    async def note(session: AsyncSession, ident: int) -> JobStatus:
        row = await session.get_one(Job, ident)
        row.note = "changed"
        await session.flush()
        assert not inspect(row).unloaded & {"status", "fence", "lease_expires_at"}
        return row.status

    async def main() -> None:
        async with sessions(engine) as factory:
            runs = AsyncRuns(factory, Job, JobStep)
            run = await runs.claim(1)
            assert run is not None
            await run.step("only", note, 1)
            assert (run.row.updated_at, run.row.note, run.row.status) == (None, None, JobStatus.RUNNING)
            (receipt,) = run.receipts
            assert (receipt.step, receipt.result, receipt.recorded_at.tzinfo is None) == ("only", "under way", False)
            await run.finish(note="landed")
            assert (run.row.note, run.row.status, run.row.error) == ("landed", JobStatus.DONE, None)
            assert run.row.finished_at is not None
            fresh = await runs.get(1)
            assert fresh is not None
            assert fresh.updated_at is not None
            async with factory() as session, session.begin():
                loaded = await session.get_one(Job, 2)
                assert await transition(jobs, session, loaded, JobStatus.CANCELLED)
                assert loaded.status is JobStatus.CANCELLED
                assert (loaded.updated_at, loaded.finished_at is None) == (None, False)
                assert not await runs.request_cancel(session, loaded)
                (stored,) = (await session.scalars(select(JobStep))).all()
                assert (stored.result, stored.outcome, stored.error) == ("under way", "succeeded", None)

    asyncio.run(main())
    engine.dispose()


def test_transition_over_asyncio_tells_a_lost_race(engine: Engine, ident: Any) -> None:
    async def main() -> None:
        async with sessions(engine) as factory, factory() as session:
            assert await transition(plan_statuses, session, (Plan, ident), PlanStatus.CANCELLED)
            assert not await transition(plan_statuses, session, (Plan, ident), PlanStatus.CANCELLED)
            await session.commit()

    asyncio.run(main())
    assert column(engine, ident, "status") is PlanStatus.CANCELLED


def test_execute_reports_how_it_ended_as_the_synchronous_form_does(engine: Engine, ident: Any) -> None:
    async def fails(run: AsyncRun[Plan]) -> None:
        await run.step("first", write_entry, "a")
        raise ValueError("no stock")

    outcome = carried_out(engine, lambda plans: plans.execute(ident, fails))
    assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.FAILED)
    assert outcome == Runs(sessionmaker(engine), Plan, PlanStep).execute(ident, lambda run: None)
