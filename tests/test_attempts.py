"""A limit of attempts for a single run, beside that of its class."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, String
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import (
    AttemptsMixin,
    ConfigurationError,
    Lifecycle,
    ReceiptMixin,
    Retry,
    RetryableError,
    Run,
    RunMixin,
    Runs,
    StatusMachine,
)
from sqla_durable.testing import lapse
from tests.support import PlanStatus, plan_statuses

statuses = StatusMachine(PlanStatus, initial=PlanStatus.PENDING, transitions=plan_statuses.transitions)
lifecycle = Lifecycle(
    statuses,
    ready=PlanStatus.APPROVED,
    running=PlanStatus.EXECUTING,
    done=PlanStatus.EXECUTED,
    failed=PlanStatus.FAILED,
    dead=PlanStatus.DEAD,
    retry=Retry(max_attempts=3, backoff=timedelta(0)),
)


class Base(DeclarativeBase):
    pass


class Job(AttemptsMixin, RunMixin, Base):
    __tablename__ = "job"
    __lifecycle__ = lifecycle
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[PlanStatus] = statuses.column()


class JobStep(ReceiptMixin[Job], Base):
    __tablename__ = "job_step"


@pytest.fixture
def jobs(engine: Engine) -> Runs[Job]:
    Base.metadata.create_all(engine)
    return Runs(sessionmaker(engine), Job, JobStep)


def started(jobs: Runs[Job], limit: int | None) -> int:
    with jobs.session_factory.begin() as session:
        return jobs.start(session, status=PlanStatus.APPROVED, max_attempts=limit).id


def fails(run: Run[Job]) -> None:
    raise RetryableError("again")


@pytest.mark.parametrize(("limit", "attempts"), [(1, 1), (5, 5), (None, 3)])
def test_a_run_that_fails_is_started_as_often_as_it_may_be(jobs: Runs[Job], limit: int | None, attempts: int) -> None:
    ident = started(jobs, limit)
    outcomes = [jobs.execute(ident, fails) for _ in range(attempts)]
    assert [outcome.status for outcome in outcomes] == [PlanStatus.APPROVED] * (attempts - 1) + [PlanStatus.DEAD]


@pytest.mark.parametrize(("limit", "attempts"), [(1, 1), (5, 5), (None, 3)])
def test_a_run_whose_holder_dies_is_started_as_often_as_it_may_be(
    jobs: Runs[Job], limit: int | None, attempts: int
) -> None:
    ident = started(jobs, limit)
    for attempt in range(1, attempts + 1):
        assert jobs.claim(ident, run_now=True) is not None, attempt
        with jobs.session_factory.begin() as session:
            lapse(session, Job, ident)
        jobs.reap()
    run = jobs.get(ident)
    assert run is not None
    assert (run.status, run.attempts) == (PlanStatus.DEAD, attempts)


def test_a_limit_of_nothing_is_refused(jobs: Runs[Job]) -> None:
    with pytest.raises(IntegrityError, match="max_attempts"):
        started(jobs, 0)


def declare(*bases: type[Any], **attributes: Any) -> None:
    class Other(DeclarativeBase):
        pass

    own = {"__tablename__": "other", "id": mapped_column(String, primary_key=True), **attributes}
    type("Declared", (*bases, Other), own)


def test_a_declaration_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Declared\(AttemptsMixin, RunMixin, ...\)"):
        declare(AttemptsMixin)
    run = {"__lifecycle__": lifecycle, "status": statuses.column()}
    with pytest.raises(ConfigurationError, match="AttemptsMixin keeps an Integer"):
        declare(AttemptsMixin, RunMixin, **run, max_attempts=mapped_column(String))


def test_it_goes_on_the_class_that_owns_the_root_table() -> None:
    class Other(DeclarativeBase):
        pass

    class Root(RunMixin, Other):
        __tablename__ = "root"
        __lifecycle__ = lifecycle
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        status: Mapped[PlanStatus] = statuses.column()
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "root"}  # noqa: RUF012 - as declarative has it

    with pytest.raises(ConfigurationError, match="owns the root table, here Root"):

        class Child(AttemptsMixin, Root):
            __mapper_args__ = {"polymorphic_identity": "child"}  # noqa: RUF012 - as above


def test_the_row_shows_it(jobs: Runs[Job], engine: Engine) -> None:
    ident = started(jobs, 4)
    with Session(engine) as session:
        assert session.get_one(Job, ident).max_attempts == 4
