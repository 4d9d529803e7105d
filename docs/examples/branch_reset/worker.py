"""The worker. As a program: runs until it is told to stop."""

import asyncio
import logging
import sys
from datetime import timedelta

from sqla_durable.asyncio import AsyncWorker

from .database import engine, resets
from .handler import resetting
from .hosting import Hosting


async def main(concurrency: int = 10) -> None:
    async with Hosting() as hosting:
        handled = resets.handled_by(resetting(hosting))
        await AsyncWorker(handled, concurrency=concurrency, poll=timedelta(seconds=0.5)).run()
    await engine.dispose()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs each request
    asyncio.run(main(*map(int, sys.argv[1:])))
