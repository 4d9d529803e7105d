"""The worker: a process that claims what is due and carries it out, until it is told to stop."""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, Self

from sqla_durable.dispatch import AnyWork, Ended, Serving, Wake, Work, log, report
from sqla_durable.exc import RetryableError
from sqla_durable.execution import Ending, let_go
from sqla_durable.holder import Holder
from sqla_durable.listening import Listening

SIGNALS = signal.SIGTERM, signal.SIGINT
RELEASING = 5.0


class Worker(Serving[Work]):
    """Carries out due runs of any number of classes, several at a time, in threads.

    ::

        worker = Worker(plans.handled_by(carry_out), mails.handled_by(deliver), concurrency=10)
        worker.run()

    A run that fails stops no other. The worker outlives the database: where that restarts, ends its connections or
    takes no writes, it goes on as soon as it can. It may be killed at any instant: its runs are taken over when their
    leases have lapsed.

    :param works: what :meth:`.Runs.handled_by` returns; they take turns to be claimed first.
    :param concurrency: how many runs are carried out at a time. Each step takes a connection from its engine's pool.
    :param poll: how long to wait until the next look where nothing was due; each time a quarter more or less.
    :param listen: whether to be woken by notifications, on a connection of its own for each engine. They only make
     things faster. Behind a connection pooler, which would not pass them on, it only polls.
    :param grace: for how long a worker that was told to stop lets runs under way finish.
    :raises ConfigurationError: for something that is not a work, or a value out of its range.
    """

    _kind = Work

    def run(self) -> None:
        """Work until told to stop, then drain.

        In the main thread it is told by SIGTERM and SIGINT: it claims no more, lets runs under way finish within the
        grace time, and releases what is left, so that the next worker takes it at once. A second signal does what it
        would do without a worker: it ends the process, or raises ``KeyboardInterrupt``.

        A thread cannot be ended from outside: the handler of a run that was released goes on until the process ends,
        but can write nothing any more.

        :raises UsageError: where it is running already.
        """
        with _Threads(self._concurrency) as slots, self._serving(slots) as dispatcher, signals(self):
            self._log_start()
            listening = Listening(self._works if self._listen else [], lambda: slots.wake(Wake.DUE))
            try:
                dispatcher.run()
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
        with _Threads(self._concurrency) as slots, self._serving(slots) as dispatcher:
            dispatcher.run(until=time.monotonic() + budget.total_seconds())
            return Counter(dispatcher.endings)


class _Threads:
    """Daemon threads that are started as they are needed; a thread pool would have the process wait for each."""

    claims: ClassVar[bool] = True

    def __init__(self, size: int) -> None:
        self._size = size
        self._started = 0
        self._claimed: deque[tuple[AnyWork, Holder[Any], Ended]] = deque()
        self._turns: SimpleQueue[bool] = SimpleQueue()
        # A queue, as it may be put into by a signal handler that interrupts the dispatcher; an Event may not.
        self._wakes: SimpleQueue[Wake] = SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for _each in range(self._started):
            self._turns.put(False)  # noqa: FBT003 - no turn, but the end

    def start(self, work: AnyWork, holder: Holder[Any], ended: Ended) -> None:
        self._claimed.append((work, holder, ended))
        if self._started < self._size:
            self._started += 1
            threading.Thread(target=self._take_turns, name=f"sqla_durable slot {self._started}", daemon=True).start()
        self._call_up()

    def _call_up(self) -> None:
        """Call up one thread, which calls up the next before it carries anything out.

        Called up all at once, they would contend for the interpreter, though one alone may be done with short runs
        before the next has woken up.
        """
        if self._turns.empty():
            self._turns.put(True)  # noqa: FBT003 - a turn

    def wait(self, seconds: float | None) -> Wake | None:
        woken: list[Wake] = []
        with suppress(Empty):
            woken.append(self._wakes.get(timeout=seconds))
            while True:
                woken.append(self._wakes.get_nowait())
        return Wake.DUE if Wake.DUE in woken else next(iter(woken), None)

    def wake(self, why: Wake) -> None:
        self._wakes.put(why)

    def release(self, holders: Iterable[Holder[Any]]) -> None:
        # In threads of their own, as a step that has the row locked makes its release wait.
        threads = [threading.Thread(target=let_go, args=(holder,), daemon=True) for holder in holders]
        end = time.monotonic() + RELEASING
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _take_turns(self) -> None:
        while self._turns.get():
            while (claimed := self._next()) is not None:
                if self._claimed:
                    self._call_up()
                _carry_out(*claimed)

    def _next(self) -> tuple[AnyWork, Holder[Any], Ended] | None:
        with suppress(IndexError):
            return self._claimed.popleft()
        return None


def _carry_out(work: AnyWork, holder: Holder[Any], ended: Ended) -> None:
    outcome = None
    try:
        outcome = work.execute(holder)
        if outcome is None:
            # Not waited for: the thread of whoever lands it goes on from there.
            holder.land_later(partial(_conclude, work, holder, ended))
            return
        report(work, holder, outcome)
    except BaseException:  # noqa: BLE001 - one failing run never stops the others
        log.exception("%r of %r was interrupted", holder.lease, work)
    ended(holder, outcome)()


def _conclude(work: AnyWork, holder: Holder[Any], ended: Ended, unknown: RetryableError | None) -> Callable[[], None]:
    outcome = None
    try:
        outcome = work.verbs.conclude(holder, unknown)
        report(work, holder, outcome)
    except BaseException:  # noqa: BLE001 - as above
        log.exception("%r of %r was interrupted", holder.lease, work)
    return ended(holder, outcome)


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
