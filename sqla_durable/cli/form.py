"""The verbs of either form, sync or asyncio, for commands, which have no loop."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sqla_durable.cli.target import runs_at
from sqla_durable.listing import RunSummary
from sqla_durable.receipt import Receipt
from sqla_durable.run import RunMixin, RunRows
from sqla_durable.runs import Runs

if TYPE_CHECKING:
    import asyncio


class OpenRuns:
    """The :class:`.Runs` or :class:`.AsyncRuns` that TARGET stands for.

    As a context manager it keeps one loop, which the connections of an asyncio engine belong to, and closes the pool.
    """

    def __init__(self, target: str, url: str | None) -> None:
        self._runs: Any = runs_at(target, url)
        self._is_async = not isinstance(self._runs, Runs)
        self._closing = ExitStack()
        self.rows: RunRows[Any] = RunRows(self._runs.run_class)

    def __enter__(self) -> Self:
        if self._is_async:
            self._loop = self._closing.enter_context(new_loop())
        bind = self._runs.session_factory.kw.get("bind")
        if bind is not None and hasattr(bind, "dispose"):
            self._closing.callback(lambda: self._answer(bind.dispose()))
        return self

    def __exit__(self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        self._closing.close()

    @property
    def name(self) -> str:
        """The name of the run class."""
        return self.rows.entity.__name__

    def find(self, **conditions: Any) -> list[RunSummary]:
        """See :meth:`.Runs.find`."""
        found: list[RunSummary] = self._answer(self._runs.find(**conditions))
        return found

    def counts(self) -> dict[Any, int]:
        """See :meth:`.Runs.counts`."""
        counted: dict[Any, int] = self._answer(self._runs.counts())
        return counted

    def describe(self, ident: object) -> RunSummary | None:
        """See :meth:`.Runs.describe`."""
        described: RunSummary | None = self._answer(self._runs.describe(ident))
        return described

    def get_unhealed(self, ident: object) -> RunMixin | None:
        """See :meth:`.Runs.get`."""
        row: RunMixin | None = self._answer(self._runs.get(ident, heal=False))
        return row

    def receipts(self, ident: object) -> tuple[Receipt, ...]:
        """See :meth:`.Runs.receipts`."""
        receipts: tuple[Receipt, ...] = self._answer(self._runs.receipts(ident))
        return receipts

    def requeue(self, ident: object) -> bool:
        """See :meth:`.Runs.requeue`."""
        return bool(self._answer(self._runs.requeue(ident)))

    def reap(self, limit: int) -> int:
        """See :meth:`.Runs.reap`."""
        return int(self._answer(self._runs.reap(limit)))

    def request_cancel(self, ident: object) -> bool:
        """See :meth:`.Runs.request_cancel`; here in a transaction of its own."""
        begun = self._runs.session_factory.begin()
        if not self._is_async:
            with begun as session:
                return bool(self._runs.request_cancel(session, ident))

        async def request_cancel() -> Any:
            async with begun as session:
                return await self._runs.request_cancel(session, ident)

        return bool(self._answer(request_cancel()))

    def _answer(self, given: Any) -> Any:
        """Return what a verb returned, or what the coroutine that it returned does."""
        return self._loop.run(given) if inspect.iscoroutine(given) else given


def new_loop() -> asyncio.Runner:
    """Return a loop for one command."""
    import asyncio
    import sys

    # psycopg cannot wait on a proactor, which is what Windows has.
    return asyncio.Runner(loop_factory=asyncio.SelectorEventLoop if sys.platform == "win32" else None)
