"""Functions in both forms, to be waited for, listed and purged."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar
from uuid import UUID

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session, sessionmaker

from sqla_durable import FunctionHandle, FunctionMixin, FunctionRun, Functions, ReceiptMixin, Retry, Worker
from sqla_durable.asyncio import AsyncFunctions
from sqla_durable.functions import function_lifecycle
from tests.support import Background

ONCE = function_lifecycle(lease=timedelta(seconds=30), retry=Retry(max_attempts=1))


class Base(DeclarativeBase):
    pass


class Job(FunctionMixin, Base):
    __tablename__ = "job"
    __lifecycle__: ClassVar[Any] = ONCE


class JobStep(ReceiptMixin[Job], Base):
    __tablename__ = "job_step"


class Refused(Exception):
    pass


def double(run: FunctionRun[Any], given: int) -> int:
    return given * 2


def refuse(run: FunctionRun[Any], given: int) -> int:
    raise Refused(f"no {given}")


def tables(engine: Engine) -> None:
    Base.metadata.create_all(engine)


def functions_on(engine: Engine, **kw: Any) -> Functions[Job]:
    """Functions that double, and that refuse."""
    made = Functions(sessionmaker(engine, **kw), Job, JobStep)
    made.function("double")(double)
    made.function("refuse")(refuse)
    return made


def started(functions: Functions[Job], function: str = "double", given: int = 1, **options: Any) -> FunctionHandle:
    with functions.session_factory.begin() as session:
        return functions.start(session, function, given, **options)


def cancel(functions: Functions[Job], handle: FunctionHandle) -> bool:
    with functions.session_factory.begin() as session:
        return functions.request_cancel(session, handle)


class Observer:
    """One who waits, with an engine of its own and in one of two forms."""

    def __init__(self, form: str, engine: Engine, **options: Any) -> None:
        self._async = form == "async"
        self._url, self._options = engine.url, options

    def __call__(self, verb: str, *arguments: Any, **options: Any) -> Any:
        """Call a verb of Functions."""
        if self._async:
            return asyncio.run(self._await(verb, arguments, options))
        engine = create_engine(self._url, **self._options)
        try:
            return getattr(functions_on(engine), verb)(*arguments, **options)
        finally:
            engine.dispose()

    async def _await(self, verb: str, arguments: Any, options: Any) -> Any:
        engine = create_async_engine(self._url, **self._options)
        functions = AsyncFunctions(async_sessionmaker(engine), Job, JobStep)

        @functions.function("double")
        async def double(run: Any, given: int) -> int:
            return given * 2

        @functions.function("refuse")
        async def refuse(run: Any, given: int) -> int:
            raise Refused(f"no {given}")

        try:
            return await getattr(functions, verb)(*arguments, **options)
        finally:
            await engine.dispose()


@contextmanager
def at_work(engine: Engine, **options: Any) -> Iterator[None]:
    """Have a worker carry functions out meanwhile."""
    worker = Worker(*functions_on(engine).works(), poll=timedelta(seconds=0.05), **options)
    background = Background(worker.run)
    try:
        yield
    finally:
        worker.stop()
        background.result()


def awaited(engine: Engine, ident: UUID) -> Callable[[], bool]:
    """Whether somebody has marked a run as one that is waited for."""

    def look() -> bool:
        with engine.connect() as connection:
            return bool(connection.scalar(text("SELECT awaited FROM job WHERE id = :id"), {"id": ident}))

    return look


LISTENING = "FROM pg_stat_activity WHERE datname = current_database() AND query = 'LISTEN sqla_durable_landed'"


def listeners(engine: Engine) -> int:
    """How many connections listen for landings."""
    with engine.connect() as connection:
        return connection.scalar(text(f"SELECT count(*) {LISTENING}")) or 0


def cut_listeners(engine: Engine) -> int:
    """Cut these connections."""
    with engine.connect() as connection:
        return len(connection.execute(text(f"SELECT pg_terminate_backend(pid) {LISTENING}")).all())


def in_session(engine: Engine) -> Session:
    return Session(engine)
