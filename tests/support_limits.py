"""Functions with limits, many workers that carry their runs out, and how many of those were live at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Engine, create_engine, func, select
from sqlalchemy.orm import DeclarativeBase, sessionmaker

from sqla_durable import (
    FunctionHandle,
    FunctionMixin,
    FunctionRun,
    Functions,
    FunctionStatus,
    ReceiptMixin,
    Retry,
    Worker,
    function_lifecycle,
)
from sqla_durable.holder import Holder
from tests.support import Background, eventually

LEASE = timedelta(seconds=5)


class LimitsBase(DeclarativeBase):
    pass


class LimitedRun(FunctionMixin, LimitsBase):
    """Its lease is short, and it is tried again at once."""

    __tablename__ = "limited_run"
    __lifecycle__ = function_lifecycle(
        lease=LEASE, retry=Retry(max_attempts=100, backoff=timedelta(0), cap=timedelta(0))
    )


class LimitedStep(ReceiptMixin[LimitedRun], LimitsBase):
    __tablename__ = "limited_step"


Limited = Functions[LimitedRun]


def functions_on(engine: Engine, **options: Any) -> Limited:
    """Functions on the tables here."""
    return Functions(sessionmaker(engine), LimitedRun, LimitedStep, **options)


def a_moment(run: FunctionRun) -> None:
    """A body that takes long enough for others to come in between."""
    time.sleep(0.005)


def declare(functions: Limited, declared: Mapping[str, Mapping[str, Any]]) -> None:
    """Declare functions by name, each with its limits."""
    for name, limits in declared.items():

        def body(run: FunctionRun) -> None:
            a_moment(run)

        functions.function(name, **limits)(body)


def start(functions: Limited, name: str, count: int = 1, **values: Any) -> list[FunctionHandle]:
    """Start so many runs of a function."""
    with functions.session_factory.begin() as session:
        return [functions.start(session, name, **values) for _ in range(count)]


def claimed(functions: Limited, limit: int = 100) -> list[Holder[LimitedRun]]:
    """What a worker with so many slots would claim."""
    (work,) = functions.works()
    return work.verbs.claim_due(limit)


def whose(holders: list[Holder[LimitedRun]]) -> list[tuple[str, str | None]]:
    """The function and tenant of each run."""
    return [(holder.row.function, holder.row.tenant) for holder in holders]


@contextmanager
def workers(engine: Engine, count: int, make: Callable[[Engine], Limited], **options: Any) -> Iterator[list[Worker]]:
    """So many workers, each on an engine of its own, at work in threads."""
    engines = [create_engine(engine.url, **options) for _ in range(count)]
    each = [
        Worker(
            *make(own).works(), concurrency=4, poll=timedelta(seconds=0.02), listen=False, grace=timedelta(seconds=5)
        )
        for own in engines
    ]
    threads = [Background(worker.run) for worker in each]
    try:
        yield each
    finally:
        for worker in each:
            worker.stop()
        for thread in threads:
            thread.result()
        for own in engines:
            own.dispose()


def all_land(engine: Engine) -> None:
    """Wait until no run is left that is not done."""
    left = select(func.count()).select_from(LimitedRun).where(LimitedRun.status != FunctionStatus.DONE)

    def none_left() -> bool:
        with engine.connect() as connection:
            return connection.scalar(left) == 0

    eventually(none_left, "all runs that are done")


def most_at_once(engine: Engine, *scope: str) -> dict[tuple[Any, ...], int]:
    """How many runs were live at once at the most, for each value of the scope's attributes.

    The claim that takes a place begins after the landing that frees it has committed, and so after its stamp.
    """
    columns = [getattr(LimitedRun, name) for name in scope]
    with engine.connect() as connection:
        rows = connection.execute(select(LimitedRun.started_at, LimitedRun.finished_at, *columns)).all()
    lives: dict[tuple[Any, ...], list[tuple[datetime, int]]] = {}
    for started_at, finished_at, *values in rows:
        assert started_at is not None
        assert finished_at is not None
        lives.setdefault(tuple(values), []).extend([(started_at, 1), (finished_at, -1)])
    return {values: _peak(sorted(changes)) for values, changes in lives.items()}


def _peak(changes: list[tuple[datetime, int]]) -> int:
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak
