"""Orders: runs with a key, a priority and a group, that belong to a customer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

from sqlalchemy import Engine, ForeignKey, Numeric, create_engine, func, select
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship, sessionmaker

from sqla_durable import KeyMixin, PriorityMixin, ReceiptMixin, RunMixin, Runs
from tests.support_models import JobStatus, jobs, lifecycle


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customer"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]
    orders: Mapped[list[Order]] = relationship(back_populates="customer")


class Order(KeyMixin, PriorityMixin, RunMixin, Base):
    __tablename__ = "orders"
    __key_scope__ = ("tenant",)
    __lifecycle__ = lifecycle(one_in_flight=("tenant", "kind"))
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[JobStatus] = jobs.column()
    tenant: Mapped[str | None]
    kind: Mapped[str | None]
    amount: Mapped[Decimal | None] = mapped_column(Numeric(12, 2))
    details: Mapped[Any | None] = mapped_column(JSONB)
    code: Mapped[str | None] = mapped_column(unique=True)
    customer_id: Mapped[int | None] = mapped_column(ForeignKey("customer.id"))
    customer: Mapped[Customer | None] = relationship(back_populates="orders")


class OrderStep(ReceiptMixin[Order], Base):
    __tablename__ = "order_step"


class Shop:
    """An engine, its sessions, and the orders."""

    def __init__(self, engine: Engine, isolation: str | None = None) -> None:
        self.engine = engine
        self.isolation = isolation
        self.factory = sessionmaker(engine, expire_on_commit=False)
        self.orders: Runs[Order] = Runs(self.factory, Order, OrderStep)

    def start(self, **values: Any) -> Order:
        """Start an order in a transaction of its own."""
        with self.factory.begin() as session:
            return self.orders.start(session, **values)

    def count(self) -> int:
        """How many orders are committed."""
        with self.engine.connect() as connection:
            return connection.scalar(select(func.count()).select_from(Order)) or 0


@contextmanager
def shop(url: str, isolation: str | None = None) -> Iterator[Shop]:
    engine = create_engine(url, **({} if isolation is None else {"isolation_level": isolation}))
    Base.metadata.create_all(engine)
    yield Shop(engine, isolation)
    engine.dispose()
