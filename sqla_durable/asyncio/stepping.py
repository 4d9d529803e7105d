"""A claimed run, as the coroutine that carries it out sees it: its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, overload

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.util import greenlet_spawn

from sqla_durable.asyncio.tasks import wait_for
from sqla_durable.codec import Codec, codec_for, codec_for_argument, codec_of
from sqla_durable.exc import UsageError
from sqla_durable.gather import Call, gathered
from sqla_durable.holder import Holder
from sqla_durable.operation import Operation, Pending
from sqla_durable.run import RunT
from sqla_durable.stepping import Handle, keys_of
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
            return wait_for(fn(session, *args, **kwargs), fn)

        return self._alone(key, partial(self.holder.transactional, key, codec, body, (fn, args, kwargs)))

    def external(
        self, key: str | int, fn: Callable[P, Awaitable[ResultT]], /, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, ResultT]:
        """Await ``fn(*args, **kwargs)`` outside any transaction, then record its result: at least once.

        See :meth:`.Run.external`.
        """

        codec: Codec[ResultT] = codec_for(fn)

        def call() -> ResultT:
            return wait_for(fn(*args, **kwargs), fn)

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
            return wait_for(fn(name, *args, **kwargs), fn)

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
            start=lambda: wait_for(start(), start),
            poll=lambda ids: wait_for(poll(ids), poll),
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
            lambda session, payload: wait_for(fn(session, payload), fn),
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
            return wait_for(fn(*args, **kwargs), fn)

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
