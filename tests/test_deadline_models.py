"""DeadlineMixin on every kind of model: refused where it cannot work, and heeded by every landing where it can."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import DateTime, Integer, Interval, MetaData, create_engine, func, inspect, text
from sqlalchemy.dialects.postgresql import INTERVAL, JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column, sessionmaker

from sqla_durable import (
    PENDING,
    ConfigurationError,
    DeadlineMixin,
    KeyMixin,
    ReceiptMixin,
    Run,
    RunMixin,
    Runs,
    TimedOut,
)
from sqla_durable.testing import overrun
from tests.support import eventually
from tests.support_deadline import HOUR, Status, Timed, statuses
from tests.support_jobs import job_lifecycle

LIFECYCLE = Timed.__lifecycle__
_numbers = itertools.count(1)
Classes = tuple[type[Any], type[Any], MetaData]


# what cannot work


def refused(*bases: type[Any], **members: Any) -> None:
    class Base(DeclarativeBase):
        pass

    given = {"id": mapped_column(Integer, primary_key=True), "__tablename__": "job", **members}
    type("Job", (*bases, Base), given)


def test_a_lifecycle_that_names_no_status_for_it_says_what_to_add() -> None:
    lifecycle = job_lifecycle()
    with pytest.raises(ConfigurationError, match=r"Job has DeadlineMixin, and nothing to become; add Lifecycle\(timed"):
        refused(DeadlineMixin, RunMixin, __lifecycle__=lifecycle, status=lifecycle.machine.column())


def test_without_a_run_it_says_how_to_declare_it() -> None:
    with pytest.raises(ConfigurationError, match=r"DeadlineMixin without RunMixin; declare it as class Job\(DeadlineM"):
        refused(DeadlineMixin)


def test_it_goes_on_the_class_that_owns_the_table() -> None:
    class Base(DeclarativeBase):
        pass

    class Job(RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = LIFECYCLE
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "job"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[Status] = statuses.column()
        kind: Mapped[str]

    with pytest.raises(ConfigurationError, match="goes on the class that owns the root table, here Job"):

        class Special(DeadlineMixin, Job):
            __mapper_args__ = {"polymorphic_identity": "special"}  # noqa: RUF012


@pytest.mark.parametrize("type_", [Integer(), DateTime(timezone=True)])
def test_a_column_of_another_type_under_its_name_is_refused(type_: Any) -> None:
    column: Any = mapped_column(type_)
    with pytest.raises(ConfigurationError, match=r"max_duration is .* but DeadlineMixin keeps an Interval there"):
        refused(DeadlineMixin, RunMixin, __lifecycle__=LIFECYCLE, status=statuses.column(), max_duration=column)


@pytest.mark.parametrize("type_", [Interval(), INTERVAL(precision=3)])
def test_a_column_of_ones_own_that_holds_an_interval_is_taken(type_: Any) -> None:
    column: Any = mapped_column(type_)
    refused(DeadlineMixin, RunMixin, __lifecycle__=LIFECYCLE, status=statuses.column(), max_duration=column)


# what can


def plain() -> Classes:
    class Base(DeclarativeBase):
        pass

    class Job(DeadlineMixin, RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = LIFECYCLE
        __table_args__ = {"comment": "of the user's own"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[Status] = statuses.column()

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    return Job, JobStep, Base.metadata


def dataclass() -> Classes:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Job(RunMixin, DeadlineMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = LIFECYCLE
        id: Mapped[int] = mapped_column(primary_key=True, init=False)
        status: Mapped[Status] = statuses.column(init=False)

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    return Job, JobStep, Base.metadata


def renamed() -> Classes:
    """Other names for the columns, two columns for the key, another schema, and columns that change at each update."""

    class Base(DeclarativeBase):
        metadata = MetaData(schema="elsewhere")

    class Job(DeadlineMixin, RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = LIFECYCLE
        tenant: Mapped[int] = mapped_column("tenant %", primary_key=True)
        id: Mapped[int] = mapped_column("number", primary_key=True)
        status: Mapped[Status] = statuses.column()
        max_duration: Mapped[timedelta | None] = mapped_column("longest (%)", Interval)
        started_at: Mapped[datetime | None] = mapped_column("began", DateTime(timezone=True))
        error: Mapped[dict[str, Any] | None] = mapped_column("went wrong", JSONB(none_as_null=True))
        touched: Mapped[datetime | None] = mapped_column(DateTime(timezone=True), onupdate=func.now())

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    return Job, JobStep, Base.metadata


def inherited() -> Classes:
    """A subclass in the table of its base class."""

    class Base(DeclarativeBase):
        pass

    class Job(DeadlineMixin, RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = LIFECYCLE
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "job"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[Status] = statuses.column()
        kind: Mapped[str]

    class Special(Job):
        __mapper_args__ = {"polymorphic_identity": "special"}  # noqa: RUF012

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    return Special, JobStep, Base.metadata


MODELS: list[Callable[[], Classes]] = [plain, dataclass, renamed, inherited]


class Bench:
    """Runs of one model.

    :param url: of an empty database.
    :param model: makes the model.
    """

    def __init__(self, url: Any, model: Callable[[], Classes]) -> None:
        self.job, receipt, metadata = model()
        self.engine = create_engine(url)
        with self.engine.begin() as connection:
            connection.execute(text("CREATE SCHEMA elsewhere"))
        metadata.create_all(self.engine)
        self.factory = sessionmaker(self.engine)
        self.runs: Runs[Any] = Runs(self.factory, self.job, receipt)

    def claimed(self, limit: timedelta = HOUR) -> Run[Any]:
        composite = len(self.runs._verbs.runs.key) > 1
        values = {"tenant": 7, "id": next(_numbers)} if composite else {}
        with self.factory.begin() as session:
            started = self.runs.start(session, max_duration=limit, **values)
            session.flush()
            ident = inspect(started).identity
        run = self.runs.claim(ident)
        assert run is not None
        return run

    def late(self) -> Run[Any]:
        run = self.claimed()
        with self.factory.begin() as session:
            overrun(session, self.job, run.lease.identity)
        return run

    def ended(self, run: Run[Any]) -> Any:
        found = self.runs.get(run.lease.identity)
        return found.status, None if found.error is None else found.error["type"]


@pytest.fixture(params=MODELS)
def bench(empty_url: str, request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(empty_url, request.param)
    yield bench
    bench.engine.dispose()


TIMED_OUT = Status.TIMED_OUT, "TimedOut"


def test_every_landing_of_every_model_heeds_the_deadline(bench: Bench) -> None:
    run = bench.late()
    with pytest.raises(TimedOut):
        run.finish()
    run = bench.late()
    with pytest.raises(TimedOut):
        run.fail(ValueError())
    run = bench.late()
    with pytest.raises(TimedOut):
        run.step("late", lambda session: None)
    assert bench.runs._verbs.conclude(run.holder).status is Status.TIMED_OUT
    assert bench.ended(run) == TIMED_OUT
    run = bench.late()
    run.release()
    assert bench.ended(run) == TIMED_OUT
    run = bench.claimed()
    run.release()
    assert bench.ended(run) == (Status.READY, None)
    run = bench.claimed()
    run.finish()
    assert bench.ended(run) == (Status.DONE, None)
    run = bench.claimed()
    run.fail(ValueError())
    assert bench.ended(run) == (Status.FAILED, "ValueError")


def test_every_model_is_landed_by_its_heartbeat(bench: Bench) -> None:
    run = bench.claimed(timedelta(seconds=1))
    outcome = bench.runs.execute(run, lambda run: eventually(lambda: run.holder.ended, "the landing"))
    assert (outcome.status, outcome.exception) == (Status.TIMED_OUT, None)
    assert bench.ended(run) == TIMED_OUT
    assert run.row.status is Status.TIMED_OUT


def test_every_model_lands_in_groups_in_time_only(bench: Bench) -> None:
    runs = [bench.claimed(), bench.late(), bench.claimed()]
    landings = bench.runs._verbs.claims.landings
    leases = [run.lease for run in runs]
    waiting = [_Waiting(lease) for lease in leases]
    landed = bench.runs._verbs.store.single(lambda connection: landings._land(connection, waiting))  # type: ignore[arg-type]
    assert set(landed) == {leases[0].identity, leases[2].identity}


class _Waiting:
    output = None

    def __init__(self, lease: Any) -> None:
        self.lease = lease


def test_every_model_parks_in_time_and_lands_out_of_it(bench: Bench) -> None:
    run = bench.claimed()
    outcome = bench.runs.execute(run, lambda run: run.operation("load", start=lambda: 1, poll=lambda _: PENDING))
    assert bench.ended(run) == (Status.READY, None)
    assert outcome.status is Status.READY
    run = bench.claimed()

    def poll(ids: int) -> Any:
        with bench.factory.begin() as session:
            overrun(session, bench.job, run.lease.identity)
        return PENDING

    bench.runs.execute(run, lambda run: run.operation("load", start=lambda: 1, poll=poll))
    assert bench.ended(run) == TIMED_OUT


def test_a_key_stands_for_a_payload_of_which_the_limit_is_no_part(empty_url: str) -> None:
    class Base(DeclarativeBase):
        pass

    class Job(KeyMixin, DeadlineMixin, RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = LIFECYCLE
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[Status] = statuses.column()
        title: Mapped[str]

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    engine = create_engine(empty_url)
    Base.metadata.create_all(engine)
    jobs: Runs[Job] = Runs(sessionmaker(engine), Job, JobStep)
    with Session(engine) as session, session.begin():
        first = jobs.start(session, key="a", title="t", max_duration=HOUR)
        again = jobs.start(session, key="a", title="t", max_duration=2 * HOUR)
        assert (again, again.max_duration) == (first, HOUR)
    engine.dispose()


def test_its_check_is_named_by_the_users_convention(empty_url: str) -> None:
    class Base(DeclarativeBase):
        metadata = MetaData(naming_convention={"ck": "check_%(table_name)s_%(constraint_name)s"})

    class Job(DeadlineMixin, RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = LIFECYCLE
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[Status] = statuses.column()

    engine = create_engine(empty_url)
    Base.metadata.create_all(engine)
    checks = {check["name"] for check in inspect(engine).get_check_constraints("job")}
    engine.dispose()
    assert "check_job_max_duration" in checks
