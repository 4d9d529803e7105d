"""The worker over asyncio."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

from sqlalchemy.util import await_only, greenlet_spawn

from sqla_durable.dispatch import AsyncWork, Ended, Serving, Work, log, report
from sqla_durable.execution import Ending, Outcome, let_go
from sqla_durable.holder import Holder
from sqla_durable.listening import Listening
from sqla_durable.policy import clamped
from sqla_durable.room import Room, Wake
from sqla_durable.threads import RELEASING, Threads
from sqla_durable.worker import signals

_HEEDING = 1.0


class AsyncWorker(Serving[Work | AsyncWork]):
    """Carries out due runs of any number of classes, several at a time, in tasks. See :class:`.Worker`.

    ::

        worker = AsyncWorker(plans.handled_by(carry_out), concurrency=100)
        asyncio.run(worker.run())

    What :class:`.Runs` are to carry out with ordinary functions is done in threads beside the event loop; it shares
    ``concurrency``, the signals and the drain.

    :param works: what ``handled_by()`` of :class:`.AsyncRuns` and of :class:`.Runs` returns, or objects that have
     ``works()``, such as :class:`.Functions`; those of a form take turns to be claimed first.
    :param concurrency: how many runs are carried out at a time.
    :param poll: how long to wait until the next look where nothing was due; each time a quarter more or less.
    :param listen: whether to be woken by notifications.
    :param grace: for how long a worker that was told to stop lets runs under way finish.
    :raises ConfigurationError: for something that is not a work, or a value out of its range.
    """

    _kinds = (Work, AsyncWork)

    async def run(self) -> None:
        """Work until told to stop, then drain. See :meth:`.Worker.run`.

        What is left after the grace time is cancelled, and so released; a handler in a thread goes on, and can write
        nothing any more. A cancellation of this call does the same at once.
        """
        with self._serving() as room, signals(self):
            self._log_start()
            listening = Listening(self._works if self._listen else [], lambda: room.wake(Wake.DUE))
            try:
                await self._work_in(room)
            finally:
                await asyncio.to_thread(listening.stop)
            log.info("stopped")

    async def run_due(self, budget: timedelta) -> Counter[Ending]:
        """Carry out what is due, until nothing is or the time is up. See :meth:`.Worker.run_due`."""
        self._check(budget=budget)
        with self._serving(time.monotonic() + clamped(budget).total_seconds()) as room:
            await self._work_in(room)
            return Counter(room.endings)

    async def _work_in(self, room: Room) -> None:
        """Dispatch what is done in tasks from a task, and what is done in threads from a thread: neither waits."""
        in_tasks = [work for work in self._works if isinstance(work, AsyncWork)]
        in_threads = [work for work in self._works if isinstance(work, Work)]
        slots = _Tasks()
        with Threads(self._concurrency) as threads:
            # Both before either begins: one that has found nothing due ends the work unless it knows of the other.
            dispatchers = [self._dispatcher_of(in_threads, threads, room)] if in_threads else []
            in_loop = [self._dispatcher_of(in_tasks, slots, room)] if in_tasks else []
            beside = [_in_thread(dispatcher.run) for dispatcher in dispatchers]
            try:
                for dispatcher in in_loop:
                    await slots.beside(greenlet_spawn(dispatcher.run))
                await _within(None, beside)
            except BaseException as interruption:
                if not isinstance(interruption, Exception):
                    room.desert()
                await _within(None, beside)
                raise
            for ended in beside:
                ended.result()


def _in_thread(work: Callable[[], None]) -> asyncio.Future[None]:
    """Do it in a daemon thread, which the process does not wait for as it does for those of an executor."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def do() -> None:
        error: BaseException | None = None
        try:
            work()
        except BaseException as raised:  # noqa: BLE001 - it is raised where the thread is waited for
            error = raised
        with suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(tell, error)

    def tell(error: BaseException | None) -> None:
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    threading.Thread(target=do, name="sqla_durable dispatcher", daemon=True).start()
    return ended


class _Tasks:
    """A task for each run."""

    claims: ClassVar[bool] = False
    held_up: ClassVar[bool] = True

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

    def start(self, work: AsyncWork, holder: Holder[Any], ended: Ended) -> None:
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

    async def _carry_out(self, work: AsyncWork, holder: Holder[Any]) -> Outcome | None:
        try:
            outcome = await work.execute(holder)
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException:  # noqa: BLE001 - one failing run never stops the others
            log.exception("%s was interrupted", work.verbs.named(holder))
            return None
        report(work, holder, outcome)
        return outcome


async def _within(seconds: float | None, waited_for: Collection[asyncio.Future[Any]]) -> None:
    if waited_for:
        await asyncio.wait(waited_for, timeout=seconds)
