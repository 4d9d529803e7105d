"""The process that fulfils: ``sqla-durable worker fulfilment.worker:worker``."""

from datetime import timedelta

from sqla_durable.asyncio import AsyncWorker

from . import fulfil, report  # they declare the functions
from .database import coroutines, create_tables, functions

__all__ = ["fulfil", "report", "worker"]


def worker() -> AsyncWorker:
    create_tables()
    return AsyncWorker(functions, coroutines, concurrency=10, poll=timedelta(seconds=0.5))
