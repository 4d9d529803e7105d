"""Functions that fulfil orders, for tests: the user's two tables, and what their steps do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from pydantic import BaseModel
from sqlalchemy import Engine, create_engine, func, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import (
    FunctionMixin,
    FunctionRun,
    Functions,
    ReceiptMixin,
    Retry,
    SignalMixin,
    Worker,
    function_lifecycle,
)

BUDGET = timedelta(seconds=20)


class FunctionBase(DeclarativeBase):
    pass


class DurableRun(FunctionMixin, FunctionBase):
    __tablename__ = "durable_run"
    __lifecycle__ = function_lifecycle(lease=timedelta(seconds=30), retry=Retry(backoff=timedelta(0)))
    note: Mapped[str | None]


class DurableStep(ReceiptMixin[DurableRun], FunctionBase):
    __tablename__ = "durable_step"


class DurableSignal(SignalMixin[DurableRun], FunctionBase):
    __tablename__ = "durable_signal"


class Entry(FunctionBase):
    """An effect in the user's own table."""

    __tablename__ = "function_entry"
    id: Mapped[int] = mapped_column(primary_key=True)
    label: Mapped[str]


class Order(BaseModel):
    id: int
    article: str = "book"


class Shipment(BaseModel):
    code: str


def ship(session: Session, order: Order) -> Shipment:
    session.add(Entry(label=f"ship {order.id}"))
    return Shipment(code=f"s-{order.id}")


async def ship_async(session: AsyncSession, order: Order) -> Shipment:
    session.add(Entry(label=f"ship {order.id}"))
    return Shipment(code=f"s-{order.id}")


def made(factory: sessionmaker[Session], **options: Any) -> Functions[DurableRun]:
    """Functions with one that ships an order."""
    functions = Functions(factory, DurableRun, DurableStep, signals=DurableSignal, **options)

    @functions.function("fulfil")
    def fulfil(run: FunctionRun, order: Order) -> Shipment:
        return run.step("ship", ship, order)

    return functions


@contextmanager
def functions_on(url: str, isolation_level: Any = "READ COMMITTED") -> Iterator[Functions[DurableRun]]:
    """The same on an engine of their own."""
    engine = create_engine(url, isolation_level=isolation_level)
    yield made(sessionmaker(engine))
    engine.dispose()


def tables(engine: Engine) -> None:
    FunctionBase.metadata.create_all(engine)


def work(functions: Functions[Any]) -> None:
    """Carry out what is due."""
    Worker(*functions.works()).run_due(BUDGET)


def labels(engine: Engine) -> list[str]:
    with Session(engine) as session:
        return list(session.scalars(select(Entry.label).order_by(Entry.id)))


def runs(engine: Engine) -> int:
    with Session(engine) as session:
        return session.scalars(select(func.count()).select_from(DurableRun)).one()
