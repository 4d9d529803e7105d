"""A claimed run, as what carries it out sees it: its steps, one method for each kind of effect."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from sqlalchemy.orm import Session

from sqla_durable.codec import Codec, codec_for, codec_for_argument, codec_of
from sqla_durable.exc import UsageError
from sqla_durable.gather import Call, gathered
from sqla_durable.holder import Holder
from sqla_durable.lease import Lease
from sqla_durable.operation import Operation, Pending
from sqla_durable.receipt import Receipt
from sqla_durable.run import RunT
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


def _made(fn: Callable[..., ResultT], *args: Any, **kwargs: Any) -> ResultT:
    return plain(fn(*args, **kwargs), fn)


def keys_of(calls: Sequence[Call[Any]]) -> str:
    """Return the keys of calls that are gathered, for errors."""
    return ", ".join(str(each.key) for each in calls)


def is_coroutine_function(fn: Any) -> bool:
    """Whether a call makes a coroutine; of a partial, or an object that is called, too."""
    while isinstance(fn, partial):
        fn = fn.func
    return inspect.iscoroutinefunction(fn) or (callable(fn) and inspect.iscoroutinefunction(type(fn).__call__))


def refuse_coroutine(fn: Callable[..., Any]) -> None:
    """Refuse a coroutine function, of which nothing would run."""
    if is_coroutine_function(fn):
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
