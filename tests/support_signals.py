"""Runs that wait for signals, and what is sent to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Engine, func, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import Lifecycle, ReceiptMixin, Retry, Run, RunMixin, Runs, SignalMixin, StatusMachine, WaitMixin
from tests.support import Background, PlanStatus, blocked_backends, plan_statuses, wait_until_blocked

ValueOf = Callable[[], Any]
# Its own, as a key alone names a run of a machine that one class uses only.
order_statuses = StatusMachine(PlanStatus, initial=PlanStatus.PENDING, transitions=plan_statuses.transitions)


class OrderBase(DeclarativeBase):
    pass


class Order(WaitMixin, RunMixin, OrderBase):
    __tablename__ = "order"
    __lifecycle__ = Lifecycle(
        order_statuses,
        ready=PlanStatus.APPROVED,
        running=PlanStatus.EXECUTING,
        done=PlanStatus.EXECUTED,
        failed=PlanStatus.FAILED,
        dead=PlanStatus.DEAD,
        cancelled=PlanStatus.CANCELLED,
        lease=timedelta(seconds=30),
        retry=Retry(max_attempts=1000, backoff=timedelta(0), cap=timedelta(0)),
        requeue={PlanStatus.FAILED, PlanStatus.DEAD, PlanStatus.CANCELLED},
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    status: Mapped[PlanStatus] = order_statuses.column()
    note: Mapped[str | None]


class OrderStep(ReceiptMixin[Order], OrderBase):
    __tablename__ = "order_step"


class OrderSignal(SignalMixin[Order], OrderBase):
    __tablename__ = "order_signal"


class Line(OrderBase):
    """An effect that can be counted."""

    __tablename__ = "line"
    id: Mapped[int] = mapped_column(primary_key=True)
    label: Mapped[str]


def make_tables(engine: Engine) -> None:
    OrderBase.metadata.create_all(engine)


def orders_on(factory: sessionmaker[Session], **options: Any) -> Runs[Order]:
    return Runs(factory, Order, OrderStep, signals=OrderSignal, **options)


def new_order(factory: sessionmaker[Session], **values: Any) -> UUID:
    with factory.begin() as session:
        order = Order(status=PlanStatus.APPROVED, **values)
        session.add(order)
        session.flush()
        return order.id


def send(orders: Runs[Order], ident: object, name: str, *payloads: object) -> None:
    """Send signals and commit, each in a transaction of its own."""
    for payload in payloads:
        with orders.session_factory.begin() as session:
            assert orders.signal(session, ident, name, payload)


@contextmanager
def sent_later(orders: Runs[Order], ident: object, name: str, payload: object) -> Iterator[Session]:
    """Send a signal that is committed at the end of the block."""
    with orders.session_factory.begin() as session:
        assert orders.signal(session, ident, name, payload)
        yield session


def taken(engine: Engine, ident: UUID) -> list[tuple[str, Any, str | None]]:
    """Name, payload and taker of each signal of an order, in the order in which they were sent."""
    table = OrderSignal.__table__
    with engine.connect() as connection:
        found = connection.execute(
            select(table.c.name, table.c.payload, table.c.step).where(table.c.order_id == ident).order_by(table.c.id)
        )
        return [(name, payload, step) for name, payload, step in found]


def of_order(engine: Engine, ident: UUID) -> Any:
    """An order's row as it is committed."""
    with engine.connect() as connection:
        return connection.execute(
            select(Order.__table__, (Order.available_at <= func.clock_timestamp()).label("due")).where(
                Order.id == ident
            )
        ).one()


def add_line(session: Session, label: str) -> str:
    session.add(Line(label=label))
    return label


def lines(engine: Engine) -> list[str]:
    with Session(engine) as session:
        return list(session.scalars(select(Line.label).order_by(Line.id)))


def collecting(name: str, count: int, into: list[Any]) -> Callable[[Run[Order]], None]:
    """A handler that waits for so many signals of a name."""

    def handler(run: Run[Order]) -> None:
        into[:] = [run.wait(name, Any, key=f"{name}-{number}") for number in range(count)]

    return handler


def blocked(engine: Engine, call: ValueOf) -> Background:
    """Call something in the background, and return when PostgreSQL says that it waits for a lock."""
    before = blocked_backends(engine)
    background = Background(call)
    wait_until_blocked(engine, before + 1)
    return background
