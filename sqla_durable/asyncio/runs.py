"""Runs over asyncio.

Every verb is the one of the synchronous form, run as :meth:`~sqlalchemy.ext.asyncio.AsyncSession.run_sync` runs
its function: there is no second copy of any statement.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, Unpack, cast, overload

from sqlalchemy import ColumnElement, Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session
from sqlalchemy.util import await_only, greenlet_spawn

from sqla_durable.codec import Codec, codec_for, codec_for_argument, codec_of
from sqla_durable.dispatch import AsyncWork, in_slot
from sqla_durable.exc import ConfigurationError, UsageError
from sqla_durable.execution import Outcome
from sqla_durable.failure import Failure
from sqla_durable.gather import Call, gathered
from sqla_durable.ground import Gate
from sqla_durable.holder import Holder
from sqla_durable.lease import Lease
from sqla_durable.listing import RunConditions, RunSummary
from sqla_durable.machine import StatusT
from sqla_durable.operation import Operation, Pending
from sqla_durable.receipt import Receipt, ReceiptMixin
from sqla_durable.run import RunT
from sqla_durable.runs import Handle, keys_of, refuse_other_form
from sqla_durable.session import StepSession, step_session_class
from sqla_durable.signal import SignalMixin
from sqla_durable.status import StatusMachine
from sqla_durable.store import Store
from sqla_durable.verbs import Verbs
from sqla_durable.wait import Answer, Sleep, Wait

P = ParamSpec("P")
IdsT = TypeVar("IdsT")
PayloadT = TypeVar("PayloadT")
ResultT = TypeVar("ResultT")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")
Awaited: TypeAlias = Call[Awaitable[ResultT]]
Soon: TypeAlias = Coroutine[Any, Any, ResultT]


class AsyncStepping(Handle[RunT]):
    """A claimed run, as the coroutine that carries it out sees it: its steps.

    Concurrent steps of one run queue up behind each other.
    """

    def __init__(self, holder: Holder[RunT]) -> None:
        super().__init__(holder)
        self._one_at_a_time = asyncio.Lock()
        self._unawaited: dict[object, tuple[str | int, Coroutine[Any, Any, Any]]] = {}

    def step(
        self,
        key: str | int,
        fn: Callable[Concatenate[AsyncSession, P], Awaitable[ResultT]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, ResultT]:
        """Await ``fn(session, *args, **kwargs)`` in one transaction with the step's receipt: exactly once.

        See :meth:`.Run.step`.
        """

        codec: Codec[ResultT] = codec_for(fn)

        def body(session: AsyncSession) -> ResultT:
            return _wait_for(fn(session, *args, **kwargs), fn)

        return self._alone(key, partial(self.holder.transactional, key, codec, body, (fn, args, kwargs)))

    def external(
        self, key: str | int, fn: Callable[P, Awaitable[ResultT]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, ResultT]:
        """Await ``fn(*args, **kwargs)`` outside any transaction, then record its result: at least once.

        See :meth:`.Run.external`.
        """

        codec: Codec[ResultT] = codec_for(fn)

        def call() -> ResultT:
            return _wait_for(fn(*args, **kwargs), fn)

        return self._alone(key, partial(self.holder.external, key, codec, call, (fn, args, kwargs)))

    def keyed(
        self,
        key: str | int,
        fn: Callable[Concatenate[str, P], Awaitable[ResultT]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Coroutine[Any, Any, ResultT]:
        """Await ``fn(idempotency_key, *args, **kwargs)`` outside any transaction, then record its result.

        See :meth:`.Run.keyed`.
        """

        codec: Codec[ResultT] = codec_for(fn)

        def call(name: str) -> ResultT:
            return _wait_for(fn(name, *args, **kwargs), fn)

        return self._alone(key, partial(self.holder.keyed, key, codec, call, (fn, args, kwargs)))

    def operation(
        self,
        key: str | int,
        *,
        start: Callable[[], Awaitable[IdsT]],
        poll: Callable[[IdsT], Awaitable[ResultT | Pending]],
        every: timedelta = timedelta(seconds=10),
    ) -> Coroutine[Any, Any, ResultT]:
        """Issue an operation at most once, then poll it until it ends, without a worker that waits for it.

        See :meth:`.Run.operation`. When the heartbeat finds the lease lost, a cancel request, or the deadline passed, a
        ``start`` under way is not cancelled: its ids are recorded first.
        """

        operation: Operation[IdsT, ResultT] = Operation(
            self.holder,
            codec_for(start),
            codec_for(poll, apart_from=Pending),
            start=lambda: _wait_for(start(), start),
            poll=lambda ids: _wait_for(poll(ids), poll),
            every=every,
            given=(start, (), {}),
        )
        return self._alone(key, partial(operation.carry_out, key))

    @overload
    def wait(
        self, name: str, type_: type[ResultT], *, timeout: timedelta | None = None, key: str | int | None = None
    ) -> Coroutine[Any, Any, ResultT]: ...

    @overload
    def wait(
        self, name: str, type_: Any = Any, *, timeout: timedelta | None = None, key: str | int | None = None
    ) -> Coroutine[Any, Any, Any]: ...

    def wait(
        self, name: str, type_: Any = Any, *, timeout: timedelta | None = None, key: str | int | None = None
    ) -> Coroutine[Any, Any, Any]:
        """Take the oldest signal of that name, or hand the run back until there is one. See :meth:`.Run.wait`."""

        wait: Wait[Any] = Wait(self.holder, name, codec_of(type_), key=key, timeout=timeout)
        return self._alone(wait.key, wait.carry_out)

    def answer(
        self,
        name: str,
        fn: Callable[[AsyncSession, PayloadT], Awaitable[ResultT]],
        *,
        timeout: timedelta | None = None,
        key: str | int | None = None,
    ) -> Coroutine[Any, Any, ResultT]:
        """Take a signal likewise, and reply with what ``fn(session, payload)`` returns. See :meth:`.Run.answer`."""

        answer: Answer[PayloadT, ResultT] = Answer(
            self.holder,
            name,
            codec_for_argument(fn, 1),
            codec_for(fn),
            lambda session, payload: _wait_for(fn(session, payload), fn),
            key=key,
            timeout=timeout,
        )
        return self._alone(answer.key, answer.carry_out)

    def sleep(self, key: str | int, duration: timedelta | datetime, /) -> Coroutine[Any, Any, None]:
        """Wait until an instant without a worker that waits. See :meth:`.Run.sleep`."""

        return self._alone(key, partial(Sleep(self.holder, duration).carry_out, key))

    @overload
    def gather(self, a: Awaited[A], /) -> Soon[tuple[A]]: ...

    @overload
    def gather(self, a: Awaited[A], b: Awaited[B], /) -> Soon[tuple[A, B]]: ...

    @overload
    def gather(self, a: Awaited[A], b: Awaited[B], c: Awaited[C], /) -> Soon[tuple[A, B, C]]: ...

    @overload
    def gather(self, a: Awaited[A], b: Awaited[B], c: Awaited[C], d: Awaited[D], /) -> Soon[tuple[A, B, C, D]]: ...

    @overload
    def gather(
        self, a: Awaited[A], b: Awaited[B], c: Awaited[C], d: Awaited[D], e: Awaited[E], /
    ) -> Soon[tuple[A, B, C, D, E]]: ...

    @overload
    def gather(
        self, a: Awaited[A], b: Awaited[B], c: Awaited[C], d: Awaited[D], e: Awaited[E], f: Awaited[F], /
    ) -> Soon[tuple[A, B, C, D, E, F]]: ...

    @overload
    def gather(self, *calls: Awaited[ResultT]) -> Soon[tuple[ResultT, ...]]: ...

    def gather(self, *calls: Call[Awaitable[Any]]) -> Coroutine[Any, Any, tuple[Any, ...]]:
        """Await a few independent calls at once, each an external or keyed step with a receipt of its own.

        See :meth:`.Run.gather`. The calls are made in tasks of their own, which are cancelled with the handler.
        """

        def make(fn: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
            return _wait_for(fn(*args, **kwargs), fn)

        return self._alone(keys_of(calls), partial(gathered, self.holder, calls, make))

    async def renew(self) -> None:
        """Renew the lease now. See :meth:`.Run.renew`."""
        await greenlet_spawn(self.holder.renew)

    def refuse_unawaited(self) -> None:
        """Refuse to land a run of which a step was called and never awaited, and so never ran."""
        forgotten, self._unawaited = self._unawaited, {}
        for _, coroutine in forgotten.values():
            coroutine.close()
        if forgotten:
            steps = ", ".join(repr(key) for key, _ in forgotten.values())
            raise UsageError(f"step {steps} was never awaited, and so never ran; write await run.step(...).")

    def _alone(self, key: str | int, step: Callable[[], ResultT]) -> Coroutine[Any, Any, ResultT]:
        async def alone() -> ResultT:
            self._unawaited.pop(call, None)
            # A step inside a step's body would wait for itself here.
            self.holder.refuse_nested(key)
            async with self._one_at_a_time:
                return await greenlet_spawn(step)

        call = object()
        coroutine = alone()
        self._unawaited[call] = key, coroutine
        return coroutine


SteppingT = TypeVar("SteppingT", bound=AsyncStepping[Any])


class AsyncRun(AsyncStepping[RunT]):
    """A claimed run, as its coroutine handler sees it."""

    async def finish(self, **values: Any) -> None:
        """Land the run as done. See :meth:`.Run.finish`."""
        await greenlet_spawn(self.holder.finish, values)

    async def fail(self, error: BaseException | Failure, /, **values: Any) -> None:
        """Land the run as failed, with ``error`` recorded. See :meth:`.Run.fail`."""
        await greenlet_spawn(self.holder.fail, error, values)

    async def release(self) -> None:
        """Hand the run back. See :meth:`.Run.release`."""
        await greenlet_spawn(self.holder.release)


class AsyncRuns(Generic[RunT]):
    """The runs of one class, over asyncio. See :class:`.Runs`.

    ::

        plans = AsyncRuns(async_sessionmaker(engine), Plan, PlanStep)
        outcome = await plans.execute(plan.id, carry_out)

    :param session_factory: makes the session of each transaction; bound to one asyncio engine.
    :param run: the mapped class with :class:`.RunMixin`.
    :param receipt: the mapped class with :class:`.ReceiptMixin` of ``run``.
    :param owner: the name that leases carry for people to read.
    :param signals: the mapped class with :class:`.SignalMixin` of ``run``.
    :raises ConfigurationError: where the classes do not belong together.
    """

    def __init__(
        self,
        session_factory: async_sessionmaker[Any],
        run: type[RunT],
        receipt: type[ReceiptMixin[Any]],
        *,
        owner: str | None = None,
        signals: type[SignalMixin[Any]] | None = None,
    ) -> None:
        self._verbs = Verbs(Store(AsyncSessions(session_factory), run, receipt, signals), owner)
        self.session_factory = session_factory
        """The sessionmaker that it was made with."""
        self.run_class = run
        """The mapped class of its runs."""

    async def claim(self, ident: object, *, run_now: bool = False) -> AsyncRun[RunT] | None:
        """Claim one run. See :meth:`.Runs.claim`."""
        holder = await greenlet_spawn(self._verbs.claim, ident, run_now=run_now)
        return None if holder is None else AsyncRun(holder)

    async def claim_due(self, limit: int) -> list[AsyncRun[RunT]]:
        """Claim up to ``limit`` due runs, those due for longest first. See :meth:`.Runs.claim_due`."""
        return [AsyncRun(holder) for holder in await greenlet_spawn(self._verbs.claim_due, limit)]

    async def hold(self, lease: Lease) -> AsyncRun[RunT]:
        """Return the handle for a lease that was issued elsewhere. See :meth:`.Runs.hold`."""
        return AsyncRun(await greenlet_spawn(self._verbs.claims.held, lease))

    async def execute(
        self,
        target: object,
        handler: Callable[[AsyncRun[RunT]], Awaitable[object]],
        *,
        run_now: bool = False,
    ) -> Outcome:
        """Carry a run out. See :meth:`.Runs.execute`.

        When the heartbeat finds the lease lost, a cancel request, or the deadline passed, the handler is cancelled; it
        sees :class:`asyncio.CancelledError` at its next ``await``.
        """
        known = self._handle(target)
        held = target if known is None else known.holder
        return await carry_out(
            self._verbs, held, lambda holder: AsyncRun(holder) if known is None else known, handler, run_now=run_now
        )

    def handled_by(self, handler: Callable[[AsyncRun[RunT]], Awaitable[object]]) -> AsyncWork:
        """Return these runs together with the handler that carries them out, for an :class:`.AsyncWorker`.

        :param handler: as for :meth:`execute`.
        """

        return work_of(self._verbs, AsyncRun, handler)

    def _handle(self, target: object) -> AsyncRun[RunT] | None:
        refuse_other_form(target, AsyncRun)
        return cast(AsyncRun[RunT], target) if isinstance(target, AsyncRun) else None

    async def get(self, ident: object, *, heal: bool = True) -> RunT | None:
        """Read a run, having healed it if its lease has lapsed. See :meth:`.Runs.get`."""
        return await greenlet_spawn(self._verbs.get, ident, heal=heal)

    async def find(
        self,
        *,
        status: StrEnum | Collection[StrEnum] | None = None,
        older_than: timedelta | None = None,
        newer_than: timedelta | None = None,
        error: str | None = None,
        owner: str | None = None,
        cancel_requested: bool | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[RunSummary]:
        """List the runs that meet every condition given, the newest first. See :meth:`.Runs.find`."""
        return await greenlet_spawn(
            self._verbs.find,
            status=status,
            older_than=older_than,
            newer_than=newer_than,
            error=error,
            owner=owner,
            cancel_requested=cancel_requested,
            limit=limit,
            after=after,
        )

    async def describe(self, ident: object) -> RunSummary | None:
        """Read what :meth:`find` says of one run, and the traceback of its error. See :meth:`.Runs.describe`."""
        return await greenlet_spawn(self._verbs.describe, ident)

    async def counts(self) -> dict[StrEnum, int]:
        """Count the runs of each status. See :meth:`.Runs.counts`."""
        return await greenlet_spawn(self._verbs.counts)

    async def receipts(self, ident: object) -> tuple[Receipt, ...]:
        """Read a run's receipts in the order they were recorded."""
        return await greenlet_spawn(self._verbs.receipts, ident)

    async def heal(self, ident: object) -> bool:
        """Turn a lapsed or overdue run into what its lifecycle says; True if this call did."""
        return await greenlet_spawn(self._verbs.heal, ident)

    async def reap(self, limit: int = 100) -> int:
        """Heal up to ``limit`` lapsed runs, and expire as many overdue ones. See :meth:`.Runs.reap`."""
        return await greenlet_spawn(self._verbs.reap, limit)

    async def requeue(self, ident: object) -> bool:
        """Give a terminal run another life. See :meth:`.Runs.requeue`."""
        return await greenlet_spawn(self._verbs.requeue, ident)

    async def requeue_all(
        self, *, limit: int | None = None, everything: bool = False, **conditions: Unpack[RunConditions]
    ) -> int:
        """Give all runs that meet every condition another life. See :meth:`.Runs.requeue_all`."""
        return await greenlet_spawn(self._verbs.bulk.requeue, limit, conditions, everything=everything)

    async def purge(
        self,
        older_than: timedelta,
        *,
        status: StrEnum | Collection[StrEnum] | None = None,
        batch: int = 1000,
        limit: int | None = None,
    ) -> int:
        """Delete runs that ended long enough ago, and their receipts. See :meth:`.Runs.purge`."""
        return await greenlet_spawn(self._verbs.bulk.purge, older_than, status, batch, limit)

    async def cancel_all(
        self,
        session: AsyncSession,
        *,
        limit: int | None = None,
        everything: bool = False,
        **conditions: Unpack[RunConditions],
    ) -> int:
        """Ask, in the caller's transaction, for many runs to be cancelled. See :meth:`.Runs.cancel_all`."""
        return await session.run_sync(self._verbs.bulk.cancel, limit, conditions, everything=everything)

    @overload
    async def update(
        self,
        ident: object,
        name: str,
        payload: object,
        *,
        timeout: timedelta,
        type_: Any = Any,
        returns: type[ResultT],
    ) -> ResultT: ...

    @overload
    async def update(
        self, ident: object, name: str, payload: object, *, timeout: timedelta, type_: Any = Any, returns: Any = Any
    ) -> Any: ...

    async def update(
        self, ident: object, name: str, payload: object, *, timeout: timedelta, type_: Any = Any, returns: Any = Any
    ) -> Any:
        """Send a signal, and wait for what the run replies. See :meth:`.Runs.update`."""
        return await greenlet_spawn(self._verbs.sending.update, ident, name, payload, type_, returns, timeout)

    async def signal(
        self, session: AsyncSession, ident: object, name: str, payload: object = None, *, type_: Any = Any
    ) -> bool:
        """Send a signal to a run, in the caller's transaction. See :meth:`.Runs.signal`."""
        return await session.run_sync(self._verbs.sending.signal, ident, name, payload, type_)

    async def start(self, session: AsyncSession, /, *, key: str | None = None, **values: Any) -> RunT:
        """Start a run in the caller's transaction. See :meth:`.Runs.start`."""
        return await session.run_sync(self._verbs.start, key, values)

    async def request_cancel(self, session: AsyncSession, ident: object) -> bool:
        """Ask, in the caller's transaction, for a run to be cancelled. See :meth:`.Runs.request_cancel`."""
        return await session.run_sync(self._verbs.request_cancel, ident)

    async def fence(self, session: AsyncSession, lease: Lease) -> None:
        """Lock the run in the caller's transaction and check the fence. See :meth:`.Runs.fence`."""
        await session.run_sync(self._verbs.fence, lease)

    async def record(
        self, session: AsyncSession, lease: Lease, key: str | int, result: object, *, type_: Any = Any
    ) -> None:
        """Write a step's receipt in the caller's transaction. See :meth:`.Runs.record`."""
        await session.run_sync(self._verbs.record, lease, key, result, type_)

    async def attach_ids(
        self, session: AsyncSession, ident: object, key: str | int, ids: object, *, type_: Any = Any
    ) -> bool:
        """Say by which ids the service knows an operation. See :meth:`.Runs.attach_ids`."""
        return await session.run_sync(self._verbs.attach_ids, ident, key, ids, type_)

    async def never_issued(self, session: AsyncSession, ident: object, key: str | int) -> bool:
        """Allow an operation to be issued anew. See :meth:`.Runs.never_issued`."""
        return await session.run_sync(self._verbs.never_issued, ident, key)


