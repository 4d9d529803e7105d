"""Functions of one form that the other form knows: started, watched and asked from sessions of that form."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import (
    ConfigurationError,
    Ending,
    FunctionRun,
    Functions,
    FunctionStatus,
    InputError,
    RunFailed,
    UsageError,
    Worker,
)
from sqla_durable.asyncio import AsyncFunctionRun, AsyncFunctions, AsyncWorker
from tests.support import Plan, PlanStep
from tests.support_functions import (
    BUDGET,
    DurableRun,
    DurableSignal,
    DurableStep,
    Order,
    Shipment,
    ship_async,
    tables,
    work,
)
from tests.support_observe import Job, JobStep


class Both:
    """Coroutine functions, and ordinary ones that know them."""

    def __init__(self, engine: Engine) -> None:
        tables(engine)
        self.async_engine = create_async_engine(engine.url)
        self.functions = Functions(sessionmaker(engine), DurableRun, DurableStep, signals=DurableSignal)
        self.coroutines = AsyncFunctions(
            async_sessionmaker(self.async_engine), DurableRun, DurableStep, signals=DurableSignal
        )
        self.functions.include(self.coroutines)

        @self.coroutines.function("fulfil")
        async def fulfil(run: AsyncFunctionRun, order: Order) -> Shipment:
            if order.id < 0:
                raise ValueError(order.id)
            return await run.step("ship", ship_async, order)

        @self.coroutines.function("hear")
        async def hear(run: AsyncFunctionRun) -> str:
            return await run.wait("word", str)

        self.fulfil = fulfil
        self.hear = hear

    def run(self, test: Callable[[], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            try:
                return await test()
            finally:
                await self.async_engine.dispose()

        return asyncio.run(main())

    def work(self) -> None:
        self.run(lambda: AsyncWorker(self.functions, self.coroutines).run_due(BUDGET))


@pytest.fixture
def both(engine: Engine) -> Both:
    return Both(engine)


def test_a_coroutine_function_is_started_and_watched_from_ordinary_sessions(both: Both) -> None:
    functions = both.functions
    with functions.session_factory() as session:
        functions.start(session, both.fulfil, Order(id=1), key="k")
    with functions.session_factory.begin() as session:
        one = functions.start(session, both.fulfil, Order(id=1), key="k")
        many = functions.start_many(session, both.fulfil, [Order(id=2), Order(id=3)])
        named = functions.start(session, "fulfil", functions.decode_input(both.fulfil, {"id": 4}))
        assert functions.describe(one, session=session).status is FunctionStatus.READY
    with functions.session_factory.begin() as session:
        assert functions.request_cancel(session, many[1])
    both.work()
    assert functions.result(functions.handle(both.fulfil, key="k")) == Shipment(code="s-1")
    assert [functions.result(each).code for each in (many[0], named)] == ["s-2", "s-4"]
    assert functions.wait(many[1]) is FunctionStatus.CANCELLED
    assert len(functions.find(function=both.fulfil)) == 4
    with functions.session_factory() as session, pytest.raises(InputError, match="'fulfil'"):
        functions.start(session, both.fulfil, 5)  # type: ignore[arg-type]


def test_a_coroutine_function_hears_a_signal_of_an_ordinary_session(both: Both) -> None:
    with both.functions.session_factory.begin() as session:
        handle = both.functions.start(session, both.hear)
        assert both.functions.signal(session, handle, "word", "go")
    both.work()
    assert both.functions.result(handle) == "go"


def test_a_coroutine_function_is_carried_out_by_its_own_form_only(both: Both) -> None:
    functions = both.functions
    with functions.session_factory.begin() as session:
        handle = functions.start(session, both.fulfil, Order(id=1))
    work(functions)
    for which in (handle, handle.id):
        assert which is not None
        with pytest.raises(UsageError, match=r"'fulfil' is a coroutine function; .*AsyncFunctions"):
            functions.execute(which)
    assert functions.describe(handle).attempts == 0
    both.work()
    outcome = functions.execute(handle)
    assert (outcome.ending, outcome.replayed) == (Ending.LANDED, True)


def test_an_ordinary_function_is_started_and_watched_from_asyncio_sessions(engine: Engine, both: Both) -> None:
    ordinary = Functions(sessionmaker(engine), DurableRun, DurableStep)
    both.coroutines.include(ordinary)

    @ordinary.function("where")
    def where(run: FunctionRun, number: int) -> str:
        return f"{threading.current_thread().name} {number}"

    async def test() -> None:
        async with both.coroutines.session_factory.begin() as session:
            handle = await both.coroutines.start(session, where, 1)
            (other,) = await both.coroutines.start_many(session, where, [2])
        with pytest.raises(UsageError, match=r"'where' is an ordinary function; .* Functions"):
            await both.coroutines.execute(handle)
        await AsyncWorker(ordinary, both.coroutines).run_due(BUDGET)
        assert (await both.coroutines.result(handle)).endswith(" 1")
        assert (await both.coroutines.result(other)).endswith(" 2")

    both.run(test)


def test_the_result_of_an_unknown_function_is_refused_before_it_is_waited_for(both: Both, engine: Engine) -> None:
    with both.functions.session_factory.begin() as session:
        handle = both.functions.start(session, both.fulfil, Order(id=1))
        failing = both.functions.start(session, both.fulfil, Order(id=-1))
    knows_none = Functions(sessionmaker(engine), DurableRun, DurableStep)
    for which in (handle, handle.id):
        asked: Any = which
        with pytest.raises(UsageError, match=r"'fulfil' is no function of these Functions.*include"):
            knows_none.result(asked, timeout=timedelta(minutes=10))
    both.work()
    with pytest.raises(RunFailed, match="ValueError"):
        knows_none.result(failing)


@pytest.mark.parametrize("first", ["declared", "included"])
def test_a_name_means_one_function_in_both_forms(engine: Engine, first: str) -> None:
    functions = Functions(sessionmaker(engine), DurableRun, DurableStep)
    coroutines = AsyncFunctions(async_sessionmaker(create_async_engine(engine.url)), DurableRun, DurableStep)

    @coroutines.function("fulfil")
    async def fulfil(run: AsyncFunctionRun) -> None: ...

    def other(run: FunctionRun) -> None: ...

    if first == "included":
        functions.include(coroutines)
        with pytest.raises(ConfigurationError, match="there is a function 'fulfil' already"):
            functions.function("fulfil")(other)
    else:
        functions.function("fulfil")(other)
        with pytest.raises(ConfigurationError, match="there is a function 'fulfil' already"):
            functions.include(coroutines)


def test_what_has_other_tables_or_no_functions_is_not_included(
    both: Both, session_factory: sessionmaker[Session]
) -> None:
    others: Any = Functions(session_factory, Job, JobStep)
    with pytest.raises(ConfigurationError, match=r"Job.*DurableRun"):
        both.functions.include(others)
    for no_functions in (Plan, PlanStep, both.fulfil):
        given: Any = no_functions
        with pytest.raises(ConfigurationError, match="Functions or AsyncFunctions"):
            both.functions.include(given)


def test_to_include_the_same_again_changes_nothing(both: Both) -> None:
    both.functions.include(both.coroutines)
    with both.functions.session_factory.begin() as session:
        handle = both.functions.start(session, both.fulfil, Order(id=1))
    both.work()
    assert isinstance(both.functions.result(handle), Shipment)


def test_a_limit_per_tenant_is_one_of_the_table_so_both_forms_must_have_the_same(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    limited = Functions(session_factory, DurableRun, DurableStep, concurrency_per_tenant=5)
    async_engine = create_async_engine(engine.url)
    coroutines = AsyncFunctions(async_sessionmaker(async_engine), DurableRun, DurableStep)
    with pytest.raises(ConfigurationError, match="concurrency_per_tenant=5 of these Functions and None of the"):
        limited.include(coroutines)
    with pytest.raises(ConfigurationError, match="functions of DurableRun with different limits per tenant"):
        AsyncWorker(limited, coroutines)
    same = Functions(session_factory, DurableRun, DurableStep)
    same.include(coroutines)
    AsyncWorker(same, coroutines)


def test_a_worker_says_which_functions_it_starts_and_does_not_carry_out(
    both: Both, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(both.functions)
    worker.stop()
    worker.run()
    said = "runs of fulfil, hear are started here and carried out elsewhere"
    assert [said in record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [True]
    caplog.clear()
    both.run(lambda: drained(AsyncWorker(both.functions, both.coroutines)))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


async def drained(worker: AsyncWorker) -> None:
    worker.stop()
    await worker.run()


def test_a_name_that_is_taken_in_what_includes_them_is_refused_too(both: Both) -> None:
    @both.functions.function("taken")
    def taken(run: FunctionRun) -> int:
        return 1

    with pytest.raises(ConfigurationError, match="'taken'"):

        @both.coroutines.function("taken")
        async def other(run: AsyncFunctionRun) -> int:
            return 2
