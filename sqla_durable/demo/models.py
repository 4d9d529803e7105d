"""The tables: a plan that is a run, its receipts, and the stocks, balances and ledgers that its steps write."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Numeric
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqla_durable import Lifecycle, ReceiptMixin, Retry, RunMixin, StatusMachine


class PlanStatus(StrEnum):
    PENDING = "pending"
    APPROVED = "approved"
    EXECUTING = "executing"
    EXECUTED = "executed"
    FAILED = "failed"


plan_statuses = StatusMachine(
    PlanStatus,
    initial=PlanStatus.PENDING,
    transitions={
        PlanStatus.PENDING: {PlanStatus.APPROVED},
        PlanStatus.APPROVED: {PlanStatus.EXECUTING},
        PlanStatus.EXECUTING: {PlanStatus.EXECUTED, PlanStatus.FAILED, PlanStatus.APPROVED},
    },
)


class Base(DeclarativeBase):
    pass


class Plan(RunMixin, Base):
    __tablename__ = "plan"
    __lifecycle__ = Lifecycle(
        plan_statuses,
        ready=PlanStatus.APPROVED,
        running=PlanStatus.EXECUTING,
        done=PlanStatus.EXECUTED,
        failed=PlanStatus.FAILED,
        # Short, unbounded and without a delay, as the demo kills as often as it is asked to. The defaults are
        # 120 seconds and 5 attempts, with a growing delay in between.
        lease=timedelta(seconds=1),
        retry=Retry(max_attempts=None, backoff=timedelta(0)),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    status: Mapped[PlanStatus] = plan_statuses.column()
    actions: Mapped[list[dict[str, Any]]] = mapped_column(JSONB)


class PlanStep(ReceiptMixin[Plan], Base):
    __tablename__ = "plan_step"


class Stock(Base):
    __tablename__ = "stock"

    article: Mapped[str] = mapped_column(primary_key=True)
    site: Mapped[str] = mapped_column(primary_key=True)
    quantity: Mapped[int]


class Account(Base):
    __tablename__ = "account"

    name: Mapped[str] = mapped_column(primary_key=True)
    balance: Mapped[Decimal] = mapped_column(Numeric(14, 2))


# The ledgers have no unique constraint on the position: nothing but the steps' receipts keeps an effect from being
# written twice.


class StockEntry(Base):
    __tablename__ = "stock_entry"

    id: Mapped[int] = mapped_column(primary_key=True)
    position: Mapped[int]
    article: Mapped[str]
    source: Mapped[str]
    target: Mapped[str]
    quantity: Mapped[int]


class PaymentEntry(Base):
    __tablename__ = "payment_entry"

    id: Mapped[int] = mapped_column(primary_key=True)
    position: Mapped[int]
    payer: Mapped[str]
    payee: Mapped[str]
    amount: Mapped[Decimal] = mapped_column(Numeric(14, 2))
