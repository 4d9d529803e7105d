"""The verbs of either form, sync or asyncio, for commands, which have no loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack, suppress
from datetime import timedelta
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from sqla_durable.cli.target import is_functions, runs_at
from sqla_durable.exc import RunNotFound
from sqla_durable.functions import FunctionHandle, Functions, FunctionSummary
from sqla_durable.listing import RunSummary
from sqla_durable.receipt import Receipt
from sqla_durable.run import RunMixin, RunRows
from sqla_durable.runs import Runs

if TYPE_CHECKING:
    import asyncio

ValueT = TypeVar("ValueT")


class OpenRuns:
    """The :class:`.Runs` or :class:`.AsyncRuns` that TARGET stands for.

    As a context manager it keeps one loop, which the connections of an asyncio engine belong to, and closes the pool.

    :param runs: these.
    """

    def __init__(self, runs: Any) -> None:
        self._runs: Any = runs
        self._is_async = not isinstance(runs, Runs | Functions)
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

    def counts(self, **conditions: Any) -> dict[Any, Any]:
        """See :meth:`.Runs.counts` and :meth:`.Functions.counts`."""
        counted: dict[Any, Any] = self._answer(self._runs.counts(**conditions))
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

    def requeue_all(self, **conditions: Any) -> int:
        """See :meth:`.Runs.requeue_all`."""
        return int(self._answer(self._runs.requeue_all(**conditions)))

    def purge(self, older_than: timedelta, **options: Any) -> int:
        """See :meth:`.Runs.purge`."""
        return int(self._answer(self._runs.purge(older_than, **options)))

    def request_cancel(self, ident: object) -> bool:
        """See :meth:`.Runs.request_cancel`; here in a transaction of its own."""
        return bool(self._begun(lambda session: self._runs.request_cancel(session, ident)))

    def signal(self, ident: object, name: str, payload: object) -> bool:
        """See :meth:`.Runs.signal`; here in a transaction of its own."""
        return bool(self._begun(lambda session: self._runs.signal(session, ident, name, payload)))

    def cancel_all(self, **conditions: Any) -> int:
        """See :meth:`.Runs.cancel_all`; here in a transaction of its own."""
        return int(self._begun(lambda session: self._runs.cancel_all(session, **conditions)))

    def entities(self) -> list[type[Any]]:
        """The run class and its receipt class."""
        return [self._runs.run_class, self._runs.receipt_class]

    def transact(self, verb: Callable[..., ValueT], *arguments: Any) -> ValueT:
        """Call what takes a plain session, in a transaction."""

        def call(session: Any) -> Any:
            return session.run_sync(verb, *arguments) if self._is_async else verb(session, *arguments)

        answer: ValueT = self._begun(call)
        return answer

    def _begun(self, verb: Callable[[Any], Any]) -> Any:
        """Call a verb in a transaction."""
        begun = self._runs.session_factory.begin()
        if not self._is_async:
            with begun as session:
                return verb(session)

        async def call() -> Any:
            async with begun as session:
                return await verb(session)

        return self._answer(call())

    def _answer(self, given: Any) -> Any:
        """Return what a verb returned, or what the coroutine that it returned does."""
        return self._loop.run(given) if inspect.iscoroutine(given) else given


class OpenFunctions(OpenRuns):
    """The :class:`.Functions` or :class:`.AsyncFunctions` that TARGET stands for."""

    def describe(self, ident: object) -> FunctionSummary | None:
        """See :meth:`.Functions.describe`."""
        with suppress(RunNotFound):
            described: FunctionSummary = self._answer(self._runs.describe(_id(ident)))
            return described
        return None

    def get_unhealed(self, ident: object) -> RunMixin | None:
        """See :meth:`.Runs.get`."""
        functions = self._runs
        # Not imported before: it needs greenlet, and whoever has made such functions has imported it.
        form: Any = import_module("sqla_durable.asyncio").AsyncRuns if self._is_async else Runs
        runs = form(functions.session_factory, functions.run_class, functions.receipt_class)
        row: RunMixin | None = self._answer(runs.get(ident, heal=False))
        return row

    def receipts(self, ident: object) -> tuple[Receipt, ...]:
        """See :meth:`.Functions.steps`."""
        receipts: tuple[Receipt, ...] = self._answer(self._runs.steps(_id(ident)))
        return receipts

    def requeue(self, ident: object) -> bool:
        """See :meth:`.Functions.requeue`."""
        return bool(self._answer(self._runs.requeue(_id(ident))))

    def request_cancel(self, ident: object) -> bool:
        """See :meth:`.Functions.request_cancel`; here in a transaction of its own."""
        return super().request_cancel(_id(ident))

    def signal(self, ident: object, name: str, payload: object) -> bool:
        """See :meth:`.Functions.signal`; here in a transaction of its own."""
        return super().signal(_id(ident), name, payload)

    def knows(self, function: str) -> bool:
        """Whether it may be the name of a function: one that this process knows, if it knows any."""
        known = self._runs.works()[0].verbs.starts()
        return not known or function in known

    def start(self, name: str, *inputs: object, **options: Any) -> FunctionHandle:
        """See :meth:`.Functions.start`; here in a transaction of its own.

        :param inputs: the JSON value of the input, if there is one.
        """
        given = [self._runs.decode_input(name, each) for each in inputs]
        handle: FunctionHandle = self._begun(lambda session: self._runs.start(session, name, *given, **options))
        return handle

    def result(self, handle: FunctionHandle, timeout: timedelta | None) -> Any:
        """See :meth:`.Functions.result`."""
        return self._answer(self._runs.result(handle, timeout=timeout))


def opened(target: str, url: str | None) -> OpenRuns:
    """Return the verbs of what TARGET stands for."""
    runs = runs_at(target, url)
    return OpenFunctions(runs) if is_functions(runs) else OpenRuns(runs)


def _id(ident: object) -> Any:
    key: Any = ident
    return key[0] if isinstance(ident, tuple) else key


def new_loop() -> asyncio.Runner:
    """Return a loop for one command."""
    import asyncio
    import sys

    # psycopg cannot wait on a proactor, which is what Windows has.
    return asyncio.Runner(loop_factory=asyncio.SelectorEventLoop if sys.platform == "win32" else None)
