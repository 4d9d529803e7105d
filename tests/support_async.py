"""The asyncio form behind the synchronous face, so that one driver takes both through every verb."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker
from sqlalchemy.util import await_only, greenlet_spawn

from sqla_durable import Call, Receipt, Runs
from sqla_durable.asyncio import AsyncRun, AsyncRuns
from sqla_durable.asyncio.stepping import AsyncStepping
from tests.support import Entry, Plan, PlanStep

Wait = Callable[[Awaitable[Any]], Any]


def as_async_step(fn: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    @functools.wraps(fn)
    async def step(session: AsyncSession, *args: Any) -> Any:
        return await session.run_sync(fn, *args)

    return step


def as_async_call(fn: Callable[..., Any]) -> Callable[..., Awaitable[Any]]:
    if isinstance(fn, functools.partial):
        return functools.partial(as_async_call(fn.func), *fn.args, **fn.keywords)

    @functools.wraps(fn)
    async def call(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0)
        return fn(*args, **kwargs)

    return call


class Facade:
    """Looks like a run: its verbs wait for those of an asyncio run."""

    def __init__(self, run: AsyncStepping[Any], wait: Wait) -> None:
        self.run = run
        self.awaits = wait
        self.holder = run.holder

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.run, name)
        if not callable(found):
            return found
        return lambda *args, **kwargs: self.awaits(found(*args, **kwargs))

    def step(self, key: Any, fn: Callable[..., Any], *args: Any) -> Any:
        return self.awaits(self.run.step(key, as_async_step(fn), *args))

    def answer(self, name: str, fn: Callable[..., Any], **options: Any) -> Any:
        return self.awaits(self.run.answer(name, as_async_step(fn), **options))

    def external(self, key: Any, fn: Callable[..., Any], *args: Any) -> Any:
        return self.awaits(self.run.external(key, as_async_call(fn), *args))

    def keyed(self, key: Any, fn: Callable[..., Any], *args: Any) -> Any:
        return self.awaits(self.run.keyed(key, as_async_call(fn), *args))

    def operation(self, key: Any, *, start: Callable[..., Any], poll: Callable[..., Any], **options: Any) -> Any:
        return self.awaits(self.run.operation(key, start=as_async_call(start), poll=as_async_call(poll), **options))

    def gather(self, *calls: Call[Any]) -> Any:
        return self.awaits(self.run.gather(*(replace(each, fn=as_async_call(each.fn)) for each in calls)))

    def idempotency_key(self, key: Any) -> str:
        return self.run.idempotency_key(key)


class RunsFacade:
    """Looks like :class:`.Runs`: its verbs run those of an :class:`.AsyncRuns` on a loop."""

    def __init__(self, runner: asyncio.Runner, engine: AsyncEngine, entity: Any, receipt: Any, **options: Any) -> None:
        self.runner = runner
        self.sessions = async_sessionmaker(engine, **options)
        self.runs: AsyncRuns[Any] = AsyncRuns(self.sessions, entity, receipt)

    def wait(self, awaitable: Awaitable[Any]) -> Any:
        async def awaited() -> Any:
            return await awaitable

        return self.runner.run(awaited())

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self.runs, name)
        return lambda *args, **kwargs: self.wait(verb(*args, **kwargs))

    def claim(self, ident: Any, **options: Any) -> Facade | None:
        run = self.wait(self.runs.claim(ident, **options))
        return None if run is None else Facade(run, self.wait)

    def claim_due(self, limit: int) -> list[Facade]:
        return [Facade(run, self.wait) for run in self.wait(self.runs.claim_due(limit))]

    def hold(self, lease: Any) -> Facade:
        return Facade(self.wait(self.runs.hold(lease)), self.wait)

    def execute(self, target: Any, handler: Callable[[Any], Any], **options: Any) -> Any:
        async def carry_out(run: AsyncRun[Any]) -> None:
            await greenlet_spawn(handler, Facade(run, await_only))

        given = target.run if isinstance(target, Facade) else target
        return self.wait(self.runs.execute(given, carry_out, **options))

    # The driver's own sessions are synchronous ones; these verbs get a session of the loop's instead.

    def _in_session(self, session: Session, verb: str, *args: Any) -> Any:
        async def work() -> Any:
            async with self.sessions() as own, own.begin():
                return await getattr(self.runs, verb)(own, *args)

        return self.wait(work())

    def fence(self, session: Session, lease: Any) -> None:
        self._in_session(session, "fence", lease)

    def record(self, session: Session, *args: Any) -> None:
        self._in_session(session, "record", *args)

    def attach_ids(self, session: Session, *args: Any) -> Any:
        return self._in_session(session, "attach_ids", *args)

    def never_issued(self, session: Session, *args: Any) -> Any:
        return self._in_session(session, "never_issued", *args)

    def request_cancel(self, session: Session, ident: Any) -> Any:
        return self._in_session(session, "request_cancel", ident)


# --- one test, one loop, one engine

Scenario = Callable[[AsyncRuns[Plan]], Awaitable[Any]]


@asynccontextmanager
async def sessions(engine: Engine) -> AsyncIterator[async_sessionmaker[AsyncSession]]:
    async_engine = create_async_engine(engine.url)
    try:
        yield async_sessionmaker(async_engine)
    finally:
        assert async_engine.pool.checkedout() == 0  # type: ignore[attr-defined]
        await async_engine.dispose()


def carried_out(engine: Engine, scenario: Scenario) -> Any:
    async def main() -> Any:
        async with sessions(engine) as factory:
            return await scenario(AsyncRuns(factory, Plan, PlanStep))

    return asyncio.run(main())


async def write_entry(session: AsyncSession, label: str) -> str:
    session.add(Entry(label=label))
    await session.flush()
    return label


def receipts(engine: Engine, ident: Any) -> tuple[Receipt, ...]:
    return Runs(sessionmaker(engine), Plan, PlanStep).receipts(ident)
