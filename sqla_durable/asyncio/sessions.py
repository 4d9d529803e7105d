"""Sessions for a store from an asyncio sessionmaker, and how the asyncio form waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar, cast

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only, greenlet_spawn

from sqla_durable.asyncio.tasks import called, result_of
from sqla_durable.exc import ConfigurationError
from sqla_durable.ground import Gate
from sqla_durable.session import StepSession, step_session_class

ResultT = TypeVar("ResultT")
A = TypeVar("A")


AnyAsyncSession = AsyncSession | async_scoped_session[Any]
"""What a caller may give: a session, or the proxy that stands for the one of this task."""


def unproxied(session: AnyAsyncSession) -> AsyncSession:
    """Return the session behind an :class:`~sqlalchemy.ext.asyncio.async_scoped_session`."""
    return cast(AsyncSession, session()) if isinstance(session, async_scoped_session) else session


class AsyncSessions:
    """Sessions for :class:`.Store` from an asyncio sessionmaker."""

    is_async = True

    def __init__(self, factory: async_sessionmaker[Any]) -> None:
        if not isinstance(cast(object, factory), async_sessionmaker):
            raise ConfigurationError(f"{factory!r} is not an async_sessionmaker; pass async_sessionmaker(engine).")
        self._factory = factory
        sync_class = factory.kw.get("sync_session_class") or factory.class_.sync_session_class
        self._step_class = step_session_class(sync_class)

    def plain(self, bind: Engine | None = None) -> Session:
        other = {} if bind is None else {"bind": AsyncEngine(bind), "binds": None}
        session: AsyncSession = self._factory(**other)
        return session.sync_session

    def step(self) -> StepSession:
        facade: AsyncSession = self._factory(sync_session_class=self._step_class)
        session = cast(StepSession, facade.sync_session)
        return session.as_step(facade)

    def sleep(self, seconds: float) -> None:
        await_only(asyncio.sleep(seconds))

    def gate(self) -> Gate:
        return _Gate()

    def notified(self, driver: Any, seconds: float) -> list[str]:
        async def heard() -> list[str]:
            notifications = driver.notifies(timeout=seconds, stop_after=1)
            return [notification.payload async for notification in notifications]

        return await_only(heard())

    def concurrently(
        self, calls: Sequence[Callable[[], ResultT]]
    ) -> Generator[tuple[int, Callable[[], ResultT]], None, None]:
        tasks = {asyncio.create_task(called(call)): at for at, call in enumerate(calls)}
        waiting = set(tasks)
        try:
            while waiting:
                ended, waiting = await_only(asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED))
                for task in sorted(ended, key=tasks.__getitem__):
                    yield tasks[task], partial(result_of, task)
        finally:
            for task in waiting:
                task.cancel()
            if waiting:
                await_only(asyncio.wait(waiting))

    def run_in_thread(self, work: Callable[[], None]) -> None:
        # Not the default loop: psycopg cannot wait on a proactor, which that is on Windows.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(greenlet_spawn(work))

    def block(self, wait: Callable[[], object]) -> None:
        # Not within the greenlet: a daemon thread that wakes up in there while the interpreter is shut down, and is
        # ended for it, has the process end by SIGSEGV.
        async def blocked() -> None:
            wait()

        await_only(blocked())


class _Gate:
    """A future of the loop that the waiting task runs in."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = self._loop.create_future()

    def wait(self, seconds: float | None = None) -> None:
        await_only(self._opened if seconds is None else self._within(seconds))

    async def _within(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._opened

    def open(self) -> None:
        self._loop.call_soon_threadsafe(self._open)

    def _open(self) -> None:
        if not self._opened.done():
            self._opened.set_result(None)
