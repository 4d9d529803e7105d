"""Listening for notifications that something is due, on a connection that is used for nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Engine

from sqla_durable.dispatch import OUTAGES, AnyWork, log, seconds
from sqla_durable.ground import Ground
from sqla_durable.wake import CHANNEL

_SLICE = 0.5
_CLOSING = 2.0
_SILENCE = timedelta(seconds=30)


class Listening:
    """Listens, in a thread for each engine, until it is stopped.

    Nothing depends on it but how soon a worker looks: a notification that is lost, or one too many, does no harm.

    :param works: what to listen for.
    :param due: called, in those threads, when something may be due.
    """

    def __init__(self, works: Iterable[AnyWork], due: Callable[[], None]) -> None:
        grounds: dict[int, tuple[Ground, set[str]]] = {}
        for work in works:
            store = work.verbs.store
            _, names = grounds.setdefault(id(store.engine.pool), (store, set()))
            names.add(store.runs.table.name)
        self._listeners = [_Listener(ground, names, due) for ground, names in grounds.values()]
        for listener in self._listeners:
            listener.start()

    def stop(self) -> None:
        """Stop, and wait for a moment for the connections to be closed."""
        for listener in self._listeners:
            listener.stopped.set()
        end = time.monotonic() + _CLOSING
        for listener in self._listeners:
            listener.join(max(0.0, end - time.monotonic()))


class _Listener(threading.Thread):
    def __init__(self, ground: Ground, names: set[str], due: Callable[[], None]) -> None:
        super().__init__(name="sqla_durable listening", daemon=True)
        self._ground = ground
        self._names = names
        self._due = due
        self.stopped = threading.Event()

    def run(self) -> None:
        self._ground.sessions.run_in_thread(self._listen)

    def _listen(self) -> None:
        engine = self._ground.own_engine()
        failures = 0
        while not self.stopped.is_set():
            try:
                with self._connected(engine) as connection:
                    if _is_pooled(connection):
                        log.info("there is a pooler before %r, which passes no notifications on; polling", engine)
                        break
                    connection.exec_driver_sql(f"LISTEN {CHANNEL}")
                    failures = 0
                    self._due()  # what was started before, without a notification that anybody heard
                    self._hear(connection)
            except Exception as error:  # noqa: BLE001 - a hook of the user's may raise anything
                failures += 1
                log.debug("listening is interrupted: %r", error)
                self.stopped.wait(seconds(OUTAGES, failures))
        engine.dispose()

    @contextmanager
    def _connected(self, engine: Engine) -> Generator[Connection, None, None]:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            try:
                yield connection
            finally:
                connection.invalidate()  # it listens, or is broken: of no use to a pool

    def _hear(self, connection: Connection) -> None:
        driver: Any = connection.connection.driver_connection
        silent = 0.0
        while not self.stopped.is_set():
            heard = self._ground.sessions.notified(driver, _SLICE)
            if self._names & set(heard):
                self._due()
            silent = 0.0 if heard else silent + _SLICE
            if silent >= _SILENCE.total_seconds():
                # A connection that broke without a word is as silent as an idle one.
                connection.exec_driver_sql("SELECT 1")
                silent = 0.0


def _is_pooled(connection: Connection) -> bool:
    """Whether the backend is another one than the driver was told: a pooler makes that number up."""
    driver: Any = connection.connection.driver_connection
    return bool(connection.exec_driver_sql("SELECT pg_backend_pid()").scalar() != driver.info.backend_pid)
