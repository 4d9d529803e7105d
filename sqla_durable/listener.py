"""A thread that listens for notifications, on a connection that is used for nothing else."""

from __future__ import annotations

import threading
from collections.abc import Collection, Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Engine

from sqla_durable.dispatch import OUTAGES, log, seconds
from sqla_durable.ground import Ground

_SLICE = 0.5
_SILENCE = timedelta(seconds=30)


class Listener(threading.Thread):
    """Listens on one channel until it is stopped, and again after whatever interrupts it.

    Nothing may depend on it but how soon somebody looks: a notification that is lost, or one too many, does no harm.

    :param ground: whose engine it connects like.
    :param channel: what it listens on.
    """

    def __init__(self, ground: Ground, channel: str) -> None:
        super().__init__(name="sqla_durable listening", daemon=True)
        self._ground = ground
        self._channel = channel
        self.stopped = threading.Event()

    def began(self) -> None:
        """Called when it has begun to listen: of what happened before it has not heard."""
        raise NotImplementedError

    def heard(self, payloads: Collection[str]) -> None:
        """Called with what it has heard."""
        raise NotImplementedError

    def interrupted(self) -> None:
        """Called when it listens no more, for now or for good."""

    def pooled(self) -> None:
        """Called where it gives up, as there is a pooler before the database, which passes no notifications on."""
        log.info("there is a pooler before %r, which passes no notifications on; polling", self._ground.engine)

    def goes_on(self) -> bool:
        """Whether it is to go on; asked twice a second."""
        return not self.stopped.is_set()

    def run(self) -> None:
        """Listen."""
        self._ground.sessions.run_in_thread(self._listen)

    def _listen(self) -> None:
        engine = self._ground.own_engine()
        failures = 0
        while self.goes_on():
            try:
                with self._connected(engine) as connection:
                    if is_pooled(connection):
                        self.pooled()
                        break
                    connection.exec_driver_sql(f"LISTEN {self._channel}")
                    failures = 0
                    self.began()
                    self._hear(connection)
            except Exception as error:  # noqa: BLE001 - a hook of the user's may raise anything
                self.interrupted()
                failures += 1
                log.debug("listening is interrupted: %r", error)
                self.stopped.wait(seconds(OUTAGES, failures))
        self.interrupted()
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
        while self.goes_on():
            heard = self._ground.sessions.notified(driver, _SLICE)
            if heard:
                self.heard(heard)
            silent = 0.0 if heard else silent + _SLICE
            if silent >= _SILENCE.total_seconds():
                # A connection that broke without a word is as silent as an idle one.
                connection.exec_driver_sql("SELECT 1")
                silent = 0.0


def is_pooled(connection: Connection) -> bool:
    """Whether the backend is another one than the driver was told: a pooler makes that number up."""
    driver: Any = connection.connection.driver_connection
    return bool(connection.exec_driver_sql("SELECT pg_backend_pid()").scalar() != driver.info.backend_pid)
