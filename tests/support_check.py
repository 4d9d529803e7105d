"""A server of its own for what a check looks at, and models of every kind on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqla_durable import (
    Finding,
    FunctionMixin,
    KeyMixin,
    Lifecycle,
    Monthly,
    ReceiptMixin,
    RunMixin,
    SignalMixin,
    StatusMachine,
    WaitMixin,
    check,
    create_partitions,
    embedded,
    uuid7,
)
from tests.support import PlanStatus, plan_statuses

SETTINGS = {"wal_level": "logical", "max_prepared_transactions": "10"}

# Of its own: what takes a bare key goes by the one class that a machine serves.
statuses = StatusMachine(PlanStatus, initial=plan_statuses.initial, transitions=plan_statuses.transitions)


class Base(DeclarativeBase):
    pass


class Order(KeyMixin, WaitMixin, RunMixin, Base):
    """A guarded run, of which one is in flight for each customer."""

    __tablename__ = "order"
    __guard__ = True
    __lifecycle__ = Lifecycle(
        statuses,
        ready=PlanStatus.APPROVED,
        running=PlanStatus.EXECUTING,
        done=PlanStatus.EXECUTED,
        failed=PlanStatus.FAILED,
        one_in_flight=("customer",),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[PlanStatus] = statuses.column()
    customer: Mapped[str]


class OrderStep(ReceiptMixin[Order], Base):
    __tablename__ = "order_step"


class OrderSignal(SignalMixin[Order], Base):
    __tablename__ = "order_signal"


class Job(FunctionMixin, Base):
    __tablename__ = "job"


class JobStep(ReceiptMixin[Job], Base):
    __tablename__ = "job_step"
    __partition__ = Monthly()


class Ticket(Base):
    """A status machine alone."""

    __tablename__ = "ticket"
    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid7)
    status: Mapped[PlanStatus] = statuses.column()


class Customer(Base):
    """What is the user's alone is not compared."""

    __tablename__ = "customer"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


@pytest.fixture(scope="module")
def own_server(request: pytest.FixtureRequest) -> Iterator[embedded.EmbeddedServer]:
    """A server that nobody else uses: these tests change its settings."""
    bin_dir = request.config.getoption("--postgres")
    with embedded.start(bin_dir=None if bin_dir is None else Path(bin_dir), settings=SETTINGS) as server:
        yield server


@pytest.fixture
def own(own_server: embedded.EmbeddedServer) -> Iterator[Engine]:
    """The models on that server, as they should be."""
    engine = create_engine(make_url(own_server.url))
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        create_partitions(session, JobStep)
    yield engine
    with engine.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    engine.dispose()


def execute(engine: Engine, *statements: str) -> None:
    """Execute SQL as it is, each in a transaction of its own."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT", no_parameters=True) as connection:
        for statement in statements:
            connection.exec_driver_sql(statement)


def found(engine: Engine, models: Any = Base) -> list[tuple[str, str, str]]:
    """What a check finds: the severity, the kind, and what it is about."""
    return [(each.severity.value, each.code, each.subject) for each in check(engine, models)]


def one(engine: Engine, models: Any = Base) -> Finding:
    """The only finding of a check."""
    findings = check(engine, models)
    assert len(findings) == 1, findings
    return findings[0]
