# plan_models.py
from datetime import timedelta
from enum import StrEnum
from typing import TypedDict

from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqla_durable import Lifecycle, ReceiptMixin, Retry, RunMixin, StatusMachine


class PlanStatus(StrEnum):
    PENDING = "pending"
    APPROVED = "approved"
    EXECUTING = "executing"
    EXECUTED = "executed"
    FAILED = "failed"
    CANCELLED = "cancelled"


plan_statuses = StatusMachine(
    PlanStatus,
    initial=PlanStatus.PENDING,
    transitions={
        PlanStatus.PENDING: {PlanStatus.APPROVED, PlanStatus.CANCELLED},
        PlanStatus.APPROVED: {PlanStatus.EXECUTING, PlanStatus.CANCELLED},
        PlanStatus.EXECUTING: {
            PlanStatus.EXECUTED,
            PlanStatus.FAILED,
            PlanStatus.CANCELLED,
            PlanStatus.APPROVED,  # the way back, when the process that carried it out is gone
        },
    },
)


class Base(DeclarativeBase):
    pass


class Transfer(TypedDict):
    payer: str
    payee: str
    amount: int


class Plan(RunMixin, Base):
    __tablename__ = "plan"
    __lifecycle__ = Lifecycle(
        plan_statuses,
        ready=PlanStatus.APPROVED,
        running=PlanStatus.EXECUTING,
        done=PlanStatus.EXECUTED,
        failed=PlanStatus.FAILED,
        cancelled=PlanStatus.CANCELLED,
        lease=timedelta(seconds=1),  # short, so that you need not wait for long; the default is two minutes
        retry=Retry(max_attempts=3, backoff=timedelta(0)),
        requeue={PlanStatus.FAILED},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[PlanStatus] = plan_statuses.column()
    transfers: Mapped[list[Transfer]] = mapped_column(JSONB)


class PlanStep(ReceiptMixin[Plan], Base):
    __tablename__ = "plan_step"


class Account(Base):
    __tablename__ = "account"

    name: Mapped[str] = mapped_column(primary_key=True)
    balance: Mapped[int]
