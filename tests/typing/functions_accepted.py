"""What users write with functions; both type checkers must infer these types. It is not run."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any, assert_type
from uuid import UUID

from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from sqla_durable import (
    AttemptsMixin,
    Call,
    FunctionConditions,
    FunctionHandle,
    FunctionMixin,
    FunctionRun,
    Functions,
    FunctionStatus,
    FunctionSummary,
    InputError,
    InputMismatch,
    OnMismatch,
    Outcome,
    Receipt,
    ReceiptMismatch,
    ReceiptMixin,
    ResultMismatch,
    Retry,
    Run,
    RunCancelled,
    RunFailed,
    RunInputMismatch,
    RunNotLanded,
    RunTimedOut,
    StatusMachine,
    StepUnreached,
    Worker,
    call,
    function_lifecycle,
    function_statuses,
    keyed_call,
)
from sqla_durable.asyncio import AsyncFunctionRun, AsyncFunctions, AsyncWorker


class Base(DeclarativeBase):
    pass


class DurableRun(FunctionMixin, Base):
    __tablename__ = "durable_run"
    __lifecycle__ = function_lifecycle(lease=timedelta(seconds=30), retry=Retry(max_attempts=3))
    note: Mapped[str | None] = mapped_column()


class DurableStep(ReceiptMixin[DurableRun], Base):
    __tablename__ = "durable_step"


class Order(BaseModel):
    id: int


@dataclass
class Shipment:
    code: str


functions = Functions(sessionmaker[Session](), DurableRun, DurableStep)
async_functions = AsyncFunctions(async_sessionmaker[AsyncSession](), DurableRun, DurableStep)


def ship(session: Session, order: Order, times: int = 1) -> Shipment:
    return Shipment(f"{order.id} {times} {session}")


async def ship_async(session: AsyncSession, order: Order) -> Shipment:
    return Shipment(f"{order.id} {session}")


@functions.function("fulfil", retry=Retry(max_attempts=5), max_duration=None)
def fulfil(run: FunctionRun[DurableRun], order: Order) -> Shipment:
    assert_type(run.row, DurableRun)
    assert_type(run.row.note, str | None)
    run.publish({"step": 1})
    return run.step("ship", ship, order, times=2)


def ask(url: str, times: int = 1) -> bytes:
    return url.encode() * times


def pay(idempotency_key: str, amount: Decimal) -> Shipment:
    return Shipment(f"{idempotency_key} {amount}")


async def ask_async(url: str) -> bytes:
    return url.encode()


async def pay_async(idempotency_key: str, amount: Decimal) -> Shipment:
    return Shipment(f"{idempotency_key} {amount}")


@functions.function("gathers", on_mismatch=OnMismatch.PARK, aliases={"a": "b", 2: ("c", 3)})
def gathers(run: FunctionRun) -> None:
    a, b = call("a", ask, "https://example.org"), keyed_call(2, pay, amount=Decimal(1))
    assert_type(a, Call[bytes])
    assert_type(b, Call[Shipment])
    assert_type(run.gather(a), tuple[bytes])
    assert_type(run.gather(a, b), tuple[bytes, Shipment])
    assert_type(run.gather(a, b, a), tuple[bytes, Shipment, bytes])
    assert_type(run.gather(a, b, a, b), tuple[bytes, Shipment, bytes, Shipment])
    assert_type(run.gather(a, b, a, b, a), tuple[bytes, Shipment, bytes, Shipment, bytes])
    assert_type(run.gather(a, b, a, b, a, b), tuple[bytes, Shipment, bytes, Shipment, bytes, Shipment])
    assert_type(run.gather(*[call(at, ask, "x") for at in range(9)]), tuple[bytes, ...])


def errors() -> list[type[ReceiptMismatch]]:
    return [ResultMismatch, InputMismatch, StepUnreached, RunInputMismatch]


def gathers_in_a_core_run(run: Run[Any]) -> None:
    assert_type(run.gather(call("a", ask, "x"), call("b", count_up)), tuple[bytes, int])


def count_up() -> int:
    return 1


@functions.function("nightly")
def nightly(run: FunctionRun) -> int:
    return run.step("count", count)


def count(_: Session) -> int:
    return 1


@async_functions.function("fulfil")
async def fulfil_async(run: AsyncFunctionRun, order: Order) -> Shipment:
    await run.publish(order)
    return await run.step("ship", ship_async, order)


@async_functions.function("gathers", on_mismatch=OnMismatch.KEEP, aliases={"a": "b"})
async def gathers_async(run: AsyncFunctionRun) -> None:
    a, b = call("a", ask_async, "https://example.org"), keyed_call(2, pay_async, amount=Decimal(1))
    assert_type(await run.gather(a), tuple[bytes])
    assert_type(await run.gather(a, b), tuple[bytes, Shipment])
    assert_type(await run.gather(a, b, a, b, a, b), tuple[bytes, Shipment, bytes, Shipment, bytes, Shipment])
    assert_type(await run.gather(*[call(at, ask_async, "x") for at in range(9)]), tuple[bytes, ...])


@async_functions.function("nightly")
async def nightly_async(run: AsyncFunctionRun) -> int:
    return run.lease.attempt


def call_it_directly(run: FunctionRun[DurableRun]) -> None:
    assert_type(fulfil(run, Order(id=1)), Shipment)
    assert_type(nightly(run), int)


def use(session: Session, order: Order) -> None:
    handle = functions.start(
        session, fulfil, order, key="k", run_at=timedelta(hours=1), priority=1, tenant="t", note="x"
    )
    assert_type(handle, FunctionHandle[Shipment])
    assert_type(functions.start(session, nightly), FunctionHandle[int])
    assert_type(functions.start(session, "fulfil", {"id": 1}), FunctionHandle[Any])
    many = functions.start_many(session, fulfil, [order], key=lambda each: str(each.id))
    assert_type(many, list[FunctionHandle[Shipment]])
    assert_type(functions.handle(fulfil, key="k"), FunctionHandle[Shipment])
    assert_type(functions.handle(fulfil, id=UUID(int=1)), FunctionHandle[Shipment])
    assert_type(functions.result(handle, timeout=timedelta(seconds=1)), Shipment)
    assert_type(functions.result(handle, session=session), Shipment)
    assert_type(functions.wait(handle), FunctionStatus)
    assert_type(functions.steps(handle), tuple[Receipt, ...])
    assert_type(functions.request_cancel(session, handle), bool)
    assert_type(functions.requeue(handle), bool)
    fork = functions.fork(session, handle, from_step="ship", key="k", run_at=timedelta(1), priority=2, note="x")
    assert_type(fork, FunctionHandle[Shipment])
    assert_type(functions.execute(handle, run_now=True), Outcome)
    assert_type(functions.find(function=fulfil, status=FunctionStatus.FAILED), list[FunctionSummary])
    described = functions.describe(handle)
    assert_type(described, FunctionSummary)
    assert_type(described.cancellable, bool)
    assert_type(described.handle.id, UUID | None)
    assert_type(functions.run_class, type[DurableRun])
    assert_type(functions.counts(tenant="t"), dict[str, dict[FunctionStatus, int]])
    assert_type(functions.requeue_all(function=fulfil, status=FunctionStatus.FAILED, limit=5), int)
    assert_type(functions.cancel_all(session, everything=True), int)
    assert_type(functions.purge(timedelta(30), status=[FunctionStatus.DONE]), int)
    assert_type(functions.reap(), int)
    assert_type(described.waiting, bool)
    conditions: FunctionConditions = {"tenant": "t", "older_than": timedelta(1)}
    functions.cancel_all(session, **conditions)
    Worker(functions).stop()


async def use_async(session: AsyncSession, order: Order) -> None:
    handle = await async_functions.start(session, fulfil_async, order, key="k")
    assert_type(handle, FunctionHandle[Shipment])
    print(await async_functions.result(handle))  # where what is wanted is any object
    assert_type(await async_functions.start(session, nightly_async), FunctionHandle[int])
    assert_type(await async_functions.start_many(session, fulfil_async, [order]), list[FunctionHandle[Shipment]])
    assert_type(async_functions.handle(fulfil_async, key="k"), FunctionHandle[Shipment])
    assert_type(async_functions.handle(fulfil_async, id=UUID(int=1)), FunctionHandle[Shipment])
    assert_type(await async_functions.result(handle), Shipment)
    assert_type(await async_functions.wait(handle), FunctionStatus)
    assert_type(await async_functions.describe(handle, session=session), FunctionSummary)
    assert_type(await async_functions.steps(handle), tuple[Receipt, ...])
    assert_type(await async_functions.request_cancel(session, handle), bool)
    assert_type(await async_functions.requeue(handle), bool)
    assert_type(await async_functions.fork(session, handle, from_step=1), FunctionHandle[Shipment])
    assert_type(await async_functions.execute(handle), Outcome)
    assert_type(await async_functions.find(tenant="t"), list[FunctionSummary])
    assert_type(await async_functions.counts(), dict[str, dict[FunctionStatus, int]])
    assert_type(await async_functions.requeue_all(waiting=False), int)
    assert_type(await async_functions.cancel_all(session, key="k"), int)
    assert_type(await async_functions.purge(timedelta(30)), int)
    assert_type(await async_functions.reap(5), int)
    AsyncWorker(async_functions, functions).stop()


def use_included(session: Session, order: Order) -> None:
    functions.include(async_functions)
    handle = functions.start(session, fulfil_async, order, key="k")
    assert_type(handle, FunctionHandle[Shipment])
    assert_type(functions.start(session, nightly_async), FunctionHandle[int])
    assert_type(functions.start_many(session, fulfil_async, [order]), list[FunctionHandle[Shipment]])
    assert_type(functions.handle(fulfil_async, key="k"), FunctionHandle[Shipment])
    assert_type(functions.handle(fulfil_async, id=UUID(int=1)), FunctionHandle[Shipment])
    assert_type(functions.result(handle), Shipment)
    assert_type(functions.find(function=fulfil_async), list[FunctionSummary])


async def use_included_async(session: AsyncSession, order: Order) -> None:
    async_functions.include(functions)
    assert_type(await async_functions.start(session, fulfil, order), FunctionHandle[Shipment])
    assert_type(await async_functions.start(session, nightly), FunctionHandle[int])
    assert_type(await async_functions.start_many(session, fulfil, [order]), list[FunctionHandle[Shipment]])
    assert_type(async_functions.handle(fulfil, key="k"), FunctionHandle[Shipment])


def use_proxies(one: scoped_session[Session], order: Order) -> None:
    assert_type(functions.start(one, fulfil, order), FunctionHandle[Shipment])
    assert_type(functions.start_many(one, fulfil, [order]), list[FunctionHandle[Shipment]])
    assert_type(functions.request_cancel(one, UUID(int=1)), bool)


async def use_async_proxies(one: async_scoped_session[AsyncSession], order: Order) -> None:
    assert_type(await async_functions.start(one, fulfil_async, order), FunctionHandle[Shipment])
    assert_type(await async_functions.request_cancel(one, UUID(int=1)), bool)
    assert_type(await async_functions.describe(UUID(int=1), session=one), FunctionSummary)


def fails(error: RunFailed) -> list[type[Exception]]:
    assert_type(error.failure is None, bool)
    return [InputError, RunCancelled, RunTimedOut, RunNotLanded]


assert_type(function_statuses, StatusMachine[FunctionStatus])


class Limited(AttemptsMixin):
    """A limit of attempts for each run, beside RunMixin."""
