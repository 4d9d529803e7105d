"""Runs in schemas: on the table, on the metadata, and translated per tenant; receipts live beside their run."""

# ruff: noqa: RUF012 - mapper and table arguments are written as SQLAlchemy's documentation writes them

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, MetaData, create_engine, func, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.schema import CreateSchema

from sqla_durable import Lease, LostLease, ReceiptMixin, Run, RunMixin, Runs, UsageError
from sqla_durable.testing import lapse
from tests.support import eventually
from tests.support_models import Driver, JobStatus, definitions, drive, jobs, leave, lifecycle, make_effects

Classes = tuple[type[Any], type[Any]]


def on_the_table() -> Classes:
    class Base(DeclarativeBase):
        pass

    class Job(RunMixin, Base):
        __tablename__ = "job"
        __table_args__ = {"schema": "app"}
        __lifecycle__ = lifecycle()
        id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
        status: Mapped[JobStatus] = jobs.column()

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"
        __table_args__ = {"schema": "app"}

    return Job, JobStep


def on_the_metadata() -> Classes:
    class Base(DeclarativeBase):
        metadata = MetaData(schema="app")

    class Job(RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = lifecycle()
        id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
        status: Mapped[JobStatus] = jobs.column()

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    return Job, JobStep


class Base(DeclarativeBase):
    pass


class Job(RunMixin, Base):
    __tablename__ = "job"
    __table_args__ = {"schema": "tenant"}
    __lifecycle__ = lifecycle()
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[JobStatus] = jobs.column()


class JobStep(ReceiptMixin[Job], Base):
    __tablename__ = "job_step"
    __table_args__ = {"schema": "tenant"}


@pytest.fixture
def bare(empty_url: str) -> Iterator[Engine]:
    """An engine on a database without tables, in which other schemas have tables of the same names to be hit."""
    engine = create_engine(empty_url)
    with engine.begin() as connection:
        for schema in ("app", "north", "south"):
            connection.execute(CreateSchema(schema))
    yield engine
    engine.dispose()


@pytest.mark.parametrize("made", [on_the_table, on_the_metadata])
def test_every_verb_in_a_schema(bare: Engine, made: Callable[[], Classes]) -> None:
    job, step = made()
    drive(bare, job, step)
    assert definitions(bare, step.__table__)["fk_job_step_job_id"].startswith("FOREIGN KEY (job_id) REFERENCES app.job")
    with bare.connect() as connection:
        tables = connection.execute(text("SELECT schemaname FROM pg_tables WHERE tablename LIKE 'job%'"))
        assert set(tables.scalars()) == {"app"}


def tenant(bare: Engine, schema: str) -> Engine:
    engine = bare.execution_options(schema_translate_map={"tenant": schema})
    Base.metadata.create_all(engine)
    return engine


def counts(bare: Engine, schema: str) -> tuple[int, int]:
    with bare.connect() as connection:
        return (
            connection.scalar(text(f"SELECT count(*) FROM {schema}.job")) or 0,
            connection.scalar(text(f"SELECT count(*) FROM {schema}.job_step")) or 0,
        )


@pytest.mark.parametrize("schema", ["north", None])
def test_every_verb_in_a_translated_schema(bare: Engine, schema: str | None) -> None:
    engine = bare.execution_options(schema_translate_map={"tenant": schema})
    drive(engine, Job, JobStep)


def test_every_verb_where_no_schema_is_translated_to_one(bare: Engine) -> None:
    class Plain(DeclarativeBase):
        pass

    class Task(RunMixin, Plain):
        __tablename__ = "job"
        __lifecycle__ = lifecycle()
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[JobStatus] = jobs.column()

    class TaskStep(ReceiptMixin[Task], Plain):
        __tablename__ = "job_step"

    drive(bare.execution_options(schema_translate_map={None: "south"}), Task, TaskStep)
    assert counts(bare, "south")[0] > 0


def test_two_tenants_in_one_process_never_touch_each_others_rows(bare: Engine) -> None:
    make_effects(bare)
    drivers: dict[str, Driver] = {}
    for schema in ("north", "south"):
        factory = sessionmaker(tenant(bare, schema))
        drivers[schema] = Driver(
            Runs(factory, Job, JobStep), tenant(bare, schema), factory, Job, lambda status: Job(status=status)
        )
    # The same primary key in both.
    ident = drivers["north"].add()
    assert drivers["south"].add() == ident
    run = drivers["north"].runs.claim(ident)
    assert run.step("only", leave, "a") == "a"
    assert run.external("call", lambda: 1) == 1
    assert drivers["south"].status(ident) is JobStatus.READY
    assert drivers["south"].runs.receipts(ident) == ()
    drivers["north"].lapse(ident)
    assert drivers["south"].runs.reap() == 0
    assert not drivers["south"].runs.heal(ident)
    run.finish()
    assert (drivers["north"].status(ident), drivers["south"].status(ident)) == (JobStatus.DONE, JobStatus.READY)
    assert drivers["south"].runs.execute(ident, lambda run: run.step("only", leave, "b")).status is JobStatus.DONE
    assert (counts(bare, "north"), counts(bare, "south")) == ((1, 2), (1, 1))


def test_a_lease_of_one_tenant_is_not_one_of_another(bare: Engine) -> None:
    ours, theirs = (Runs(sessionmaker(tenant(bare, schema)), Job, JobStep, owner="me") for schema in ("north", "south"))
    for schema in ("north", "south"):
        with sessionmaker(tenant(bare, schema)).begin() as session:
            session.add(Job(status=JobStatus.READY))
    lease = ours.claim_due(1)[0].lease
    assert theirs.claim_due(1)[0].lease.identity == lease.identity
    with pytest.raises((UsageError, LostLease)):
        theirs.hold(lease)


def test_a_lease_names_its_table_with_its_schema() -> None:
    engine = create_engine("postgresql+psycopg://")
    runs = Runs(sessionmaker(engine), Job, JobStep)
    with pytest.raises(UsageError, match=r"other\.job.*tenant\.job"):
        runs.hold(Lease("other.job", (1,), 1, 1, "me"))


@pytest.mark.past_guards
def test_the_heartbeat_of_a_translated_run_keeps_its_lease_and_notices_its_loss(
    bare: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    class Quick(DeclarativeBase):
        pass

    class Task(RunMixin, Quick):
        __tablename__ = "task"
        __table_args__ = {"schema": "tenant"}
        __lifecycle__ = lifecycle(lease=timedelta(seconds=0.3))
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[JobStatus] = jobs.column()

    class TaskStep(ReceiptMixin[Task], Quick):
        __tablename__ = "task_step"
        __table_args__ = {"schema": "tenant"}

    engine = bare.execution_options(schema_translate_map={"tenant": "north"})
    Quick.metadata.create_all(engine)
    factory = sessionmaker(engine)
    runs = Runs(factory, Task, TaskStep)
    with factory.begin() as session:
        session.add(row := Task(status=JobStatus.READY))
        session.flush()
        ident = row.id

    def expiry() -> Any:
        with engine.connect() as connection:
            return connection.scalar(select(Task.lease_expires_at).where(Task.id == ident))

    def taken_over(run: Run[Task]) -> None:
        first = expiry()
        eventually(lambda: expiry() > first, "a heartbeat")
        with factory.begin() as session:
            lapse(session, Task, ident)
        with factory.begin() as session:  # as if another process had claimed it
            session.execute(
                text("UPDATE north.task SET fence = fence + 1, lease_owner = 'other', lease_expires_at = 'infinity'")
            )
        eventually(lambda: run.holder.lost is not None, "the heartbeat to notice")

    with caplog.at_level(logging.WARNING, "sqla_durable"):
        outcome = runs.execute(ident, taken_over)
    assert outcome.ending == "lost lease"
    assert not [record for record in caplog.records if "heartbeat failed" in record.message]


def test_receipts_declared_without_a_schema_still_find_their_run(bare: Engine) -> None:
    class Mixed(DeclarativeBase):
        pass

    class Task(RunMixin, Mixed):
        __tablename__ = "task"
        __table_args__ = {"schema": "app"}
        __lifecycle__ = lifecycle()
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[JobStatus] = jobs.column()

    class TaskStep(ReceiptMixin[Task], Mixed):
        __tablename__ = "task_step"

    drive(bare, Task, TaskStep)
    with Session(bare) as session:
        assert session.scalar(select(func.count()).select_from(TaskStep))
