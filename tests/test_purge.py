"""Purging deletes what is over for long enough, with its receipts, and never anything else."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, ForeignKey, create_engine, func, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import (
    FunctionMixin,
    FunctionRun,
    Functions,
    FunctionStatus,
    Rate,
    ReceiptMixin,
    RunNotFound,
    RunReferenced,
    Runs,
    UsageError,
)
from tests.support import Background, Plan, PlanStatus, PlanStep, approved_plan, wait_until_blocked
from tests.support_observe import Job, JobStep, cancel, functions_on, started, tables

DAY = timedelta(days=1)
NOW = timedelta(0)


@pytest.fixture
def jobs(engine: Engine) -> Functions[Job]:
    tables(engine)
    return functions_on(engine)


def aged(engine: Engine, days: float, *idents: Any, table: str = "job") -> None:
    with engine.begin() as connection:
        for ident in idents:
            connection.execute(
                text(f"UPDATE {table} SET finished_at = now() - :days * interval '1 day' WHERE id = :id"),
                {"days": days, "id": ident},
            )


def done(jobs: Functions[Job], engine: Engine, days: float, **options: Any) -> UUID:
    handle = started(jobs, **options)
    jobs.execute(handle)
    assert handle.id is not None
    aged(engine, days, handle.id)
    return handle.id


def left(engine: Engine) -> set[UUID]:
    with Session(engine) as session:
        return set(session.scalars(select(Job.id)))


def receipts(engine: Engine) -> int:
    with Session(engine) as session:
        return session.scalar(select(func.count()).select_from(JobStep)) or 0


def test_what_ended_long_enough_ago_is_deleted_with_its_receipts(engine: Engine, jobs: Functions[Job]) -> None:
    @jobs.function("stepping")
    def stepping(run: FunctionRun[Any]) -> int:
        return run.step("one", lambda session: 1)

    with jobs.session_factory.begin() as session:
        handles = [jobs.start(session, stepping) for _ in range(2)]
    for handle in handles:
        jobs.execute(handle)
    assert receipts(engine) == 2
    aged(engine, 40, handles[0].id)
    aged(engine, 20, handles[1].id)
    assert jobs.purge(30 * DAY) == 1
    assert left(engine) == {handles[1].id}
    assert receipts(engine) == 1
    with pytest.raises(RunNotFound):
        jobs.result(handles[0])


def test_a_live_run_is_never_deleted_however_old(engine: Engine, jobs: Functions[Job]) -> None:
    ready, running, asked = started(jobs), started(jobs), started(jobs)
    for handle in running, asked:
        assert jobs._verbs.claim(handle.id, run_now=True)
    assert cancel(jobs, asked)
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL sqla_durable.override = 'a run of some age'"))
        connection.execute(text("UPDATE job SET created_at = now() - interval '9 years', finished_at = created_at"))
    assert jobs.purge(NOW) == 0
    assert left(engine) == {ready.id, running.id, asked.id}


def test_only_the_statuses_that_were_named_are_deleted(engine: Engine, jobs: Functions[Job]) -> None:
    failed = started(jobs, "refuse")
    jobs.execute(failed)
    cancelled = started(jobs, run_at=DAY)
    cancel(jobs, cancelled)
    kept = done(jobs, engine, 9)
    with pytest.raises(UsageError, match="ready is not terminal"):
        jobs.purge(NOW, status=[FunctionStatus.DONE, FunctionStatus.READY])
    with pytest.raises(UsageError, match="not a status"):
        jobs.purge(NOW, status=PlanStatus.FAILED)  # type: ignore[arg-type]
    assert jobs.purge(NOW, status=FunctionStatus.FAILED) == 1
    assert jobs.purge(NOW, status=[FunctionStatus.CANCELLED, FunctionStatus.TIMED_OUT]) == 1
    assert left(engine) == {kept}


def test_batches_and_a_limit_take_those_that_ended_first(engine: Engine, jobs: Functions[Job]) -> None:
    idents = [done(jobs, engine, days) for days in range(9, 2, -1)]
    assert jobs.purge(NOW, batch=2, limit=3) == 3
    assert left(engine) == set(idents[3:])
    assert jobs.purge(NOW, batch=2) == 4
    for wrong in {"batch": 0}, {"limit": 0}:
        with pytest.raises(UsageError, match="at least 1"):
            jobs.purge(NOW, **wrong)
    with pytest.raises(UsageError, match="older_than"):
        jobs.purge(-DAY)


def test_a_key_is_free_again(engine: Engine, jobs: Functions[Job]) -> None:
    first = done(jobs, engine, 9, key="k")
    assert started(jobs, key="k").id == first
    assert jobs.purge(DAY) == 1
    assert started(jobs, key="k").id != first


# at the same time


def test_a_run_that_is_being_requeued_is_left(engine: Engine, jobs: Functions[Job]) -> None:
    handle = started(jobs, "refuse")
    jobs.execute(handle)
    aged(engine, 9, handle.id)
    with engine.begin() as connection:
        connection.execute(select(Job.__table__.c.id).where(Job.id == handle.id).with_for_update())
        assert jobs.purge(DAY) == 0
    assert jobs.requeue(handle)
    assert jobs.purge(NOW) == 0


def test_a_requeue_that_waits_for_a_purge_finds_nothing(engine: Engine, jobs: Functions[Job]) -> None:
    from sqla_durable import clock, purge

    handle = started(jobs, "refuse")
    jobs.execute(handle)
    statement = purge.purge(jobs._verbs.runs, [FunctionStatus.FAILED], clock.now(), 10)
    with engine.begin() as connection:
        assert connection.execute(statement).scalar_one() == 1
        late = Background(lambda: jobs.requeue(handle))
        wait_until_blocked(engine)
    assert late.result() is False
    assert left(engine) == set()


def test_two_purges_at_once_delete_each_run_once(engine: Engine, jobs: Functions[Job]) -> None:
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO job (id, function, status, finished_at) SELECT gen_random_uuid(), 'double', 'done',"
                " now() - interval '9 days' FROM generate_series(1, 5000)"
            )
        )
    purges = [Background(lambda: functions_on(engine).purge(DAY, batch=50)) for _ in range(4)]
    assert sum(purge.result() for purge in purges) == 5000
    assert left(engine) == set()


# tables that refer to runs


class Base(DeclarativeBase):
    pass


class Task(FunctionMixin, Base):
    __tablename__ = "task"


class TaskStep(ReceiptMixin[Task], Base):
    __tablename__ = "task_step"


class Invoice(Base):
    __tablename__ = "invoice"
    id: Mapped[int] = mapped_column(primary_key=True)
    task_id: Mapped[UUID | None] = mapped_column(ForeignKey("task.id"))


@pytest.fixture(params=["NO ACTION", "RESTRICT", "NO ACTION DEFERRABLE INITIALLY DEFERRED"])
def referring(request: pytest.FixtureRequest, empty_url: str) -> Iterator[Engine]:
    engine = create_engine(empty_url)
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE invoice DROP CONSTRAINT invoice_task_id_fkey"))
        connection.execute(
            text(
                "ALTER TABLE invoice ADD CONSTRAINT invoice_of_task FOREIGN KEY (task_id) REFERENCES task"
                f" ON DELETE {request.param}"
            )
        )
    yield engine
    engine.dispose()


def test_a_row_that_refers_to_a_run_keeps_it_and_the_error_says_which(referring: Engine) -> None:
    functions = Functions(sessionmaker(referring), Task, TaskStep)
    functions.function("double")(lambda run: None)
    with functions.session_factory.begin() as session:
        handles = [functions.start(session, "double") for _ in range(5)]
        session.add(Invoice(task_id=handles[3].id))
    for position, handle in enumerate(handles):
        functions.execute(handle)
        aged(referring, 9 - position, handle.id, table="task")
    with pytest.raises(RunReferenced, match="'invoice' refer to runs of Task") as caught:
        functions.purge(DAY, batch=2)
    assert (caught.value.table, caught.value.constraint, caught.value.purged) == ("invoice", "invoice_of_task", 2)
    assert len(functions.find()) == 3
    with functions.session_factory.begin() as session:
        session.execute(text("DELETE FROM invoice"))
    assert functions.purge(DAY, batch=2) == 3


# plans


def test_plans_are_purged_likewise(engine: Engine, session_factory: sessionmaker[Session]) -> None:
    plans = Runs(session_factory, Plan, PlanStep)
    old, ready = approved_plan(session_factory), approved_plan(session_factory)
    plans.execute(old, lambda run: run.step("one", lambda session: 1))
    aged(engine, 9, old, table="plan")
    assert plans.purge(30 * DAY) == 0
    assert plans.purge(DAY) == 1
    with Session(engine) as session:
        assert list(session.scalars(select(Plan.id))) == [ready]
        assert not list(session.scalars(select(PlanStep.step)))


def test_a_hierarchy_of_joined_tables_is_purged_whole(empty_url: str) -> None:
    from sqla_durable import Lifecycle, RunMixin
    from tests.support import plan_statuses

    class Own(DeclarativeBase):
        pass

    class Work(RunMixin, Own):
        __tablename__ = "work"
        __lifecycle__ = Lifecycle(
            plan_statuses,
            ready=PlanStatus.APPROVED,
            running=PlanStatus.EXECUTING,
            done=PlanStatus.EXECUTED,
            failed=PlanStatus.FAILED,
        )
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        status: Mapped[PlanStatus] = plan_statuses.column()
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "work"}  # noqa: RUF012

    class Mail(Work):
        __tablename__ = "mail"
        id: Mapped[int] = mapped_column(ForeignKey("work.id"), primary_key=True)
        __mapper_args__ = {"polymorphic_identity": "mail"}  # noqa: RUF012

    class WorkStep(ReceiptMixin[Work], Own):
        __tablename__ = "work_step"

    engine = create_engine(empty_url)
    Own.metadata.create_all(engine)
    factory = sessionmaker(engine)
    with factory.begin() as session:
        session.add_all([Work(id=1, status=PlanStatus.APPROVED), Mail(id=2, status=PlanStatus.APPROVED)])
    works = Runs(factory, Work, WorkStep)
    for ident in 1, 2:
        works.execute(ident, lambda run: None)
    assert Runs(factory, Mail, WorkStep).purge(NOW) == 1
    with factory.begin() as session:
        assert [work.id for work in session.scalars(select(Work))] == [1]
        session.add(Mail(id=3, status=PlanStatus.APPROVED))
    works.execute(3, lambda run: None)
    assert works.purge(NOW) == 2
    engine.dispose()


def test_a_run_whose_token_is_not_back_in_the_bucket_is_kept_for_its_rate(jobs: Functions[Job], engine: Engine) -> None:
    jobs.function("seldom", rate=Rate(1, per=timedelta(hours=1)))(lambda run: None)
    with jobs.session_factory.begin() as session:
        handle = jobs.start(session, "seldom")
    assert jobs.execute(handle).status is FunctionStatus.DONE
    assert jobs.purge(NOW) == 0
    with engine.begin() as connection:
        connection.execute(text("UPDATE job SET paced_at = now()"))
    assert jobs.purge(NOW) == 1
    with pytest.raises(RunNotFound):
        jobs.describe(handle)
