"""A worker in a process of its own, in the synchronous form, over asyncio, or mixed: then there are two runs.

Arguments: the database, the form, and the options of the worker as JSON, with durations in seconds. Beside them,
``model`` is ``plan``, or ``errand`` with a lease of one second; ``behaviour`` is what its runs do, one of those named
below; ``releasing`` is how long a release may take; ``stops_when_claimed`` has the process stop after its first claim.
The lines out are ``started`` with the run's attempt, ``finished``, and ``stopped``.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import sqla_durable.asyncio.worker
import sqla_durable.threads
from sqla_durable import LostLease, Run, Runs, Worker
from sqla_durable.asyncio import AsyncRun, AsyncRuns, AsyncWorker
from sqla_durable.holder import Holder
from sqla_durable.verbs import Verbs
from tests.support import Plan, PlanStep, write_entry
from tests.support_brief import BRIEF
from tests.support_jobs import Brief, BriefStep
from tests.support_processes import hear, say

NAME = "worker"
FOR_EVER = 3600
MODELS: dict[str, tuple[Any, Any]] = {"plan": (Plan, PlanStep), "errand": tuple(BRIEF)}


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# synchronous


def hangs_in_step(session: Session) -> None:
    write_entry(session, "never")
    session.flush()
    say("in step")
    time.sleep(FOR_EVER)


def asks_then_writes(run: Run[Any]) -> None:
    hear()
    try:
        run.step("only", write_entry, "stale")
    except LostLease as lost:
        say(["lost", type(lost).__name__])
        raise


def two_steps(run: Run[Any]) -> None:
    for step in ("one", "two"):
        run.step(step, write_entry, f"{run.row.id} {step}")
        time.sleep(0.02)


SYNC: dict[str, Callable[[Run[Any]], object]] = {
    "short": lambda run: run.step("only", write_entry, str(run.row.id)),
    "asks": lambda run: run.external("asks", hear),
    "asks, then writes": asks_then_writes,
    "two steps": two_steps,
    "takes a second": lambda run: time.sleep(1),
    "hangs": lambda run: time.sleep(FOR_EVER),
    "hangs in step": lambda run: run.step("only", hangs_in_step),
    "kills": lambda run: kill_myself(),
    "blocks": lambda run: time.sleep(FOR_EVER),
}


def work(url: str, model: str, behaviour: str, **options: Any) -> None:
    def carry_out(run: Run[Any]) -> None:
        say(["started", run.lease.attempt])
        SYNC[behaviour](run)
        say("finished")

    engine = create_engine(url, connect_args={"application_name": NAME})
    run, receipt = MODELS[model]
    Worker(Runs(sessionmaker(engine), run, receipt).handled_by(carry_out), **options).run()


# over asyncio


async def write(session: AsyncSession, label: str) -> str:
    return await session.run_sync(write_entry, label)


async def hangs_in_async_step(session: AsyncSession) -> None:
    await write(session, "never")
    await session.flush()
    say("in step")
    await asyncio.sleep(FOR_EVER)


async def hears() -> Any:
    return await asyncio.to_thread(hear)


async def blocks() -> None:
    time.sleep(FOR_EVER)


async def swallows() -> None:
    while True:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)


async def kills() -> None:
    kill_myself()


async def asks_then_writes_over_asyncio(run: AsyncRun[Any]) -> None:
    await hears()
    try:
        await run.step("only", write, "stale")
    except (LostLease, asyncio.CancelledError):
        say(["lost", "LostLease"])
        raise


async def two_steps_over_asyncio(run: AsyncRun[Any]) -> None:
    for step in ("one", "two"):
        await run.step(step, write, f"{run.row.id} {step}")
        await asyncio.sleep(0.02)


ASYNC: dict[str, Callable[[AsyncRun[Any]], Awaitable[object]]] = {
    "short": lambda run: run.step("only", write, str(run.row.id)),
    "asks": lambda run: run.external("asks", hears),
    "asks, then writes": asks_then_writes_over_asyncio,
    "two steps": two_steps_over_asyncio,
    "takes a second": lambda run: asyncio.sleep(1),
    "hangs": lambda run: asyncio.sleep(FOR_EVER),
    "hangs in step": lambda run: run.step("only", hangs_in_async_step),
    "blocks": lambda run: blocks(),
    "swallows": lambda run: swallows(),
    "kills": lambda run: kills(),
}


async def work_over_asyncio(url: str, model: str, behaviour: str, **options: Any) -> None:
    async def carry_out(run: AsyncRun[Any]) -> None:
        say(["started", run.lease.attempt])
        await ASYNC[behaviour](run)
        say("finished")

    engine = create_async_engine(url, connect_args={"application_name": NAME})
    run, receipt = MODELS[model]
    await AsyncWorker(AsyncRuns(async_sessionmaker(engine), run, receipt).handled_by(carry_out), **options).run()
    await engine.dispose()


# mixed


async def work_in_both_forms(url: str, behaviour: str, **options: Any) -> None:
    def carry_out(run: Run[Any]) -> None:
        say(["started", "in a thread"])
        SYNC[behaviour](run)
        say("finished")

    async def carry_out_over_asyncio(run: AsyncRun[Any]) -> None:
        say(["started", "in a task"])
        await ASYNC[behaviour](run)
        say("finished")

    engine, async_engine = create_engine(url), create_async_engine(url)
    await AsyncWorker(
        Runs(sessionmaker(engine), Brief, BriefStep).handled_by(carry_out),
        AsyncRuns(async_sessionmaker(async_engine), *BRIEF).handled_by(carry_out_over_asyncio),
        **options,
    ).run()
    await async_engine.dispose()


def stop_when_claimed() -> None:
    """Stop this process, as a debugger or a suspended machine would, right after its first claim."""
    claim_due = Verbs.claim_due

    def claimed(verbs: Verbs[Any], limit: int) -> list[Holder[Any]]:
        holders = claim_due(verbs, limit)
        if holders:
            Verbs.claim_due = claim_due  # type: ignore[method-assign]
            say("claimed")
            os.kill(os.getpid(), signal.SIGSTOP)
        return holders

    Verbs.claim_due = claimed  # type: ignore[method-assign]


def main(url: str, form: str, given: str) -> None:
    logging.basicConfig(level=logging.INFO)
    options = json.loads(given)
    sqla_durable.threads.RELEASING = sqla_durable.asyncio.worker.RELEASING = options.pop("releasing")
    if options.pop("stops_when_claimed", False):
        stop_when_claimed()
    for name in ("poll", "grace"):
        if name in options:
            options[name] = timedelta(seconds=options[name])
    if form == "sync":
        work(url, **options)
    elif form == "mixed":
        asyncio.run(work_in_both_forms(url, **options))
    else:
        asyncio.run(work_over_asyncio(url, **options))
    say("stopped")


if __name__ == "__main__":
    main(*sys.argv[1:])
