"""What workers log: what they are at, and how runs have ended, by the names that people know."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, update
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import RetryableError, Run, Runs, Worker
from sqla_durable.asyncio import AsyncFunctions, AsyncWorker
from tests.support import Plan, PlanStep, approved_plan
from tests.support_observe import Job, JobStep, Refused, functions_on, started, tables

BUDGET = timedelta(seconds=20)


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "sqla_durable.worker")
    return caplog


def said(log: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """The level and message of each line about runs, in no order."""
    return sorted((record.levelname, record.getMessage()) for record in log.records if record.name.endswith("worker"))


def in_loop(engine: Engine, work: Callable[[AsyncFunctions[Job]], Awaitable[object]]) -> None:
    """Do something with functions that are carried out in tasks."""

    async def do() -> None:
        own = create_async_engine(engine.url)
        await work(in_tasks(async_sessionmaker(own)))
        await own.dispose()

    asyncio.run(do())


def in_tasks(factory: async_sessionmaker[AsyncSession]) -> AsyncFunctions[Job]:
    made = AsyncFunctions(factory, Job, JobStep)

    @made.function("double")
    async def double(run: Any, given: int) -> int:
        return given * 2

    @made.function("refuse")
    async def refuse(run: Any, given: int) -> int:
        raise Refused(f"no {given}")

    return made


@pytest.mark.parametrize("form", ["threads", "tasks"])
def test_the_run_of_a_function_is_named_by_its_id_its_function_and_its_key(
    engine: Engine, form: str, log: pytest.LogCaptureFixture
) -> None:
    tables(engine)
    functions = functions_on(engine)
    fine = started(functions, key="k-1", tenant="acme")
    failed = started(functions, "refuse")
    if form == "threads":
        Worker(functions).run_due(BUDGET)
    else:
        in_loop(engine, lambda functions: AsyncWorker(functions).run_due(BUDGET))
    assert said(log) == [
        ("DEBUG", f"Job {fine.id} of function 'double' with the key 'k-1' of tenant 'acme' is done"),
        ("ERROR", f"Job {failed.id} of function 'refuse' is failed"),
    ]


def test_a_run_of_a_model_is_named_as_on_the_command_line(
    session_factory: sessionmaker[Session], log: pytest.LogCaptureFixture
) -> None:
    def refuse(run: Run[Plan]) -> None:
        raise ValueError("no")

    ident = approved_plan(session_factory)
    Worker(Runs(session_factory, Plan, PlanStep).handled_by(refuse)).run_due(BUDGET)
    assert said(log) == [("ERROR", f"Plan {ident} is failed")]


def test_a_worker_says_once_what_it_works_on_and_which_functions_it_knows(
    engine: Engine, session_factory: sessionmaker[Session], log: pytest.LogCaptureFixture
) -> None:
    tables(engine)
    plans = Runs(session_factory, Plan, PlanStep).handled_by(print)

    def work(more: AsyncFunctions[Job]) -> Awaitable[None]:
        @more.function("other")
        async def other(run: Any) -> None: ...

        worker = AsyncWorker(functions_on(engine), plans, more)
        worker.stop()
        return worker.run()

    in_loop(engine, work)
    assert ("INFO", "working on Job (double, refuse, other), Plan") in said(log)


def test_the_log_of_a_run_whose_row_its_function_has_emptied_is_written_all_the_same(
    engine: Engine, log: pytest.LogCaptureFixture
) -> None:
    tables(engine)
    functions = functions_on(engine)

    @functions.function("empties")
    def empties(run: Any) -> None:
        run.row.__dict__.pop("function", None)
        raise Refused("no")

    with functions.session_factory.begin() as session:
        handle = functions.start(session, empties)
    Worker(functions).run_due(BUDGET)
    assert said(log) == [("ERROR", f"Job {handle.id} is failed")]


def test_a_run_that_goes_back_is_logged_with_the_kind_of_its_error(
    session_factory: sessionmaker[Session], log: pytest.LogCaptureFixture
) -> None:
    class Away(RetryableError):
        pass

    def refuse(run: Run[Plan]) -> None:
        raise Away

    ident = approved_plan(session_factory)
    plans = Runs(session_factory, Plan, PlanStep)
    with session_factory.begin() as session:
        session.execute(update(Plan).values(attempts=1))
    Worker(plans.handled_by(refuse)).run_due(timedelta(seconds=0.3))
    assert ("WARNING", f"Plan {ident}: interrupted (Away)") in said(log)
