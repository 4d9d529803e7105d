"""Interruptions: the step rolled back, no failure recorded, the run given back where it can be, and passed on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, delete, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import ConfigurationError, Ending, Run, Runs
from sqla_durable.asyncio import AsyncRun, AsyncRuns
from tests.support import (
    DEADLINE,
    Entry,
    Plan,
    PlanStatus,
    PlanStep,
    approved_plan,
    column,
    entries,
    let_lapse,
    write_entry,
)
from tests.support_brief import ErrandStatus, errands
from tests.support_points import EFFECTS, STEPS, Points, carry_out, check_given_back, commits

INTERRUPTIONS = [KeyboardInterrupt, SystemExit, GeneratorExit]


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep)


# the synchronous form


@pytest.mark.parametrize("place", ["step", "external", "between", "before"])
@pytest.mark.parametrize("interruption", INTERRUPTIONS)
def test_an_interruption_rolls_back_gives_the_run_back_and_passes(
    engine: Engine,
    session_factory: sessionmaker[Session],
    plans: Runs[Plan],
    interruption: type[BaseException],
    place: str,
) -> None:
    ident = approved_plan(session_factory)
    raised = interruption("enough")

    def interrupted() -> None:
        raise raised

    def body(session: Session) -> None:
        write_entry(session, "never")
        session.flush()
        interrupted()

    def handler(run: Run[Plan]) -> None:
        if place == "before":
            interrupted()
        run.step("first", write_entry, "a")
        if place == "step":
            run.step("second", body)
        elif place == "external":
            run.external("second", interrupted)
        interrupted()

    with pytest.raises(interruption) as caught:
        plans.execute(ident, handler)
    assert caught.value is raised
    assert entries(engine) == ([] if place == "before" else ["a"])
    assert [receipt.step for receipt in plans.receipts(ident)] == ([] if place == "before" else ["first"])
    check_given_back(session_factory, ident)


def test_an_interruption_at_any_point_never_fails_a_run_and_never_doubles_an_effect(
    engine: Engine, session_factory: sessionmaker[Session], tmp_path: Path
) -> None:
    ledger = tmp_path / "ledger"
    worker = create_engine(engine.url)
    plans: Runs[Plan] = Runs(sessionmaker(worker), Plan, PlanStep)
    handler = partial(carry_out, ledger=ledger)
    plans.execute(approved_plan(session_factory), handler)  # connects
    undisturbed = Points()
    with undisturbed.of(worker):
        plans.execute(approved_plan(session_factory), handler)
    for point, label in enumerate(undisturbed.labels):
        with engine.begin() as connection:
            connection.execute(delete(Entry))
        ident = approved_plan(session_factory)

        def visit(number: int, _: str, point: int = point) -> None:
            if number == point:
                raise KeyboardInterrupt

        points = Points(visit)
        try:
            with pytest.raises(KeyboardInterrupt), points.of(worker):
                plans.execute(ident, handler)
            check_interrupted(engine, session_factory, ident, commits(undisturbed.labels[: point + 1]))
            outcome = plans.execute(ident, handler)
            assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.EXECUTED)
            assert [receipt.step for receipt in outcome.receipts] == STEPS
            assert entries(engine) == EFFECTS
            assert column(engine, ident, "note") == "x"
        except AssertionError as error:
            error.add_note(f"interrupted at point {point} of {len(undisturbed.labels)}, {label!r}")
            raise
    worker.dispose()


def check_interrupted(engine: Engine, factory: sessionmaker[Session], ident: UUID, stand: int) -> None:
    """Where a run stands that was interrupted after so many commits; a claim that was not answered is let lapse."""
    status = column(engine, ident, "status")
    assert column(engine, ident, "failures") == []
    if stand == len(STEPS) + 2:
        assert status is PlanStatus.EXECUTED
    elif stand == 1 and status is PlanStatus.EXECUTING:
        assert entries(engine) == []
        let_lapse(factory, ident)
    else:
        assert status is PlanStatus.APPROVED


@pytest.mark.parametrize("interruption", INTERRUPTIONS)
def test_without_an_edge_to_ready_an_interrupted_run_is_left_to_its_lease(
    engine: Engine, session_factory: sessionmaker[Session], interruption: type[BaseException]
) -> None:
    model = errands(releases=False)
    model.create(engine)
    runs = model.runs(session_factory)
    ident = model.new(session_factory)

    def handler(run: Run[Any]) -> None:
        run.step("first", write_entry, "a")
        raise interruption

    with pytest.raises(interruption):
        runs.execute(ident, handler)
    row = runs.get(ident)
    assert row is not None
    assert (row.status, row.error, row.attempts) == (ErrandStatus.RUNNING, None, 1)
    assert row.lease_expires_at is not None
    assert runs.execute(ident, handler).ending is Ending.LOST_RACE


def test_without_an_edge_to_ready_a_release_says_so_and_changes_nothing(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    model = errands(releases=False)
    model.create(engine)
    runs = model.runs(session_factory)
    run = runs.claim(model.new(session_factory))
    assert run is not None
    with pytest.raises(ConfigurationError, match="running -> ready"):
        run.release()
    run.step("only", write_entry, "a")
    run.finish()


def test_an_interruption_of_a_holder_that_lost_its_run_leaves_the_new_holder_alone(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    others: list[Run[Plan] | None] = []

    def handler(run: Run[Plan]) -> None:
        let_lapse(session_factory, ident)
        others.append(plans.claim(ident))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plans.execute(ident, handler)
    assert column(engine, ident, "status") is PlanStatus.EXECUTING
    assert others[0] is not None
    others[0].finish()


# asyncio


async def write_entry_async(session: AsyncSession, label: str) -> str:
    return await session.run_sync(write_entry, label)


@asynccontextmanager
async def async_plans(engine: Engine) -> AsyncIterator[AsyncRuns[Plan]]:
    async_engine = create_async_engine(engine.url.render_as_string(hide_password=False))
    yield AsyncRuns(async_sessionmaker(async_engine), Plan, PlanStep)
    await async_engine.dispose()


async def wait_in(place: str, reached: Callable[[], None], run: AsyncRun[Plan]) -> None:
    """A handler that gets to one place and stays there."""

    async def wait(here: str) -> None:
        if here == place:
            reached()
            await asyncio.Event().wait()

    async def body(session: AsyncSession) -> None:
        await write_entry_async(session, "never")
        await session.flush()
        await wait("step")
        if place == "statement":
            reached()
            await session.execute(text("SELECT pg_sleep(60)"))

    await wait("before")
    await run.step("first", write_entry_async, "a")
    await wait("between")
    if place in {"step", "statement"}:
        await run.step("second", body)
    await run.external("second", wait, "external")


PLACES = ["before", "between", "step", "statement", "external"]


@pytest.mark.parametrize("place", PLACES)
def test_a_cancelled_task_rolls_back_gives_the_run_back_and_is_cancelled(
    engine: Engine, session_factory: sessionmaker[Session], place: str
) -> None:
    ident = approved_plan(session_factory)

    async def main() -> None:
        async with async_plans(engine) as plans:
            reached = asyncio.Event()
            task = asyncio.create_task(plans.execute(ident, partial(wait_in, place, reached.set)))
            async with asyncio.timeout(DEADLINE):
                await reached.wait()
            task.cancel("enough")
            with pytest.raises(asyncio.CancelledError):
                await task
            assert task.cancelled()

    asyncio.run(main())
    assert entries(engine) == ([] if place == "before" else ["a"])
    check_given_back(session_factory, ident)


@pytest.mark.parametrize("place", PLACES)
def test_a_timeout_around_execute_gives_the_run_back_and_raises_timeout_error(
    engine: Engine, session_factory: sessionmaker[Session], place: str
) -> None:
    ident = approved_plan(session_factory)

    async def expiring(plans: AsyncRuns[Plan]) -> None:
        now = asyncio.get_running_loop().time
        async with asyncio.timeout(None) as limit:
            await plans.execute(ident, partial(wait_in, place, lambda: limit.reschedule(now())))

    async def main() -> None:
        async with async_plans(engine) as plans:
            with pytest.raises(TimeoutError):
                await expiring(plans)

    asyncio.run(main())
    assert entries(engine) == ([] if place == "before" else ["a"])
    check_given_back(session_factory, ident)


def test_a_timeout_inside_the_handler_is_the_handlers_own_affair(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    ident = approved_plan(session_factory)

    async def slow(session: AsyncSession) -> str:
        await write_entry_async(session, "never")
        await session.flush()
        await asyncio.Event().wait()
        return "never"

    async def handler(run: AsyncRun[Plan]) -> None:
        try:
            async with asyncio.timeout(0.05):
                await run.step("only", slow)
        except TimeoutError:
            await run.step("only", write_entry_async, "instead")

    async def main() -> None:
        async with async_plans(engine) as plans:
            assert (await plans.execute(ident, handler)).status is PlanStatus.EXECUTED

    asyncio.run(main())
    assert entries(engine) == ["instead"]
