"""Slots that are threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, NamedTuple, Self

from sqla_durable.dispatch import Ended, Work, log, report
from sqla_durable.exc import RetryableError
from sqla_durable.execution import let_go
from sqla_durable.holder import Holder
from sqla_durable.room import Wake

RELEASING = 5.0


class _Claimed(NamedTuple):
    """A claimed run, and what becomes of it."""

    work: Work
    holder: Holder[Any]
    ended: Ended


class Threads:
    """Daemon threads that are started as they are needed; a thread pool would have the process wait for each."""

    claims: ClassVar[bool] = True
    held_up: ClassVar[bool] = False

    def __init__(self, size: int) -> None:
        self._size = size
        self._started = 0
        self._claimed: deque[_Claimed] = deque()
        self._carried_out: dict[Holder[Any], _Claimed] = {}
        self._turns: SimpleQueue[bool] = SimpleQueue()
        # A queue, as it may be put into by a signal handler that interrupts the dispatcher; an Event may not.
        self._wakes: SimpleQueue[Wake] = SimpleQueue()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for _each in range(self._started):
            self._turns.put(False)  # noqa: FBT003 - no turn, but the end

    def start(self, work: Work, holder: Holder[Any], ended: Ended) -> None:
        self._claimed.append(_Claimed(work, holder, ended))
        if self._started < self._size:
            self._started += 1
            self._start_thread(self._take_turns)
        self._call_up()

    def _start_thread(self, target: Callable[..., None], *args: Any) -> None:
        threading.Thread(target=target, args=args, name=f"sqla_durable slot {self._started}", daemon=True).start()

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
                if not self._carry_out(claimed):
                    return

    def _next(self) -> _Claimed | None:
        with suppress(IndexError):
            return self._claimed.popleft()
        return None

    def _carry_out(self, claimed: _Claimed) -> bool:
        """Carry a run out; return whether the slot is still this thread's, and was not given up meanwhile."""
        work, holder, ended = claimed
        self._carried_out[holder] = claimed
        outcome, interrupted = None, False
        try:
            outcome = work.execute(holder, partial(self._give_up, holder))
        except BaseException:  # noqa: BLE001 - one failing run never stops the others
            log.exception("%s was interrupted", _name(claimed))
            interrupted = True
        if self._carried_out.pop(holder, None) is None:
            log.info("the handler of %s has returned, long after its run had ended", _name(claimed))
            return False
        if outcome is None and not interrupted:
            # Not waited for: the thread of whoever lands it goes on from there.
            holder.land_later(partial(_conclude, claimed))
            return True
        if outcome is not None:
            report(work, holder, outcome)
        ended(holder, outcome)()
        return True

    def _give_up(self, holder: Holder[Any]) -> None:
        """Where its run has been landed meanwhile, give the slot of a thread that nothing ends to a new thread.

        Called in the heartbeat's thread, which has other runs to see to.
        """
        # Whoever takes it out, this or the thread itself, counts the ending.
        if holder.ended and (claimed := self._carried_out.pop(holder, None)) is not None:
            self._start_thread(self._take_over, claimed)

    def _take_over(self, claimed: _Claimed) -> None:
        log.warning(
            "%s is %s, but its handler has not returned; its slot is given up", _name(claimed), claimed.holder.status
        )
        _conclude(claimed, None)()
        self._take_turns()


def _conclude(claimed: _Claimed, unknown: RetryableError | None) -> Callable[[], None]:
    work, holder, ended = claimed
    outcome = None
    try:
        outcome = work.verbs.conclude(holder, unknown)
        report(work, holder, outcome)
    except BaseException:  # noqa: BLE001 - as above
        log.exception("%s was interrupted", _name(claimed))
    return ended(holder, outcome)


def _name(claimed: _Claimed) -> str:
    return claimed.work.verbs.named(claimed.holder)
