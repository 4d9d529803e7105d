"""What a worker does, once for both forms: claims what is due as slots become free, and drains when told to."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

from sqla_durable.exc import ConfigurationError, RetryableError, SchemaMismatch, UsageError
from sqla_durable.execution import Ending, Outcome, hand_back
from sqla_durable.holder import Holder
from sqla_durable.policy import clamped
from sqla_durable.retry import Retry, require_durations
from sqla_durable.room import Room, Share, Wake
from sqla_durable.verbs import Verbs

log = logging.getLogger("sqla_durable.worker")

OUTAGES = Retry(max_attempts=None, backoff=timedelta(seconds=0.1), cap=timedelta(seconds=5), jitter=0.5)
_SPREAD = 0.25
_SOONEST = 0.1
_MOMENT = 0.001


@dataclass(frozen=True, eq=False)
class AnyWork:
    """The runs of one class together with the handler that carries them out, in either form.

    :param verbs: the runs.
    :param execute: carries out a claimed run of theirs.
    """

    verbs: Verbs[Any]
    execute: Callable[..., Any]

    def __post_init__(self) -> None:
        self.verbs.claims.check()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} on {self.verbs.runs.entity.__name__}>"


@dataclass(frozen=True, eq=False, repr=False)
class Work(AnyWork):
    """The runs of one class together with the handler that carries them out; made by :meth:`.Runs.handled_by`.

    ``execute`` is called with a claimed run, and with what the heartbeat is to call when its holder may not go on.
    Where it returns None, the run is to be landed as done.
    """

    execute: Callable[[Holder[Any], Callable[[], None]], Outcome | None]


@dataclass(frozen=True, eq=False, repr=False)
class AsyncWork(AnyWork):
    """The same over asyncio; made by :meth:`.AsyncRuns.handled_by`."""

    execute: Callable[[Holder[Any]], Coroutine[Any, Any, Outcome]]


WorkT = TypeVar("WorkT", bound=AnyWork)
WorkT_co = TypeVar("WorkT_co", bound=AnyWork, covariant=True)


class HasWorks(Protocol[WorkT_co]):
    """What a worker can be given in place of works, such as :class:`.Functions`."""

    def works(self) -> Sequence[WorkT_co]:
        """Return the works; called once, when the worker is made."""
        ...


Ended = Callable[[Holder[Any], Outcome | None], Callable[[], None]]
"""Called when a run is not being carried out any more; without an outcome where its handler was interrupted.

What it returns is called next, or once for several runs that have ended together.
"""


@contextmanager
def in_slot(*passing: type[BaseException]) -> Generator[None, None, None]:
    """Have an interruption that a handler raises itself end its own run only: that goes back, after its backoff.

    It counts as an attempt that failed, or a handler that calls ``sys.exit()`` would be started again for ever.

    :param passing: interruptions that come from outside.
    """
    try:
        yield
    except BaseException as interruption:
        if isinstance(interruption, (Exception, *passing)):
            raise
        raise RetryableError(f"the handler raised {interruption!r}, which ends no worker.") from interruption


class Slots(Protocol):
    """Where claimed runs are carried out, threads or tasks, and how the dispatcher waits for them."""

    claims: ClassVar[bool]
    """Whether a slot that has become free may claim for all that are."""
    held_up: ClassVar[bool]
    """Whether code of the user's may hold the dispatcher up."""

    def start(self, work: Any, holder: Holder[Any], ended: Ended) -> None:
        """Carry the run out beside the dispatcher, and call ``ended``."""
        ...

    def wait(self, seconds: float | None) -> Wake | None:
        """Wait until woken, or for so long; return why, or None."""
        ...

    def wake(self, why: Wake) -> None:
        """Wake the dispatcher; may be called from any thread and from a signal handler."""
        ...

    def release(self, holders: Iterable[Holder[Any]]) -> None:
        """Have runs released that are still being carried out; whatever cannot be is left to its lease."""
        ...


