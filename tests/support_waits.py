"""An order that waits, answers and sleeps, and so takes several executions, each of which may be killed."""

from __future__ import annotations

from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from sqla_durable import Ending, Outcome, Run, Runs
from sqla_durable.asyncio import AsyncRun, AsyncRuns
from tests.support_signals import Order, add_line

EXPECTED_LINES = ["paid 7", "25", "slept"]


def answered(session: Session, percent: int) -> int:
    add_line(session, str(percent))
    return percent


async def answered_async(session: AsyncSession, percent: int) -> int:
    return await session.run_sync(answered, percent)


async def add_line_async(session: AsyncSession, label: str) -> str:
    return await session.run_sync(add_line, label)


def carry_out(run: Run[Order]) -> None:
    payload = run.wait("paid", int, timeout=timedelta(hours=1))
    run.step("line", add_line, f"paid {payload}")
    run.answer("discount", answered, timeout=timedelta(hours=1))
    run.sleep("nap", timedelta(hours=1))
    run.step("slept", add_line, "slept")


async def carry_out_async(run: AsyncRun[Order]) -> None:
    payload = await run.wait("paid", int, timeout=timedelta(hours=1))
    await run.step("line", add_line_async, f"paid {payload}")
    await run.answer("discount", answered_async, timeout=timedelta(hours=1))
    await run.sleep("nap", timedelta(hours=1))
    await run.step("slept", add_line_async, "slept")


def executed(orders: Runs[Order], ident: object) -> Outcome:
    return orders.execute(ident, carry_out, run_now=True)


async def executed_async(orders: AsyncRuns[Order], ident: object) -> Outcome:
    return await orders.execute(ident, carry_out_async, run_now=True)


def is_over(outcome: Outcome) -> bool:
    return outcome.ending is Ending.LANDED
