"""Hearing of runs that have landed: one connection for each engine and process, shared by all who wait."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager, suppress
from os import getpid
from typing import Final
from weakref import WeakSet

from sqlalchemy import Pool

from sqla_durable.ground import Gate, Ground, Sessions
from sqla_durable.listener import Listener
from sqla_durable.wake import LANDED

_LINGER: Final = 10.0
# By the process, too: after a fork the threads of the parent are not there, and their connections are not the child's.
_hearings: Final[dict[tuple[int, int], Hearing]] = {}
_pooled: Final[WeakSet[Pool]] = WeakSet()


class Waiter:
    """A thread, or task, that waits to be woken.

    :param sessions: of its form.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._lock = threading.Lock()
        self._gate: Gate | None = None
        self._woken = False
        self.hearing: Hearing | None = None

    @property
    def hears(self) -> bool:
        """Whether it would be woken by a notification that was sent now."""
        return self.hearing is not None and self.hearing.listens

    def wait(self, seconds: float) -> None:
        """Wait until woken, or for so long; not at all where it was woken since the last time."""
        with self._lock:
            gate = self._gate = None if self._woken else self._sessions.gate()
        try:
            if gate is not None:
                gate.wait(seconds)
        finally:
            with self._lock:
                self._gate, self._woken = None, False

    def wake(self) -> None:
        """Wake it up; callable from any thread."""
        with self._lock:
            gate, self._woken = None if self._woken else self._gate, True
            if gate is not None:
                with suppress(RuntimeError):  # its loop was closed
                    gate.open()


class Hearing(Listener):
    """Wakes waiters up: those of a run when that has landed, and all when it begins to listen.

    Started by the first waiter, it ends a while after the last one has gone.
    """

    def __init__(self, ground: Ground) -> None:
        super().__init__(ground, LANDED)
        self._pool = ground.engine.pool
        self._lock = threading.Lock()
        self._waiters: defaultdict[str, set[Waiter]] = defaultdict(set)
        self._left_at = time.monotonic()
        self._ended = False
        self.listens = False

    def join_in(self, name: str, waiter: Waiter) -> bool:
        """Have a waiter woken when the run of that name lands; False where this has ended."""
        with self._lock:
            if self._ended:
                return False
            if self.ident is None:
                self.start()
            self._waiters[name].add(waiter)
            waiter.hearing = self
        return True

    def leave(self, name: str, waiter: Waiter) -> None:
        """Have it woken no more."""
        with self._lock:
            self._waiters[name].discard(waiter)
            if not self._waiters[name]:
                del self._waiters[name]
            self._left_at = time.monotonic()

    def began(self) -> None:
        """Have all look at once: what has landed before was not heard."""
        self.listens = True
        with self._lock:
            every = list(self._waiters)
        self.heard(every)

    def heard(self, payloads: Collection[str]) -> None:
        """Wake those up who wait for these runs."""
        with self._lock:
            woken = [waiter for name in set(payloads) if name in self._waiters for waiter in self._waiters[name]]
        _wake(woken)

    def interrupted(self) -> None:
        """Have them look by themselves meanwhile."""
        self.listens = False

    def pooled(self) -> None:
        """Have nobody try that again with this engine."""
        super().pooled()
        _pooled.add(self._pool)
        with self._lock:
            self._end()

    def goes_on(self) -> bool:
        """Whether anybody waits, or did a moment ago."""
        with self._lock:
            if not self._waiters and time.monotonic() - self._left_at > _LINGER:
                self._end()
            return not self._ended

    def _end(self) -> None:
        self._ended = True
        _hearings.pop((getpid(), id(self._pool)), None)


@contextmanager
def hearing(ground: Ground, name: str) -> Generator[Waiter, None, None]:
    """Have a waiter woken when a run lands, as far as there is anybody to tell of it.

    :param ground: whose engine it waits with.
    :param name: the run's primary key as text.
    """
    waiter = Waiter(ground.sessions)
    pool = ground.engine.pool
    if pool in _pooled:
        yield waiter
        return
    shared = _join(ground, pool, name, waiter)
    try:
        yield waiter
    finally:
        shared.leave(name, waiter)


def _join(ground: Ground, pool: Pool, name: str, waiter: Waiter) -> Hearing:
    while True:
        shared = _hearings.setdefault((getpid(), id(pool)), Hearing(ground))
        if shared.join_in(name, waiter):
            return shared


def _wake(waiters: Iterable[Waiter]) -> None:
    for waiter in waiters:
        waiter.wake()
