"""A function with a transactional, a keyed and a waiting step, from its start to its result, in both forms."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from sqlalchemy import Engine, create_engine, exists, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import FunctionRun, Functions
from sqla_durable.asyncio import AsyncFunctionRun, AsyncFunctions
from tests.support_functions import DurableRun, DurableSignal, DurableStep, Entry
from tests.support_points import Points, pay

NAME = "crash_functions"
STEPS = ["reserve", "pay", "approved", "answer", "rest", "ship"]
_NO_TIME = timedelta(0)
EFFECTS = ["reserved", "asked", "shipped by ada"]


class Given(BaseModel):
    ledger: str


class Approval(BaseModel):
    by: str


def reserve(session: Session) -> int:
    session.add(Entry(label="reserved"))
    return 7


def add(session: Session, number: int) -> int:
    session.add(Entry(label="asked"))
    return number + 1


def ship(session: Session, by: str) -> str:
    session.add(Entry(label=f"shipped by {by}"))
    return f"shipped by {by}"


async def reserve_async(session: AsyncSession) -> int:
    return await session.run_sync(reserve)


async def pay_async(key: str, ledger: Path) -> str:
    return pay(key, ledger)


async def add_async(session: AsyncSession, number: int) -> int:
    return await session.run_sync(add, number)


async def ship_async(session: AsyncSession, by: str) -> str:
    return await session.run_sync(ship, by)


def functions_of(engine: Engine) -> Functions[DurableRun]:
    functions = Functions(sessionmaker(engine), DurableRun, DurableStep, signals=DurableSignal)

    @functions.function("fulfil")
    def fulfil(run: FunctionRun, given: Given) -> str:
        run.step("reserve", reserve)
        run.keyed("pay", pay, Path(given.ledger))
        approval = run.wait("approved", Approval)
        run.answer("answer", add)
        run.sleep("rest", _NO_TIME)
        return run.step("ship", ship, approval.by)

    return functions


def async_functions_of(engine: Any) -> AsyncFunctions[DurableRun]:
    functions = AsyncFunctions(async_sessionmaker(engine), DurableRun, DurableStep, signals=DurableSignal)

    @functions.function("fulfil")
    async def fulfil(run: AsyncFunctionRun, given: Given) -> str:
        await run.step("reserve", reserve_async)
        await run.keyed("pay", pay_async, Path(given.ledger))
        approval = await run.wait("approved", Approval)
        await run.answer("answer", add_async)
        await run.sleep("rest", _NO_TIME)
        return await run.step("ship", ship_async, approval.by)

    return functions


SIGNALS: list[tuple[str, Any]] = [("approved", Approval(by="ada")), ("answer", 1)]


def unsent(session: Session) -> list[tuple[str, Any]]:
    """The signals that nobody has sent yet."""
    return [
        (name, payload)
        for name, payload in SIGNALS
        if not session.scalar(select(exists().where(DurableSignal.name == name)))
    ]


def live(url: str, ledger: Path, key: str, points: Points | None = None) -> str:
    """Start the function if it has not been, send what it waits for, and carry it out to its end."""
    engine = create_engine(url, connect_args={"application_name": NAME})
    functions = functions_of(engine)

    def life() -> str:
        with functions.session_factory.begin() as session:
            handle = functions.start(session, "fulfil", Given(ledger=str(ledger)), key=key)
        functions.execute(handle)
        while True:
            with functions.session_factory.begin() as session:
                if not (left := unsent(session)):
                    break
                functions.signal(session, handle, *left[0])
            functions.execute(handle)
        functions.execute(handle)
        return str(functions.result(handle))

    try:
        if points is None:
            return life()
        with points.of(engine):
            return life()
    finally:
        engine.dispose()


def live_async(url: str, ledger: Path, key: str, points: Points | None = None) -> str:
    """The same over asyncio."""

    async def main() -> str:
        engine = create_async_engine(url, connect_args={"application_name": NAME})
        functions = async_functions_of(engine)

        async def life() -> str:
            async with functions.session_factory.begin() as session:
                handle = await functions.start(session, "fulfil", Given(ledger=str(ledger)), key=key)
            await functions.execute(handle)
            while True:
                async with functions.session_factory.begin() as session:
                    if not (left := await session.run_sync(unsent)):
                        break
                    await functions.signal(session, handle, *left[0])
                await functions.execute(handle)
            await functions.execute(handle)
            return str(await functions.result(handle))

        try:
            if points is None:
                return await life()
            with points.of(engine.sync_engine):
                return await life()
        finally:
            await engine.dispose()

    return asyncio.run(main())


LIVES: dict[str, Callable[..., str]] = {"sync": live, "async": live_async}
