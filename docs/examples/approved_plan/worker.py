"""A worker that executes plans as soon as they are approved: ``DATABASE_URL=... python -m approved_plan.worker``."""

from __future__ import annotations

import asyncio
import logging
import os

from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from sqla_durable.asyncio import AsyncRuns, AsyncWorker

from .models import Plan, PlanStep
from .steps import execute_plan


async def main() -> None:
    engine = create_async_engine(os.environ["DATABASE_URL"])
    plans = AsyncRuns(async_sessionmaker(engine), Plan, PlanStep)
    await AsyncWorker(plans.handled_by(execute_plan), concurrency=4).run()
    await engine.dispose()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    asyncio.run(main())
