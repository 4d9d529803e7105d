"""The worker: a process that claims what is due and carries it out, until it is told to stop."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from sqla_durable.dispatch import Serving, Work, log
from sqla_durable.execution import Ending
from sqla_durable.listening import Listening
from sqla_durable.policy import clamped
from sqla_durable.room import Wake
from sqla_durable.threads import Threads

SIGNALS = signal.SIGTERM, signal.SIGINT


class Worker(Serving[Work]):
    """Carries out due runs of any number of classes, several at a time, in threads.

    ::

        worker = Worker(plans.handled_by(carry_out), mails.handled_by(deliver), concurrency=10)
        worker.run()

    A run that fails stops no other. The worker outlives the database: where that restarts, ends its connections or
    takes no writes, it goes on as soon as it can. It may be killed at any instant: its runs are taken over when their
    leases have lapsed.

    :param works: what :meth:`.Runs.handled_by` returns, or objects that have ``works()``, such as :class:`.Functions`;
     they take turns to be claimed first.
    :param concurrency: how many runs are carried out at a time. Each step takes a connection from its engine's pool.
    :param poll: how long to wait until the next look where nothing was due; each time a quarter more or less.
    :param listen: whether to be woken by notifications, on a connection of its own for each engine. They only make
     things faster. Behind a connection pooler, which would not pass them on, it only polls.
    :param grace: for how long a worker that was told to stop lets runs under way finish.
    :raises ConfigurationError: for something that is not a work, or a value out of its range.
    """

    _kinds = (Work,)

    def run(self) -> None:
        """Work until told to stop, then drain.

        In the main thread it is told by SIGTERM and SIGINT: it claims no more, lets runs under way finish within the
        grace time, and releases what is left, so that the next worker takes it at once. A second signal does what it
        would do without a worker: it ends the process, or raises ``KeyboardInterrupt``.

        A thread cannot be ended from outside: the handler of a run that was released goes on until the process ends,
        but can write nothing any more. Where a run has landed while its handler is blocked, as timed out for one, the
        slot is given to another run meanwhile.

        :raises UsageError: where it is running already.
        :raises SchemaMismatch: where the database lacks a table or column. It is asked before the first claim; where
         one vanishes later, what is under way ends first, and the run that met it goes back to ready.
        """
        with Threads(self._concurrency) as slots, self._serving() as room, signals(self):
            self._log_start()
            listening = Listening(self._works if self._listen else [], lambda: room.wake(Wake.DUE))
            try:
                self._dispatcher_of(self._works, slots, room).run()
            finally:
                listening.stop()
            log.info("stopped")

    def run_due(self, budget: timedelta) -> Counter[Ending]:
        """Carry out what is due, until nothing is or the time is up: for places where no process lives on.

        Claiming ends with the budget; runs that are still under way then are released, for the next call to take.

        :param budget: how long this may take; leave it some seconds shorter than the platform's own limit.
        :return: how many runs ended in which way.
        """
        self._check(budget=budget)
        until = time.monotonic() + clamped(budget).total_seconds()
        with Threads(self._concurrency) as slots, self._serving(until) as room:
            self._dispatcher_of(self._works, slots, room).run()
            return Counter(room.endings)


@contextmanager
def signals(worker: Serving[Any]) -> Generator[None, None, None]:
    """Have the worker drain on the first signal, and whatever was there before answer the next one.

    With :func:`signal.signal` in the asyncio form too: what a loop is told of waits for a handler that blocks it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[signal.Signals, Any] = {}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def drain(*_: object) -> None:
        restore()
        worker.stop()

    for number in SIGNALS:
        before[number] = signal.signal(number, drain)
    try:
        yield
    finally:
        restore()
