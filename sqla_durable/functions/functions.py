"""Functions whose steps are journaled: started in a transaction, carried out by workers, observed by a handle."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, ParamSpec, TypeVar, Unpack, overload
from uuid import UUID

from sqlalchemy import ColumnElement
from sqlalchemy.orm import sessionmaker

from sqla_durable.caller import AnySession
from sqla_durable.changes import OnMismatch
from sqla_durable.dispatch import Work
from sqla_durable.execution import Outcome
from sqla_durable.functions.definition import LONGEST_BY_DEFAULT, Aliases, Registry, refuse_name
from sqla_durable.functions.function_run import FunctionRun
from sqla_durable.functions.handle import FunctionHandle
from sqla_durable.functions.limits import Rate
from sqla_durable.functions.model import FunctionStatus, FunctionT
from sqla_durable.functions.summary import FunctionConditions, FunctionSummary
from sqla_durable.functions.verbs import FunctionVerbs
from sqla_durable.holder import Holder
from sqla_durable.receipt import Receipt, ReceiptMixin
from sqla_durable.retry import Retry
from sqla_durable.runs import work_of
from sqla_durable.signal import SignalMixin
from sqla_durable.stepping import plain
from sqla_durable.sync_sessions import SyncSessions

if TYPE_CHECKING:
    from sqla_durable.asyncio.functions import AsyncFunctions

P = ParamSpec("P")
InputT = TypeVar("InputT")
OutputT = TypeVar("OutputT")
ReplyT = TypeVar("ReplyT")
When = datetime | timedelta | ColumnElement[datetime]
"""When a run is due: an aware datetime, an SQL expression, or a duration from now on the database's clock."""
NO_INPUT: Final[Any] = object()