async def transition(
    machine: StatusMachine[StatusT],
    session: AsyncSession,
    run_or_ident: object,
    to: StatusT,
    *,
    from_: StatusT | Collection[StatusT] | None = None,
    where: ColumnElement[bool] | None = None,
    values: Mapping[str, Any] | None = None,
) -> bool:
    """Move one row along an edge of its machine. See :meth:`.StatusMachine.transition`."""
    return await session.run_sync(
        lambda session: machine.transition(session, run_or_ident, to, from_=from_, where=where, values=values)
    )


async def carry_out(
    verbs: Verbs[Any],
    target: object,
    make: Callable[[Holder[Any]], SteppingT],
    handler: Callable[[SteppingT], Awaitable[object]],
    *,
    run_now: bool = False,
    at_once: bool = False,
) -> Outcome:
    """Carry a run out with a coroutine function, which is cancelled when the holder may not go on.

    :param target: a holder, or what :meth:`.Verbs.claim` takes.
    :param make: makes of a holder what the handler is called with.
    :param at_once: as for :meth:`.Verbs.begin`.
    """
    watch = _Watch()

    async def handled(run: SteppingT) -> None:
        # A task begins late where another one blocks the loop; the run may be lost since it was fenced.
        if at_once and not run.holder.was_just_claimed():
            await run.renew()
        await _awaitable(handler(run), handler)

    def begin(holder: Holder[Any]) -> None:
        watch.spared = lambda: holder.issuing
        run = make(holder)
        _wait_for(watch.guard(handled(run)), handler)
        run.refuse_unawaited()

    outcome = await greenlet_spawn(verbs.execute, target, begin, on_lost=watch.cancel, run_now=run_now, at_once=at_once)
    watch.pass_on()
    return outcome


