"""Gathers two calls, the second of which waits to be told to go on.

Arguments: the database and the form. A line is ``"start"``, which is answered with the run's id, or an id, whose run is
carried out: the program says what it calls, hears a line in the second call, and says how it ended.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any
from uuid import UUID

from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from sqla_durable import Outcome, call
from sqla_durable.asyncio import AsyncFunctionRun, AsyncFunctions
from tests.support_functions import DurableRun, DurableStep
from tests.support_processes import hear, say
from tests.support_versions import Version


def called(key: str) -> str:
    say(["called", key])
    if key == "b":
        hear()
    return key


async def called_async(key: str) -> str:
    say(["called", key])
    if key == "b":
        await asyncio.to_thread(hear)
    return key


def gather(run: Any) -> None:
    run.gather(call("a", called, "a"), call("b", called, "b"))


async def executed(url: str, ident: UUID) -> Outcome:
    engine = create_async_engine(url)
    functions = AsyncFunctions(async_sessionmaker(engine), DurableRun, DurableStep)

    @functions.function("job")
    async def job(run: AsyncFunctionRun) -> None:
        await run.gather(call("a", called_async, "a"), call("b", called_async, "b"))

    return await functions.execute(ident, run_now=True)


def main(url: str, form: str) -> None:
    program = Version("sync", url)
    program.function("job", gather)
    while True:
        heard = hear()
        if heard == "start":
            say(str(program.start("job").id))
            continue
        ident = UUID(heard)
        outcome = program.execute(ident) if form == "sync" else asyncio.run(executed(url, ident))
        say([outcome.ending, outcome.status])


if __name__ == "__main__":
    main(*sys.argv[1:])
