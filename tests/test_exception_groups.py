"""Exception groups, which a TaskGroup raises: what is in them decides, not the group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import DatabaseUnavailable, Ending, Run, Runs, StepTimeout, UsageError
from sqla_durable.asyncio import AsyncRun
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, entries
from tests.support_async import carried_out, write_entry

CUT_OFF = "SELECT pg_terminate_backend(pg_backend_pid())"
CONFLICT = "DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40001'; END $$"


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep)


def group(*errors: Exception) -> ExceptionGroup[Exception]:
    return ExceptionGroup("of the user's", list(errors))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (group(DatabaseUnavailable("away")), PlanStatus.APPROVED),
        (group(group(DatabaseUnavailable("away")), StepTimeout("slow")), PlanStatus.APPROVED),
        (group(DatabaseUnavailable("away"), ValueError("wrong")), PlanStatus.FAILED),
    ],
)
def test_a_group_of_errors_is_retried_where_all_of_them_are(
    session_factory: sessionmaker[Session], plans: Runs[Plan], error: Exception, status: PlanStatus
) -> None:
    def carry_out(run: Run[Plan]) -> None:
        raise error

    assert plans.execute(approved_plan(session_factory), carry_out).status is status


def test_an_outage_in_one_of_several_concurrent_steps_gives_the_run_back(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    ident = approved_plan(session_factory)

    async def cut_off(session: AsyncSession) -> None:
        await session.execute(text(CUT_OFF))

    async def carry_out(run: AsyncRun[Plan]) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run.step("one", write_entry, "a"))
            tasks.create_task(run.step("two", cut_off))

    outcome = carried_out(engine, lambda plans: plans.execute(ident, carry_out))
    assert (outcome.ending, outcome.status) == (Ending.INTERRUPTED, PlanStatus.APPROVED)


def test_a_conflict_in_a_task_of_a_body_retries_the_step(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    ident = approved_plan(session_factory)
    attempts: list[int] = []

    async def body(session: AsyncSession) -> None:
        async def write() -> None:
            attempts.append(1)
            await write_entry(session, "a")
            if len(attempts) == 1:
                await session.execute(text(CONFLICT))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(write())

    outcome = carried_out(engine, lambda plans: plans.execute(ident, lambda run: run.step("one", body)))
    assert outcome.status is PlanStatus.EXECUTED
    assert (len(attempts), entries(engine)) == (2, ["a"])


# what would run nothing


def generates(run: Run[Plan]) -> Iterator[int]:
    yield run.step("one", lambda _: 1)


async def generates_asynchronously(run: Run[Plan]) -> AsyncIterator[int]:
    yield run.step("one", lambda _: 1)


@pytest.mark.parametrize("handler", [generates, generates_asynchronously])
def test_a_handler_that_is_a_generator_function_does_not_land_as_done(
    session_factory: sessionmaker[Session], plans: Runs[Plan], handler: Any
) -> None:
    outcome = plans.execute(approved_plan(session_factory), handler)
    assert outcome.status is PlanStatus.FAILED
    assert isinstance(outcome.exception, UsageError)
