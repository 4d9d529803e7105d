"""The tables: a plan that is a run, its receipts, and the stocks, notes and accounts that its actions change."""

from __future__ import annotations

from datetime import timedelta
from decimal import Decimal
from enum import StrEnum
from uuid import UUID, uuid4

from sqlalchemy import Numeric
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqla_durable import ExpiryMixin, KeyMixin, Lifecycle, ReceiptMixin, RunMixin, StatusMachine

from .actions import Action, ActionsType


class PlanStatus(StrEnum):
    PENDING = "pending"
    APPROVED = "approved"
    EXECUTING = "executing"
    EXECUTED = "executed"
    FAILED = "failed"
    REJECTED = "rejected"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


plan_statuses = StatusMachine(
    PlanStatus,
    initial=PlanStatus.PENDING,
    transitions={
        PlanStatus.PENDING: {
            PlanStatus.APPROVED,
            PlanStatus.REJECTED,
            PlanStatus.EXPIRED,
            PlanStatus.CANCELLED,
        },
        PlanStatus.APPROVED: {PlanStatus.EXECUTING, PlanStatus.EXPIRED, PlanStatus.CANCELLED},
        # No edge leads back: a plan is executed once, and what has failed is not tried again.
        PlanStatus.EXECUTING: {PlanStatus.EXECUTED, PlanStatus.FAILED, PlanStatus.CANCELLED},
    },
)


class Base(DeclarativeBase):
    pass


class Plan(KeyMixin, ExpiryMixin, RunMixin, Base):
    __tablename__ = "approved_plan"
    __lifecycle__ = Lifecycle(
        plan_statuses,
        ready=PlanStatus.APPROVED,
        running=PlanStatus.EXECUTING,
        done=PlanStatus.EXECUTED,
        failed=PlanStatus.FAILED,
        cancelled=PlanStatus.CANCELLED,
        expired=PlanStatus.EXPIRED,  # consent that nobody gave, or nobody used, in time
        lapsed=PlanStatus.FAILED,  # interrupted: its process died while it executed the plan
        frozen=("actions", "revision"),  # what was approved is what is executed
        lease=timedelta(seconds=120),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    status: Mapped[PlanStatus] = plan_statuses.column()
    author: Mapped[str]
    actions: Mapped[list[Action]] = mapped_column(ActionsType)
    revision: Mapped[int] = mapped_column(default=1)
    decided_by: Mapped[str | None]


class PlanStep(ReceiptMixin[Plan], Base):
    __tablename__ = "approved_plan_step"


class Stock(Base):
    __tablename__ = "approved_stock"

    article: Mapped[str] = mapped_column(primary_key=True)
    site: Mapped[str] = mapped_column(primary_key=True)
    quantity: Mapped[int]


class Note(Base):
    __tablename__ = "approved_note"

    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str]


class Account(Base):
    __tablename__ = "approved_account"

    name: Mapped[str] = mapped_column(primary_key=True)
    balance: Mapped[Decimal] = mapped_column(Numeric(14, 2))
