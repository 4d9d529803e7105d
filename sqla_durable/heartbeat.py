"""Heartbeats: a thread that renews the leases of the runs being carried out, on a connection of its own."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from sqlalchemy import Engine

from sqla_durable.exc import DatabaseUnavailable, SchemaMismatch
from sqla_durable.holder import Holder
from sqla_durable.store import Store

_log = logging.getLogger("sqla_durable")
_OnLost = Callable[[], None] | None


class Heartbeat:
    """Renews leases every third of their length, for as long as any run is being carried out.

    It also lands the runs that are past their deadline, where their handlers do not. Its own clock says only when to
    ask the database about that.

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
        self._carried_out: dict[Holder[Any], _OnLost] = {}
        self._thread: threading.Thread | None = None
        self._changed = threading.Event()

    def keep(self, holder: Holder[Any], on_lost: _OnLost = None) -> None:
        """Keep the lease of ``holder`` alive from now on, and those of the other runs claimed in the same batch.

        :param on_lost: called in the heartbeat's thread when the holder may not go on; where the run is past its
         deadline and could not be landed at once, called again when it has been.
        """
        if self._pid != os.getpid():
            # In a forked child: the parent's runs are the parent's to keep alive, and its lock may be held for ever.
            self._reset()
        with self._lock:
            self._carried_out[holder] = on_lost
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="sqla_durable heartbeat", daemon=True)
                self._thread.start()
        if any(other.ask_at is not None for other in holder.batch):
            self._changed.set()

    def leave(self, holder: Holder[Any]) -> None:
        """Keep it alive no longer."""
        with self._lock:
            self._carried_out.pop(holder, None)

    def _run(self) -> None:
        self._store.sessions.run_in_thread(self._beat_until_idle)

    def _beat_until_idle(self) -> None:
        engine = self._store.own_engine()
        interval = self._store.runs.lifecycle.heartbeat.total_seconds()
        next_beat = time.monotonic() + interval
        try:
            while True:
                self._sleep(next_beat)
                now = time.monotonic()
                with self._lock:
                    carried_out = dict(self._carried_out)
                    if not carried_out and now >= next_beat:
                        self._thread = None
                        return
                watched = _with_batches(carried_out)
                if now < next_beat:
                    watched = {holder: told for holder, told in watched.items() if _asks(holder) <= now}
                self._beat(engine, watched)
                if now >= next_beat:
                    next_beat = time.monotonic() + interval
        finally:
            engine.dispose()

    def _sleep(self, next_beat: float) -> None:
        """Sleep until the next beat, the first deadline before it, or a run that may have an earlier one."""
        self._changed.clear()
        with self._lock:
            watched = _with_batches(self._carried_out)
        wake_at = min([next_beat, *(_asks(holder) for holder in watched)])
        self._store.sessions.block(partial(self._changed.wait, max(0.0, wake_at - time.monotonic())))

    def _beat(self, engine: Engine, watched: Mapping[Holder[Any], _OnLost]) -> None:
        for holder in watched:
            holder.ask_at = None  # where the database cannot be asked now, the next beat asks
        for holder, on_lost in watched.items():
            try:
                with self._store.autocommit(engine) as connection:
                    lost = not holder.ended and holder.beat(connection)
                    lost = holder.overtake(connection) or lost
                if lost and on_lost is not None:
                    on_lost()
            except DatabaseUnavailable as error:
                _log.warning("heartbeats wait for the database: %s", error)
                engine.dispose()
                return
            except SchemaMismatch as error:
                _log.error("heartbeats fail: %s", error)
                return
            except Exception:  # noqa: BLE001 - a hook or trigger of the user's may raise anything; the others go on
                _log.warning("the heartbeat of %r failed and will be tried again", holder.lease, exc_info=True)


def _with_batches(carried_out: Mapping[Holder[Any], _OnLost]) -> dict[Holder[Any], _OnLost]:
    """The runs being carried out, after those claimed with them that wait for their turn."""
    # A run that was left to its lease is not waiting to be carried out any more.
    batches = {other for holder in carried_out for other in holder.batch if not other.left}
    return {**dict.fromkeys(batches - set(carried_out)), **carried_out}


def _asks(holder: Holder[Any]) -> float:
    return math.inf if holder.ended or holder.ask_at is None else holder.ask_at
