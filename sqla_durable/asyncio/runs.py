"""Runs over asyncio.

Every verb is the one of the synchronous form, run as :meth:`~sqlalchemy.ext.asyncio.AsyncSession.run_sync` runs
its function: there is no second copy of any statement.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Any, Generic, TypeVar, Unpack, cast, overload

from sqlalchemy import ColumnElement
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.util import greenlet_spawn

from sqla_durable.asyncio.carrying import carry_out, work_of
from sqla_durable.asyncio.sessions import AnyAsyncSession, AsyncSessions, unproxied
from sqla_durable.asyncio.stepping import AsyncStepping
from sqla_durable.dispatch import AsyncWork
from sqla_durable.execution import Outcome
from sqla_durable.failure import Failure
from sqla_durable.lease import Lease
from sqla_durable.listing import RunConditions, RunSummary
from sqla_durable.machine import StatusT
from sqla_durable.receipt import Receipt, ReceiptMixin
from sqla_durable.run import RunT
from sqla_durable.signal import SignalMixin
from sqla_durable.status import StatusMachine
from sqla_durable.stepping import refuse_other_form
from sqla_durable.store import Store
from sqla_durable.verbs import Verbs

ResultT = TypeVar("ResultT")
A = TypeVar("A")


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
        self.receipt_class = receipt
        """The mapped class of their receipts."""

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
        key: str | None = None,
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
            key=key,
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
        session: AnyAsyncSession,
        *,
        limit: int | None = None,
        everything: bool = False,
        **conditions: Unpack[RunConditions],
    ) -> int:
        """Ask, in the caller's transaction, for many runs to be cancelled. See :meth:`.Runs.cancel_all`."""
        return await unproxied(session).run_sync(self._verbs.bulk.cancel, limit, conditions, everything=everything)

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
        self, session: AnyAsyncSession, ident: object, name: str, payload: object = None, *, type_: Any = Any
    ) -> bool:
        """Send a signal to a run, in the caller's transaction. See :meth:`.Runs.signal`."""
        return await unproxied(session).run_sync(self._verbs.sending.signal, ident, name, payload, type_)

    async def start(self, session: AnyAsyncSession, /, *, key: str | None = None, **values: Any) -> RunT:
        """Start a run in the caller's transaction. See :meth:`.Runs.start`."""
        return await unproxied(session).run_sync(self._verbs.start, key, values)

    async def request_cancel(self, session: AnyAsyncSession, ident: object) -> bool:
        """Ask, in the caller's transaction, for a run to be cancelled. See :meth:`.Runs.request_cancel`."""
        return await unproxied(session).run_sync(self._verbs.request_cancel, ident)

    async def fence(self, session: AnyAsyncSession, lease: Lease) -> None:
        """Lock the run in the caller's transaction and check the fence. See :meth:`.Runs.fence`."""
        await unproxied(session).run_sync(self._verbs.fence, lease)

    async def record(
        self, session: AnyAsyncSession, lease: Lease, key: str | int, result: object, *, type_: Any = Any
    ) -> None:
        """Write a step's receipt in the caller's transaction. See :meth:`.Runs.record`."""
        await unproxied(session).run_sync(self._verbs.record, lease, key, result, type_)

    async def attach_ids(
        self, session: AnyAsyncSession, ident: object, key: str | int, ids: object, *, type_: Any = Any
    ) -> bool:
        """Say by which ids the service knows an operation. See :meth:`.Runs.attach_ids`."""
        return await unproxied(session).run_sync(self._verbs.attach_ids, ident, key, ids, type_)

    async def never_issued(self, session: AnyAsyncSession, ident: object, key: str | int) -> bool:
        """Allow an operation to be issued anew. See :meth:`.Runs.never_issued`."""
        return await unproxied(session).run_sync(self._verbs.never_issued, ident, key)


async def transition(
    machine: StatusMachine[StatusT],
    session: AnyAsyncSession,
    run_or_ident: object,
    to: StatusT,
    *,
    from_: StatusT | Collection[StatusT] | None = None,
    where: ColumnElement[bool] | None = None,
    values: Mapping[str, Any] | None = None,
) -> bool:
    """Move one row along an edge of its machine. See :meth:`.StatusMachine.transition`."""
    return await unproxied(session).run_sync(
        lambda session: machine.transition(session, run_or_ident, to, from_=from_, where=where, values=values)
    )
