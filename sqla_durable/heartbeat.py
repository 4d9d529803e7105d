"""Heartbeats: a thread that renews the leases of the runs being carried out, on a connection of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine

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
        self._carried_out: dict[Holder[Any], Callable[[], None] | None] = {}
        self._thread: threading.Thread | None = None

    @contextmanager
    def keeping(self, holder: Holder[Any], on_lost: Callable[[], None] | None = None) -> Generator[None, None, None]:
        """Keep the lease of ``holder`` alive, and those of the other runs claimed in the same batch.

        :param on_lost: called in the heartbeat's thread, once, when the holder may not go on.
        """
        with self._lock:
            self._carried_out[holder] = on_lost
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="sqla_durable heartbeat", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                self._carried_out.pop(holder, None)

    def _run(self) -> None:
        self._store.sessions.run_in_thread(self._beat_until_idle)

    def _beat_until_idle(self) -> None:
        engine = self._own_engine()
        try:
            while True:
                time.sleep(self._store.runs.lifecycle.heartbeat.total_seconds())
                with self._lock:
                    carried_out = dict(self._carried_out)
                    if not carried_out:
                        self._thread = None
                        return
                waiting = {other for holder in carried_out for other in holder.batch} - set(carried_out)
                self._beat(engine, {**dict.fromkeys(waiting), **carried_out})
        finally:
            engine.dispose()

    def _beat(self, engine: Engine, watched: Mapping[Holder[Any], Callable[[], None] | None]) -> None:
        try:
            with engine.connect() as connection:
                for holder, on_lost in watched.items():
                    if not holder.ended and holder.beat(connection) and on_lost is not None:
                        on_lost()
        except Exception:  # noqa: BLE001 - a hook of the user's may raise anything, and the next beat may succeed
            _log.warning("a heartbeat failed and will be tried again", exc_info=True)
            engine.dispose()

    def _own_engine(self) -> Engine:
        engine = self._store.engine
        own = Engine(engine.pool.recreate(), engine.dialect, engine.url)
        options = {**engine.get_execution_options(), "isolation_level": "AUTOCOMMIT"}
        return own.execution_options(**options)
