"""Carries a run with one operation out in a fork of itself, for each line it reads, and kills that fork at a point.

Arguments: the database, and the folder of the service. A line is ``[form, ident, point]``; the answer is ``[signal or
null, points reached, outcome or null]``. The points are those of :mod:`tests.support_points`, and the service's.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from uuid import UUID

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import configure_mappers, sessionmaker

from sqla_durable import Outcome, Pending, Runs
from sqla_durable.asyncio import AsyncRun, AsyncRuns
from tests.programs.crash_points import in_fork, killed_at
from tests.support import Plan, PlanStep
from tests.support_points import Points
from tests.support_processes import hear, say
from tests.support_service import EVERY, KEY, Batch, Service

NAME = "operations"


class Watched(Service):
    """The service, with points before and after what it does."""

    def __init__(self, folder: Path, points: Points) -> None:
        super().__init__(folder)
        self._points = points

    def start(self) -> Batch:
        self._points.reach("start called")
        ids = super().start()
        self._points.reach("start issued")
        return ids

    def poll(self, batch: Batch) -> dict[str, int] | Pending:
        self._points.reach("poll called")
        answer = super().poll(batch)
        self._points.reach("poll answered")
        return answer


def carried_out(url: str, folder: Path, ident: UUID, points: Points) -> Outcome:
    engine = create_engine(url, connect_args={"application_name": NAME})
    with points.of(engine):
        plans = Runs(sessionmaker(engine), Plan, PlanStep)
        return plans.execute(ident, Watched(folder, points).carry_out, run_now=True)


def carried_out_async(url: str, folder: Path, ident: UUID, points: Points) -> Outcome:
    service = Watched(folder, points)

    async def start() -> Batch:
        return service.start()

    async def poll(batch: Batch) -> dict[str, int] | Pending:
        return service.poll(batch)

    async def carry_out(run: AsyncRun[Plan]) -> None:
        await run.operation(KEY, start=start, poll=poll, every=EVERY)

    async def main() -> Outcome:
        engine = create_async_engine(url, connect_args={"application_name": NAME})
        with points.of(engine.sync_engine):
            plans = AsyncRuns(async_sessionmaker(engine), Plan, PlanStep)
            return await plans.execute(ident, carry_out, run_now=True)

    return asyncio.run(main())


def main(url: str, folder: str) -> None:
    configure_mappers()
    while True:
        form, ident, point = hear()
        carried = partial({"sync": carried_out, "async": carried_out_async}[form], url, Path(folder), UUID(ident))
        number, heard = in_fork(partial(killed_at, point, carried))
        labels = [line for line in heard if isinstance(line, str)]
        say([number, labels, next((line for line in heard if isinstance(line, dict)), None)])


if __name__ == "__main__":
    main(*sys.argv[1:])