class _Source:
    """A work, and until when it is left alone because its database is away: others go on meanwhile."""

    def __init__(self, work: AnyWork) -> None:
        self.work = work
        self._outages = 0
        self._rests_until = -math.inf
        self._fits = False

    @property
    def hands_back(self) -> bool:
        """Whether a claimed run can be handed back."""
        return self.work.verbs.runs.lifecycle.releases

    def claim(self, limit: int) -> list[Holder[Any]]:
        """Claim what is due, or nothing while the database is away.

        :raises SchemaMismatch: where the database lacks a table or column.
        """
        if self.rest():
            return []
        try:
            if not self._fits:
                # Or the first step would find it out, of a run that is claimed.
                self.work.verbs.store.refuse_lacking()
                self._fits = True
            claimed = self.work.verbs.claim_due(limit)
        except RetryableError as error:
            self._outages += 1
            self._rests_until = time.monotonic() + seconds(OUTAGES, self._outages)
            name, why = self.work.verbs.runs.entity.__name__, " ".join(str(error).split())
            log.warning("claiming %s waits for the database: %s", name, why)
            return []
        self._outages = 0
        return claimed

    def rest(self) -> float:
        """For how long it is left alone from now on."""
        return max(0.0, self._rests_until - time.monotonic())

    def wake(self) -> None:
        """Leave it alone no longer: there is a sign that the database is back."""
        self._rests_until = -math.inf


class Dispatcher:
    """Claims due runs and hands them to slots, in batches no larger than the number of free ones.

    :param works: what to claim, and how to carry it out; they take turns to be first.
    :param slots: where runs are carried out.
    :param room: how many at a time, and until when.
    :param poll: how long to wait until the next look where nothing was due, give or take a quarter.
    :param grace: how long a drain lets runs under way finish; what is left then is released.
    """

    def __init__(self, works: Sequence[AnyWork], slots: Slots, room: Room, poll: timedelta, grace: timedelta) -> None:
        self._sources = deque(_Source(work) for work in works)
        self._slots = slots
        self._room = room
        self._share = Share(slots.wake, len(works))
        self._poll = poll.total_seconds()
        self._grace = grace.total_seconds()
        self._claiming = threading.Lock()
        self._mismatch: SchemaMismatch | None = None
        room.let_in(self._share)

    def run(self) -> None:
        """Claim and carry out until told to stop; then let what is under way finish, or release it.

        An interruption leaves at once, without letting anything finish.

        :raises SchemaMismatch: where the database lacks a table or column, having let finish what can.
        """
        try:
            try:
                self._dispatch()
            finally:
                self._room.close()  # slots, which may go on after this, must not claim, nor may others go on
        except Exception:
            self._drain()
            raise
        self._drain()
        if self._mismatch is not None:
            raise self._mismatch

    def _dispatch(self) -> None:
        while not self._room.over():
            ended = self._room.endings.total()
            with self._claiming:
                self._fill()
            if self._share.more:
                self._wait_for_slots()
            elif self._room.until is None:
                pause = self._poll * random.uniform(1 - _SPREAD, 1 + _SPREAD)  # noqa: S311 - a spread, no secret
                self._wait(pause, *self._rests(), *self._soon(), for_slot=False)
            elif self._room.endings.total() != ended:
                continue  # it may have left something that is due, which the claim did not see
            elif rests := self._rests():
                self._wait(*rests, for_slot=True)
            elif self._room.settled(self._share, ended):
                return
            else:
                self._wait(for_slot=True)

    def _ended(self, holder: Holder[Any], outcome: Outcome | None) -> Callable[[], None]:
        ending = Ending.INTERRUPTED if outcome is None else outcome.ending
        if outcome is not None and isinstance(outcome.exception, SchemaMismatch):
            # Every run would meet it.
            self._mismatch = outcome.exception
            self._room.close()
        self._room.leave(self._share, holder, ending)
        if ending is Ending.INTERRUPTED or holder.limited:
            # It went back to ready, and may be due at once by the backoff of its lifecycle; or what is ready may be
            # claimed in its place.
            return self._due
        return self._freed

    def _due(self) -> None:
        self._room.tell_others(self._share)
        self._slots.wake(Wake.DUE)

    def _freed(self) -> None:
        self._room.tell_others(self._share)
        if not (self._slots.claims and self._refill()):
            self._slots.wake(Wake.FREED)

    def _refill(self) -> bool:
        """Claim for the free slots in the thread of a slot that has become free, which saves a change of threads.

        :return: whether the dispatcher's own thread need not be woken: there is more, for the next free slot to claim.
        """
        while self._share.more and self._free and not self._room.over():
            if not self._claiming.acquire(blocking=False):
                return True  # whoever claims looks again at what is free
            try:
                self._fill()
            except Exception:  # noqa: BLE001 - the dispatcher meets the error itself, and knows what to do
                self._share.more = False
            finally:
                self._claiming.release()
        return self._share.more and not self._room.over()

    @property
    def _free(self) -> int:
        return self._room.free(self._share)

    def _rests(self) -> list[float]:
        return [rest for source in self._sources if (rest := source.rest())]

    def _soon(self) -> list[float]:
        # Not at the very instant, at which all workers would look.
        found = [source.work.verbs.claims.soon for source in self._sources]
        return [max(seconds, self._poll * _SOONEST) for seconds in found if seconds is not None]

    def _fill(self) -> None:
        """Claim for the free slots, and note whether more may be due than there were slots for."""
        more = False
        self._sources.rotate(-1)
        for source in self._sources:
            limit = self._room.reserve(self._share, lends=self._slots.held_up and source.hands_back)
            if not limit:
                more = True
                break
            claimed: Sequence[Holder[Any]] = ()
            try:
                claimed = source.claim(limit)
            finally:
                surplus = self._room.enter(self._share, claimed)
            for holder in claimed[: len(claimed) - len(surplus)]:
                self._slots.start(source.work, holder, self._ended)
            for holder in surplus:
                hand_back(holder)
            more = more or len(claimed) == limit
        self._room.looked(self._share, more=more)

    def _wait_for_slots(self) -> None:
        """Wait for a free slot, and then a moment for those that are about to be."""
        end = None
        while self._share.more and (free := self._free) < self._room.size and not self._room.over():
            if free and end is None:
                end = time.monotonic() + _MOMENT
            left = [] if end is None else [end - time.monotonic()]
            if left and left[0] <= 0:
                return
            self._wait(*left, *self._room.looks_again_in(self._share), for_slot=True)

    def _wait(self, *longest: float, for_slot: bool) -> None:
        """Wait until something may be due, for so long at the most; with ``for_slot`` until a slot is free, too."""
        now = time.monotonic()
        ends = [now + each for each in longest] + ([] if self._room.until is None else [self._room.until])
        while not self._room.closed:
            left = min(ends) - time.monotonic() if ends else None
            if left is not None and left <= 0:
                return
            why = self._slots.wait(left)
            if why is Wake.DUE:
                for source in self._sources:
                    source.wake()
            if why is Wake.DUE or (why is Wake.FREED and for_slot):
                return

    def _drain(self) -> None:
        end = time.monotonic() + self._grace if self._room.until is None else self._room.until
        # A slot may be claiming still.
        if self._claiming.acquire(timeout=max(0.0, end - time.monotonic())):
            self._claiming.release()
        if self._share.active:
            log.info("draining: %d run(s) under way", len(self._share.active))
        while self._share.active and (left := min(end, self._room.deserted_at) - time.monotonic()) > 0:
            self._slots.wait(left)
        left_over = self._room.under_way(self._share)
        if left_over:
            log.warning("%d run(s) did not end in time and are released", len(left_over))
            self._slots.release(left_over)
        for holder in left_over:
            self._ended(holder, None)


