"""The same over asyncio: coroutine bodies, and every verb of a handle."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from sqla_durable import (
    ConfigurationError,
    Ending,
    Functions,
    FunctionStatus,
    InputError,
    KeyConflict,
    Retry,
    RetryableError,
    RunCancelled,
    RunFailed,
    RunNotFound,
    RunNotLanded,
    UsageError,
)
from sqla_durable.asyncio import AsyncFunctionRun, AsyncFunctions, AsyncWorker
from tests.support_functions import BUDGET, DurableRun, DurableStep, Order, Shipment, labels, runs, ship_async, tables

Test = Callable[[AsyncFunctions[DurableRun]], Awaitable[None]]


def on(engine: Engine, test: Test) -> None:
    """Run a test on functions with one that ships an order."""
    tables(engine)

    async def main() -> None:
        async_engine = create_async_engine(engine.url)
        functions = AsyncFunctions(async_sessionmaker(async_engine), DurableRun, DurableStep)

        @functions.function("fulfil")
        async def fulfil(run: AsyncFunctionRun, order: Order) -> Shipment:
            await run.publish({"packed": order.id})
            return await run.step("ship", ship_async, order)

        try:
            await test(functions)
        finally:
            await async_engine.dispose()

    asyncio.run(main())


async def started(functions: AsyncFunctions[Any], function: Any, /, *given: Any, **options: Any) -> Any:
    async with functions.session_factory.begin() as session:
        return await functions.start(session, function, *given, **options)


async def work(functions: AsyncFunctions[Any]) -> None:
    await AsyncWorker(*functions.works()).run_due(BUDGET)


def test_a_worker_carries_it_out_and_every_verb_tells_the_same(engine: Engine) -> None:
    async def test(functions: AsyncFunctions[DurableRun]) -> None:
        handle = await started(functions, "fulfil", Order(id=1), key="k", tenant="north")
        with pytest.raises(RunNotLanded):
            await functions.result(handle, timeout=timedelta(seconds=0.05))
        await work(functions)
        assert await functions.wait(handle) is FunctionStatus.DONE
        assert await functions.result(handle) == Shipment(code="s-1")
        described = await functions.describe(handle)
        assert (described.steps, described.state, described.handle) == (1, {"packed": 1}, handle)
        assert [receipt.step for receipt in await functions.steps(handle)] == ["ship"]
        assert [each.handle for each in await functions.find(key="k")] == [handle]
        body = next(iter(functions._registry)).body
        assert await functions.result(functions.handle(body, key="k", tenant="north")) == Shipment(code="s-1")
        assert await functions.result(functions.handle(body, id=handle.id)) == Shipment(code="s-1")
        with pytest.raises(RunNotFound):
            await functions.describe(functions.handle(body, key="other"))
        assert (await functions.execute(handle)).replayed

    on(engine, test)
    assert labels(engine) == ["ship 1"]


def test_it_joins_the_callers_transaction_and_can_be_read_there(engine: Engine) -> None:
    async def test(functions: AsyncFunctions[DurableRun]) -> None:
        async with functions.session_factory() as session:
            handle = await functions.start(session, "fulfil", Order(id=1))
            assert (await functions.describe(handle, session=session)).status is FunctionStatus.READY
            assert await functions.steps(handle, session=session) == ()
            with pytest.raises(RunNotLanded):
                await functions.result(handle, session=session)
            await session.rollback()
        with pytest.raises(RunNotFound):
            await functions.describe(handle)

    on(engine, test)
    assert runs(engine) == 0


def test_an_async_scoped_session_serves_as_the_callers_session(engine: Engine) -> None:
    async def test(functions: AsyncFunctions[DurableRun]) -> None:
        scoped = async_scoped_session(functions.session_factory, asyncio.current_task)
        handle = await functions.start(scoped, "fulfil", Order(id=1))
        many = await functions.start_many(scoped, "fulfil", [Order(id=2), Order(id=3)])
        assert (await functions.describe(handle, session=scoped)).status is FunctionStatus.READY
        assert await functions.steps(handle, session=scoped) == ()
        with pytest.raises(RunNotLanded):
            await functions.result(handle, session=scoped)
        with pytest.raises(ConfigurationError, match="signals"):
            await functions.signal(scoped, handle, "packed")
        with pytest.raises(UsageError, match="no receipt"):
            await functions.fork(scoped, handle, from_step="ship")
        assert await functions.request_cancel(scoped, many[0])
        assert await functions.cancel_all(scoped, everything=True) == 2
        await scoped.commit()
        await scoped.remove()
        assert await functions.wait(handle) is FunctionStatus.CANCELLED

    on(engine, test)


def test_keys_and_inputs_are_checked_as_in_the_other_form(engine: Engine) -> None:
    async def test(functions: AsyncFunctions[DurableRun]) -> None:
        async with functions.session_factory.begin() as session:
            one = await functions.start(session, "fulfil", Order(id=1), key="k")
            assert await functions.start(session, "fulfil", Order(id=1), key="k") == one
            assert (await functions.start_many(session, "fulfil", [Order(id=1)], key=lambda _: "k")) == [one]
            with pytest.raises(KeyConflict):
                await functions.start(session, "fulfil", Order(id=2), key="k")
            with pytest.raises(InputError):
                await functions.start(session, "fulfil", {"id": 1})

    on(engine, test)
    assert runs(engine) == 1


def test_a_failure_is_retried_as_the_function_says_and_then_told(engine: Engine) -> None:
    async def test(functions: AsyncFunctions[DurableRun]) -> None:
        @functions.function("flaky", retry=Retry(max_attempts=3, backoff=timedelta(0)))
        async def flaky(run: AsyncFunctionRun) -> int:
            if run.lease.attempt < 3:
                raise RetryableError("again")
            return run.lease.attempt

        @functions.function("boom")
        async def boom(run: AsyncFunctionRun) -> None:
            raise ValueError("no stock")

        handles = [await started(functions, flaky), await started(functions, boom)]
        await work(functions)
        assert await functions.result(handles[0]) == 3
        with pytest.raises(RunFailed, match="no stock"):
            await functions.result(handles[1])
        assert await functions.requeue(handles[1])
        assert (await functions.describe(handles[1])).status is FunctionStatus.READY

    on(engine, test)


def test_a_waiting_run_is_cancelled_at_once_and_a_running_one_at_its_next_await(engine: Engine) -> None:
    async def test(functions: AsyncFunctions[DurableRun]) -> None:
        @functions.function("long")
        async def long(run: AsyncFunctionRun) -> None:
            async with functions.session_factory.begin() as session:
                assert await functions.request_cancel(session, run.lease.identity[0])
            await run.step("never", ship_async, Order(id=1))

        waiting, running = await started(functions, "fulfil", Order(id=1)), await started(functions, long)
        async with functions.session_factory.begin() as session:
            assert await functions.request_cancel(session, waiting)
        await work(functions)
        for handle in (waiting, running):
            with pytest.raises(RunCancelled):
                await functions.result(handle)

    on(engine, test)
    assert labels(engine) == []


def test_a_worker_leaves_functions_that_it_does_not_know_to_others(engine: Engine) -> None:
    async def test(functions: AsyncFunctions[DurableRun]) -> None:
        other = AsyncFunctions(functions.session_factory, DurableRun, DurableStep)

        @other.function("elsewhere")
        async def elsewhere(run: AsyncFunctionRun) -> str:
            return "done there"

        handle = await started(other, elsewhere)
        await work(functions)
        assert (await functions.execute(handle)).ending is Ending.NOT_CLAIMABLE
        await work(other)
        assert await other.result(handle) == "done there"

    on(engine, test)


def test_a_plain_function_is_refused_with_where_it_belongs(engine: Engine) -> None:
    async def test(functions: AsyncFunctions[DurableRun]) -> None:
        with pytest.raises(ConfigurationError, match="Functions"):
            functions.function("plain")(lambda run: None)

    on(engine, test)


class Called:
    """An object that is called as a plain function is."""

    def __call__(self, run: AsyncFunctionRun, order: Order) -> Shipment:
        raise AssertionError


class Awaited:
    """An object that is called as a coroutine function is."""

    async def __call__(self, run: AsyncFunctionRun, order: Order) -> Shipment:
        return await run.step("ship", ship_async, order)


async def ship_to(run: AsyncFunctionRun, order: Order, country: str) -> Shipment:
    return Shipment(code=f"{country}-{order.id}")


def no_coroutine(run: AsyncFunctionRun, order: Order, country: str) -> Shipment:
    raise AssertionError


@pytest.mark.parametrize(
    "body",
    [Called(), partial(no_coroutine, country="de"), partial(Called()), partial(partial(no_coroutine), country="de")],
    ids=["callable object", "partial", "partial of an object", "partial of a partial"],
)
def test_what_is_no_coroutine_function_is_refused_whatever_it_is_wrapped_in(engine: Engine, body: Any) -> None:
    async def test(functions: AsyncFunctions[DurableRun]) -> None:
        with pytest.raises(ConfigurationError, match=r"'plain': .* is no coroutine function; .* Functions"):
            functions.function("plain")(body)

    on(engine, test)


@pytest.mark.parametrize(
    ("body", "code"),
    [(Awaited(), "s-1"), (partial(ship_to, country="de"), "de-1"), (partial(Awaited()), "s-1")],
    ids=["callable object", "partial", "partial of an object"],
)
def test_what_is_a_coroutine_function_within_is_carried_out(engine: Engine, body: Any, code: str) -> None:
    async def test(functions: AsyncFunctions[DurableRun]) -> None:
        functions.function("wrapped")(body)
        handle = await started(functions, body, Order(id=1))
        await work(functions)
        assert await functions.result(handle) == Shipment(code=code)

    on(engine, test)


@pytest.mark.parametrize("body", [Awaited(), partial(ship_to, country="de"), partial(Awaited())])
def test_the_other_form_refuses_a_coroutine_function_whatever_it_is_wrapped_in(engine: Engine, body: Any) -> None:
    functions = Functions(sessionmaker(engine), DurableRun, DurableStep)
    with pytest.raises(ConfigurationError, match=r"'wrapped': .* is a coroutine function; .* AsyncFunctions"):
        functions.function("wrapped")(body)