def work_of(
    verbs: Verbs[Any], make: Callable[[Holder[Any]], SteppingT], handler: Callable[[SteppingT], Awaitable[object]]
) -> AsyncWork:
    """Return the runs of ``verbs`` together with the coroutine function that carries them out.

    :param make: makes of a holder what the handler is called with.
    """

    async def handled(run: SteppingT) -> None:
        with in_slot(asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):
            await _awaitable(handler(run), handler)

    def execute(holder: Holder[Any]) -> Coroutine[Any, Any, Outcome]:
        return carry_out(verbs, holder, make, handled, at_once=True)

    return AsyncWork(verbs, execute)


class _Watch:
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
        # A task of its own, so that this cancellation cannot be taken for one of the caller's.
        task = asyncio.create_task(_as_task(handler))
        self._task = task
        try:
            result = await task
            if isinstance(result, _Exit):
                raise result.interruption
            return result
        finally:
            self._task = None
            if inspect.iscoroutine(handler):
                handler.close()  # it was never started where the cancellation came first

    def cancel(self) -> None:
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


class AsyncSessions:
    """Sessions for :class:`.Store` from an asyncio sessionmaker."""

    is_async = True

    def __init__(self, factory: async_sessionmaker[Any]) -> None:
        if not isinstance(cast(object, factory), async_sessionmaker):
            raise ConfigurationError(f"{factory!r} is not an async_sessionmaker; pass async_sessionmaker(engine).")
        self._factory = factory
        sync_class = factory.kw.get("sync_session_class") or factory.class_.sync_session_class
        self._step_class = step_session_class(sync_class)

    def plain(self, bind: Engine | None = None) -> Session:
        other = {} if bind is None else {"bind": AsyncEngine(bind), "binds": None}
        session: AsyncSession = self._factory(**other)
        return session.sync_session

    def step(self) -> StepSession:
        facade: AsyncSession = self._factory(sync_session_class=self._step_class)
        session = cast(StepSession, facade.sync_session)
        return session.as_step(facade)

    def sleep(self, seconds: float) -> None:
        await_only(asyncio.sleep(seconds))

    def gate(self) -> Gate:
        return _Gate()

    def notified(self, driver: Any, seconds: float) -> list[str]:
        async def heard() -> list[str]:
            notifications = driver.notifies(timeout=seconds, stop_after=1)
            return [notification.payload async for notification in notifications]

        return await_only(heard())

    def concurrently(
        self, calls: Sequence[Callable[[], ResultT]]
    ) -> Generator[tuple[int, Callable[[], ResultT]], None, None]:
        tasks = {asyncio.create_task(_called(call)): at for at, call in enumerate(calls)}
        waiting = set(tasks)
        try:
            while waiting:
                ended, waiting = await_only(asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED))
                for task in sorted(ended, key=tasks.__getitem__):
                    yield tasks[task], partial(_result, task)
        finally:
            for task in waiting:
                task.cancel()
            if waiting:
                await_only(asyncio.wait(waiting))

    def run_in_thread(self, work: Callable[[], None]) -> None:
        # Not the default loop: psycopg cannot wait on a proactor, which that is on Windows.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(greenlet_spawn(work))

    def block(self, wait: Callable[[], object]) -> None:
        # Not within the greenlet: a daemon thread that wakes up in there while the interpreter is shut down, and is
        # ended for it, has the process end by SIGSEGV.
        async def blocked() -> None:
            wait()

        await_only(blocked())


