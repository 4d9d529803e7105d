"""The session helper: claims runs, carries them out step by step, and reads them."""

from __future__ import annotations

import contextvars
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import datetime, timedelta
from enum import StrEnum
from queue import SimpleQueue
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar, Unpack, cast, overload

from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable.codec import Codec, codec_for, codec_for_argument, codec_of
from sqla_durable.dispatch import Work, in_slot
from sqla_durable.exc import ConfigurationError, UsageError
from sqla_durable.execution import Outcome
from sqla_durable.failure import Failure
from sqla_durable.gather import Call, gathered
from sqla_durable.ground import Gate
from sqla_durable.holder import Holder
from sqla_durable.lease import Lease
from sqla_durable.listing import RunConditions, RunSummary
from sqla_durable.operation import Operation, Pending
from sqla_durable.receipt import Receipt, ReceiptMixin
from sqla_durable.run import RunT
from sqla_durable.session import StepSession, step_session_class
from sqla_durable.signal import SignalMixin
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
_AT_ONCE: Final = 32


class Handle(Generic[RunT]):
    """What a claimed run shows in either form."""

    def __init__(self, holder: Holder[RunT]) -> None:
        self.holder = holder

    @property
    def row(self) -> RunT:
        """The user's object as it was when the run was claimed, detached.

        A step that needs the present reads it from its session.
        """
        return self.holder.row

    @property
    def lease(self) -> Lease:
        """What the claim handed out."""
        return self.holder.lease

    @property
    def receipts(self) -> tuple[Receipt, ...]:
        """The receipts known so far, in the order they were recorded; no statement is sent."""
        return self.holder.known()

    def idempotency_key(self, key: str | int) -> str:
        """Return the idempotency key of a step: a UUID made of the run and the step's key; no statement is sent.

        It is the same in every attempt, process and form, and after a requeue. It differs between runs, also between
        those of databases that have the same tables and primary keys: the run's ``created_at`` is part of it.

        :param key: the step's key.
        :raises UsageError: where the run's primary key is of a type that has no text of its own.
        """
        return self.holder.idempotency_key(key)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.holder.lease!r}>"


def refuse_other_form(target: object, form: type[Any]) -> None:
    """Refuse a handle of the other form, sync or asyncio."""
    if isinstance(target, Handle) and not isinstance(target, form):
        raise UsageError(f"{target!r} was claimed in the other form; {form.__name__} is wanted here.")


