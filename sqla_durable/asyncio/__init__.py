"""The same over asyncio.

This package needs greenlet, which the ``asyncio`` extra brings.
"""

import importlib

try:
    importlib.import_module("greenlet")
except ImportError as missing:
    raise ImportError('sqla_durable.asyncio needs greenlet: pip install "sqla_durable[asyncio]"') from missing

from sqla_durable.asyncio.functions import AsyncFunctionRun, AsyncFunctions
from sqla_durable.asyncio.runs import AsyncRun, AsyncRuns, transition
from sqla_durable.asyncio.worker import AsyncWorker
from sqla_durable.dispatch import AsyncWork

__all__ = ["AsyncFunctionRun", "AsyncFunctions", "AsyncRun", "AsyncRuns", "AsyncWork", "AsyncWorker", "transition"]
