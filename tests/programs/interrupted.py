"""Carries a plan out and waits in the middle of it for a Ctrl-C, in the synchronous form or over asyncio.

Arguments: the database, the form, and where it waits: ``step`` is inside a step's transaction, ``call`` inside an
external step, and ``between`` between two steps. A line in is the run's key; the lines out are ``waiting``, and the
exception that ``execute`` let pass.
"""

from __future__ import annotations

import asyncio
import sys
import time
from uuid import UUID

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Run, Runs
from sqla_durable.asyncio import AsyncRun, AsyncRuns
from tests.support import Plan, PlanStep, write_entry
from tests.support_processes import hear, say

FOR_EVER = 3600


def sync(url: str, ident: UUID, place: str) -> None:
    def wait(here: str) -> None:
        if here == place:
            say("waiting")
            time.sleep(FOR_EVER)

    def body(session: Session) -> None:
        write_entry(session, "second")
        session.flush()
        wait("step")

    def carry_out(run: Run[Plan]) -> None:
        run.step("first", write_entry, "first")
        wait("between")
        run.step("second", body)
        run.external("third", wait, "call")

    Runs(sessionmaker(create_engine(url)), Plan, PlanStep).execute(ident, carry_out)


async def over_asyncio(url: str, ident: UUID, place: str) -> None:
    async def wait(here: str) -> None:
        if here == place:
            say("waiting")
            await asyncio.sleep(FOR_EVER)

    async def first(session: AsyncSession) -> str:
        return await session.run_sync(write_entry, "first")

    async def body(session: AsyncSession) -> None:
        await session.run_sync(write_entry, "second")
        await session.flush()
        await wait("step")

    async def carry_out(run: AsyncRun[Plan]) -> None:
        await run.step("first", first)
        await wait("between")
        await run.step("second", body)
        await run.external("third", wait, "call")

    await AsyncRuns(async_sessionmaker(create_async_engine(url)), Plan, PlanStep).execute(ident, carry_out)


def main(url: str, form: str, place: str) -> None:
    ident = UUID(hear()["ident"])
    try:
        if form == "sync":
            sync(url, ident, place)
        else:
            asyncio.run(over_asyncio(url, ident, place))
    except KeyboardInterrupt as interruption:
        say(type(interruption).__name__)


if __name__ == "__main__":
    main(*sys.argv[1:])
