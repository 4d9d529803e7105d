"""Deadlines over asyncio: a coroutine that waits is cancelled, and one that blocks the loop cannot keep its run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from sqla_durable import Ending, Outcome, TimedOut
from sqla_durable.asyncio import AsyncRun, AsyncRuns
from tests.support_deadline import (
    HOUR,
    Beating,
    BeatingStep,
    Status,
    Timed,
    TimedBase,
    TimedStep,
    add,
    pass_deadline,
    row,
)

SOON = timedelta(milliseconds=300)
Handler = Callable[[AsyncRun[Timed]], Awaitable[None]]


@pytest.fixture
def engine(empty_url: str) -> Iterator[Engine]:
    engine = create_engine(empty_url)
    TimedBase.metadata.create_all(engine)
    yield engine
    engine.dispose()


def executed(
    engine: Engine, ident: int, handler: Handler, kind: tuple[type[Any], type[Any]] = (Timed, TimedStep)
) -> Outcome:
    async def main() -> Outcome:
        through = create_async_engine(engine.url)
        runs: AsyncRuns[Any] = AsyncRuns(async_sessionmaker(through), *kind)
        try:
            outcome = await runs.execute(ident, handler)
            task = asyncio.current_task()
            assert task is not None
            assert not task.cancelling()
            return outcome
        finally:
            await through.dispose()

    return asyncio.run(main())


async def nothing(session: AsyncSession) -> None:
    """A body without an effect."""


async def waits(run: AsyncRun[Timed]) -> None:
    await asyncio.sleep(20)


async def waits_in_a_step(run: AsyncRun[Timed]) -> None:
    async def body(session: AsyncSession) -> None:
        await asyncio.sleep(20)

    await run.step("long", body)


async def waits_in_a_call(run: AsyncRun[Timed]) -> None:
    async def call() -> None:
        await asyncio.sleep(20)

    await run.external("long", call)


async def swallows_the_cancellation(run: AsyncRun[Timed]) -> None:
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(20)
    for _ in range(3):
        with pytest.raises(TimedOut):
            await run.step("late", nothing)
        with pytest.raises(TimedOut):
            await run.finish()


async def blocks_the_loop(run: AsyncRun[Timed]) -> None:
    ends = time.monotonic() + 20
    while not run.holder.ended and time.monotonic() < ends:
        time.sleep(0.01)


async def blocks_the_loop_and_goes_on(run: AsyncRun[Timed]) -> None:
    await blocks_the_loop(run)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(0)
    with pytest.raises(TimedOut):
        await run.step("late", nothing)


async def waits_in_a_thread(run: AsyncRun[Timed]) -> None:
    await asyncio.to_thread(time.sleep, 1)


@pytest.mark.parametrize(
    "handler",
    [
        waits,
        waits_in_a_step,
        waits_in_a_call,
        swallows_the_cancellation,
        blocks_the_loop,
        blocks_the_loop_and_goes_on,
        waits_in_a_thread,
    ],
)
def test_a_coroutine_that_is_past_its_deadline_lands_as_timed_out(engine: Engine, handler: Handler) -> None:
    ident = add(engine, SOON)
    began = time.monotonic()
    outcome = executed(engine, ident, handler)
    assert time.monotonic() - began < 10
    assert (outcome.ending, outcome.status, outcome.receipts) == (Ending.LANDED, Status.TIMED_OUT, ())
    found = row(engine, ident)
    assert found.status == Status.TIMED_OUT
    assert found.finished_at >= found.started_at + found.max_duration
    assert outcome.failure is not None
    assert outcome.failure.to_json() == found.error


def test_a_coroutine_that_swallows_its_deadline_lands_as_timed_out(engine: Engine) -> None:
    ident = add(engine, HOUR)

    async def carry_out(run: AsyncRun[Timed]) -> None:
        await run.step("early", nothing)
        pass_deadline(engine, ident)
        with suppress(TimedOut):
            await run.step("late", nothing)

    outcome = executed(engine, ident, carry_out)
    assert (outcome.status, [receipt.step for receipt in outcome.receipts]) == (Status.TIMED_OUT, ["early"])


def test_a_coroutine_that_cleans_up_after_its_deadline_is_cancelled_once(engine: Engine) -> None:
    ident = add(engine, timedelta(seconds=2), Beating)
    cancelled: list[Any] = []

    async def body(session: AsyncSession) -> None:
        await asyncio.sleep(20)

    async def carry_out(run: AsyncRun[Timed]) -> None:
        try:
            # The row is locked by a step, so that the heartbeat lands it when it comes again.
            await run.step("long", body)
        except asyncio.CancelledError:
            cancelled.append("once")
            while not run.holder.ended:
                await asyncio.sleep(0.05)
            cancelled.append("cleaned up")
            raise

    assert executed(engine, ident, carry_out, (Beating, BeatingStep)).status is Status.TIMED_OUT
    assert cancelled == ["once", "cleaned up"]
