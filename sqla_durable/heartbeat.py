"""Heartbeats: a thread that renews the leases of the runs being carried out, on a connection of its own."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

from sqlalchemy import Engine

from sqla_durable.exc import DatabaseUnavailable
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
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._carried_out: dict[Holder[Any], Callable[[], None] | None] = {}
        self._thread: threading.Thread | None = None

    def keep(self, holder: Holder[Any], on_lost: Callable[[], None] | None = None) -> None:
        """Keep the lease of ``holder`` alive from now on, and those of the other runs claimed in the same batch.

        :param on_lost: called in the heartbeat's thread, once, when the holder may not go on.
        """
        if self._pid != os.getpid():
            # In a forked child: the parent's runs are the parent's to keep alive, and its lock may be held for ever.
            self._reset()
        with self._lock:
            self._carried_out[holder] = on_lost
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="sqla_durable heartbeat", daemon=True)
                self._thread.start()

    def leave(self, holder: Holder[Any]) -> None:
        """Keep it alive no longer."""
        with self._lock:
            self._carried_out.pop(holder, None)

    def _run(self) -> None:
        self._store.sessions.run_in_thread(self._beat_until_idle)

    def _beat_until_idle(self) -> None:
        engine = self._store.own_engine()
        try:
            while True:
                # Not time.sleep(), which over asyncio would be within a greenlet: a thread that wakes up in there while
                # the interpreter is shut down has the process end by SIGSEGV.
                self._store.sessions.sleep(self._store.runs.lifecycle.heartbeat.total_seconds())
                with self._lock:
                    carried_out = dict(self._carried_out)
                    if not carried_out:
                        self._thread = None
                        return
                # A run that was left to its lease is not waiting to be carried out any more.
                batches = {other for holder in carried_out for other in holder.batch if not other.left}
                waiting = batches - set(carried_out)
                self._beat(engine, {**dict.fromkeys(waiting), **carried_out})
        finally:
            engine.dispose()

    def _beat(self, engine: Engine, watched: Mapping[Holder[Any], Callable[[], None] | None]) -> None:
        for holder, on_lost in watched.items():
            try:
                with self._store.autocommit(engine) as connection:
                    lost = not holder.ended and holder.beat(connection)
                if lost and on_lost is not None:
                    on_lost()
            except DatabaseUnavailable as error:
                _log.warning("heartbeats wait for the database: %s", error)
                engine.dispose()
                return
            except Exception:  # noqa: BLE001 - a hook or trigger of the user's may raise anything; the others go on
                _log.warning("the heartbeat of %r failed and will be tried again", holder.lease, exc_info=True)
