"""Workers of every form behind one face, each at work in a thread of its own with an engine of its own."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import URL, Engine, create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker
from sqlalchemy.util import await_only, greenlet_spawn

from sqla_durable import Ending, Runs, Work, Worker
from sqla_durable.asyncio import AsyncRun, AsyncRuns, AsyncWork, AsyncWorker
from tests.support import DEADLINE, Background, Plan, PlanStep, eventually
from tests.support_async import Facade

BOTH = ["sync", "async"]
MIXED = "mixed"
"""An AsyncWorker that carries out the first of what it is given in threads, and what follows in tasks."""
ONE_AND_SLOWLY_THE_OTHER = ["sync", pytest.param("async", marks=pytest.mark.slow)]
Handler = Callable[[Any], None]
Handled = tuple[type[Any], type[Any], Handler]
QUICK: dict[str, Any] = {"poll": timedelta(seconds=0.05), "listen": False, "grace": timedelta(seconds=DEADLINE)}


def plans_by(handler: Handler) -> Handled:
    return Plan, PlanStep, handler


def wait_for(event: threading.Event, run: Any) -> None:
    """In a handler of either form: wait, without blocking the loop."""
    if isinstance(run, Facade):
        run.awaits(_set(event))
    else:
        assert event.wait(DEADLINE)


async def _set(event: threading.Event) -> None:
    async with asyncio.timeout(DEADLINE):
        while not event.is_set():
            await asyncio.sleep(0.005)


def as_async_handler(handler: Handler) -> Callable[[AsyncRun[Any]], Any]:
    async def carry_out(run: AsyncRun[Any]) -> None:
        await greenlet_spawn(handler, Facade(run, await_only))

    return carry_out


class Crew:
    """A worker of one form; what it does is done in the thread that calls it.

    :param options: what the worker is made with, beside ``engine_options``.
    """

    def __init__(
        self, form: str, url: URL, *handled: Handled, engine_options: dict[str, Any] | None = None, **options: Any
    ) -> None:
        self.form = form
        self._engine_options = engine_options or {}
        self._url = url
        self._options = {**QUICK, **options}
        self._handled = handled
        self.worker: Any = None

    def run(self) -> None:
        """See :meth:`.Worker.run`."""
        self._within("run")

    def run_due(self, budget: timedelta) -> Counter[Ending]:
        """See :meth:`.Worker.run_due`."""
        counted: Counter[Ending] = self._within("run_due", budget)
        return counted

    def stop(self) -> None:
        eventually(lambda: self.worker, "the worker").stop()

    def _within(self, verb: str, *arguments: Any) -> Any:
        if self.form == "sync":
            engine = create_engine(self._url, **self._engine_options)
            factory = sessionmaker(engine)
            works = [Runs(factory, run, receipt).handled_by(handler) for run, receipt, handler in self._handled]
            self.worker = Worker(*works, **self._options)
            try:
                return getattr(self.worker, verb)(*arguments)
            finally:
                eventually(lambda: not engine.pool.checkedout(), "every connection back")  # type: ignore[attr-defined]
                engine.dispose()
        return asyncio.run(self._over_asyncio(verb, *arguments))

    async def _over_asyncio(self, verb: str, *arguments: Any) -> Any:
        engine = create_async_engine(self._url, **self._engine_options)
        beside = create_engine(self._url, **self._engine_options)
        factory, sync_factory = async_sessionmaker(engine), sessionmaker(beside)
        in_threads = 1 if self.form == MIXED else 0
        works: list[Work | AsyncWork] = [
            Runs(sync_factory, run, receipt).handled_by(handler) for run, receipt, handler in self._handled[:in_threads]
        ]
        works += [
            AsyncRuns(factory, run, receipt).handled_by(as_async_handler(handler))
            for run, receipt, handler in self._handled[in_threads:]
        ]
        self.worker = AsyncWorker(*works, **self._options)
        try:
            return await getattr(self.worker, verb)(*arguments)
        finally:
            assert not engine.pool.checkedout()  # type: ignore[attr-defined]
            await engine.dispose()
            beside.dispose()


@contextmanager
def working(form: str, engine: Engine, *handled: Handled, **options: Any) -> Iterator[Crew]:
    """Have a worker at work meanwhile, and drain it."""
    crew = Crew(form, engine.url, *handled, **options)
    background = Background(crew.run)
    try:
        yield crew
    finally:
        if background.is_alive():
            crew.stop()
        background.result()
