"""Listening for notifications that something is due."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from sqla_durable.dispatch import AnyWork
from sqla_durable.ground import Ground
from sqla_durable.listener import Listener
from sqla_durable.wake import CHANNEL

_CLOSING = 2.0


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


class _Listener(Listener):
    def __init__(self, ground: Ground, names: set[str], due: Callable[[], None]) -> None:
        super().__init__(ground, CHANNEL)
        self._names = names
        self._due = due

    def began(self) -> None:
        self._due()  # what was started before, without a notification that anybody heard

    def heard(self, payloads: Collection[str]) -> None:
        if self._names.intersection(payloads):
            self._due()
