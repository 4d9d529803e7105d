"""Carries a plan out in a fork of itself, once for each line it reads, and kills that fork at the point the line names.

Arguments: the database, and the file that external effects go to. A line is ``[form, ident, point]``; the answer is
``[signal or null, points reached, outcome or null]``. Only what the dead left in the database counts for the test.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import configure_mappers, sessionmaker

from sqla_durable import Outcome, Runs
from sqla_durable.asyncio import AsyncRuns
from tests.support import Plan, PlanStep
from tests.support_points import Points, carry_out, carry_out_async, told
from tests.support_processes import hear, say

NAME = "crash_points"


def carried_out(url: str, ledger: Path, ident: UUID, points: Points) -> Outcome:
    engine = create_engine(url, connect_args={"application_name": NAME})
    with points.of(engine):
        return Runs(sessionmaker(engine), Plan, PlanStep).execute(ident, partial(carry_out, ledger=ledger))


def carried_out_async(url: str, ledger: Path, ident: UUID, points: Points) -> Outcome:
    async def main() -> Outcome:
        engine = create_async_engine(url, connect_args={"application_name": NAME})
        with points.of(engine.sync_engine):
            plans = AsyncRuns(async_sessionmaker(engine), Plan, PlanStep)
            return await plans.execute(ident, partial(carry_out_async, ledger=ledger))

    return asyncio.run(main())


def in_fork(work: Callable[[int], None]) -> tuple[int | None, list[Any]]:
    """Call ``work`` with a pipe to write lines to; return the signal that ended the fork, and the lines."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            work(writing)
            os._exit(0)
        except BaseException:  # noqa: BLE001  the fork must not go on as its parent
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as lines:
        heard = [json.loads(line) for line in lines]
    _, status = os.waitpid(child, 0)
    return (os.WTERMSIG(status) if os.WIFSIGNALED(status) else None), heard


def killed_at(point: int | None, carried: Callable[[Points], Outcome], pipe: int) -> None:
    """Carry a plan out, telling ``pipe`` the points and the outcome, up to the point at which this process dies."""

    def visit(number: int, label: str) -> None:
        os.write(pipe, (json.dumps(label) + "\n").encode())
        if number == point:
            os.kill(os.getpid(), signal.SIGKILL)

    outcome = carried(Points(visit))
    os.write(pipe, (json.dumps(told(outcome)) + "\n").encode())


def main(url: str, ledger: str) -> None:
    configure_mappers()
    while True:
        form, ident, point = hear()
        carried = partial({"sync": carried_out, "async": carried_out_async}[form], url, Path(ledger), UUID(ident))
        number, heard = in_fork(partial(killed_at, point, carried))
        labels = [line for line in heard if isinstance(line, str)]
        say([number, labels, next((line for line in heard if isinstance(line, dict)), None)])


if __name__ == "__main__":
    main(*sys.argv[1:])
