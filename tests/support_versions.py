"""Versions of a program's functions, each in either form, with bodies that are written once."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.util import await_only, greenlet_spawn

from sqla_durable import FunctionHandle, Functions, Outcome
from sqla_durable.asyncio import AsyncFunctionRun, AsyncFunctions
from tests.support_async import Facade
from tests.support_functions import DurableRun, DurableSignal, DurableStep

FORMS = ["sync", "async"]


class Version:
    """The functions that one version of the code knows.

    :param form: sync or async.
    :param url: the database.
    """

    def __init__(self, form: str, url: str) -> None:
        self.form = form
        self._url = url
        self.engine = create_engine(url)
        self.factory = sessionmaker(self.engine)
        self._bodies: list[tuple[str, Callable[..., Any], dict[str, Any]]] = []
        self.functions: Functions[DurableRun] = Functions(self.factory, DurableRun, DurableStep, signals=DurableSignal)
        """The verbs of the synchronous form, to look at what either has left."""

    def function(self, name: str, body: Callable[..., Any], **options: Any) -> None:
        """Declare a function with a body for a synchronous run."""
        self._bodies.append((name, body, options))
        self.functions.function(name, **options)(body)
        if self.form == "async":
            self._async_functions(async_sessionmaker())  # refuses what cannot be declared

    def start(self, name: str, *given: Any, **options: Any) -> FunctionHandle[Any]:
        with self.factory.begin() as session:
            handle: FunctionHandle[Any] = self.functions.start(session, name, *given, **options)
            return handle

    def execute(self, handle: Any, **options: Any) -> Outcome:
        """Carry a run out in this process."""
        if self.form == "sync":
            return self.functions.execute(handle, **options)
        return self._async(lambda functions, _: functions.execute(handle, **options))

    def signal(self, handle: Any, name: str, payload: object) -> None:
        """Send a signal and commit."""
        with self.factory.begin() as session:
            assert self.functions.signal(session, handle, name, payload)

    def fork(self, handle: Any, **options: Any) -> FunctionHandle[Any]:
        """Fork in a transaction of its own."""
        if self.form == "sync":
            with self.factory.begin() as session:
                return self.functions.fork(session, handle, **options)

        async def forked(functions: AsyncFunctions[Any], factory: async_sessionmaker[AsyncSession]) -> Any:
            async with factory.begin() as session:
                return await functions.fork(session, handle, **options)

        return self._async(forked)

    def steps(self, handle: Any) -> dict[str, Any]:
        """The recorded results by step, in the order they were recorded."""
        return {receipt.step: receipt.result for receipt in self.functions.steps(handle)}

    def row(self, handle: Any) -> DurableRun:
        with Session(self.engine) as session:
            return session.get_one(DurableRun, getattr(handle, "id", handle))

    def close(self) -> None:
        self.engine.dispose()

    def _async_functions(self, factory: async_sessionmaker[Any]) -> AsyncFunctions[DurableRun]:
        functions: AsyncFunctions[DurableRun] = AsyncFunctions(factory, DurableRun, DurableStep, signals=DurableSignal)
        for name, body, options in self._bodies:
            functions.function(name, **options)(as_coroutine(body))
        return functions

    def _async(self, work: Callable[[AsyncFunctions[Any], async_sessionmaker[AsyncSession]], Any]) -> Any:
        async def main() -> Any:
            engine = create_async_engine(self._url)
            try:
                factory = async_sessionmaker(engine)
                return await work(self._async_functions(factory), factory)
            finally:
                await engine.dispose()

        return asyncio.run(main())


def as_coroutine(body: Callable[..., Any]) -> Callable[..., Any]:
    """A coroutine function whose run shows the synchronous face to ``body``."""
    if isinstance(body, functools.partial):
        leading, body = body.args, body.func
        return as_coroutine(lambda run, *given: body(*leading, run, *given))

    @functools.wraps(body)
    async def coroutine(run: AsyncFunctionRun, *given: Any) -> Any:
        return await greenlet_spawn(body, Facade(run, await_only), *given)

    return coroutine


@contextmanager
def versions(form: str, url: str, count: int = 2) -> Iterator[list[Version]]:
    """Several versions of one program."""
    made = [Version(form, url) for _ in range(count)]
    yield made
    for version in made:
        version.close()