class Functions(Generic[FunctionT]):
    """Ordinary functions whose steps are journaled in two tables of yours.

    ::

        functions = Functions(sessionmaker(engine), DurableRun, DurableStep)

        @functions.function("fulfil-order")
        def fulfil_order(run: FunctionRun, order: Order) -> Shipment: ...

        with Session.begin() as session:
            handle = functions.start(session, fulfil_order, order, key=f"fulfil-{order.id}")

    Wherever a ``handle`` is taken, the UUID that is the run's primary key will do.

    :param session_factory: makes the session of each transaction; bound to one engine of PostgreSQL by psycopg 3.
    :param run: the mapped class with :class:`.FunctionMixin`.
    :param receipt: the mapped class with :class:`.ReceiptMixin` of ``run``.
    :param signals: the mapped class with :class:`.SignalMixin` of ``run``, where runs wait for signals.
    :param owner: the name that leases carry for people to read.
    :param concurrency_per_tenant: how many runs of one tenant may be live, of whatever function, in all workers.
    :raises ConfigurationError: where the classes do not belong together.
    """

    def __init__(
        self,
        session_factory: sessionmaker[Any],
        run: type[FunctionT],
        receipt: type[ReceiptMixin[Any]],
        *,
        signals: type[SignalMixin[Any]] | None = None,
        owner: str | None = None,
        concurrency_per_tenant: int | None = None,
    ) -> None:
        self._registry = Registry(concurrency_per_tenant)
        self._verbs = FunctionVerbs(SyncSessions(session_factory), run, receipt, signals, owner, self._registry)
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
        [Callable[Concatenate[FunctionRun[Any], P], OutputT]], Callable[Concatenate[FunctionRun[Any], P], OutputT]
    ]:
        """Declare a function; the decorated one stays what it was, and keeps its signature.

        It is called with its run and one input, or with its run alone. Input and result are pydantic models,
        dataclasses or plain typed values, as its annotations say.

        :param name: what its runs are known by, in the database too: it outlives renaming the Python function.
        :param retry: how often a run may be started, and how long it waits in between; by default what the run class
         says.
        :param max_duration: for how long a run may be carried out at a time, on the database clock, before it lands as
         timed out; by default one hour, None for any time. Waiting in the database does not count. A run keeps what
         its function had when it was started.
        :param concurrency: how many of its runs may be live, which is running, at a time in all workers.
        :param concurrency_per_tenant: how many of them of one tenant; a run without a tenant does not count.
        :param rate: how many may be started in a time by all workers.
        :param on_mismatch: what happens where the code has changed and is at odds with the receipts of a run; by
         default the run fails.
        :param aliases: the former key of each renamed step by its present one; several, with the latest first. Its
         receipts are found, and a keyed step goes on with the idempotency key that it had at first.
        :raises ConfigurationError: where the name is taken, the function could not be called so, or two steps would
         share a receipt.
        """
        refuse_name(name)

        def register(
            body: Callable[Concatenate[FunctionRun[Any], P], OutputT],
        ) -> Callable[Concatenate[FunctionRun[Any], P], OutputT]:
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
        """Know the functions of others on the same tables, too, and those that are declared there later.

        All but carrying them out is then done from here: coroutine functions are started by an ordinary session, and
        their results read. Their own form, and its worker, carries them out, and under the limits that it has.

        :param other: the others, of either form.
        :raises ConfigurationError: where their runs are in other tables, or a name is taken.
        """
        self._verbs.include(other)

    # in the caller's transaction

    @overload
    def start(
        self,
        session: AnySession,
        function: Callable[[Any], Awaitable[OutputT]],
        /,
        *,
        key: str | None = None,
        run_at: When | None = None,
        priority: int | None = None,
        tenant: str | None = None,
        **values: Any,
    ) -> FunctionHandle[OutputT]: ...

    @overload
    def start(
        self,
        session: AnySession,
        function: Callable[[Any, InputT], Awaitable[OutputT]],
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
    def start(
        self,
        session: AnySession,
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
    def start(
        self,
        session: AnySession,
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
    def start(
        self,
        session: AnySession,
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

    def start(
        self,
        session: AnySession,
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
        """Start a run of a function in the caller's transaction: it exists if, and only if, the caller commits.

        With a key, the same key and input return the handle of the run that was started before, in whatever status it
        is. Keys are unique for each function and tenant.

        :param session: the caller's session, which is flushed first; nothing is committed here.
        :param function: the decorated function, or its name.
        :param given: its input, what it is called with.
        :param key: the idempotency key, from 1 to 255 printable characters.
        :param run_at: when it is due: an aware datetime, a duration from now, or an SQL expression; by default at once.
        :param priority: from 0, the default, to 9; a higher one is carried out first.
        :param tenant: whose run it is.
        :param values: attributes of your own on the run class.
        :raises InputError: where the input is not what the function takes; no run exists.
        :raises KeyConflict: where the key belongs to a run that was started with another input.
        :raises TransactionConflict: retry the whole transaction.
        """
        inputs = () if given is NO_INPUT else (given,)
        values |= {"run_at": run_at, "priority": priority, "tenant": tenant}
        return self._verbs.start_function(session, function, inputs, key, values)

    @overload
    def start_many(
        self,
        session: AnySession,
        function: Callable[[Any, InputT], Awaitable[OutputT]],
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
    def start_many(
        self,
        session: AnySession,
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
    def start_many(
        self,
        session: AnySession,
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

    def start_many(
        self,
        session: AnySession,
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
        """Start a run for each input with one statement for every thousand, in the caller's transaction.

        What is not named here is as for :meth:`start`, and the same for all of them.

        :param inputs: what each is called with.
        :param key: returns the idempotency key for an input.
        :return: the handles in the order of the inputs.
        :raises InputError: where an input is not what the function takes; no run exists.
        :raises KeyConflict: where a key belongs to a run that was started with another input.
        :raises TransactionConflict: retry the whole transaction.
        """
        every = list(inputs)
        keys = None if key is None else [key(each) for each in every]
        values |= {"run_at": run_at, "priority": priority, "tenant": tenant}
        return self._verbs.start_many(session, function, [(each,) for each in every], keys, values)

    def signal(
        self,
        session: AnySession,
        handle: FunctionHandle[Any] | UUID,
        name: str,
        payload: object = None,
        *,
        type_: Any = Any,
    ) -> bool:
        """Send a signal to a run, in the caller's transaction: it is sent if, and only if, the caller commits.

        A run that waits for it, with ``run.wait()`` or ``run.answer()``, becomes due; one that does not wait yet finds
        it when it comes to that. See :meth:`.Runs.signal`.

        :param name: the signal's, from 1 to 200 printable characters.
        :param payload: what the run is handed: a JSON value, a pydantic model, a dataclass.
        :param type_: how the payload is stored, as an annotation would say it; by default as what it is.
        :return: True if it was sent; False where the run has landed.
        :raises RunNotFound: where there is no such run.
        :raises ConfigurationError: where the functions were made without ``signals``.
        :raises TransactionConflict: retry the whole transaction.
        """
        return self._verbs.signal(session, handle, name, payload, type_)

    @overload
    def update(
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
    def update(
        self,
        handle: FunctionHandle[Any] | UUID,
        name: str,
        payload: object = None,
        *,
        timeout: timedelta,
        type_: Any = Any,
        returns: Any = Any,
    ) -> Any: ...

    def update(
        self,
        handle: FunctionHandle[Any] | UUID,
        name: str,
        payload: object = None,
        *,
        timeout: timedelta,
        type_: Any = Any,
        returns: Any = Any,
    ) -> Any:
        """Send a signal in a transaction of its own, and return what the run replies with ``run.answer()``.

        :param name: the signal's.
        :param payload: what the run is handed, stored as ``type_`` says: see :meth:`signal`.
        :param timeout: for how long to wait for the reply.
        :param returns: what the reply is decoded as; by default plain JSON.
        :raises UpdateFailed: where what the run called to answer it has failed for good.
        :raises UpdateTimeout: where no reply came in time; the signal stays sent.
        :raises NotAnswered: where the run has ended without a reply, or has taken the signal with ``run.wait()``.
        :raises RunNotFound: where there is no such run.
        :raises ConfigurationError: where the functions were made without ``signals``.
        """
        return self._verbs.update(handle, name, payload, type_, returns, timeout)

    def request_cancel(self, session: AnySession, handle: FunctionHandle[Any] | UUID) -> bool:
        """Ask, in the caller's transaction, for a run to be cancelled; the first instant is kept.

        One that is not being carried out lands at once; one that is, at its next step or heartbeat.

        :return: True if the request stands; False where the run has landed already, and is unchanged.
        :raises TransactionConflict: retry the whole transaction.
        """
        return self._verbs.cancel_function(session, handle)

    def decode_input(self, function: Callable[..., Any] | str, value: object) -> Any:
        """Return a JSON value, such as a request's, as the input that a function takes: for :meth:`start`.

        :param function: the decorated function, or its name.
        :param value: as ``json.loads`` returns it.
        :raises InputError: where it is not one that the function takes, or it takes none.
        """
        return self._verbs.decode_input(function, value)

    def fork(
        self,
        session: AnySession,
        handle: FunctionHandle[OutputT],
        /,
        *,
        from_step: str | int,
        key: str | None = None,
        run_at: When | None = None,
        priority: int | None = None,
        **values: Any,
    ) -> FunctionHandle[OutputT]:
        """Start a new run from a step of another one, in the caller's transaction.

        It has the function, input, tenant, priority and your own columns of the other, and the receipts of its steps
        that had succeeded before that step; it begins with them, and does the rest. The other run is untouched, in
        whatever status it is, and is not waited for. Keyed steps that are done again are called with other idempotency
        keys: the fork is another run.

        :param session: the caller's session, which is flushed first; nothing is committed here.
        :param handle: the run that is forked.
        :param from_step: the key of the first step that is done again; it has a receipt, of success or not.
        :param key: the idempotency key of the fork; with it, the same fork returns the same run.
        :param run_at: as for :meth:`start`.
        :param priority: that of the run that is forked, by default.
        :param values: attributes of your own on the run class that are to differ.
        :raises UsageError: where there is no receipt of that step, naming those there are; or where a step before it,
         an operation or a wait, has not ended.
        :raises RunNotFound: where there is no such run.
        :raises KeyConflict: where the key belongs to another run.
        :raises TransactionConflict: retry the whole transaction.
        """
        values |= {"run_at": run_at, "priority": priority}
        return self._verbs.fork(session, handle, from_step, key, values)

    # observing

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
        """Rebuild a handle from the key that a run was started with, or from its id; nothing is read.

        :param function: the decorated function.
        :param key: the idempotency key.
        :param tenant: the tenant that it was started for, if any.
        :param id: the primary key of the run, as ``handle.id`` has it.
        :raises UsageError: where neither is given, or both.
        """
        return self._verbs.handle(function, key, tenant, id)

    def describe(self, handle: FunctionHandle[Any] | UUID, *, session: AnySession | None = None) -> FunctionSummary:
        """Read how a run stands: its status, attempts, times, progress and failure.

        :param session: the caller's, to read in its transaction.
        :raises RunNotFound: where there is no such run.
        """
        return self._verbs.describe_function(handle, session)

    def steps(self, handle: FunctionHandle[Any] | UUID, *, session: AnySession | None = None) -> tuple[Receipt, ...]:
        """Read the receipts of a run in the order they were recorded.

        :param session: the caller's, to read in its transaction.
        :raises RunNotFound: where the handle has a key that no run has.
        """
        return self._verbs.steps_of(handle, session)

    def wait(self, handle: FunctionHandle[Any] | UUID, *, timeout: timedelta | None = None) -> FunctionStatus:
        """Wait until a run has landed; return the status in which it has.

        :param timeout: for how long at the most; None for any time.
        :raises RunNotLanded: where it has not by then; it goes on.
        :raises RunNotFound: where there is no such run.
        """
        status: FunctionStatus = self._verbs.wait(handle, timeout).status
        return status

    def result(
        self,
        handle: FunctionHandle[OutputT],
        *,
        timeout: timedelta | None = None,
        session: AnySession | None = None,
    ) -> OutputT:
        """Return what a run has returned, having waited for it to land.

        :param timeout: for how long to wait at the most; None for any time.
        :param session: the caller's, to read in its transaction without waiting.
        :raises RunFailed: where it has failed, with what was recorded; :class:`.RunCancelled` and :class:`.RunTimedOut`
         where it was cancelled, or ran past its deadline.
        :raises RunNotLanded: where it has not landed in time; it goes on.
        :raises RunNotFound: where there is no such run.
        :raises ResultMismatch: where the recorded result does not decode as what the function returns now.
        """
        output: OutputT = self._verbs.result(handle, timeout, session)
        return output

    def find(
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
        """List the runs that meet every condition given, the newest first. See :meth:`.Runs.find`.

        :param function: only runs of this function, given itself or its name.
        :param key: only runs with this key.
        :param tenant: only runs of this tenant.
        :param waiting: only runs that wait, or do not: ready, and not due yet on the database clock.
        """
        return self._verbs.find(
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

    def requeue(self, handle: FunctionHandle[Any] | UUID) -> bool:
        """Give a run that failed, was cancelled or timed out another life. See :meth:`.Runs.requeue`."""
        return self._verbs.requeue_function(handle)

    # many at a time

    def counts(self, **conditions: Unpack[FunctionConditions]) -> dict[str, dict[FunctionStatus, int]]:
        """Count the runs of each function and status, of those that meet every condition given.

        :param conditions: those of :meth:`find`.
        :return: for each function that has such runs, by its name, how many are in each status.
        """
        return self._verbs.counts_by_function(conditions)

    def requeue_all(
        self, *, limit: int | None = None, everything: bool = False, **conditions: Unpack[FunctionConditions]
    ) -> int:
        """Give all runs that meet every condition another life; return how many. See :meth:`.Runs.requeue_all`.

        :param limit: how many at the most; by default all.
        :param everything: whether all runs are meant, where there is no condition.
        :param conditions: those of :meth:`find`.
        :raises UsageError: without any condition.
        """
        return self._verbs.bulk.requeue(limit, conditions, everything=everything)

    def cancel_all(
        self,
        session: AnySession,
        *,
        limit: int | None = None,
        everything: bool = False,
        **conditions: Unpack[FunctionConditions],
    ) -> int:
        """Ask, in the caller's transaction, for many runs to be cancelled. See :meth:`.Runs.cancel_all`.

        :param limit: how many at the most; by default all.
        :param everything: whether all runs are meant, where there is no condition.
        :param conditions: those of :meth:`find`.
        :return: how many were asked.
        :raises UsageError: without any condition.
        :raises TransactionConflict: retry the whole transaction.
        """
        return self._verbs.bulk.cancel(session, limit, conditions, everything=everything)

    def reap(self, limit: int = 100) -> int:
        """Heal up to ``limit`` lapsed runs; return how many. A worker does it, too. See :meth:`.Runs.reap`."""
        return self._verbs.reap(limit)

    def purge(
        self,
        older_than: timedelta,
        *,
        status: FunctionStatus | Collection[FunctionStatus] | None = None,
        batch: int = 1000,
        limit: int | None = None,
    ) -> int:
        """Delete runs that ended long enough ago, and their receipts; return how many. See :meth:`.Runs.purge`.

        :param older_than: how long ago at the least, on the database clock.
        :param status: only runs in this terminal status, or in one of these.
        :param batch: how many are deleted at a time.
        :param limit: how many at the most; by default all.
        :raises RunReferenced: where rows of another table refer to such a run and keep it from being deleted.
        """
        return self._verbs.bulk.purge(older_than, status, batch, limit)

    # carrying out

    def execute(self, handle: FunctionHandle[Any] | UUID, *, run_now: bool = False) -> Outcome:
        """Carry one run out in this process, as a worker would. See :meth:`.Runs.execute`.

        :param run_now: claim a run that is not due, too.
        """
        return self._verbs.execute(self._verbs.ident(handle), self._carry_out, run_now=run_now)

    def works(self) -> Sequence[Work]:
        """Return what a :class:`.Worker` carries out; ``Worker(functions)`` calls it."""
        return [work_of(self._verbs, self._carry_out)]

    def _carry_out(self, holder: Holder[FunctionT]) -> None:
        definition, given = self._verbs.prepare(holder)
        run: FunctionRun[FunctionT] = FunctionRun(holder, self._verbs)
        self._verbs.returned(holder, definition, plain(definition.body(run, *given), definition.body))
