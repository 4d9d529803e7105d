"""Lines with functions that both type checkers must reject. It is not run.

Each ignore comment stands for the rejection: both checkers report one that is not needed.
"""

from __future__ import annotations

from uuid import UUID

from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from sqla_durable import FunctionHandle, FunctionRun, call, keyed_call
from tests.typing.functions_accepted import (
    Order,
    Shipment,
    ask,
    async_functions,
    fulfil,
    fulfil_async,
    functions,
    nightly,
    pay,
    ship,
)


def use(session: Session, order: Order) -> None:
    functions.start(session, fulfil, {"id": 1})  # type: ignore[arg-type]
    functions.start(session, fulfil)  # type: ignore[arg-type]
    functions.start(session, nightly, order)  # type: ignore[arg-type]
    functions.handle(fulfil)  # type: ignore[call-overload]
    functions.handle(fulfil, key="k", id=UUID(int=1))  # type: ignore[call-overload]
    functions.handle(fulfil, id="1")  # type: ignore[call-overload]
    functions.start(session, fulfil, order, key=1)  # type: ignore[call-overload]
    functions.start_many(session, fulfil, ["one"])  # type: ignore[arg-type]
    functions.start(session, fulfil_async, {"id": 1})  # type: ignore[arg-type]
    functions.start(session, fulfil_async)  # type: ignore[arg-type]
    functions.start_many(session, fulfil_async, ["one"])  # type: ignore[arg-type]
    functions.include(fulfil_async)  # type: ignore[arg-type]
    other: FunctionHandle[int] = functions.start(session, fulfil_async, order)  # type: ignore[arg-type]
    wrong: FunctionHandle[int] = functions.start(session, fulfil, order)  # type: ignore[arg-type]
    result: str = functions.result(functions.start(session, fulfil, order))  # type: ignore[assignment]
    print(wrong, other, result)


@functions.function("no run")  # type: ignore[arg-type]
def no_run(order: Order) -> None:
    print(order)


@async_functions.function("no coroutine")  # type: ignore[arg-type]
def no_coroutine(run: FunctionRun, order: Order) -> None:
    print(run, order)


def body(run: FunctionRun, order: Order) -> Shipment:
    run.finish()  # type: ignore[attr-defined]
    run.step("no session first", without_session, order)  # type: ignore[arg-type, call-arg]
    number: int = run.step("wrong result", ship, order)  # type: ignore[assignment]
    return number  # type: ignore[return-value]


def gathers(run: FunctionRun) -> None:
    call("too few arguments", ask)  # type: ignore[call-arg]
    call("wrong type of argument", ask, 1)  # type: ignore[arg-type]
    call(1.5, ask, "x")  # type: ignore[arg-type]
    keyed_call("no key", pay_nothing)  # type: ignore[arg-type]
    keyed_call("too few arguments", pay)  # type: ignore[call-arg]
    _, _, _ = run.gather(call("a", ask, "x"), call("b", ask, "x"))  # type: ignore[misc]
    number: int = run.gather(call("a", ask, "x"))[0]  # type: ignore[assignment]
    run.gather(ask)  # type: ignore[call-overload]
    print(number)


def pay_nothing() -> None: ...


def forks(session: Session, run: FunctionHandle[Shipment]) -> None:
    functions.fork(session, run)  # type: ignore[call-arg]
    functions.fork(session, run, from_step=1.5)  # type: ignore[arg-type]
    other: FunctionHandle[int] = functions.fork(session, run, from_step="a")  # type: ignore[arg-type]
    functions.function("policy", on_mismatch="park")  # type: ignore[arg-type]
    functions.requeue_all(unknown=1)  # type: ignore[call-arg]
    functions.cancel_all(session, tenant=1)  # type: ignore[arg-type]
    functions.purge(30)  # type: ignore[arg-type]
    print(other)


def without_session(order: Order) -> Shipment:
    return Shipment(str(order.id))


async def use_async(session: AsyncSession, order: Order) -> None:
    await async_functions.start(session, fulfil_async, 1)  # type: ignore[arg-type]
    await async_functions.start(session, fulfil, 1)  # type: ignore[arg-type]
    await async_functions.start(session, fulfil)  # type: ignore[arg-type]
    wrong: FunctionHandle[int] = await async_functions.start(session, fulfil_async, order)  # type: ignore[arg-type]
    print(wrong)