class Stepping(Handle[RunT]):
    """A claimed run, as what carries it out sees it: its steps.

    Its methods may be called from any thread; steps of one run queue up behind each other. A body must not wait for a
    thread that it has started and that calls a step of the same run: each would wait for the other.
    """

    def __init__(self, holder: Holder[RunT]) -> None:
        super().__init__(holder)
        self._one_at_a_time = threading.RLock()

    @contextmanager
    def _alone(self, key: str | int) -> Generator[None, None, None]:
        # Before it waits: a step inside a call of gather(), in another thread, would wait for itself.
        self.holder.refuse_nested(key)
        with self._one_at_a_time:
            yield

    def step(
        self,
        key: str | int,
        fn: Callable[Concatenate[Session, P], ResultT],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> ResultT:
        """Call ``fn(session, *args, **kwargs)`` in one transaction with the step's receipt: exactly once.

        The transaction locks the run's row and checks the fence first. A step that has a receipt is not run again;
        its recorded result is returned, without a statement.

        :param key: the step's name in this run, the same in every attempt; an int is stored as its decimal.
        :param fn: the body. Its return annotation says how the result is stored; without one it must be plain JSON.
         It may use savepoints, but not commit, roll back or close the session.
        :return: what ``fn`` returned, as it reads back from the receipt.
        :raises LostLease: where the fence has moved on; ``fn`` is not called, or nothing of it is committed.
        :raises Cancelled: where someone asked for the run to be cancelled.
        :raises TimedOut: where the run ran past its deadline.
        :raises StepFailed: where the receipt says that the step failed.
        :raises StepReused: where the key was used before in this execution.
        :raises TransactionEnded: where the body ended its transaction or swallowed a database error.
        :raises ResultError: where the result would not come back equal.
        :raises ReceiptMismatch: where the receipt is of another kind of step, or its result does not decode; in a
         function also where it was recorded for another input.
        :raises RetryableError: where the database cut the step off, or was lost; nothing is recorded.
        :raises Exception: what ``fn`` raises; it is recorded as the step's failure.
        """
        refuse_coroutine(fn)
        codec: Codec[ResultT] = codec_for(fn)
        given = fn, args, kwargs
        with self._alone(key):
            return self.holder.transactional(key, codec, lambda session: plain(fn(session, *args, **kwargs), fn), given)

    def external(self, key: str | int, fn: Callable[P, ResultT], /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        """Call ``fn(*args, **kwargs)`` outside any transaction, then record its result: at least once.

        No lock and no connection is held during the call, so it may take its time; the receipt is one statement. A
        crash between the two repeats the call.

        :param key: as for :meth:`step`.
        :param fn: the call, without a session.
        :return: what ``fn`` returned, as it reads back from the receipt.
        :raises Exception: as for :meth:`step`.
        """
        refuse_coroutine(fn)
        codec: Codec[ResultT] = codec_for(fn)
        with self._alone(key):
            return self.holder.external(key, codec, lambda: plain(fn(*args, **kwargs), fn), (fn, args, kwargs))

    def keyed(
        self, key: str | int, fn: Callable[Concatenate[str, P], ResultT], /, *args: P.args, **kwargs: P.kwargs
    ) -> ResultT:
        """Call ``fn(idempotency_key, *args, **kwargs)`` outside any transaction, then record its result.

        Like :meth:`external`, and the call is made with the same idempotency key each time. A service that has one
        effect for all calls with one key has the effect exactly once.

        :param key: as for :meth:`step`.
        :param fn: the call; its first argument is :meth:`idempotency_key` of the step.
        :return: what ``fn`` returned, as it reads back from the receipt.
        :raises UsageError: where the run's primary key is of a type that an idempotency key cannot be made of.
        :raises Exception: as for :meth:`step`.
        """
        refuse_coroutine(fn)
        codec: Codec[ResultT] = codec_for(fn)
        given = fn, args, kwargs
        with self._alone(key):
            return self.holder.keyed(key, codec, lambda name: plain(fn(name, *args, **kwargs), fn), given)

    def operation(
        self,
        key: str | int,
        *,
        start: Callable[[], IdsT],
        poll: Callable[[IdsT], ResultT | Pending],
        every: timedelta = timedelta(seconds=10),
    ) -> ResultT:
        """Issue an operation at most once, then poll it until it ends, without a worker that waits for it.

        While ``poll`` returns :data:`.PENDING` the run is handed back, due at the next poll, and :class:`.Suspended`
        unwinds the handler; no attempt is counted. The next execution comes back here and only polls. A ``poll`` that
        raises leaves the operation as it is: it is polled again.

        :param key: as for :meth:`step`.
        :param start: issues the operation and returns what the service knows it by; its return annotation says how
         that is stored. It raises :class:`.NotIssued` where the service certainly does not have the operation.
        :param poll: is given what ``start`` returned, and returns the result, or :class:`.Pending`. It raises
         :class:`.OperationFailed` where the operation itself has failed.
        :param every: how long to wait between polls.
        :return: the result, as it reads back from the receipt.
        :raises Suspended: while the operation has not ended, or could not be asked about; let it pass.
        :raises OperationUnknown: where it was issued, or was about to be, and no ids were recorded.
        :raises OperationFailed: where ``poll`` says so; :class:`.StepFailed` from then on.
        :raises ConfigurationError: where the machine has no edge from running to ready.
        :raises Exception: as for :meth:`step`.
        """
        refuse_coroutine(start)
        refuse_coroutine(poll)
        operation: Operation[IdsT, ResultT] = Operation(
            self.holder,
            codec_for(start),
            codec_for(poll, apart_from=Pending),
            start=lambda: plain(start(), start),
            poll=lambda ids: plain(poll(ids), poll),
            every=every,
            given=(start, (), {}),
        )
        with self._alone(key):
            return operation.carry_out(key)

    @overload
    def wait(
        self, name: str, type_: type[ResultT], *, timeout: timedelta | None = None, key: str | int | None = None
    ) -> ResultT: ...

    @overload
    def wait(
        self, name: str, type_: Any = Any, *, timeout: timedelta | None = None, key: str | int | None = None
    ) -> Any: ...

    def wait(
        self, name: str, type_: Any = Any, *, timeout: timedelta | None = None, key: str | int | None = None
    ) -> Any:
        """Take the oldest signal of that name which no step has taken: exactly once, with a receipt.

        While there is none the run is handed back and :class:`.Suspended` unwinds the handler; no attempt is counted,
        and no worker waits. A signal makes the run due, and the next execution comes back here.

        :param name: the signal's, from 1 to 200 printable characters.
        :param type_: what its payload is decoded as, as an annotation would say it; by default plain JSON.
        :param timeout: for how long to wait, on the database clock, from the first attempt on; None is for ever.
        :param key: the step's name in this run; by default the signal's.
        :return: the payload.
        :raises Suspended: while there is no signal; let it pass.
        :raises SignalTimeout: where none came in time. It is recorded as the step's failure.
        :raises SignalMismatch: where the payload does not decode; the signal is not consumed.
        :raises ConfigurationError: where ``Runs`` was made without ``signals``, or the machine has no edge from running
         to ready.
        :raises Exception: as for :meth:`step`.
        """
        wait: Wait[Any] = Wait(self.holder, name, codec_of(type_), key=key, timeout=timeout)
        with self._alone(wait.key):
            return wait.carry_out()

    def answer(
        self,
        name: str,
        fn: Callable[[Session, PayloadT], ResultT],
        *,
        timeout: timedelta | None = None,
        key: str | int | None = None,
    ) -> ResultT:
        """Take a signal likewise, and reply: ``fn(session, payload)`` in one transaction with both, exactly once.

        Whoever sent it with :meth:`.Runs.update` is handed what ``fn`` returned. What it raises for good is the step's
        failure, and the reply.

        :param fn: the body, as of :meth:`step`. Its second parameter's annotation says how the payload is decoded.
        :return: what ``fn`` returned, as it reads back from the receipt.
        :raises Exception: as for :meth:`wait` and :meth:`step`.
        """
        refuse_coroutine(fn)
        answer: Answer[PayloadT, ResultT] = Answer(
            self.holder,
            name,
            codec_for_argument(fn, 1),
            codec_for(fn),
            lambda session, payload: plain(fn(session, payload), fn),
            key=key,
            timeout=timeout,
        )
        with self._alone(answer.key):
            return answer.carry_out()

    def sleep(self, key: str | int, duration: timedelta | datetime, /) -> None:
        """Wait until an instant without a worker that waits: the run is handed back, and due again then.

        The first attempt's instant stands, so that a run which is claimed before it is handed back for the rest. No
        attempt is counted. One that has passed is recorded, and the handler goes on.

        :param key: as for :meth:`step`.
        :param duration: for how long, on the database clock; or until when, with a time zone.
        :raises Suspended: until that instant; let it pass.
        :raises ConfigurationError: where the machine has no edge from running to ready.
        :raises Exception: as for :meth:`step`.
        """
        sleep = Sleep(self.holder, duration)
        with self._alone(key):
            sleep.carry_out(key)

    @overload
    def gather(self, a: Call[A], /) -> tuple[A]: ...

    @overload
    def gather(self, a: Call[A], b: Call[B], /) -> tuple[A, B]: ...

    @overload
    def gather(self, a: Call[A], b: Call[B], c: Call[C], /) -> tuple[A, B, C]: ...

    @overload
    def gather(self, a: Call[A], b: Call[B], c: Call[C], d: Call[D], /) -> tuple[A, B, C, D]: ...

    @overload
    def gather(self, a: Call[A], b: Call[B], c: Call[C], d: Call[D], e: Call[E], /) -> tuple[A, B, C, D, E]: ...

    @overload
    def gather(
        self, a: Call[A], b: Call[B], c: Call[C], d: Call[D], e: Call[E], f: Call[F], /
    ) -> tuple[A, B, C, D, E, F]: ...

    @overload
    def gather(self, *calls: Call[ResultT]) -> tuple[ResultT, ...]: ...

    def gather(self, *calls: Call[Any]) -> tuple[Any, ...]:
        """Make a few independent calls at once, each an external or keyed step with a receipt of its own.

        ::

            stock, price = run.gather(call("stock", look_up, item), call("price", ask, item))

        The calls are made in threads of their own, no more than 32 at a time; each receipt is recorded as its call
        ends. Those that have a receipt are answered from it. Where one fails, the others end and are recorded before
        its failure is raised, and the same calls may be gathered again: only what has failed is called anew.

        :param calls: what :func:`~sqla_durable.call` and :func:`~sqla_durable.keyed_call` return, with distinct keys.
        :return: the results in the order of the calls, as they read back from the receipts.
        :raises StepReused: where a key was used before in this execution, or is given twice.
        :raises LostLease: where the fence has moved on, when all calls have ended.
        :raises ExceptionGroup: where several calls have failed; it is retryable where each of them is.
        :raises Exception: as for :meth:`step`.
        """
        for each in calls:
            refuse_coroutine(each.fn)
        with self._alone(keys_of(calls)):
            return gathered(self.holder, calls, _made)

    def renew(self) -> None:
        """Renew the lease now; within a step of this run, whose lock is proof enough, return at once.

        :raises LostLease: where the fence has moved on.
        :raises Cancelled: where someone asked for the run to be cancelled.
        :raises TimedOut: where the run ran past its deadline.
        """
        self.holder.renew()


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
        :param limit: how many at the most.
        :param after: the ``cursor`` of the last run of the page before.
        :raises UsageError: for a status of another machine, a duration out of range, or a cursor of another table.
        """
        return self._verbs.find(
            status=status,
            older_than=older_than,
            newer_than=newer_than,
            error=error,
            owner=owner,
            cancel_requested=cancel_requested,
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
        session: Session,
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

    def signal(self, session: Session, ident: object, name: str, payload: object = None, *, type_: Any = Any) -> bool:
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

    def start(self, session: Session, /, *, key: str | None = None, **values: Any) -> RunT:
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

    def request_cancel(self, session: Session, ident: object) -> bool:
        """Ask, in the caller's transaction, for a live run to be cancelled; the first instant is kept.

        A run without a holder lands at once where its machine declares that edge; a running one at its next step or
        heartbeat.

        :return: True if the request stands; False where the run is terminal already, or its expiry has passed: then
         it is unchanged.
        :raises UsageError: where the lifecycle names no cancelled status.
        :raises TransactionConflict: retry the whole transaction.
        """
        return self._verbs.request_cancel(session, ident)

    def fence(self, session: Session, lease: Lease) -> None:
        """Lock the run in the caller's transaction and check the holder's fence: the first half of a step.

        :raises LostLease: where the fence has moved on; the caller must not commit.
        :raises TransactionConflict: retry the whole transaction.
        """
        self._verbs.fence(session, lease)

    def record(self, session: Session, lease: Lease, key: str | int, result: object, *, type_: Any = Any) -> None:
        """Write a step's receipt in the caller's transaction, after a fence check: the second half of a step.

        The session is flushed first, so that the receipt never stands without the effect.

        :param type_: how ``result`` is stored, as a return annotation would say it; by default as plain JSON.
        :raises LostLease: where the fence has moved on; the caller must not commit.
        :raises StepReused: where the step has a receipt already.
        :raises ResultError: where the result would not come back equal.
        :raises TransactionConflict: retry the whole transaction.
        """
        self._verbs.record(session, lease, key, result, type_)

    def attach_ids(self, session: Session, ident: object, key: str | int, ids: object, *, type_: Any = Any) -> bool:
        """Say, in the caller's transaction, by which ids the service knows an operation whose outcome is unknown.

        The run's status stays as it is: :meth:`requeue` it, and it polls.

        :param ids: what ``start`` would have returned.
        :param type_: how they are stored, as the return annotation of ``start`` says it; by default as plain JSON.
        :return: True if this call did; False where no operation of that key is issued without ids.
        :raises ResultError: where they would not come back equal.
        :raises TransactionConflict: retry the whole transaction.
        """
        return self._verbs.attach_ids(session, ident, key, ids, type_)

    def never_issued(self, session: Session, ident: object, key: str | int) -> bool:
        """Allow, in the caller's transaction, an operation to be issued anew: its receipt is deleted.

        To be said of an operation that the service certainly does not have, or that has failed there. The run's status
        stays as it is: :meth:`requeue` it, and it issues.

        :return: True if this call did; False where no operation of that key is issued without ids, or has failed, or
         where the run is running under the very fence it was issued under: its holder may be issuing it right now.
        :raises TransactionConflict: retry the whole transaction.
        """
        return self._verbs.never_issued(session, ident, key)


class SyncSessions:
    """Sessions for :class:`.Store` from a sessionmaker."""

    is_async = False

    def __init__(self, factory: sessionmaker[Any]) -> None:
        if not isinstance(cast(object, factory), sessionmaker):
            raise ConfigurationError(f"{factory!r} is not a sessionmaker; pass sessionmaker(engine).")
        self._factory = factory
        self._step_class = step_session_class(factory.class_)

    def plain(self, bind: Engine | None = None) -> Session:
        session: Session = self._factory() if bind is None else self._factory(bind=bind, binds=None)
        return session

    def step(self) -> StepSession:
        session = self._step_class(**self._factory.kw)
        return session.as_step(session)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def gate(self) -> Gate:
        return _Gate()

    def notified(self, driver: Any, seconds: float) -> list[str]:
        return [notification.payload for notification in driver.notifies(timeout=seconds, stop_after=1)]

    def concurrently(
        self, calls: Sequence[Callable[[], ResultT]]
    ) -> Generator[tuple[int, Callable[[], ResultT]], None, None]:
        ended: SimpleQueue[tuple[int, Future[ResultT]]] = SimpleQueue()
        left = deque(enumerate(calls))

        def make() -> None:
            while left:
                try:
                    position, call = left.popleft()
                except IndexError:
                    return
                future: Future[ResultT] = Future()
                try:
                    future.set_result(context.copy().run(call))
                except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                    future.set_exception(error)
                ended.put((position, future))

        context = contextvars.copy_context()
        try:
            for _ in range(min(len(calls), _AT_ONCE)):
                # Daemons: an interrupted process does not wait for calls that nobody waits for any more.
                threading.Thread(target=make, name="sqla_durable gather", daemon=True).start()
            for _ in calls:
                position, future = ended.get()
                yield position, future.result
        finally:
            left.clear()

    def run_in_thread(self, work: Callable[[], None]) -> None:
        work()

    def block(self, wait: Callable[[], object]) -> None:
        wait()


class _Gate:
    """A lock that one thread acquires and another releases, which is the fastest there is for this."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lock.acquire()

    def wait(self, seconds: float | None = None) -> None:
        self._lock.acquire(timeout=-1 if seconds is None else seconds)

    def open(self) -> None:
        self._lock.release()


def work_of(verbs: Verbs[RunT], handler: Callable[[Holder[RunT]], object]) -> Work:
    """Return the runs of ``verbs`` together with what carries a claimed one of them out."""

    def handled(holder: Holder[RunT]) -> None:
        with in_slot():
            handler(holder)

    def execute(holder: Holder[RunT], on_lost: Callable[[], None]) -> Outcome | None:
        return verbs.begin(holder, handled, at_once=True, on_lost=on_lost)

    return Work(verbs, execute)


def _made(fn: Callable[..., ResultT], *args: Any, **kwargs: Any) -> ResultT:
    return plain(fn(*args, **kwargs), fn)


def keys_of(calls: Sequence[Call[Any]]) -> str:
    """Return the keys of calls that are gathered, for errors."""
    return ", ".join(str(each.key) for each in calls)


def refuse_coroutine(fn: Callable[..., Any]) -> None:
    """Refuse a coroutine function, of which nothing would run."""
    if inspect.iscoroutinefunction(fn):
        raise UsageError(f"{fn!r} is a coroutine function; use AsyncRuns from sqla_durable.asyncio.")


def plain(result: ResultT, fn: Callable[..., Any]) -> ResultT:
    """Refuse a coroutine or generator that nobody would run: the run would land as done with nothing carried out."""
    if inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result):
        if inspect.iscoroutine(result):
            result.close()
        raise UsageError(
            f"{fn!r} returned a {type(result).__name__}, and nothing in it would run; return a value, or use AsyncRuns "
            "from sqla_durable.asyncio for coroutine functions."
        )
    return result
