"""A report on the shop at the end of a day: a coroutine function, beside the others in the same tables."""

from datetime import UTC, date, datetime, time, timedelta

from pydantic import BaseModel
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from sqla_durable.asyncio import AsyncFunctionRun

from .database import coroutines
from .models import DurableRun, Order, OrderStatus


class Report(BaseModel):
    day: date
    orders: dict[OrderStatus, int]


async def count_orders(session: AsyncSession, day: date) -> Report:
    counted = await session.execute(select(Order.status, func.count()).group_by(Order.status).order_by(Order.status))
    return Report(day=day, orders={OrderStatus(row[0]): row[1] for row in counted})


@coroutines.function("report")
async def report(run: AsyncFunctionRun[DurableRun], day: date) -> Report:
    """Count the orders when the day is over; a day that is over by then, at once."""
    await run.sleep("the end of the day", datetime.combine(day + timedelta(days=1), time(), UTC))
    return await run.step("count", count_orders, day)
