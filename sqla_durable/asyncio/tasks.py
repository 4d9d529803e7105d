"""Tasks of the user's code: awaited from within the library's greenlets, cancelled from the heartbeat's thread."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy.util import await_only, greenlet_spawn

from sqla_durable.exc import UsageError

ResultT = TypeVar("ResultT")


class Watch:
    """Cancels the handler's task from the heartbeat's thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._caller = asyncio.current_task()
        self._before = 0 if self._caller is None else self._caller.cancelling()
        self._task: asyncio.Task[object] | None = None
        self._cancelled = False
        self.spared: Callable[[], bool] = lambda: False
        """Whether the task is at something that ends with an error of its own where the lease is lost."""

    async def guard(self, handler: Awaitable[ResultT]) -> ResultT:
        """Await the handler as a task that :meth:`cancel` cancels."""
        # A task of its own, so that this cancellation cannot be taken for one of the caller's.
        task = asyncio.create_task(as_task(handler))
        self._task = task
        try:
            result = await task
            if isinstance(result, Exit):
                raise result.interruption
            return result
        finally:
            self._task = None
            if inspect.iscoroutine(handler):
                handler.close()  # it was never started where the cancellation came first

    def cancel(self) -> None:
        """Cancel the task; may be called from any thread."""
        with suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(self._cancel)

    def pass_on(self) -> None:
        """Raise a cancellation of the caller's that arrived together with the loss of the lease."""
        if self._caller is not None and self._caller.cancelling() > self._before:
            raise asyncio.CancelledError

    def _cancel(self) -> None:
        # Once: a second time would break off what the handler does to clean up.
        if self._task is not None and not self._cancelled and not self.spared():
            self._cancelled = True
            self._task.cancel()


@dataclass
class Exit:
    """What would end the loop if it left the task that it was raised in, before the run was released."""

    interruption: BaseException


async def as_task(awaitable: Awaitable[ResultT]) -> ResultT | Exit:
    """Await something so that no interruption leaves the task."""
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as interruption:
        return Exit(interruption)


async def called(call: Callable[[], ResultT]) -> ResultT | Exit:
    """Call something in a greenlet likewise."""
    try:
        return await greenlet_spawn(call)
    except (SystemExit, KeyboardInterrupt) as interruption:
        return Exit(interruption)


def result_of(task: asyncio.Task[ResultT | Exit]) -> ResultT:
    """Return what a task of these has ended with, or raise it."""
    result = task.result()
    if isinstance(result, Exit):
        raise result.interruption
    return result


async def _as_coroutine(awaitable: Awaitable[ResultT]) -> ResultT:
    return await awaitable


def wait_for(awaitable: Awaitable[ResultT], fn: Callable[..., Any]) -> ResultT:
    """Await something of the user's from within the greenlet that the library's own statements run in."""
    return await_only(_as_coroutine(awaited(awaitable, fn)))


def awaited(result: Awaitable[ResultT], fn: Callable[..., Any]) -> Awaitable[ResultT]:
    """Return what a function of the user's has returned, having refused what cannot be awaited."""
    if not inspect.isawaitable(result):
        raise UsageError(f"{fn!r} returned {result!r:.80}, which cannot be awaited; pass a coroutine function.")
    return result