class Serving(Generic[WorkT]):
    """What both forms of a worker are made with."""

    _kinds: ClassVar[tuple[type[AnyWork], ...]]

    def __init__(
        self,
        *works: WorkT | HasWorks[WorkT],
        concurrency: int = 10,
        poll: timedelta = timedelta(seconds=1),
        listen: bool = True,
        grace: timedelta = timedelta(seconds=30),
    ) -> None:
        self._works = [work for each in works for work in works_of(each)]
        self._concurrency = concurrency
        self._poll, self._grace = poll, grace
        self._listen = listen
        self._room: Room | None = None
        self._stopping = False
        self._check_works()
        self._check(poll=poll, grace=grace)

    def stop(self) -> None:
        """Have :meth:`run` drain and return, now or as soon as it is called; may be called from any thread."""
        self._stopping = True
        if self._room is not None:
            self._room.close()

    @contextmanager
    def _serving(self, until: float | None = None) -> Generator[Room, None, None]:
        if self._room is not None:
            raise UsageError(f"{self!r} is at work already; make another one.")
        room = Room(self._concurrency, until)
        self._room = room
        if self._stopping:
            room.close()
        try:
            yield room
        finally:
            self._room, self._stopping = None, False

    def _dispatcher_of(self, works: Sequence[AnyWork], slots: Slots, room: Room) -> Dispatcher:
        return Dispatcher(works, slots, room, clamped(self._poll), clamped(self._grace))

    def _log_start(self) -> None:
        known: dict[str, list[str]] = {}
        for work in self._works:
            functions = known.setdefault(work.verbs.runs.entity.__name__, [])
            functions += [each for each in work.verbs.knows() if each not in functions]
        for work in self._works:
            name = work.verbs.runs.entity.__name__
            if left := [each for each in work.verbs.starts() if each not in known[name]]:
                log.warning(
                    "runs of %s are started here and carried out elsewhere: pass the object that they are functions of "
                    "to a worker, too",
                    ", ".join(left),
                )
        log.info("working on %s", ", ".join(f"{name} ({', '.join(of)})" if of else name for name, of in known.items()))

    def _check(self, **durations: timedelta) -> None:
        """Refuse what a worker cannot work with, naming the parameter and the remedy."""
        name = type(self).__name__
        require_durations(self, **durations)
        for parameter, duration in durations.items():
            if duration < timedelta(0):
                raise ConfigurationError(f"{name}({parameter}={duration}): a duration cannot be negative.")
        if self._poll <= timedelta(0):
            raise ConfigurationError(f"{name}(poll={self._poll}): it would look again and again without a pause.")
        if not isinstance(cast(object, self._concurrency), int) or self._concurrency < 1:
            raise ConfigurationError(f"{name}(concurrency={self._concurrency!r}): a whole number of at least 1.")

    def _check_works(self) -> None:
        name = type(self).__name__
        for work in self._works:
            if isinstance(work, AsyncWork) and AsyncWork not in self._kinds:
                raise ConfigurationError(
                    f"{work!r} is carried out by an event loop, which {name} has none of; pass what handled_by() "
                    "returns to AsyncWorker, of sqla_durable.asyncio, which takes both forms."
                )
            if type(work) not in self._kinds:
                raise ConfigurationError(
                    f"{work!r} is not what {name} carries out; pass what handled_by() returns, of AsyncRuns to "
                    "AsyncWorker and of Runs to either worker, or an object that has works()."
                )
        if len({work.verbs for work in self._works}) < len(self._works):
            raise ConfigurationError(
                f"{name} was given two handlers for the same runs, which would be left to chance; make it one handler "
                "that looks at run.row, or a subclass of the model for each."
            )
        limits: dict[Any, int | None] = {}
        for verbs in (work.verbs for work in self._works):
            if limits.setdefault(verbs.runs.table, verbs.limit_of_tenants()) != verbs.limit_of_tenants():
                raise ConfigurationError(
                    f"{name} was given functions of {verbs.runs.entity.__name__} with different limits per tenant: "
                    "it is one limit of the table; give both forms the same concurrency_per_tenant."
                )
        if not self._works:
            raise ConfigurationError(f"{name} needs something to carry out, as in {name}(plans.handled_by(carry_out)).")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._works!r}>"


