"""A cancellation at the wrong moment leaves no connection of the user's pool in AUTOCOMMIT, open or missing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import Engine, event
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable.asyncio import AsyncRun, AsyncRuns
from tests.support import Plan, PlanStep, approved_plan
from tests.support_async import write_entry

BUSY = 0.2


async def nothing() -> None:
    pass


VERBS: dict[str, Callable[[AsyncRuns[Plan], AsyncRun[Plan]], Awaitable[Any]]] = {
    "receipts": lambda plans, run: plans.receipts(run.row.id),
    "renew": lambda _, run: run.renew(),
    "external": lambda _, run: run.external("one", nothing),
    "step": lambda _, run: run.step("one", write_entry, "a"),
    "release": lambda _, run: run.release(),
    "finish": lambda _, run: run.finish(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_connection_is_fit_for_others_after_a_cancellation_while_it_was_taken_for(
    engine: Engine, session_factory: sessionmaker[Session], verb: str
) -> None:
    """Setting it up suspends where the loop was busy for a while, and so a cancellation arrives half way through."""
    ident = approved_plan(session_factory)

    async def main() -> None:
        theirs = create_async_engine(engine.url, pool_size=1, max_overflow=0, pool_timeout=5)
        plans = AsyncRuns(async_sessionmaker(theirs), Plan, PlanStep)
        run = await plans.claim(ident)
        assert run is not None

        @event.listens_for(theirs.sync_engine, "checkout")
        def cancel(*_: object) -> None:
            if not task.cancelling():
                time.sleep(BUSY)
                task.cancel()

        task = asyncio.ensure_future(VERBS[verb](plans, run))
        with pytest.raises(asyncio.CancelledError):
            await task
        assert theirs.pool.checkedout() == 0  # type: ignore[attr-defined]
        async with theirs.connect() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            assert driver is not None
            assert not driver.autocommit
        await theirs.dispose()

    asyncio.run(main())
