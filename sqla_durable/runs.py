"""The session helper: claims runs, carries them out step by step, and reads them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import timedelta
from enum import StrEnum
from typing import Any, Generic, TypeVar, Unpack, cast, overload

from sqlalchemy.orm import sessionmaker

from sqla_durable.caller import AnySession
from sqla_durable.dispatch import Work, in_slot
from sqla_durable.execution import Outcome
from sqla_durable.failure import Failure
from sqla_durable.holder import Holder
from sqla_durable.lease import Lease
from sqla_durable.listing import RunConditions, RunSummary
from sqla_durable.receipt import Receipt, ReceiptMixin
from sqla_durable.run import RunT
from sqla_durable.signal import SignalMixin
from sqla_durable.stepping import Stepping, plain, refuse_coroutine, refuse_other_form
from sqla_durable.store import Store
from sqla_durable.sync_sessions import SyncSessions
from sqla_durable.verbs import Verbs

ResultT = TypeVar("ResultT")
A = TypeVar("A")


class Run(Stepping[RunT]):
    """A claimed run, as its handler sees it."""

    def finish(self, **values: Any) -> None:
        """Land the run as done.

        :param values: other attributes of the run to set in the same statement.
        :raises LostLease: where the fence has moved on; nothing is written.
        :raises Cancelled: where someone asked for the run to be cancelled.
        :raises TimedOut: where the run ran past its deadline.
        """
        self.holder.finish(values)

    def fail(self, error: BaseException | Failure, /, **values: Any) -> None:
        """Land the run as failed, with ``error`` recorded.

        :param error: what went wrong.
        :param values: other attributes of the run to set in the same statement.
        :raises LostLease: where the fence has moved on; nothing is written.
        :raises Cancelled: where someone asked for the run to be cancelled.
        :raises TimedOut: where the run ran past its deadline.
        """
        self.holder.fail(error, values)

    def release(self) -> None:
        """Hand the run back, ready to be claimed at once; this handle, and every copy of its lease, is spent.

        A run that someone asked to cancel lands as cancelled instead, and one past its deadline as timed out.

        :raises ConfigurationError: where the machine has no edge from running to ready.
        :raises LostLease: where the fence has moved on; nothing is written.
        """
        self.holder.release()


class Runs(Generic[RunT]):
    """The runs of one class: claimed, carried out step by step, healed and read.

    ::

        plans = Runs(sessionmaker(engine), Plan, PlanStep)
        outcome = plans.execute(plan.id, carry_out)

    :param session_factory: makes the session of each transaction; bound to one engine of PostgreSQL by psycopg 3. What
     listens to its sessions is registered before the first use.
    :param run: the mapped class with :class:`.RunMixin`. Bound to a subclass, every verb touches its rows only.
    :param receipt: the mapped class with :class:`.ReceiptMixin` of ``run``, or of a class it inherits from.
    :param owner: the name that leases carry for people to read; by default made of host, process and chance.
    :param signals: the mapped class with :class:`.SignalMixin` of ``run``, or of a class it inherits from.
    :raises ConfigurationError: where the classes do not belong together.
    """

    def __init__(
        self,
        session_factory: sessionmaker[Any],
        run: type[RunT],
        receipt: type[ReceiptMixin[Any]],
        *,
        owner: str | None = None,
        signals: type[SignalMixin[Any]] | None = None,
    ) -> None:
        self._verbs = Verbs(Store(SyncSessions(session_factory), run, receipt, signals), owner)
        self.session_factory = session_factory
        """The sessionmaker that it was made with."""
        self.run_class = run
        """The mapped class of its runs."""
        self.receipt_class = receipt
        """The mapped class of their receipts."""

    # claiming

    def claim(self, ident: object, *, run_now: bool = False) -> Run[RunT] | None:
        """Claim one run: the conditional transition to running that issues a new fence and a lease.

        A lapsed holder's run is reaped first, in the same transaction. A row that is locked is waited for: by a claim
        of the same moment, or by a step whose lease has lapsed, for as long as the step takes.

        :param ident: the primary key, as :meth:`~sqlalchemy.orm.Session.get` takes it, or the loaded object.
        :param run_now: claim a run that is not due, too.
        :return: the claimed run, or None: another holder has it, or it is not ready, or not due, or has expired.
        :raises RunNotFound: where there is no such run.
        """
        holder = self._verbs.claim(ident, run_now=run_now)
        return None if holder is None else Run(holder)

    def claim_due(self, limit: int) -> list[Run[RunT]]:
        """Claim up to ``limit`` due runs, those due for longest first; lapsed and overdue ones are reaped before.

        While :meth:`execute` carries one of them out, the leases of all of them are kept alive.

        :param limit: how many at the most.
        """
        return [Run(holder) for holder in self._verbs.claim_due(limit)]

    def hold(self, lease: Lease) -> Run[RunT]:
        """Return the handle for a lease that was issued elsewhere, having renewed it.

        :param lease: what :attr:`.Run.lease` was in the process that claimed the run.
        :raises LostLease: where the fence has moved on, or the lease was released.
        """
        return Run(self._verbs.claims.held(lease))

    def execute(self, target: object, handler: Callable[[Run[RunT]], object], *, run_now: bool = False) -> Outcome:
        """Carry a run out: claim it, keep its lease alive, call the handler, and land the run.

        A handler that returns lands the run as done, one that raises lands it as failed; after a failure that
        ``Lifecycle(retry=...)`` takes for retryable it goes back to ready instead, due after its backoff. A terminal
        run is answered from its receipts, and nothing runs.

        :param target: what :meth:`claim` takes; or a run claimed before, which is fenced and renewed first.
        :param handler: called with the run.
        :param run_now: claim a run that is not due, too.
        :return: what truly happened.
        :raises RunNotFound: where there is no such run.
        :raises BaseException: an interruption, such as ``KeyboardInterrupt``, after the run was released.
        """
        refuse_coroutine(handler)
        known = self._handle(target)

        def carry_out(holder: Holder[RunT]) -> None:
            plain(handler(Run(holder) if known is None else known), handler)

        return self._verbs.execute(target if known is None else known.holder, carry_out, run_now=run_now)

    def handled_by(self, handler: Callable[[Run[RunT]], object]) -> Work:
        """Return these runs together with the handler that carries them out, for a :class:`.Worker`.

        :param handler: as for :meth:`execute`; called in several threads at a time.
        """
        refuse_coroutine(handler)

        return work_of(self._verbs, lambda holder: plain(handler(Run(holder)), handler))

    def _handle(self, target: object) -> Run[RunT] | None:
        refuse_other_form(target, Run)
        return cast(Run[RunT], target) if isinstance(target, Run) else None

    # reading and healing

    def get(self, ident: object, *, heal: bool = True) -> RunT | None:
        """Read a run, having healed it if its lease has lapsed or its expiry has passed; the object is detached.

        :param heal: False reads it as it is, and writes nothing.
        """
        return self._verbs.get(ident, heal=heal)

    def find(
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
        """List the runs that meet every condition given, the newest first. Nothing is healed.

        Rows inserted between two calls do not move the pages: a page begins after a place, not after a number of rows.

        :param status: one status, or several.
        :param older_than: only runs whose row was inserted at least this long ago, on the database clock.
        :param newer_than: only runs whose row was inserted less than this long ago.
        :param error: only runs whose last error has this text in its type or message, in upper or lower case.
        :param owner: only runs whose lease carries this name.
        :param cancel_requested: only runs that somebody did, or did not, ask to be cancelled.
        :param key: only runs with this idempotency key; no index finds them by that alone where there is a
         ``__key_scope__``.
        :param limit: how many at the most.
        :param after: the ``cursor`` of the last run of the page before.
        :raises UsageError: for a status of another machine, a duration out of range, a cursor of another table, or a
         key of runs that have none.
        """
        return self._verbs.find(
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

    def describe(self, ident: object) -> RunSummary | None:
        """Read what :meth:`find` says of one run, and the traceback of its error; None where there is no such run."""
        found: RunSummary | None = self._verbs.describe(ident)
        return found

    def counts(self) -> dict[StrEnum, int]:
        """Count the runs of each status, in the order of the enumeration; a status without any has 0."""
        return self._verbs.counts()

    def receipts(self, ident: object) -> tuple[Receipt, ...]:
        """Read a run's receipts in the order they were recorded."""
        return self._verbs.receipts(ident)

    def heal(self, ident: object) -> bool:
        """Turn a lapsed or overdue run into what its lifecycle says; True if this call did."""
        return self._verbs.heal(ident)

    def reap(self, limit: int = 100) -> int:
        """Heal up to ``limit`` lapsed runs, those started first, and expire as many overdue ones; return how many.

        A row that is locked is skipped. A lapsed run that goes back to ready can be overdue there, and counts twice.
        """
        return self._verbs.reap(limit)

    def requeue(self, ident: object) -> bool:
        """Give a terminal run another life: ready, attempts reset, fence and successful receipts kept.

        An expiry that has passed is cleared, as the run would expire at once; one that is still to come stands.
        The receipts of operations are kept, too, however far these have come.

        :return: True if this call did; False where the run is not in a status that ``Lifecycle(requeue=...)`` names.
        :raises UsageError: where the lifecycle names none.
        :raises RunInFlight: where ``Lifecycle(one_in_flight=...)`` leaves no room for it.
        """
        return self._verbs.requeue(ident)

    def requeue_all(
        self, *, limit: int | None = None, everything: bool = False, **conditions: Unpack[RunConditions]
    ) -> int:
        """Give all runs that meet every condition another life, as :meth:`requeue` does; return how many.

        In batches, each in a transaction of its own, those that finished first before others. A row that is locked is
        left, and so is a run that has ended since this was called.

        :param limit: how many at the most; by default all.
        :param everything: whether all runs are meant, where there is no condition.
        :param conditions: those of :meth:`find`.
        :raises UsageError: without any condition.
        :raises RunInFlight: where ``Lifecycle(one_in_flight=...)`` leaves no room for one; none of its batch is
         requeued.
        """
        return self._verbs.bulk.requeue(limit, conditions, everything=everything)

    def purge(
        self,
        older_than: timedelta,
        *,
        status: StrEnum | Collection[StrEnum] | None = None,
        batch: int = 1000,
        limit: int | None = None,
    ) -> int:
        """Delete runs that ended long enough ago, and their receipts; return how many.

        In batches, each in a transaction of its own, those that finished first before others. A run that has not ended
        is never deleted, and a row that is locked is left. With a run goes its idempotency key: the same key starts
        another one.

        :param older_than: how long ago at the least, on the database clock.
        :param status: only runs in this terminal status, or in one of these.
        :param batch: how many are deleted at a time.
        :param limit: how many at the most; by default all.
        :raises RunReferenced: where rows of another table refer to such a run and keep it from being deleted; none of
         its batch is.
        :raises UsageError: for a status that is not terminal, or a duration out of range.
        """
        return self._verbs.bulk.purge(older_than, status, batch, limit)

    # in the caller's transaction

    def cancel_all(
        self,
        session: AnySession,
        *,
        limit: int | None = None,
        everything: bool = False,
        **conditions: Unpack[RunConditions],
    ) -> int:
        """Ask, in the caller's transaction, for all live runs that meet every condition to be cancelled.

        As :meth:`request_cancel` does. A run that was asked before is not asked again, and one whose row is locked, by
        a step for one, is left: call this again until it returns 0 and :meth:`find` finds none.

        :param limit: how many at the most; by default all.
        :param everything: whether all runs are meant, where there is no condition.
        :param conditions: those of :meth:`find`.
        :return: how many were asked.
        :raises UsageError: without any condition, or where the lifecycle names no cancelled status.
        :raises TransactionConflict: retry the whole transaction.
        """
        return self._verbs.bulk.cancel(session, limit, conditions, everything=everything)

    @overload
    def update(
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
    def update(
        self, ident: object, name: str, payload: object, *, timeout: timedelta, type_: Any = Any, returns: Any = Any
    ) -> Any: ...

    def update(
        self, ident: object, name: str, payload: object, *, timeout: timedelta, type_: Any = Any, returns: Any = Any
    ) -> Any:
        """Send a signal in a transaction of its own, and wait for what the run replies with :meth:`.Run.answer`.

        :param timeout: for how long to wait for the reply.
        :param type_: as for :meth:`signal`.
        :param returns: what the reply is decoded as; by default plain JSON.
        :return: the reply.
        :raises UpdateFailed: where what the run called to answer it has failed for good.
        :raises UpdateTimeout: where no reply came in time; the signal stays sent.
        :raises NotAnswered: where the run has ended without a reply, or has taken the signal with ``wait()``.
        :raises RunNotFound: where there is no such run.
        :raises ResultError: where the payload would not come back equal.
        :raises ConfigurationError: where it was made without ``signals``.
        """
        return self._verbs.sending.update(ident, name, payload, type_, returns, timeout)

    # in the caller's transaction

    def signal(
        self, session: AnySession, ident: object, name: str, payload: object = None, *, type_: Any = Any
    ) -> bool:
        """Send a signal to a run, in the caller's transaction: it is sent if, and only if, the caller commits.

        It is kept until the run takes it, with :meth:`.Run.wait` or :meth:`.Run.answer`; signals of one name are taken
        in the order in which they were sent. A run that waits for it becomes due. Until the caller's transaction ends,
        the run cannot be handed back to wait, so keep that short; a step of the run waits for nothing.

        :param name: from 1 to 200 printable characters.
        :param payload: what the run is handed.
        :param type_: how the payload is stored, as an annotation would say it; by default as plain JSON, or as the
         pydantic model, dataclass or other value that it is.
        :return: True if it was sent; False where the run has landed.
        :raises RunNotFound: where there is no such run.
        :raises ResultError: where the payload would not come back equal.
        :raises ConfigurationError: where it was made without ``signals``.
        :raises TransactionConflict: retry the whole transaction.
        """
        return self._verbs.sending.signal(session, ident, name, payload, type_)

    def start(self, session: AnySession, /, *, key: str | None = None, **values: Any) -> RunT:
        """Start a run in the caller's transaction: it exists if, and only if, the caller commits.

        The session is flushed first. The object is built by the class's own constructor, and is persistent and loaded
        when it is returned. A ``flush`` of one with the same values would insert the same.

        With a key, the same key and values return the run that was started before, in whatever status it is; nothing
        is inserted. Values that say only when it runs, ``available_at``, the priority and the status, are not compared.

        :param session: the caller's session; nothing is committed here, and there is no savepoint.
        :param key: the idempotency key, from 1 to 255 printable characters; the class has :class:`.KeyMixin`.
        :param values: what the constructor takes; the status, initial or ready; ``available_at``, an aware datetime, an
         SQL expression, or a :class:`~datetime.timedelta` from now on the database's clock; with
         :class:`.PriorityMixin`, ``priority``.
        :return: the new run, or the one that the key belongs to.
        :raises KeyConflict: where the key belongs to a run that was started with other values.
        :raises RunInFlight: where ``Lifecycle(one_in_flight=...)`` leaves no room for it.
        :raises UsageError: for a key or value that cannot be right.
        :raises TransactionConflict: retry the whole transaction; under REPEATABLE READ and SERIALIZABLE also where
         another transaction started the same at the same time. The retry returns its run.
        """
        return self._verbs.start(session, key, values)

    def request_cancel(self, session: AnySession, ident: object) -> bool:
        """Ask, in the caller's transaction, for a live run to be cancelled; the first instant is kept.

        A run without a holder lands at once where its machine declares that edge; a running one at its next step or
        heartbeat.

        :return: True if the request stands; False where the run is terminal already, or its expiry has passed: then
         it is unchanged.
        :raises UsageError: where the lifecycle names no cancelled status.
        :raises TransactionConflict: retry the whole transaction.
        """
        return self._verbs.request_cancel(session, ident)

    def fence(self, session: AnySession, lease: Lease) -> None:
        """Lock the run in the caller's transaction and check the holder's fence: the first half of a step.

        :raises LostLease: where the fence has moved on; the caller must not commit.
        :raises TransactionConflict: retry the whole transaction.
        """
        self._verbs.fence(session, lease)

    def record(self, session: AnySession, lease: Lease, key: str | int, result: object, *, type_: Any = Any) -> None:
        """Write a step's receipt in the caller's transaction, after a fence check: the second half of a step.

        The session is flushed first, so that the receipt never stands without the effect.

        :param type_: how ``result`` is stored, as a return annotation would say it; by default as plain JSON.
        :raises LostLease: where the fence has moved on; the caller must not commit.
        :raises StepReused: where the step has a receipt already.
        :raises ResultError: where the result would not come back equal.
        :raises TransactionConflict: retry the whole transaction.
        """
        self._verbs.record(session, lease, key, result, type_)

    def attach_ids(self, session: AnySession, ident: object, key: str | int, ids: object, *, type_: Any = Any) -> bool:
        """Say, in the caller's transaction, by which ids the service knows an operation whose outcome is unknown.

        The run's status stays as it is: :meth:`requeue` it, and it polls.

        :param ids: what ``start`` would have returned.
        :param type_: how they are stored, as the return annotation of ``start`` says it; by default as plain JSON.
        :return: True if this call did; False where no operation of that key is issued without ids.
        :raises ResultError: where they would not come back equal.
        :raises TransactionConflict: retry the whole transaction.
        """
        return self._verbs.attach_ids(session, ident, key, ids, type_)

    def never_issued(self, session: AnySession, ident: object, key: str | int) -> bool:
        """Allow, in the caller's transaction, an operation to be issued anew: its receipt is deleted.

        To be said of an operation that the service certainly does not have, or that has failed there. The run's status
        stays as it is: :meth:`requeue` it, and it issues.

        :return: True if this call did; False where no operation of that key is issued without ids, or has failed, or
         where the run is running under the very fence it was issued under: its holder may be issuing it right now.
        :raises TransactionConflict: retry the whole transaction.
        """
        return self._verbs.never_issued(session, ident, key)


def work_of(verbs: Verbs[RunT], handler: Callable[[Holder[RunT]], object]) -> Work:
    """Return the runs of ``verbs`` together with what carries a claimed one of them out."""

    def handled(holder: Holder[RunT]) -> None:
        with in_slot():
            handler(holder)

    def execute(holder: Holder[RunT], on_lost: Callable[[], None]) -> Outcome | None:
        return verbs.begin(holder, handled, at_once=True, on_lost=on_lost)

    return Work(verbs, execute)
