"""Sessions for a store from a sessionmaker, and how the synchronous form waits."""

from __future__ import annotations

import contextvars
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Final, TypeVar, cast

from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable.exc import ConfigurationError
from sqla_durable.ground import Gate
from sqla_durable.session import StepSession, step_session_class

ResultT = TypeVar("ResultT")
A = TypeVar("A")
_AT_ONCE: Final = 32


class SyncSessions:
    """Sessions for :class:`.Store` from a sessionmaker."""

    is_async = False

    def __init__(self, factory: sessionmaker[Any]) -> None:
        if not isinstance(cast(object, factory), sessionmaker):
            raise ConfigurationError(f"{factory!r} is not a sessionmaker; pass sessionmaker(engine).")
        self._factory = factory
        self._step_class = step_session_class(factory.class_)

    def plain(self, bind: Engine | None = None) -> Session:
        session: Session = self._factory() if bind is None else self._factory(bind=bind, binds=None)
        return session

    def step(self) -> StepSession:
        session = self._step_class(**self._factory.kw)
        return session.as_step(session)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def gate(self) -> Gate:
        return _Gate()

    def notified(self, driver: Any, seconds: float) -> list[str]:
        return [notification.payload for notification in driver.notifies(timeout=seconds, stop_after=1)]

    def concurrently(
        self, calls: Sequence[Callable[[], ResultT]]
    ) -> Generator[tuple[int, Callable[[], ResultT]], None, None]:
        ended: SimpleQueue[tuple[int, Future[ResultT]]] = SimpleQueue()
        left = deque(enumerate(calls))

        def make() -> None:
            while left:
                try:
                    position, call = left.popleft()
                except IndexError:
                    return
                future: Future[ResultT] = Future()
                try:
                    future.set_result(context.copy().run(call))
                except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                    future.set_exception(error)
                ended.put((position, future))

        context = contextvars.copy_context()
        try:
            for _ in range(min(len(calls), _AT_ONCE)):
                # Daemons: an interrupted process does not wait for calls that nobody waits for any more.
                threading.Thread(target=make, name="sqla_durable gather", daemon=True).start()
            for _ in calls:
                position, future = ended.get()
                yield position, future.result
        finally:
            left.clear()

    def run_in_thread(self, work: Callable[[], None]) -> None:
        work()

    def block(self, wait: Callable[[], object]) -> None:
        wait()


class _Gate:
    """A lock that one thread acquires and another releases, which is the fastest there is for this."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self, seconds: float | None = None) -> None:
        self._lock.acquire(timeout=-1 if seconds is None else seconds)

    def open(self) -> None:
        self._lock.release()
