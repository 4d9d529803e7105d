"""The tables: a reset is a run, and a branch is what it is for."""

from datetime import datetime, timedelta
from enum import StrEnum

from sqlalchemy import DateTime
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqla_durable import KeyMixin, Lifecycle, ReceiptMixin, Retry, RunMixin, StatusMachine


class ResetStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELED = "canceled"


reset_statuses = StatusMachine(
    ResetStatus,
    initial=ResetStatus.QUEUED,
    transitions={
        ResetStatus.QUEUED: {ResetStatus.RUNNING, ResetStatus.CANCELED},
        ResetStatus.RUNNING: {
            ResetStatus.SUCCEEDED,
            ResetStatus.FAILED,
            ResetStatus.CANCELED,
            ResetStatus.QUEUED,  # the way back: the next poll is later, or the worker is gone
        },
    },
)


class Base(DeclarativeBase):
    pass


class Reset(KeyMixin, RunMixin, Base):
    __tablename__ = "reset"
    __lifecycle__ = Lifecycle(
        reset_statuses,
        ready=ResetStatus.QUEUED,
        running=ResetStatus.RUNNING,
        done=ResetStatus.SUCCEEDED,
        failed=ResetStatus.FAILED,
        cancelled=ResetStatus.CANCELED,
        one_in_flight=("project",),
        lease=timedelta(seconds=2),  # short, so that you need not wait for long; the default is two minutes
        retry=Retry(max_attempts=5, backoff=timedelta(seconds=1)),
        requeue={ResetStatus.FAILED},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[ResetStatus] = reset_statuses.column()
    project: Mapped[str]
    branch: Mapped[str]


class ResetStep(ReceiptMixin[Reset], Base):
    __tablename__ = "reset_step"


class Branch(Base):
    """What the application knows of a branch."""

    __tablename__ = "branch"

    project: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    resets: Mapped[int] = mapped_column(default=0)
    reset_at: Mapped[datetime | None] = mapped_column(DateTime(timezone=True))
    problem: Mapped[str | None]
