"""The synchronous and the asyncio form behind one face, so that one test speaks of both."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Lease, Outcome, Runs
from sqla_durable.asyncio import AsyncRuns
from tests.support import write_entry


class Form(Protocol):
    """What a holder can do, by name; a handle is a Run or an AsyncRun."""

    engine: Engine

    def claim(self, ident: object) -> Any: ...
    def hold(self, lease: Lease) -> Any: ...
    def execute(self, target: Any, label: str) -> Outcome: ...
    def step(self, run: Any, key: str, label: str) -> str: ...
    def external(self, run: Any, key: str, call: Callable[[], None]) -> str: ...
    def renew(self, run: Any) -> None: ...
    def finish(self, run: Any) -> None: ...
    def fail(self, run: Any) -> None: ...
    def release(self, run: Any) -> None: ...
    def fence(self, lease: Lease, label: str) -> None: ...
    def record(self, lease: Lease, key: str, label: str) -> None: ...
    def close(self) -> None: ...


class SyncForm:
    def __init__(self, url: str, run: type[Any], receipt: type[Any]) -> None:
        self.engine = create_engine(url)
        self._factory = sessionmaker(self.engine)
        self._runs: Runs[Any] = Runs(self._factory, run, receipt)

    def claim(self, ident: object) -> Any:
        return self._runs.claim(ident)

    def hold(self, lease: Lease) -> Any:
        return self._runs.hold(lease)

    def execute(self, target: Any, label: str) -> Outcome:
        return self._runs.execute(target, lambda run: run.step("only", write_entry, label))

    def step(self, run: Any, key: str, label: str) -> str:
        result: str = run.step(key, write_entry, label)
        return result

    def external(self, run: Any, key: str, call: Callable[[], None]) -> str:
        def send() -> str:
            call()
            return "sent"

        result: str = run.external(key, send)
        return result

    def renew(self, run: Any) -> None:
        run.renew()

    def finish(self, run: Any) -> None:
        run.finish()

    def fail(self, run: Any) -> None:
        run.fail(ValueError("no stock"))

    def release(self, run: Any) -> None:
        run.release()

    def fence(self, lease: Lease, label: str) -> None:
        """An effect of the caller's own transaction, fenced."""
        with self._factory.begin() as session:
            write_entry(session, label)
            self._runs.fence(session, lease)

    def record(self, lease: Lease, key: str, label: str) -> None:
        """An effect of the caller's own transaction, with its receipt."""
        with self._factory.begin() as session:
            self._runs.record(session, lease, key, write_entry(session, label))

    def close(self) -> None:
        self.engine.dispose()


class AsyncForm:
    def __init__(self, url: str, run: type[Any], receipt: type[Any]) -> None:
        self._loop = asyncio.Runner()
        self._engine = create_async_engine(url)
        self.engine = self._engine.sync_engine
        self._factory = async_sessionmaker(self._engine)
        self._runs: AsyncRuns[Any] = AsyncRuns(self._factory, run, receipt)

    def claim(self, ident: object) -> Any:
        return self._loop.run(self._runs.claim(ident))

    def hold(self, lease: Lease) -> Any:
        return self._loop.run(self._runs.hold(lease))

    def execute(self, target: Any, label: str) -> Outcome:
        return self._loop.run(self._runs.execute(target, lambda run: run.step("only", _write_entry, label)))

    def step(self, run: Any, key: str, label: str) -> str:
        result: str = self._loop.run(run.step(key, _write_entry, label))
        return result

    def external(self, run: Any, key: str, call: Callable[[], None]) -> str:
        async def send() -> str:
            await asyncio.to_thread(call)
            return "sent"

        result: str = self._loop.run(run.external(key, send))
        return result

    def renew(self, run: Any) -> None:
        self._loop.run(run.renew())

    def finish(self, run: Any) -> None:
        self._loop.run(run.finish())

    def fail(self, run: Any) -> None:
        self._loop.run(run.fail(ValueError("no stock")))

    def release(self, run: Any) -> None:
        self._loop.run(run.release())

    def fence(self, lease: Lease, label: str) -> None:
        async def fenced() -> None:
            async with self._factory.begin() as session:
                await _write_entry(session, label)
                await self._runs.fence(session, lease)

        self._loop.run(fenced())

    def record(self, lease: Lease, key: str, label: str) -> None:
        async def recorded() -> None:
            async with self._factory.begin() as session:
                await self._runs.record(session, lease, key, await _write_entry(session, label))

        self._loop.run(recorded())

    def close(self) -> None:
        self._loop.run(self._engine.dispose())
        self._loop.close()


async def _write_entry(session: AsyncSession, label: str) -> str:
    def write(session: Session) -> str:
        return write_entry(session, label)

    return await session.run_sync(write)


FORMS: dict[str, Callable[[str, type[Any], type[Any]], Form]] = {"sync": SyncForm, "async": AsyncForm}
