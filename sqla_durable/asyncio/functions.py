"""Functions over asyncio: the bodies are coroutine functions, and every verb is that of the synchronous form."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack, overload
from uuid import UUID

from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.util import greenlet_spawn
from typing_extensions import TypeVar as DefaultingTypeVar

from sqla_durable.asyncio.carrying import carry_out, work_of
from sqla_durable.asyncio.sessions import AnyAsyncSession, AsyncSessions, unproxied
from sqla_durable.asyncio.stepping import AsyncStepping
from sqla_durable.changes import OnMismatch
from sqla_durable.dispatch import AsyncWork
from sqla_durable.execution import Outcome
from sqla_durable.functions.definition import LONGEST_BY_DEFAULT, Aliases, Registry, refuse_name
from sqla_durable.functions.function_run import FunctionRun
from sqla_durable.functions.functions import NO_INPUT, Functions, When
from sqla_durable.functions.handle import FunctionHandle
from sqla_durable.functions.limits import Rate
from sqla_durable.functions.model import FunctionMixin, FunctionStatus, FunctionT
from sqla_durable.functions.summary import FunctionConditions, FunctionSummary
from sqla_durable.functions.verbs import FunctionVerbs
from sqla_durable.holder import Holder
from sqla_durable.receipt import Receipt, ReceiptMixin
from sqla_durable.retry import Retry
from sqla_durable.signal import SignalMixin

P = ParamSpec("P")
InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")
ReplyT = TypeVar("ReplyT")
RowT = DefaultingTypeVar("RowT", bound=FunctionMixin, default=Any)


class AsyncFunctionRun(AsyncStepping[RowT], Generic[RowT]):
    """A claimed run of a function: what its coroutine body is called with. See :class:`.FunctionRun`."""

    def __init__(self, holder: Holder[RowT], verbs: FunctionVerbs[Any]) -> None:
        super().__init__(holder)
        self._verbs = verbs

    async def publish(self, state: object) -> None:
        """Make ``state`` known as how far the run has come. See :meth:`.FunctionRun.publish`."""
        await greenlet_spawn(self._verbs.publish, self.holder, state)


class AsyncFunctions(Generic[FunctionT]):
    """Coroutine functions whose steps are journaled in two tables of yours. See :class:`.Functions`.

    ::

        functions = AsyncFunctions(async_sessionmaker(engine), DurableRun, DurableStep)

        @functions.function("fulfil-order")
        async def fulfil_order(run: AsyncFunctionRun, order: Order) -> Shipment: ...

    :param session_factory: makes the session of each transaction; bound to one asyncio engine.
    :param run: the mapped class with :class:`.FunctionMixin`.
    :param receipt: the mapped class with :class:`.ReceiptMixin` of ``run``.
    :param signals: the mapped class with :class:`.SignalMixin` of ``run``, where runs wait for signals.
    :param owner: the name that leases carry for people to read.
    :param concurrency_per_tenant: how many runs of one tenant may be live, of whatever function, in all workers.
    :raises ConfigurationError: where the classes do not belong together.
    """

    def __init__(
        self,
        session_factory: async_sessionmaker[Any],
        run: type[FunctionT],
        receipt: type[ReceiptMixin[Any]],
        *,
        signals: type[SignalMixin[Any]] | None = None,
        owner: str | None = None,
        concurrency_per_tenant: int | None = None,
    ) -> None:
        self._registry = Registry(concurrency_per_tenant, coroutines=True)
        self._verbs = FunctionVerbs(AsyncSessions(session_factory), run, receipt, signals, owner, self._registry)
        self.session_factory = session_factory
        """The sessionmaker that it was made with."""
        self.run_class = run
        """The mapped class of its runs."""
        self.receipt_class = receipt
        """The mapped class of their receipts."""

    def function(
        self,
        name: str,
        *,
        retry: Retry | None = None,
        max_duration: timedelta | None = LONGEST_BY_DEFAULT,
        concurrency: int | None = None,
        concurrency_per_tenant: int | None = None,
        rate: Rate | None = None,
        on_mismatch: OnMismatch = OnMismatch.FAIL,
        aliases: Aliases | None = None,
    ) -> Callable[
        [Callable[Concatenate[AsyncFunctionRun[Any], P], Awaitable[OutputT]]],
        Callable[Concatenate[AsyncFunctionRun[Any], P], Awaitable[OutputT]],
    ]:
        """Declare a coroutine function. See :meth:`.Functions.function`.

        :param max_duration: as there, by default one hour. The task is cancelled when it is over.
        """
        refuse_name(name)

        def register(
            body: Callable[Concatenate[AsyncFunctionRun[Any], P], Awaitable[OutputT]],
        ) -> Callable[Concatenate[AsyncFunctionRun[Any], P], Awaitable[OutputT]]:
            self._registry.add(
                name,
                body,
                retry=retry,
                max_duration=max_duration,
                concurrency=concurrency,
                concurrency_per_tenant=concurrency_per_tenant,
                rate=rate,
                on_mismatch=on_mismatch,
                aliases=aliases,
            )
            return body

        return register

    def include(self, other: Functions[FunctionT] | AsyncFunctions[FunctionT], /) -> None:
        """Know the functions of others on the same tables, too. See :meth:`.Functions.include`."""
        self._verbs.include(other)

    @overload
    async def start(
        self,
        session: AnyAsyncSession,
        function: Callable[[AsyncFunctionRun[Any]], Awaitable[OutputT]],
        /,
        *,
        key: str | None = None,
        run_at: When | None = None,
        priority: int | None = None,
        tenant: str | None = None,
        **values: Any,
    ) -> FunctionHandle[OutputT]: ...

    @overload
    async def start(
        self,
        session: AnyAsyncSession,
        function: Callable[[AsyncFunctionRun[Any], InputT], Awaitable[OutputT]],
        given: InputT,
        /,
        *,
        key: str | None = None,
        run_at: When | None = None,
        priority: int | None = None,
        tenant: str | None = None,
        **values: Any,
    ) -> FunctionHandle[OutputT]: ...

    @overload
    async def start(
        self,
        session: AnyAsyncSession,
        function: Callable[[FunctionRun[Any]], OutputT],
        /,
        *,
        key: str | None = None,
        run_at: When | None = None,
        priority: int | None = None,
        tenant: str | None = None,
        **values: Any,
    ) -> FunctionHandle[OutputT]: ...

    @overload
    async def start(
        self,
        session: AnyAsyncSession,
        function: Callable[[FunctionRun[Any], InputT], OutputT],
        given: InputT,
        /,
        *,
        key: str | None = None,
        run_at: When | None = None,
        priority: int | None = None,
        tenant: str | None = None,
        **values: Any,
    ) -> FunctionHandle[OutputT]: ...

    @overload
    async def start(
        self,
        session: AnyAsyncSession,
        function: str,
        given: object = ...,
        /,
        *,
        key: str | None = None,
        run_at: When | None = None,
        priority: int | None = None,
        tenant: str | None = None,
        **values: Any,
    ) -> FunctionHandle: ...

    async def start(
        self,
        session: AnyAsyncSession,
        function: Callable[..., Any] | str,
        given: object = NO_INPUT,
        /,
        *,
        key: str | None = None,
        run_at: When | None = None,
        priority: int | None = None,
        tenant: str | None = None,
        **values: Any,
    ) -> FunctionHandle[Any]:
        """Start a run of a function in the caller's transaction. See :meth:`.Functions.start`."""
        inputs = () if given is NO_INPUT else (given,)
        values |= {"run_at": run_at, "priority": priority, "tenant": tenant}
        return await unproxied(session).run_sync(self._verbs.start_function, function, inputs, key, values)

    @overload
    async def start_many(
        self,
        session: AnyAsyncSession,
        function: Callable[[AsyncFunctionRun[Any], InputT], Awaitable[OutputT]],
        inputs: Iterable[InputT],
        /,
        *,
        key: Callable[[InputT], str] | None = None,
        run_at: When | None = None,
        priority: int | None = None,
        tenant: str | None = None,
        **values: Any,
    ) -> list[FunctionHandle[OutputT]]: ...

    @overload
    async def start_many(
        self,
        session: AnyAsyncSession,
        function: Callable[[FunctionRun[Any], InputT], OutputT],
        inputs: Iterable[InputT],
        /,
        *,
        key: Callable[[InputT], str] | None = None,
        run_at: When | None = None,
        priority: int | None = None,
        tenant: str | None = None,
        **values: Any,
    ) -> list[FunctionHandle[OutputT]]: ...

    @overload
    async def start_many(
        self,
        session: AnyAsyncSession,
        function: str,
        inputs: Iterable[Any],
        /,
        *,
        key: Callable[[Any], str] | None = None,
        run_at: When | None = None,
        priority: int | None = None,
        tenant: str | None = None,
        **values: Any,
    ) -> list[FunctionHandle]: ...

    async def start_many(
        self,
        session: AnyAsyncSession,
        function: Callable[..., Any] | str,
        inputs: Iterable[Any],
        /,
        *,
        key: Callable[[Any], str] | None = None,
        run_at: When | None = None,
        priority: int | None = None,
        tenant: str | None = None,
        **values: Any,
    ) -> list[FunctionHandle[Any]]:
        """Start a run for each input, in the caller's transaction. See :meth:`.Functions.start_many`."""
        every = list(inputs)
        keys = None if key is None else [key(each) for each in every]
        values |= {"run_at": run_at, "priority": priority, "tenant": tenant}
        given = [(each,) for each in every]
        return await unproxied(session).run_sync(self._verbs.start_many, function, given, keys, values)

    async def signal(
        self,
        session: AnyAsyncSession,
        handle: FunctionHandle[Any] | UUID,
        name: str,
        payload: object = None,
        *,
        type_: Any = Any,
    ) -> bool:
        """Send a signal to a run, in the caller's transaction. See :meth:`.Functions.signal`."""
        return await unproxied(session).run_sync(self._verbs.signal, handle, name, payload, type_)

    @overload
    async def update(
        self,
        handle: FunctionHandle[Any] | UUID,
        name: str,
        payload: object = None,
        *,
        timeout: timedelta,
        type_: Any = Any,
        returns: type[ReplyT],
    ) -> ReplyT: ...

    @overload
    async def update(
        self,
        handle: FunctionHandle[Any] | UUID,
        name: str,
        payload: object = None,
        *,
        timeout: timedelta,
        type_: Any = Any,
        returns: Any = Any,
    ) -> Any: ...

    async def update(
        self,
        handle: FunctionHandle[Any] | UUID,
        name: str,
        payload: object = None,
        *,
        timeout: timedelta,
        type_: Any = Any,
        returns: Any = Any,
    ) -> Any:
        """Send a signal, and return what the run replies. See :meth:`.Functions.update`."""
        return await greenlet_spawn(self._verbs.update, handle, name, payload, type_, returns, timeout)

    async def request_cancel(self, session: AnyAsyncSession, handle: FunctionHandle[Any] | UUID) -> bool:
        """Ask, in the caller's transaction, for a run to be cancelled. See :meth:`.Functions.request_cancel`."""
        return await unproxied(session).run_sync(self._verbs.cancel_function, handle)

    def decode_input(self, function: Callable[..., Any] | str, value: object) -> Any:
        """Return a JSON value as the input that a function takes. See :meth:`.Functions.decode_input`."""
        return self._verbs.decode_input(function, value)

    async def fork(
        self,
        session: AnyAsyncSession,
        handle: FunctionHandle[OutputT],
        /,
        *,
        from_step: str | int,
        key: str | None = None,
        run_at: When | None = None,
        priority: int | None = None,
        **values: Any,
    ) -> FunctionHandle[OutputT]:
        """Start a new run from a step of another one, in the caller's transaction. See :meth:`.Functions.fork`."""
        values |= {"run_at": run_at, "priority": priority}
        return await unproxied(session).run_sync(self._verbs.fork, handle, from_step, key, values)

    @overload
    def handle(
        self, function: Callable[..., Awaitable[OutputT]], /, *, key: str, tenant: str | None = None
    ) -> FunctionHandle[OutputT]: ...

    @overload
    def handle(self, function: Callable[..., Awaitable[OutputT]], /, *, id: UUID) -> FunctionHandle[OutputT]: ...

    @overload
    def handle(
        self, function: Callable[..., OutputT], /, *, key: str, tenant: str | None = None
    ) -> FunctionHandle[OutputT]: ...

    @overload
    def handle(self, function: Callable[..., OutputT], /, *, id: UUID) -> FunctionHandle[OutputT]: ...

    def handle(
        self,
        function: Callable[..., Any],
        /,
        *,
        key: str | None = None,
        tenant: str | None = None,
        id: UUID | None = None,  # noqa: A002 - as the handle calls it
    ) -> FunctionHandle[Any]:
        """Rebuild a handle from the key that a run was started with, or from its id. See :meth:`.Functions.handle`."""
        return self._verbs.handle(function, key, tenant, id)

    async def describe(
        self, handle: FunctionHandle[Any] | UUID, *, session: AnyAsyncSession | None = None
    ) -> FunctionSummary:
        """Read how a run stands. See :meth:`.Functions.describe`."""
        return await greenlet_spawn(self._verbs.describe_function, handle, _sync(session))

    async def steps(
        self, handle: FunctionHandle[Any] | UUID, *, session: AnyAsyncSession | None = None
    ) -> tuple[Receipt, ...]:
        """Read the receipts of a run in the order they were recorded. See :meth:`.Functions.steps`."""
        return await greenlet_spawn(self._verbs.steps_of, handle, _sync(session))

    async def wait(self, handle: FunctionHandle[Any] | UUID, *, timeout: timedelta | None = None) -> FunctionStatus:
        """Wait until a run has landed; return the status in which it has. See :meth:`.Functions.wait`."""
        landed = await greenlet_spawn(self._verbs.wait, handle, timeout)
        status: FunctionStatus = landed.status
        return status

    async def result(
        self,
        handle: FunctionHandle[OutputT],
        *,
        timeout: timedelta | None = None,
        session: AnyAsyncSession | None = None,
    ) -> OutputT:
        """Return what a run has returned, having waited for it to land. See :meth:`.Functions.result`."""
        output: OutputT = await greenlet_spawn(self._verbs.result, handle, timeout, _sync(session))
        return output

    async def find(
        self,
        *,
        function: Callable[..., Any] | str | None = None,
        key: str | None = None,
        tenant: str | None = None,
        status: FunctionStatus | Collection[FunctionStatus] | None = None,
        older_than: timedelta | None = None,
        newer_than: timedelta | None = None,
        error: str | None = None,
        owner: str | None = None,
        cancel_requested: bool | None = None,
        waiting: bool | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> list[FunctionSummary]:
        """List the runs that meet every condition given, the newest first. See :meth:`.Functions.find`."""
        return await greenlet_spawn(
            self._verbs.find,
            function=function,
            key=key,
            tenant=tenant,
            status=status,
            older_than=older_than,
            newer_than=newer_than,
            error=error,
            owner=owner,
            cancel_requested=cancel_requested,
            waiting=waiting,
            limit=limit,
            after=after,
        )

    async def requeue(self, handle: FunctionHandle[Any] | UUID) -> bool:
        """Give a run that failed, was cancelled or timed out another life. See :meth:`.Runs.requeue`."""
        return await greenlet_spawn(self._verbs.requeue_function, handle)

    async def counts(self, **conditions: Unpack[FunctionConditions]) -> dict[str, dict[FunctionStatus, int]]:
        """Count the runs of each function and status. See :meth:`.Functions.counts`."""
        return await greenlet_spawn(self._verbs.counts_by_function, conditions)

    async def requeue_all(
        self, *, limit: int | None = None, everything: bool = False, **conditions: Unpack[FunctionConditions]
    ) -> int:
        """Give all runs that meet every condition another life. See :meth:`.Functions.requeue_all`."""
        return await greenlet_spawn(self._verbs.bulk.requeue, limit, conditions, everything=everything)

    async def cancel_all(
        self,
        session: AnyAsyncSession,
        *,
        limit: int | None = None,
        everything: bool = False,
        **conditions: Unpack[FunctionConditions],
    ) -> int:
        """Ask, in the caller's transaction, for many runs to be cancelled. See :meth:`.Functions.cancel_all`."""
        return await unproxied(session).run_sync(self._verbs.bulk.cancel, limit, conditions, everything=everything)

    async def reap(self, limit: int = 100) -> int:
        """Heal up to ``limit`` lapsed runs. See :meth:`.Functions.reap`."""
        return await greenlet_spawn(self._verbs.reap, limit)

    async def purge(
        self,
        older_than: timedelta,
        *,
        status: FunctionStatus | Collection[FunctionStatus] | None = None,
        batch: int = 1000,
        limit: int | None = None,
    ) -> int:
        """Delete runs that ended long enough ago, and their receipts. See :meth:`.Functions.purge`."""
        return await greenlet_spawn(self._verbs.bulk.purge, older_than, status, batch, limit)

    async def execute(self, handle: FunctionHandle[Any] | UUID, *, run_now: bool = False) -> Outcome:
        """Carry one run out in this process, as a worker would. See :meth:`.Functions.execute`."""
        ident = await greenlet_spawn(self._verbs.ident, handle)
        return await carry_out(self._verbs, ident, self._run, self._carry_out, run_now=run_now)

    def works(self) -> Sequence[AsyncWork]:
        """Return what an :class:`.AsyncWorker` carries out; ``AsyncWorker(functions)`` calls it."""
        return [work_of(self._verbs, self._run, self._carry_out)]

    def _run(self, holder: Holder[FunctionT]) -> AsyncFunctionRun[FunctionT]:
        return AsyncFunctionRun(holder, self._verbs)

    async def _carry_out(self, run: AsyncFunctionRun[FunctionT]) -> None:
        definition, given = await greenlet_spawn(self._verbs.prepare, run.holder)
        result = await definition.body(run, *given)
        await greenlet_spawn(self._verbs.returned, run.holder, definition, result)


def _sync(session: AnyAsyncSession | None) -> Any:
    return None if session is None else unproxied(session).sync_session