def works_of(given: WorkT | HasWorks[WorkT]) -> Sequence[WorkT]:
    """Return the works that something stands for; what stands for none is for the worker to refuse."""
    if isinstance(given, (AnyWork, type)) or not callable(getattr(given, "works", None)):
        return [cast(WorkT, given)]
    return given.works()


def report(work: AnyWork, holder: Holder[Any], outcome: Outcome) -> None:
    """Log how a run ended."""
    # A run that waits for something outside is carried out as intended, unless it could not be asked.
    intended = outcome.ending in {Ending.LANDED, Ending.SUSPENDED} and outcome.failure is None
    if intended and not log.isEnabledFor(logging.DEBUG):
        return
    name = work.verbs.named(holder)
    if intended:
        log.debug("%s is %s", name, outcome.status)
    elif outcome.ending is Ending.LANDED:
        log.error("%s is %s", name, outcome.status, exc_info=outcome.exception)
    else:
        why = outcome.status if outcome.exception is None else _in_a_line(outcome.exception)
        log.warning("%s: %s (%s)", name, outcome.ending, why)


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")


def seconds(retry: Retry, failures: int) -> float:
    """The delay that a policy says after so many failures in a row, where no database can be asked for it."""
    factor = retry.factor ** min(failures - 1, retry.doublings)
    delay = min(retry.backoff.total_seconds() * factor, retry.cap.total_seconds())
    return delay * random.uniform(1 - retry.jitter, 1 + retry.jitter)  # noqa: S311 - a spread, no secret
