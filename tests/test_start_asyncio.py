"""The asyncio form of a start: the same run, loaded, in the caller's transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import inspect, select
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine

from sqla_durable import KeyConflict, RunInFlight, TransactionConflict, UsageError
from sqla_durable.asyncio import AsyncRun, AsyncRuns, transition
from tests.support import wait_until_blocked
from tests.support_models import JobStatus, jobs
from tests.support_start import Customer, Order, OrderStep, Shop, shop

Work = Callable[[AsyncRuns[Order], async_sessionmaker[AsyncSession]], Awaitable[Any]]


@pytest.fixture
def store(empty_url: str) -> Iterator[Shop]:
    with shop(empty_url) as made:
        yield made


def carried_out(url: str, work: Work, isolation: str = "READ COMMITTED", **options: Any) -> Any:
    async def main() -> Any:
        engine = create_async_engine(url, isolation_level=isolation)
        factory = async_sessionmaker(engine, **options)
        try:
            return await work(AsyncRuns(factory, Order, OrderStep), factory)
        finally:
            await engine.dispose()

    return asyncio.run(main())


def test_everything_is_loaded_without_a_further_statement(store: Shop, empty_url: str) -> None:
    async def work(orders: AsyncRuns[Order], factory: async_sessionmaker[AsyncSession]) -> None:
        async with factory.begin() as session:
            session.add(customer := Customer(name="ada"))
            order = await orders.start(session, key="a", customer=customer, available_at=timedelta(hours=1))
            for attribute in inspect(Order).column_attrs:
                getattr(order, attribute.key)  # MissingGreenlet where it is not loaded
            assert order.customer is customer
            assert order.customer_id == customer.id
            assert order.available_at > order.created_at

    carried_out(empty_url, work)
    assert store.count() == 1


@pytest.mark.parametrize("options", [{}, {"expire_on_commit": False, "autoflush": False}])
def test_replays_conflicts_and_groups(store: Shop, empty_url: str, options: dict[str, Any]) -> None:
    async def work(orders: AsyncRuns[Order], factory: async_sessionmaker[AsyncSession]) -> None:
        group = {"tenant": "t", "kind": "k"}
        async with factory.begin() as session:
            order = await orders.start(session, key="a", amount=Decimal(1), **group)
            assert await orders.start(session, key="a", amount=Decimal("1.0"), **group) is order
        async with factory.begin() as session:
            again = await orders.start(session, key="a", amount=Decimal(1), **group)
            assert again.status is JobStatus.WAITING
            with pytest.raises(KeyConflict):
                await orders.start(session, key="a", **group)
            with pytest.raises(RunInFlight):
                await orders.start(session, **group)
            with pytest.raises(UsageError, match="naive"):
                await orders.start(session, available_at=again.available_at.replace(tzinfo=None))

    carried_out(empty_url, work, **options)
    assert store.count() == 1


def test_an_async_scoped_session_serves_as_the_callers_session(store: Shop, empty_url: str) -> None:
    async def work(orders: AsyncRuns[Order], factory: async_sessionmaker[AsyncSession]) -> None:
        scoped = async_scoped_session(factory, asyncio.current_task)
        order = await orders.start(scoped, status=JobStatus.READY)
        ident, waiting = order.id, await orders.start(scoped)
        assert await transition(jobs, scoped, waiting, JobStatus.READY)
        await scoped.commit()
        run = await orders.claim(ident)
        assert run is not None
        await orders.fence(scoped, run.lease)
        await orders.record(scoped, run.lease, "own", 1)
        assert not await orders.attach_ids(scoped, ident, "send", 1)
        assert not await orders.never_issued(scoped, ident, "send")
        await scoped.commit()
        await scoped.remove()
        assert [receipt.step for receipt in await orders.receipts(ident)] == ["own"]

    carried_out(empty_url, work)


def test_a_rollback_takes_the_run_away(store: Shop, empty_url: str) -> None:
    async def work(orders: AsyncRuns[Order], factory: async_sessionmaker[AsyncSession]) -> None:
        async with factory() as session:
            order = await orders.start(session, key="a")
            await session.rollback()
            assert order not in session

    carried_out(empty_url, work)
    assert store.count() == 0


def test_a_cancelled_start_leaves_nothing(store: Shop, empty_url: str) -> None:
    async def work(orders: AsyncRuns[Order], factory: async_sessionmaker[AsyncSession]) -> None:
        async def start() -> None:
            async with factory.begin() as session:
                await orders.start(session, key="a")

        with store.factory() as session:
            store.orders.start(session, key="a")
            task = asyncio.create_task(start())
            await asyncio.to_thread(wait_until_blocked, store.engine)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await start()

    carried_out(empty_url, work)
    assert store.count() == 1


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_tasks_that_start_the_same_get_one_run(store: Shop, empty_url: str, isolation: str) -> None:
    async def work(orders: AsyncRuns[Order], factory: async_sessionmaker[AsyncSession]) -> list[int]:
        async def start() -> int:
            while True:
                try:
                    async with factory.begin() as session:
                        return (await orders.start(session, key="a")).id
                except TransactionConflict:
                    continue

        return await asyncio.gather(*(start() for _ in range(5)))

    started = carried_out(empty_url, work, isolation)
    assert len(set(started)) == 1
    assert store.count() == 1


def test_a_step_starts_another_run(store: Shop, empty_url: str) -> None:
    async def work(orders: AsyncRuns[Order], factory: async_sessionmaker[AsyncSession]) -> None:
        async def follow_up(session: AsyncSession) -> int:
            return (await orders.start(session, code="second")).id

        async def carry_out(run: AsyncRun[Order]) -> None:
            await run.step("only", follow_up)

        async with factory.begin() as session:
            ident = (await orders.start(session, status=JobStatus.READY)).id
        for _ in range(2):
            await orders.execute(ident, carry_out)
        async with factory() as session:
            assert len((await session.scalars(select(Order))).all()) == 2

    carried_out(empty_url, work)
