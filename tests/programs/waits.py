"""Executes an order that waits once in a fork of itself, once for each line it reads, and kills that fork at a point.

Argument: the database. A line is ``[form, ident, point]``; the answer is ``[signal or null, points reached, ending]``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from functools import partial
from uuid import UUID

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import configure_mappers, sessionmaker

from sqla_durable import Outcome
from sqla_durable.asyncio import AsyncRuns
from tests.programs.crash_points import NAME, in_fork
from tests.support_points import Points
from tests.support_processes import hear, say
from tests.support_signals import Order, OrderSignal, OrderStep, orders_on
from tests.support_waits import executed, executed_async


def in_sync(url: str, ident: UUID, points: Points) -> Outcome:
    engine = create_engine(url, connect_args={"application_name": NAME})
    with points.of(engine):
        return executed(orders_on(sessionmaker(engine)), ident)


def in_async(url: str, ident: UUID, points: Points) -> Outcome:
    async def main() -> Outcome:
        engine = create_async_engine(url, connect_args={"application_name": NAME})
        with points.of(engine.sync_engine):
            orders = AsyncRuns(async_sessionmaker(engine), Order, OrderStep, signals=OrderSignal)
            return await executed_async(orders, ident)

    return asyncio.run(main())


def killed_at(point: int | None, form: str, url: str, ident: UUID, pipe: int) -> None:
    def visit(number: int, label: str) -> None:
        os.write(pipe, (json.dumps(label) + "\n").encode())
        if number == point:
            os.kill(os.getpid(), signal.SIGKILL)

    outcome = {"sync": in_sync, "async": in_async}[form](url, ident, Points(visit))
    os.write(pipe, (json.dumps({"ending": outcome.ending.value}) + "\n").encode())


def main(url: str) -> None:
    configure_mappers()
    while True:
        form, ident, point = hear()
        number, heard = in_fork(partial(killed_at, point, form, url, UUID(ident)))
        labels = [line for line in heard if isinstance(line, str)]
        say([number, labels, next((line["ending"] for line in heard if isinstance(line, dict)), None)])


if __name__ == "__main__":
    main(*sys.argv[1:])