class _Gate:
    """A future of the loop that the waiting task runs in."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = self._loop.create_future()

    def wait(self, seconds: float | None = None) -> None:
        await_only(self._opened if seconds is None else self._within(seconds))

    async def _within(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._opened

    def open(self) -> None:
        self._loop.call_soon_threadsafe(self._open)

    def _open(self) -> None:
        if not self._opened.done():
            self._opened.set_result(None)


@dataclass
class _Exit:
    """What would end the loop if it left the task that it was raised in, before the run was released."""

    interruption: BaseException


async def _as_task(awaitable: Awaitable[ResultT]) -> ResultT | _Exit:
    try:
        return await awaitable
    except (SystemExit, KeyboardInterrupt) as interruption:
        return _Exit(interruption)


async def _called(call: Callable[[], ResultT]) -> ResultT | _Exit:
    try:
        return await greenlet_spawn(call)
    except (SystemExit, KeyboardInterrupt) as interruption:
        return _Exit(interruption)


def _result(task: asyncio.Task[ResultT | _Exit]) -> ResultT:
    result = task.result()
    if isinstance(result, _Exit):
        raise result.interruption
    return result


async def _as_coroutine(awaitable: Awaitable[ResultT]) -> ResultT:
    return await awaitable


def _wait_for(awaitable: Awaitable[ResultT], fn: Callable[..., Any]) -> ResultT:
    """Await something of the user's from within the greenlet that the library's own statements run in."""
    return await_only(_as_coroutine(_awaitable(awaitable, fn)))


def _awaitable(result: Awaitable[ResultT], fn: Callable[..., Any]) -> Awaitable[ResultT]:
    if not inspect.isawaitable(result):
        raise UsageError(f"{fn!r} returned {result!r:.80}, which cannot be awaited; pass a coroutine function.")
    return result
