"""The process that has branches reset: ``sqla-durable worker branch_reset.worker:worker``."""

import logging
from datetime import timedelta

from sqla_durable.asyncio import AsyncWorker

from .database import create_tables, resets
from .handler import resetting
from .hosting import Hosting


def worker(concurrency: int = 10) -> AsyncWorker:
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request
    create_tables()
    handled = resets.handled_by(resetting(Hosting()))
    return AsyncWorker(handled, concurrency=concurrency, poll=timedelta(seconds=0.5))
