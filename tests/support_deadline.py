"""Runs with a deadline: one model that every test of deadlines and endings shares."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy import Engine, insert, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqla_durable import DeadlineMixin, Lifecycle, ReceiptMixin, Retry, RunMixin, StatusMachine
from sqla_durable.testing import overrun

HOUR = timedelta(hours=1)


class Status(StrEnum):
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    DEAD = "dead"
    CANCELLED = "called off"
    TIMED_OUT = "timed out"


statuses = StatusMachine(
    Status,
    initial=Status.READY,
    transitions={
        Status.READY: {Status.RUNNING, Status.CANCELLED},
        Status.RUNNING: set(Status) - {Status.RUNNING},
    },
)


class TimedBase(DeclarativeBase):
    pass


class Timed(DeadlineMixin, RunMixin, TimedBase):
    """Its lease, and so the time between heartbeats, is far longer than what a test waits for."""

    __tablename__ = "timed"
    __lifecycle__ = Lifecycle(
        statuses,
        ready=Status.READY,
        running=Status.RUNNING,
        done=Status.DONE,
        failed=Status.FAILED,
        dead=Status.DEAD,
        cancelled=Status.CANCELLED,
        timed_out=Status.TIMED_OUT,
        lease=timedelta(minutes=5),
        retry=Retry(on=OSError, max_attempts=3, backoff=timedelta(0), cap=timedelta(0)),
        requeue={Status.TIMED_OUT, Status.FAILED},
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[Status] = statuses.column()
    note: Mapped[str | None]


class TimedStep(ReceiptMixin[Timed], TimedBase):
    __tablename__ = "timed_step"


class Beating(DeadlineMixin, RunMixin, TimedBase):
    """Its heartbeat comes three times a second."""

    __tablename__ = "beating"
    __lifecycle__ = Lifecycle(
        statuses,
        ready=Status.READY,
        running=Status.RUNNING,
        done=Status.DONE,
        failed=Status.FAILED,
        cancelled=Status.CANCELLED,
        timed_out=Status.TIMED_OUT,
        lease=timedelta(seconds=1),
        step_timeout=None,
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[Status] = statuses.column()


class BeatingStep(ReceiptMixin[Beating], TimedBase):
    __tablename__ = "beating_step"


def add(engine: Engine, max_duration: timedelta | None, kind: type[Any] = Timed) -> int:
    """A ready run; its key."""
    with engine.begin() as connection:
        ident = connection.scalar(insert(kind).values(max_duration=max_duration).returning(kind.id))
    assert isinstance(ident, int)
    return ident


def pass_deadline(engine: Engine, ident: int, kind: type[Any] = Timed) -> None:
    with Session(engine) as session, session.begin():
        overrun(session, kind, ident)


def row(engine: Engine, ident: int, kind: type[Any] = Timed) -> Any:
    """The run as it is committed."""
    table = kind.__table__
    with engine.connect() as connection:
        return connection.execute(select(table).where(table.c.id == ident)).one()
