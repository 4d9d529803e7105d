"""Heartbeats: a thread that renews the leases of the runs being carried out, on a connection of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from sqla_durable.exc import DurableError
from sqla_durable.holder import Holder
from sqla_durable.store import Store

_log = logging.getLogger("sqla_durable")


class Heartbeat:
    """Renews leases every third of their length, for as long as any run is being carried out.

    A thread, in the asyncio form too: user code that blocks the event loop must not starve it. Its connection comes
    from a pool of its own, since steps may hold every connection of the user's.

    :param store: whose runs these are.
    """

    def __init__(self, store: Store[Any]) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._watched: dict[Holder[Any], Callable[[], None] | None] = {}
        self._thread: threading.Thread | None = None

    @contextmanager
    def keeping(self, holder: Holder[Any], on_lost: Callable[[], None] | None = None) -> Generator[None, None, None]:
        """Keep the lease of ``holder`` alive, and those of the other runs claimed in the same batch.

        :param on_lost: called in the heartbeat's thread, once, when the holder may not go on.
        """
        batch = [other for other in holder.batch if not other.ended]
        with self._lock:
            added = [other for other in batch if other not in self._watched]
            self._watched.update(dict.fromkeys(added))
            self._watched[holder] = on_lost
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="sqla_durable heartbeat", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                for other in [holder, *added]:
                    self._watched.pop(other, None)

    def _run(self) -> None:
        self._store.sessions.run_in_thread(self._beat_until_idle)

    def _beat_until_idle(self) -> None:
        engine = self._own_engine()
        try:
            while True:
                self._wake.wait(self._store.runs.lifecycle.heartbeat.total_seconds())
                with self._lock:
                    watched = list(self._watched.items())
                    if not watched:
                        self._thread = None
                        return
                self._beat(engine, watched)
        finally:
            engine.dispose()

    def _beat(self, engine: Engine, watched: Iterable[tuple[Holder[Any], Callable[[], None] | None]]) -> None:
        try:
            with engine.connect() as connection:
                for holder, on_lost in watched:
                    if not holder.ended and holder.beat(connection) and on_lost is not None:
                        on_lost()
        except (SQLAlchemyError, DurableError) as error:
            _log.warning("a heartbeat failed and will be tried again: %s", error)

    def _own_engine(self) -> Engine:
        engine = self._store.engine
        own = Engine(engine.pool.recreate(), engine.dialect, engine.url)
        return own.execution_options(isolation_level="AUTOCOMMIT")
