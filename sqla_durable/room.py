"""The room of a worker: how many runs it carries out at a time, shared by the dispatchers of its two forms."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any

from sqla_durable.execution import Ending
from sqla_durable.holder import Holder

_EXACT_BATCHES = 10
_HELD_UP = 0.1


class Wake(Enum):
    """Why a dispatcher that waits is woken."""

    FREED = auto()
    """A slot has become free."""
    DUE = auto()
    """Something may be due, or the worker is to stop."""


class Share:
    """What one dispatcher has of a room.

    :param wake: wakes it; may be called from any thread and from a signal handler.
    :param weight: how many works it has, by which slots are shared where there are not enough for both.
    """

    def __init__(self, wake: Callable[[Wake], None], weight: int) -> None:
        self.wake = wake
        self.weight = weight
        self.active: set[Holder[Any]] = set()
        """The runs under way."""
        self.claiming = 0
        """How many slots a claim that is under way may fill."""
        self.lends_at = math.inf
        """When these are others' to take, as that claim is held up by code of the user's that blocks the event loop."""
        self.more = False
        """Whether more may be due than it had slots for."""
        self.looked = -1
        """How many runs had ended when it last looked and found nothing due."""

    @property
    def used(self) -> int:
        """How many slots it has taken."""
        return len(self.active) + self.claiming

    def lends(self) -> bool:
        """Whether others may have the slots of its claim by now."""
        return time.monotonic() >= self.lends_at


class Room:
    """The slots of one worker.

    Where each of two dispatchers would fill all of them, each has its part, by the number of their works; what one
    does not want is the other's. A lock for all of it: slots become free in any thread.

    :param size: how many there are.
    :param until: an instant of :func:`time.monotonic` at which to leave, or before it as soon as nothing is due or
     under way; by default never.
    """

    def __init__(self, size: int, until: float | None = None) -> None:
        self.size = size
        self.until = until
        self.closed = False
        """Whether nothing more is to be claimed."""
        self.deserted_at = math.inf
        """When to wait no longer for what is under way, whatever the grace time is."""
        self.endings: Counter[Ending] = Counter()
        self._shares: list[Share] = []
        self._lock = threading.Lock()
        self._odd: Share | None = None

    def let_in(self, share: Share) -> None:
        """Let a dispatcher in."""
        self._shares.append(share)

    def over(self) -> bool:
        """Whether nothing more is to be claimed, as the worker was told to stop or its time is up."""
        return self.closed or (self.until is not None and time.monotonic() >= self.until)

    def close(self) -> None:
        """Have nothing more claimed; callable from a signal handler, and so without the lock."""
        self.closed = True
        self.wake(Wake.DUE)

    def desert(self) -> None:
        """Close it, and let nothing finish: what is under way is released at once."""
        self.deserted_at = -math.inf
        self.close()

    def wake(self, why: Wake) -> None:
        """Wake everybody."""
        for share in self._shares:
            share.wake(why)

    # taking slots

    def free(self, share: Share) -> int:
        """How many slots this one may take."""
        with self._lock:
            return self._free(share)

    def reserve(self, share: Share, *, lends: bool) -> int:
        """Take the slots that a claim may fill, so that nobody else claims for them; :meth:`enter` settles it.

        :param lends: whether others may have them where the claim takes oddly long.
        """
        with self._lock:
            free = 0 if self.closed else self._free(share)
            # In tens where there are many, so that there are few different statements to prepare.
            taken = free if free <= _EXACT_BATCHES else free - free % _EXACT_BATCHES
            if len(self._shares) > 1:
                self._borrow(share, taken)
                if taken and share.used + taken > self._part(share):
                    self._odd = share
            share.claiming = taken
            share.lends_at = time.monotonic() + _HELD_UP if lends else math.inf
            return taken

    def enter(self, share: Share, claimed: Sequence[Holder[Any]]) -> Sequence[Holder[Any]]:
        """Note what was claimed for the reserved slots, and give the others back.

        :return: those of the runs that there are no slots for any more.
        """
        with self._lock:
            share.claiming = 0
            share.lends_at = math.inf
            free = self.size - self._used()
            share.active.update(claimed[:free])
            return claimed[free:]

    def looks_again_in(self, share: Share) -> list[float]:
        """In how many seconds to see whether a claim of another's lends it slots, where one is under way that may."""
        instants = [other.lends_at for other in self._others(share) if other.lends_at < math.inf]
        now = time.monotonic()
        return [at - now if at > now else _HELD_UP for at in instants]

    def looked(self, share: Share, *, more: bool) -> None:
        """Note whether more may be due than there were slots for, and wake whom that leaves a slot."""
        share.more = more
        if len(self._shares) == 1:
            return
        with self._lock:
            free = self._used() < self.size
            others = [other for other in self._others(share) if free and other.more]
        for other in others:
            other.wake(Wake.FREED)

    def leave(self, share: Share, holder: Holder[Any], ending: Ending) -> None:
        """Note that a run is under way no longer, unless that was noted before."""
        with self._lock:
            if holder in share.active:
                share.active.discard(holder)
                self.endings[ending] += 1

    def under_way(self, share: Share) -> list[Holder[Any]]:
        """Return the runs that are under way."""
        with self._lock:
            return list(share.active)

    def tell_others(self, share: Share) -> None:
        """Wake the others that wait for a slot, or for everything to end."""
        for other in self._others(share):
            if other.more or self.until is not None:
                other.wake(Wake.FREED)

    def settled(self, share: Share, ended: int) -> bool:
        """Note that one has found nothing due; return whether nothing is due or under way for anybody.

        :param ended: how many runs had ended before it looked: one that has ended since may have left something.
        """
        with self._lock:
            share.looked = ended
            total = self.endings.total()
            return not self._used() and all(each.looked == total for each in self._shares)

    def _used(self) -> int:
        return sum(each.used for each in self._shares)

    def _free(self, share: Share) -> int:
        if len(self._shares) == 1:
            return self.size - share.used
        free = max(0, self.size - self._used())
        # What waits for a blocked event loop needs no slot yet.
        wanted = any(other.more and not other.lends() for other in self._others(share))
        if free and not wanted:
            return free
        lent = 0 if free else sum(other.claiming for other in self._others(share) if other.lends())
        # The slot that does not divide is had in turns.
        part = math.floor(self._part(share)) if free and self._odd is share else math.ceil(self._part(share))
        return max(0, min(free + lent, part - share.used))

    def _borrow(self, share: Share, taken: int) -> None:
        """Take from the claims of others what is not free; they hand back what they have claimed for it."""
        missing = taken - (self.size - self._used())
        for other in self._others(share):
            if missing > 0 and other.lends():
                borrowed = min(missing, other.claiming)
                other.claiming -= borrowed
                missing -= borrowed

    def _others(self, share: Share) -> list[Share]:
        return [other for other in self._shares if other is not share]

    def _part(self, share: Share) -> float:
        return self.size * share.weight / sum(each.weight for each in self._shares)
