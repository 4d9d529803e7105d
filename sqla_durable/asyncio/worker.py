"""The worker over asyncio."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar, cast

from sqlalchemy.util import await_only, greenlet_spawn

from sqla_durable.dispatch import AnyWork, AsyncWork, Ended, Serving, Wake, log, report
from sqla_durable.execution import Ending, Outcome, let_go
from sqla_durable.holder import Holder
from sqla_durable.listening import Listening
from sqla_durable.worker import RELEASING, signals

_HEEDING = 1.0


class AsyncWorker(Serving[AsyncWork]):
    """Carries out due runs of any number of classes, several at a time, in tasks. See :class:`.Worker`.

    ::

        worker = AsyncWorker(plans.handled_by(carry_out), concurrency=100)
        asyncio.run(worker.run())

    :param works: what :meth:`.AsyncRuns.handled_by` returns; they take turns to be claimed first.
    :param concurrency: how many runs are carried out at a time.
    :param poll: how long to wait until the next look where nothing was due; each time a quarter more or less.
    :param listen: whether to be woken by notifications.
    :param grace: for how long a worker that was told to stop lets runs under way finish.
    :raises ConfigurationError: for something that is not a work, or a value out of its range.
    """

    _kind = AsyncWork

    async def run(self) -> None:
        """Work until told to stop, then drain. See :meth:`.Worker.run`.

        What is left after the grace time is cancelled, and so released. A cancellation of this call does the same at
        once.
        """
        slots = _Tasks()
        with self._serving(slots) as dispatcher, signals(self):
            self._log_start()
            listening = Listening(self._works if self._listen else [], lambda: slots.wake(Wake.DUE))
            try:
                await slots.beside(greenlet_spawn(dispatcher.run))
            finally:
                await asyncio.to_thread(listening.stop)
            log.info("stopped")

    async def run_due(self, budget: timedelta) -> Counter[Ending]:
        """Carry out what is due, until nothing is or the time is up. See :meth:`.Worker.run_due`."""
        self._check(budget=budget)
        slots = _Tasks()
        with self._serving(slots) as dispatcher:
            await slots.beside(greenlet_spawn(dispatcher.run, until=time.monotonic() + budget.total_seconds()))
            return Counter(dispatcher.endings)


class _Tasks:
    """A task for each run."""

    claims: ClassVar[bool] = False

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = asyncio.Event()
        self._why: set[Wake] = set()
        self._tasks: dict[Holder[Any], asyncio.Task[Outcome | None]] = {}

    async def beside(self, dispatching: Coroutine[Any, Any, None]) -> None:
        """Await the dispatcher; where that is interrupted, cancel what it has started, and wait for the releases."""
        try:
            await dispatching
        finally:
            await self._release(list(self._tasks))

    def start(self, work: AnyWork, holder: Holder[Any], ended: Ended) -> None:
        def done(task: asyncio.Task[Outcome | None]) -> None:
            del self._tasks[holder]
            ended(holder, None if task.cancelled() or task.exception() else task.result())()

        task = self._loop.create_task(self._carry_out(work, holder))
        self._tasks[holder] = task
        task.add_done_callback(done)  # not in the task, which does not even begin where it is cancelled before

    def wait(self, seconds: float | None) -> Wake | None:
        await_only(self._until_woken(seconds))
        self._woken.clear()
        why, self._why = self._why, set()
        return Wake.DUE if Wake.DUE in why else next(iter(why), None)

    def wake(self, why: Wake) -> None:
        with suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._wake, why)

    def release(self, holders: Iterable[Holder[Any]]) -> None:
        await_only(self._release(list(holders)))

    async def _until_woken(self, seconds: float | None) -> None:
        # Not wait_for(), which until Python 3.12 loses a cancellation that comes together with the event.
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()

    def _wake(self, why: Wake) -> None:
        self._why.add(why)
        self._woken.set()

    async def _release(self, holders: Sequence[Holder[Any]]) -> None:
        """Cancel tasks, which release their runs; then release what had not begun yet, or does not heed it."""
        tasks = [self._tasks[holder] for holder in holders if holder in self._tasks]
        for task in tasks:
            task.cancel()
        await _within(_HEEDING, tasks)
        left = [holder for holder in holders if not holder.ended and holder.lost is None]
        await _within(RELEASING, [asyncio.create_task(greenlet_spawn(let_go, holder)) for holder in left])

    async def _carry_out(self, work: AnyWork, holder: Holder[Any]) -> Outcome | None:
        try:
            outcome = await cast(Coroutine[Any, Any, Outcome], work.execute(holder))
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException:  # noqa: BLE001 - one failing run never stops the others
            log.exception("%r of %r was interrupted", holder.lease, work)
            return None
        report(work, holder, outcome)
        return outcome


async def _within(seconds: float, tasks: Collection[asyncio.Task[Any]]) -> None:
    if tasks:
        await asyncio.wait(tasks, timeout=seconds)
