"""The tables: what the shop is about, and three for all functions."""

from datetime import timedelta
from enum import StrEnum

from sqlalchemy import CheckConstraint, ForeignKey, String
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqla_durable import FunctionMixin, ReceiptMixin, SignalMixin, function_lifecycle


class Base(DeclarativeBase):
    pass


class OrderStatus(StrEnum):
    OPEN = "open"
    REFUSED = "refused"
    CANCELLED = "cancelled"
    SHIPPED = "shipped"
    RETURNED = "returned"
    CLOSED = "closed"


class Order(Base):
    __tablename__ = "fulfilment_order"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    article: Mapped[str] = mapped_column(ForeignKey("fulfilment_stock.article"))
    quantity: Mapped[int]
    address: Mapped[str]
    status: Mapped[OrderStatus] = mapped_column(String(20), default=OrderStatus.OPEN)


class Stock(Base):
    __tablename__ = "fulfilment_stock"
    __table_args__ = (CheckConstraint("quantity >= 0"),)

    article: Mapped[str] = mapped_column(primary_key=True)
    quantity: Mapped[int]
    cents: Mapped[int]


class DurableRun(FunctionMixin, Base):
    __tablename__ = "fulfilment_run"
    __lifecycle__ = function_lifecycle(lease=timedelta(seconds=2))  # short, so that you need not wait for long

    order_id: Mapped[int | None] = mapped_column(ForeignKey("fulfilment_order.id"), index=True)


class DurableStep(ReceiptMixin[DurableRun], Base):
    __tablename__ = "fulfilment_step"


class DurableSignal(SignalMixin[DurableRun], Base):
    __tablename__ = "fulfilment_signal"
