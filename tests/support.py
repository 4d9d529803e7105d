"""The models that most tests share, and how they wait for PostgreSQL rather than for a clock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import StrEnum
from typing import Any, TypeVar
from uuid import UUID, uuid4

from sqlalchemy import Engine, func, select, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import Lifecycle, ReceiptMixin, Retry, RunMixin, StatusMachine
from sqla_durable.testing import lapse

ValueT = TypeVar("ValueT")
DEADLINE = 20.0


class PlanStatus(StrEnum):
    PENDING = "pending"
    APPROVED = "approved"
    EXECUTING = "executing"
    EXECUTED = "executed"
    FAILED = "failed"
    DEAD = "dead"
    CANCELLED = "cancelled"
    REJECTED = "rejected"


plan_statuses = StatusMachine(
    PlanStatus,
    initial=PlanStatus.PENDING,
    transitions={
        PlanStatus.PENDING: {PlanStatus.APPROVED, PlanStatus.REJECTED, PlanStatus.CANCELLED},
        PlanStatus.APPROVED: {PlanStatus.EXECUTING, PlanStatus.CANCELLED},
        PlanStatus.EXECUTING: {
            PlanStatus.EXECUTED,
            PlanStatus.FAILED,
            PlanStatus.DEAD,
            PlanStatus.CANCELLED,
            PlanStatus.APPROVED,
        },
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
        dead=PlanStatus.DEAD,
        cancelled=PlanStatus.CANCELLED,
        lease=timedelta(seconds=30),
        retry=Retry(max_attempts=3, backoff=timedelta(0), cap=timedelta(0)),
        requeue={PlanStatus.FAILED, PlanStatus.DEAD},
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    status: Mapped[PlanStatus] = plan_statuses.column()
    actions: Mapped[list[Any]] = mapped_column(JSONB, default=list)
    note: Mapped[str | None]


class PlanStep(ReceiptMixin[Plan], Base):
    __tablename__ = "plan_step"


class Entry(Base):
    """An effect that can be counted."""

    __tablename__ = "entry"
    id: Mapped[int] = mapped_column(primary_key=True)
    label: Mapped[str]


def write_entry(session: Session, label: str) -> str:
    """A step's body."""
    session.add(Entry(label=label))
    return label


def entries(engine: Engine) -> list[str]:
    """The labels of all committed effects, in order."""
    with Session(engine) as session:
        return list(session.scalars(select(Entry.label).order_by(Entry.id)))


def approved_plan(factory: sessionmaker[Session], **values: Any) -> UUID:
    """A plan that may be claimed."""
    with factory.begin() as session:
        plan = Plan(status=PlanStatus.APPROVED, **values)
        session.add(plan)
        session.flush()
        return plan.id


def let_lapse(factory: sessionmaker[Session], ident: object) -> None:
    """The holder of a plan has shown no sign of life for longer than its lease."""
    with factory.begin() as session:
        lapse(session, Plan, ident)


def column(engine: Engine, ident: UUID, name: str) -> Any:
    """A plan's column as it is committed."""
    with engine.connect() as connection:
        return connection.scalar(select(Plan.__table__.c[name]).where(Plan.id == ident))


# waiting

ROW_BY_ROW = "-c enable_hashjoin=off -c enable_mergejoin=off -c enable_seqscan=off -c enable_material=off"
"""Options of a connection whose statements update one row before they have locked the next."""


def eventually(condition: Callable[[], ValueT | None], what: str = "the condition") -> ValueT:
    """Poll until ``condition`` returns something true."""
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"{what} did not come about within {DEADLINE} s")


def blocked_backends(engine: Engine) -> int:
    """How many backends of this database PostgreSQL reports as waiting for a lock."""
    with engine.connect() as connection:
        return (
            connection.scalar(
                select(func.count())
                .select_from(text("pg_stat_activity"))
                .where(text("datname = current_database() AND wait_event_type = 'Lock'"))
            )
            or 0
        )


def wait_until_blocked(engine: Engine, backends: int = 1) -> None:
    """Wait until PostgreSQL reports that many backends waiting for a lock."""
    eventually(lambda: blocked_backends(engine) >= backends, f"{backends} blocked backend(s)")


class Background(threading.Thread):
    """A call in a thread of its own, whose result or exception :meth:`result` hands over."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:  # noqa: BLE001 - it is handed over by result()
            self._error = error

    def result(self) -> Any:
        self.join(DEADLINE)
        assert not self.is_alive(), "the background call did not end"
        if self._error is not None:
            raise self._error
        return self._value


@contextmanager
def locked(engine: Engine, ident: UUID) -> Iterator[None]:
    """Hold an unrelated lock on a plan's row."""
    with engine.begin() as connection:
        connection.execute(select(Plan.__table__.c.id).where(Plan.id == ident).with_for_update())
        yield
