"""Tasks, cancellation, timeouts, context variables and event loops around the asyncio form."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import NestedStep, StepReused
from sqla_durable.asyncio import AsyncRun, AsyncRuns
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, column, entries
from tests.support_async import carried_out, receipts, write_entry


@pytest.fixture
def ident(session_factory: sessionmaker[Session]) -> Any:
    return approved_plan(session_factory)


# --- tasks


def test_concurrent_steps_of_one_run_queue_up_and_each_is_done_once(engine: Engine, ident: Any) -> None:
    inside = 0

    async def body(session: AsyncSession, label: str) -> str:
        nonlocal inside
        inside += 1
        assert inside == 1
        await asyncio.sleep(0)
        result = await write_entry(session, label)
        inside -= 1
        return result

    async def carry_out(run: AsyncRun[Plan]) -> None:
        labels = [str(number) * 3 + "x" for number in range(5)]
        assert await asyncio.gather(*(run.step(label, body, label) for label in labels)) == labels

    outcome = carried_out(engine, lambda plans: plans.execute(ident, carry_out))
    assert outcome.status is PlanStatus.EXECUTED
    assert len(entries(engine)) == 5


def test_two_tasks_with_the_same_key_one_executes_and_the_other_is_refused(engine: Engine, ident: Any) -> None:
    async def carry_out(run: AsyncRun[Plan]) -> None:
        results = await asyncio.gather(
            run.step("only", write_entry, "a"), run.step("only", write_entry, "b"), return_exceptions=True
        )
        assert results[0] == "a"
        assert isinstance(results[1], StepReused)

    assert carried_out(engine, lambda plans: plans.execute(ident, carry_out)).exception is None
    assert entries(engine) == ["a"]


def test_many_runs_at_once_on_a_small_pool(engine: Engine, session_factory: sessionmaker[Session]) -> None:
    idents = [approved_plan(session_factory) for _ in range(8)]

    async def carry_out(run: AsyncRun[Plan]) -> None:
        await run.step("a", write_entry, "a")
        await run.external("b", asyncio.sleep, 0)
        await run.step("c", write_entry, "c")

    async def scenario(plans: AsyncRuns[Plan]) -> None:
        outcomes = await asyncio.gather(*(plans.execute(ident, carry_out) for ident in idents))
        assert {outcome.status for outcome in outcomes} == {PlanStatus.EXECUTED}

    carried_out(engine, scenario)
    assert len(entries(engine)) == 16


@pytest.mark.parametrize("how", ["await", "gather", "create_task", "external"])
def test_a_step_inside_a_steps_body_is_refused_and_does_not_wait_for_itself(
    engine: Engine, ident: Any, how: str
) -> None:
    async def carry_out(run: AsyncRun[Plan]) -> None:
        async def body(session: AsyncSession) -> None:
            await write_entry(session, "never")
            match how:
                case "await":
                    await run.step("inner", write_entry, "b")
                case "gather":
                    await asyncio.gather(run.step("inner", write_entry, "b"))
                case "create_task":
                    await asyncio.create_task(run.step("inner", write_entry, "b"))
                case _:
                    await run.external("inner", asyncio.sleep, 0)

        with pytest.raises(NestedStep):
            await asyncio.wait_for(run.step("outer", body), 20)
        assert await run.step("inner", write_entry, "a") == "a"

    assert carried_out(engine, lambda plans: plans.execute(ident, carry_out)).exception is None
    assert entries(engine) == ["a"]
    assert [receipt.step for receipt in receipts(engine, ident)] == ["inner"]


def test_a_task_that_a_body_leaves_behind_may_do_steps_of_its_own_later(engine: Engine, ident: Any) -> None:
    async def carry_out(run: AsyncRun[Plan]) -> None:
        gate = asyncio.Event()

        async def later() -> str:
            await gate.wait()
            return await run.step("second", write_entry, "b")

        left: list[asyncio.Task[str]] = []

        async def body(session: AsyncSession) -> None:
            left.append(asyncio.create_task(later()))

        await run.step("first", body)
        gate.set()
        assert await left[0] == "b"

    assert carried_out(engine, lambda plans: plans.execute(ident, carry_out)).exception is None


def test_context_variables_reach_the_handler_and_the_bodies(engine: Engine, ident: Any) -> None:
    tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant")

    async def body(session: AsyncSession) -> str:
        return tenant.get()

    async def call() -> str:
        return tenant.get()

    async def carry_out(run: AsyncRun[Plan]) -> None:
        assert tenant.get() == "a"
        assert await run.step("body", body) == "a"
        tenant.set("b")
        assert await run.external("call", call) == "b"

    async def scenario(plans: AsyncRuns[Plan]) -> None:
        tenant.set("a")
        assert (await plans.execute(ident, carry_out)).exception is None
        assert tenant.get() == "a"

    carried_out(engine, scenario)


# --- cancellation and timeouts


@pytest.mark.parametrize("where", ["body", "call", "between", "sql"])
def test_a_cancelled_task_undoes_the_step_releases_the_run_and_passes_on(
    engine: Engine, ident: Any, where: str
) -> None:
    reached: asyncio.Event

    async def body(session: AsyncSession) -> None:
        await write_entry(session, "never")
        reached.set()
        await (session.execute(text("SELECT pg_sleep(60)")) if where == "sql" else asyncio.sleep(60))

    async def call() -> None:
        reached.set()
        await asyncio.sleep(60)

    async def carry_out(run: AsyncRun[Plan]) -> None:
        await run.step("first", write_entry, "a")
        if where in {"body", "sql"}:
            await run.step("second", body)
        elif where == "call":
            await run.external("second", call)
        else:
            await call()

    async def scenario(plans: AsyncRuns[Plan]) -> None:
        nonlocal reached
        reached = asyncio.Event()
        task = asyncio.create_task(plans.execute(ident, carry_out))
        await asyncio.wait_for(reached.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    carried_out(engine, scenario)
    assert entries(engine) == ["a"]
    assert [receipt.step for receipt in receipts(engine, ident)] == ["first"]
    assert column(engine, ident, "status") is PlanStatus.APPROVED
    assert column(engine, ident, "error") is None


def test_a_timeout_around_execute_releases_the_run(engine: Engine, ident: Any) -> None:
    async def carry_out(run: AsyncRun[Plan]) -> None:
        await run.step("first", write_entry, "a")
        await asyncio.sleep(60)

    async def scenario(plans: AsyncRuns[Plan]) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await plans.execute(ident, carry_out)

    carried_out(engine, scenario)
    assert column(engine, ident, "status") is PlanStatus.APPROVED


def test_a_timeout_within_the_handler_is_the_handlers_own_matter(engine: Engine, ident: Any) -> None:
    async def slow(session: AsyncSession) -> None:
        await write_entry(session, "never")
        await asyncio.sleep(60)

    async def carry_out(run: AsyncRun[Plan]) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await run.step("slow", slow)
        await run.step("instead", write_entry, "a")

    outcome = carried_out(engine, lambda plans: plans.execute(ident, carry_out))
    assert outcome.status is PlanStatus.EXECUTED
    assert entries(engine) == ["a"]
    assert [receipt.step for receipt in outcome.receipts] == ["instead"]


def test_a_handler_that_swallows_a_cancellation_cannot_hide_it_from_the_caller(engine: Engine, ident: Any) -> None:
    reached: asyncio.Event

    async def carry_out(run: AsyncRun[Plan]) -> None:
        reached.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await run.step("last", write_entry, "a")

    async def scenario(plans: AsyncRuns[Plan]) -> None:
        nonlocal reached
        reached = asyncio.Event()
        task = asyncio.create_task(plans.execute(ident, carry_out))
        await asyncio.wait_for(reached.wait(), 20)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    carried_out(engine, scenario)
    assert entries(engine) == ["a"]
    assert column(engine, ident, "lease_owner") is None


# --- loops


def test_two_event_loops_one_after_the_other_carry_on_the_same_run(engine: Engine, ident: Any) -> None:
    async def first(plans: AsyncRuns[Plan]) -> None:
        run = await plans.claim(ident)
        assert run is not None
        await run.step("first", write_entry, "a")
        await run.release()

    async def second(plans: AsyncRuns[Plan]) -> Any:
        async def carry_out(run: AsyncRun[Plan]) -> None:
            assert await run.step("first", write_entry, "no") == "a"
            await run.step("second", write_entry, "b")

        return await plans.execute(ident, carry_out)

    carried_out(engine, first)
    assert carried_out(engine, second).status is PlanStatus.EXECUTED
    assert entries(engine) == ["a", "b"]


def test_one_helper_serves_two_loops_when_its_engine_is_disposed_of_in_between(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    async_engine = create_async_engine(engine.url)
    plans = AsyncRuns(async_sessionmaker(async_engine), Plan, PlanStep)

    async def main(ident: Any) -> Any:
        outcome = await plans.execute(ident, lambda run: run.step("only", write_entry, "a"))
        await async_engine.dispose()
        return outcome.status

    for _ in range(2):
        assert asyncio.run(main(approved_plan(session_factory))) is PlanStatus.EXECUTED
    assert entries(engine) == ["a", "a"]
