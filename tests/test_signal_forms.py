"""Waiting in the asyncio form, on models of every shape, and what it costs in round trips."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import pytest
from sqlalchemy import Engine, ForeignKey, MetaData, String, create_engine, inspect, select, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column, sessionmaker

from sqla_durable import (
    ConfigurationError,
    Ending,
    ReceiptMixin,
    Run,
    RunMixin,
    Runs,
    SignalMixin,
    Suspended,
    UpdateFailed,
    WaitMixin,
)
from sqla_durable.asyncio import AsyncRun, AsyncRuns
from sqla_durable.testing import let_pass
from tests.support import Plan, PlanStatus
from tests.support_async import sessions
from tests.support_jobs import JobStatus, job_lifecycle
from tests.support_signals import (
    Order,
    OrderSignal,
    OrderStep,
    lines,
    make_tables,
    new_order,
    orders_on,
    send,
    taken,
)
from tests.support_waits import EXPECTED_LINES, carry_out_async
from tests.support_wire import Wire

HOUR = timedelta(hours=1)
WARM_UP = 8
BEGIN = COMMIT = STATEMENT = 1

Scenario = Callable[[AsyncRuns[Order], async_sessionmaker[AsyncSession]], Awaitable[None]]


# --- asyncio


@pytest.fixture
def ident(engine: Engine, session_factory: sessionmaker[Session]) -> Any:
    make_tables(engine)
    return new_order(session_factory)


def in_asyncio(engine: Engine, scenario: Scenario) -> None:
    async def main() -> None:
        async with sessions(engine) as factory:
            await scenario(AsyncRuns(factory, Order, OrderStep, signals=OrderSignal), factory)

    asyncio.run(main())


def test_an_order_waits_answers_and_sleeps_over_asyncio(
    engine: Engine, ident: Any, session_factory: sessionmaker[Session]
) -> None:
    async def scenario(orders: AsyncRuns[Order], factory: async_sessionmaker[AsyncSession]) -> None:
        assert (await orders.execute(ident, carry_out_async)).ending is Ending.SUSPENDED
        async with factory.begin() as session:
            assert await orders.signal(session, ident, "paid", 7)
        assert (await orders.execute(ident, carry_out_async)).ending is Ending.SUSPENDED
        update = asyncio.create_task(orders.update(ident, "discount", 25, returns=int, timeout=timedelta(seconds=15)))
        while not (await orders.execute(ident, carry_out_async)).receipts[2:]:
            await asyncio.sleep(0.01)
        assert await update == 25
        async with factory.begin() as session:
            await session.run_sync(lambda session: let_pass(session, OrderStep, ident, "nap"))
        assert (await orders.execute(ident, carry_out_async)).status is PlanStatus.EXECUTED

    in_asyncio(engine, scenario)
    assert lines(engine) == EXPECTED_LINES
    assert taken(engine, ident) == [("paid", 7, "paid"), ("discount", 25, "discount")]


def test_an_update_that_fails_says_so_over_asyncio(engine: Engine, ident: Any) -> None:
    async def refuse(session: AsyncSession, payload: int) -> None:
        raise ValueError("no")

    async def handler(run: AsyncRun[Order]) -> None:
        await run.answer("discount", refuse)

    async def scenario(orders: AsyncRuns[Order], factory: async_sessionmaker[AsyncSession]) -> None:
        update = asyncio.create_task(orders.update(ident, "discount", 25, timeout=timedelta(seconds=15)))
        while (await orders.execute(ident, handler)).ending is Ending.SUSPENDED:
            await asyncio.sleep(0.01)
        with pytest.raises(UpdateFailed):
            await update

    in_asyncio(engine, scenario)


def test_waits_of_one_run_queue_up_and_the_first_that_finds_nothing_parks_it(engine: Engine, ident: Any) -> None:
    async def handler(run: AsyncRun[Order]) -> None:
        assert await asyncio.gather(run.wait("a", int), run.wait("b", int)) == [1, 2]

    async def scenario(orders: AsyncRuns[Order], factory: async_sessionmaker[AsyncSession]) -> None:
        assert (await orders.execute(ident, handler)).ending is Ending.SUSPENDED
        async with factory.begin() as session:
            await orders.signal(session, ident, "b", 2)
            await orders.signal(session, ident, "a", 1)
        outcome = await orders.execute(ident, handler)
        assert (outcome.status, outcome.exception) == (PlanStatus.EXECUTED, None)

    in_asyncio(engine, scenario)


def test_a_wait_that_is_not_awaited_is_named(engine: Engine, ident: Any) -> None:
    async def handler(run: AsyncRun[Order]) -> None:
        run.wait("a", int)  # type: ignore[unused-coroutine]

    async def scenario(orders: AsyncRuns[Order], factory: async_sessionmaker[AsyncSession]) -> None:
        outcome = await orders.execute(ident, handler)
        assert "'a' was never awaited" in str(outcome.exception)

    in_asyncio(engine, scenario)


# --- what it costs


@pytest.fixture
def wire(engine: Engine) -> Iterator[Wire]:
    wire = Wire(engine.url)
    yield wire
    wire.close()


def test_a_signal_and_a_sleep_cost_one_round_trip_and_a_wait_that_finds_a_signal_two(
    engine: Engine, wire: Wire, session_factory: sessionmaker[Session]
) -> None:
    make_tables(engine)
    through = create_engine(wire.url)
    orders, here = orders_on(sessionmaker(through)), orders_on(session_factory)
    costs: dict[str, int] = {}

    def cost(name: str, call: Callable[[], Any]) -> None:
        with wire.counting() as count:
            call()
        costs[name] = count.round_trips

    def suspended(call: Callable[[], Any]) -> None:
        with pytest.raises(Suspended):
            call()

    def claimed(ident: Any) -> Run[Order]:
        run = orders.claim(ident, run_now=True)
        assert run is not None
        return run

    def life() -> None:
        ident = new_order(session_factory)
        with orders.session_factory() as session:
            session.execute(select(1))
            cost("signal", lambda: orders.signal(session, ident, "a", 1))
            session.commit()
        run = claimed(ident)
        cost("wait with a signal there", lambda: run.wait("a", int))
        cost("parked wait", lambda: suspended(lambda: run.wait("b", int)))
        send(here, ident, "b", 2)
        run = claimed(ident)
        cost("replayed wait", lambda: run.wait("a", int))
        cost("answer with a signal there", lambda: run.answer("b", lambda session, payload: 1))
        cost("parked sleep", lambda: suspended(lambda: run.sleep("nap", HOUR)))
        with session_factory.begin() as session:
            let_pass(session, OrderStep, ident, "nap")
        run = claimed(ident)
        cost("sleep that is over", lambda: run.sleep("nap", HOUR))
        run.finish()

    for _ in range(WARM_UP):
        life()
    through.dispose()
    step = BEGIN + 2 * STATEMENT + COMMIT
    assert costs == {
        "signal": STATEMENT,
        "wait with a signal there": 2 * STATEMENT,
        "parked wait": STATEMENT + BEGIN + 3 * STATEMENT + COMMIT,
        "replayed wait": 0,
        "answer with a signal there": step + 2 * STATEMENT,
        "parked sleep": STATEMENT,
        "sleep that is over": STATEMENT,
    }


# --- models


class OddBase(MappedAsDataclass, DeclarativeBase, kw_only=True):
    metadata = MetaData(
        schema="odd",
        naming_convention={
            "ix": "ix_%(column_0_label)s",
            "ck": "ck_%(table_name)s_%(constraint_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
            "pk": "pk_%(table_name)s",
        },
    )


odd_lifecycle = job_lifecycle()


class Odd(WaitMixin, RunMixin, OddBase):
    """A composite key, attributes with other names than their columns, a schema and an onupdate."""

    __tablename__ = "odd run"
    __lifecycle__ = odd_lifecycle
    tenant: Mapped[str] = mapped_column("Tenant", String(20), primary_key=True)
    number: Mapped[int] = mapped_column("No.", primary_key=True, autoincrement=False)
    status: Mapped[JobStatus] = odd_lifecycle.machine.column("State", init=False)
    touched: Mapped[str | None] = mapped_column(String(20), onupdate="touched", default=None)


class OddStep(ReceiptMixin[Odd], OddBase):
    __tablename__ = "odd step"


class OddSignal(SignalMixin[Odd], OddBase):
    __tablename__ = "odd signal"
    channel: Mapped[str] = mapped_column(String(20), server_default="post", default="post")


class KindBase(DeclarativeBase):
    pass


kind_lifecycle = job_lifecycle()


class Kind(WaitMixin, RunMixin, KindBase):
    __tablename__ = "kind"
    __lifecycle__ = kind_lifecycle
    __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_on": "type", "polymorphic_identity": "kind"}
    id: Mapped[int] = mapped_column(primary_key=True)
    type: Mapped[str]
    status: Mapped[JobStatus] = kind_lifecycle.machine.column()


class Special(Kind):
    __tablename__ = "special"
    __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": "special"}
    id: Mapped[int] = mapped_column(ForeignKey(Kind.id), primary_key=True)


class KindStep(ReceiptMixin[Kind], KindBase):
    __tablename__ = "kind_step"


class KindSignal(SignalMixin[Kind], KindBase):
    __tablename__ = "kind_signal"


@dataclass
class Case:
    """How one model is started."""

    run: type[Any]
    receipt: type[Any]
    signals: type[Any]
    values: dict[str, Any]
    other: dict[str, Any]


CASES = {
    "composite": Case(Odd, OddStep, OddSignal, {"tenant": "a%b", "number": 7}, {"tenant": "a%b", "number": 8}),
    "inherited": Case(Special, KindStep, KindSignal, {"id": 1}, {"id": 2}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("translated", [False, True], ids=["", "schema_translate_map"])
def test_models_of_every_shape_wait(engine: Engine, case: Case, translated: bool) -> None:
    schema = case.run.__table__.schema
    mapped = "elsewhere" if translated else schema
    with engine.begin() as connection:
        for name in {mapped, "odd"} - {None}:
            connection.execute(text(f"CREATE SCHEMA {name}"))
    moved = engine.execution_options(schema_translate_map={schema: mapped}) if translated else engine
    case.run.metadata.create_all(moved)
    factory = sessionmaker(moved)
    runs: Runs[Any] = Runs(factory, case.run, case.receipt, signals=case.signals)
    with factory.begin() as session:
        session.add_all([case.run(**case.values), case.run(**case.other)])
    key = tuple(case.values.values())

    def handler(run: Run[Any]) -> None:
        assert run.wait("paid", int, timeout=HOUR) == 7
        run.answer("asked", lambda session, payload: payload)
        run.sleep("nap", HOUR)

    assert runs.execute(key, handler).ending is Ending.SUSPENDED
    with factory.begin() as session:
        assert runs.signal(session, key, "paid", 7)
        assert runs.signal(session, key, "asked", "x")
    assert runs.execute(key, handler).ending is Ending.SUSPENDED
    with factory.begin() as session:
        let_pass(session, case.receipt, key, "nap")
    assert runs.execute(key, handler).status is JobStatus.DONE
    with factory() as session:
        found = session.scalars(select(case.signals)).all()
        assert [(signal.name, signal.step) for signal in found] == [("paid", "paid"), ("asked", "asked")]
        untouched = session.get_one(case.run, tuple(case.other.values()))
        assert untouched.waits_for is None
        if case.run is Odd:
            assert session.get_one(Odd, key).touched is None
    with engine.connect() as connection:
        tables = inspect(connection).get_table_names(schema=mapped)
        assert case.signals.__tablename__ in tables


def test_the_index_covers_what_nobody_has_taken() -> None:
    (index,) = OrderSignal.__table__.indexes  # type: ignore[attr-defined]
    assert [column.name for column in index.columns] == ["order_id", "name", "id"]
    assert str(index.dialect_options["postgresql"]["where"]) == "order_signal.step IS NULL"
    assert [column.name for column in OrderSignal.__table__.primary_key] == ["order_id", "id"]


def test_runs_of_another_subclass_are_not_signalled(engine: Engine) -> None:
    from sqla_durable import RunNotFound

    KindBase.metadata.create_all(engine)
    factory = sessionmaker(engine)
    runs: Runs[Special] = Runs(factory, Special, KindStep, signals=KindSignal)
    with factory.begin() as session:
        session.add(Kind(id=1))
    with factory.begin() as session, pytest.raises(RunNotFound):
        runs.signal(session, 1, "paid", 7)


# --- declarations that cannot work


def test_a_run_that_cannot_wait_has_no_signals() -> None:
    with pytest.raises(ConfigurationError, match="WaitMixin"):

        class PlanSignals(SignalMixin[Plan], OddBase):
            __tablename__ = "nothing_1"


def test_signals_say_whose_they_are() -> None:
    with pytest.raises(ConfigurationError, match="SignalMixin\\[YourRunClass\\]"):

        class NobodysSignals(SignalMixin, OddBase):  # type: ignore[type-arg]
            __tablename__ = "nothing_2"

    with pytest.raises(ConfigurationError, match="signals"):
        SignalMixin["Plan"]  # type: ignore[type-arg, name-defined]


def test_only_runs_wait() -> None:
    with pytest.raises(ConfigurationError, match="without RunMixin"):

        class Lonely(WaitMixin, OddBase):
            __tablename__ = "nothing_3"
            id: Mapped[int] = mapped_column(primary_key=True)


def test_a_column_of_the_users_that_the_library_would_leave_empty_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="channel"):

        class EmptySignals(SignalMixin[Odd], OddBase):
            __tablename__ = "nothing_4"
            channel: Mapped[str]
