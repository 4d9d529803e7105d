"""Runs in inheritance hierarchies: only rows of the bound class are touched, and the mixin goes on the root."""

# ruff: noqa: RUF012 - mapper and table arguments are written as SQLAlchemy's documentation writes them

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from enum import StrEnum
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, Enum, ForeignKey, String, create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import ConfigurationError, LostLease, ReceiptMixin, RunMixin, RunNotFound, Runs
from tests.support_models import Driver, JobStatus, definitions, drive, jobs, leave, lifecycle, make_effects


@pytest.fixture
def bare(empty_url: str) -> Iterator[Engine]:
    """An engine on a database without tables."""
    engine = create_engine(empty_url)
    yield engine
    engine.dispose()


class Kind(StrEnum):
    JOB = "a job"
    FETCH = "to fetch"
    SEND = "to send"


class Single(DeclarativeBase):
    pass


class Job(RunMixin, Single):
    __tablename__ = "job"
    __lifecycle__ = lifecycle()
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "job"}
    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    kind: Mapped[str] = mapped_column(String(20))
    status: Mapped[JobStatus] = jobs.column()


class Fetch(Job):
    __mapper_args__ = {"polymorphic_identity": "fetch"}
    address: Mapped[str | None]


class SecureFetch(Fetch):
    __mapper_args__ = {"polymorphic_identity": "secure fetch"}


class Send(Job):
    __mapper_args__ = {"polymorphic_identity": "send"}


class JobStep(ReceiptMixin[Job], Single):
    __tablename__ = "job_step"


class Joined(DeclarativeBase):
    pass


class JoinedJob(RunMixin, Joined):
    __tablename__ = "joined_job"
    __lifecycle__ = lifecycle()
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "job"}
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str] = mapped_column("job kind (%)", String(20))
    status: Mapped[JobStatus] = jobs.column()


class JoinedFetch(JoinedJob):
    __tablename__ = "joined_fetch"
    __mapper_args__ = {"polymorphic_identity": "fetch"}
    id: Mapped[int] = mapped_column("fetch_id", ForeignKey(JoinedJob.id, ondelete="CASCADE"), primary_key=True)
    address: Mapped[str] = mapped_column(default="there")


class JoinedSend(JoinedJob):
    __tablename__ = "joined_send"
    __mapper_args__ = {"polymorphic_identity": "send"}
    id: Mapped[int] = mapped_column(ForeignKey(JoinedJob.id, ondelete="CASCADE"), primary_key=True)
    text: Mapped[str] = mapped_column(default="hello")


class JoinedStep(ReceiptMixin[JoinedJob], Joined):
    __tablename__ = "joined_step"


class ByEnum(DeclarativeBase):
    pass


class EnumJob(RunMixin, ByEnum):
    """Told apart by an enumeration, which is stored by value."""

    __tablename__ = "enum_job"
    __lifecycle__ = lifecycle()
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": Kind.JOB}
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[Kind] = mapped_column(Enum(Kind, values_callable=lambda kinds: [kind.value for kind in kinds]))
    status: Mapped[JobStatus] = jobs.column()


class EnumFetch(EnumJob):
    __mapper_args__ = {"polymorphic_identity": Kind.FETCH}


class EnumSend(EnumJob):
    __mapper_args__ = {"polymorphic_identity": Kind.SEND}


class EnumStep(ReceiptMixin[EnumJob], ByEnum):
    __tablename__ = "enum_step"


ROOTS = [(Job, JobStep), (JoinedJob, JoinedStep), (EnumJob, EnumStep)]
CHILDREN = [
    (Fetch, Send, JobStep),
    (SecureFetch, Fetch, JobStep),
    (JoinedFetch, JoinedSend, JoinedStep),
    (EnumFetch, EnumSend, EnumStep),
]
EVERY = [*ROOTS, *((child, step) for child, _, step in CHILDREN)]


@pytest.mark.parametrize(("entity", "step"), EVERY)
def test_every_verb_bound_to_a_class_of_a_hierarchy(bare: Engine, entity: type[Any], step: type[Any]) -> None:
    drive(bare, entity, step)


@pytest.mark.parametrize(("root", "child", "step"), [(Job, Fetch, JobStep), (JoinedJob, JoinedFetch, JoinedStep)])
def test_every_verb_bound_to_the_root_on_rows_of_a_subclass(
    bare: Engine, root: type[Any], child: type[Any], step: type[Any]
) -> None:
    drive(bare, root, step, lambda status: child(status=status, address="here"))


@pytest.mark.parametrize(("root", "child", "step"), [(Job, Fetch, JobStep), (JoinedJob, JoinedFetch, JoinedStep)])
def test_a_run_claimed_through_the_root_shows_the_columns_of_its_subclass(
    bare: Engine, root: type[Any], child: type[Any], step: type[Any]
) -> None:
    root.metadata.create_all(bare)
    factory = sessionmaker(bare)
    runs = Runs(factory, root, step)
    with factory.begin() as session:
        session.add(row := child(status=JobStatus.READY, address="here"))
        session.flush()
        ident = row.id
    assert runs.get(ident).address == "here"  # type: ignore[union-attr]
    claimed = runs.claim(ident)
    assert claimed is not None
    assert claimed.row.address == "here"


@pytest.fixture(params=CHILDREN, ids=lambda classes: classes[0].__name__)
def sibling(request: pytest.FixtureRequest, bare: Engine) -> tuple[Runs[Any], Runs[Any], Driver]:
    """The runs of a class, the runs of its sibling, and a driver that makes rows of the sibling."""
    entity, other, step = request.param
    entity.metadata.create_all(bare)
    make_effects(bare)
    factory = sessionmaker(bare)
    theirs = Runs(factory, other, step)
    return (
        Runs(factory, entity, step),
        theirs,
        Driver(theirs, bare, factory, other, lambda status: other(status=status)),
    )


def test_a_siblings_row_is_not_found_claimed_read_or_carried_out(
    sibling: tuple[Runs[Any], Runs[Any], Driver],
) -> None:
    ours, _, driver = sibling
    ident = driver.add()
    with pytest.raises(RunNotFound):
        ours.claim(ident)
    with pytest.raises(RunNotFound):
        ours.execute(ident, lambda run: pytest.fail("ran"))
    assert ours.claim_due(10) == []
    assert ours.get(ident) is None
    assert driver.status(ident) is JobStatus.READY


def test_a_siblings_row_is_not_reaped_or_healed(sibling: tuple[Runs[Any], Runs[Any], Driver]) -> None:
    ours, theirs, driver = sibling
    ident = driver.add()
    theirs.claim(ident)
    driver.lapse(ident)
    assert ours.reap(10) == 0
    assert not ours.heal(ident)
    assert ours.claim_due(10) == []
    assert driver.status(ident) is JobStatus.RUNNING
    assert theirs.reap(10) == 1


def test_a_siblings_row_is_not_requeued_cancelled_or_moved(sibling: tuple[Runs[Any], Runs[Any], Driver]) -> None:
    ours, theirs, driver = sibling
    ident, ready = driver.add(count=2)
    run = theirs.claim(ident)
    assert run is not None
    run.step("only", leave, "a")
    run.fail(ValueError("no"))
    assert not ours.requeue(ident)
    assert driver.status(ident) is JobStatus.FAILED
    entity = ours._verbs.runs.entity
    with driver.factory.begin() as session:
        assert not ours.request_cancel(session, ready)
        assert not jobs.transition(session, (entity, ready), JobStatus.CANCELLED)
    assert driver.status(ready) is JobStatus.READY
    assert driver.row(ready)["cancel_requested_at"] is None


def test_a_lease_on_a_siblings_row_writes_nothing(sibling: tuple[Runs[Any], Runs[Any], Driver]) -> None:
    ours, theirs, driver = sibling
    ident = driver.add()
    run = theirs.claim(ident)
    assert run is not None
    with pytest.raises(LostLease):
        ours.hold(run.lease)
    with driver.factory() as session, pytest.raises(LostLease):
        ours.fence(session, run.lease)
    with driver.factory() as session, pytest.raises(LostLease):
        ours.record(session, run.lease, "own", 1)
    assert run.step("only", leave, "a") == "a"
    run.finish()


@pytest.mark.parametrize(("root", "step"), ROOTS)
def test_the_root_has_each_index_and_check_once_and_a_childs_table_none(
    bare: Engine, root: type[Any], step: type[Any]
) -> None:
    root.metadata.create_all(bare)
    made = definitions(bare, root.__table__)
    assert sorted(name.split("_", 1)[0] for name in made if not name.endswith("_pkey")) == ["ck", "ck", "ix", "ix"]
    for child in root.__subclasses__():
        if child.__table__ is not root.__table__:
            assert {name.rsplit("_", 1)[1] for name in definitions(bare, child.__table__)} <= {"pkey", "fkey"}


# --- what cannot work is refused at class definition


class Plain(DeclarativeBase):
    pass


class Task(Plain):
    __tablename__ = "task"
    __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "task"}
    id: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    status: Mapped[JobStatus] = jobs.column()


def test_the_mixin_on_a_class_that_does_not_own_the_root_table_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Errand.*root table.*Task"):

        class Errand(RunMixin, Task):
            __tablename__ = "errand"
            __lifecycle__ = lifecycle()
            __mapper_args__ = {"polymorphic_identity": "errand"}
            id: Mapped[int] = mapped_column(ForeignKey(Task.id), primary_key=True)


def test_the_mixin_on_a_single_table_child_is_refused() -> None:
    # SQLAlchemy itself refuses columns of a child that are in the way; either error must come at class definition.
    with pytest.raises(ConfigurationError):

        class Chore(RunMixin, Task):
            __lifecycle__ = lifecycle()
            __mapper_args__ = {"polymorphic_identity": "chore"}


def test_a_child_with_a_lifecycle_of_its_own_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="__lifecycle__"):

        class Special(Job):
            __lifecycle__ = lifecycle()
            __mapper_args__ = {"polymorphic_identity": "special"}


def test_a_concrete_child_is_refused() -> None:
    class Local(DeclarativeBase):
        pass

    class Work(RunMixin, Local):
        __tablename__ = "work"
        __lifecycle__ = lifecycle()
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[JobStatus] = jobs.column()

    with pytest.raises(ConfigurationError, match="Concrete"):

        class Concrete(Work):
            __tablename__ = "concrete"
            __mapper_args__ = {"concrete": True}
            id: Mapped[int] = mapped_column(primary_key=True)
            status: Mapped[JobStatus] = jobs.column()


def test_runs_of_a_child_whose_rows_cannot_be_told_apart_are_refused(bare: Engine) -> None:
    class Local(DeclarativeBase):
        pass

    class Work(RunMixin, Local):
        __tablename__ = "work"
        __lifecycle__ = lifecycle()
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[JobStatus] = jobs.column()

    class Part(Work):
        __tablename__ = "part"
        id: Mapped[int] = mapped_column(ForeignKey(Work.id), primary_key=True)

    class WorkStep(ReceiptMixin[Work], Local):
        __tablename__ = "work_step"

    Local.metadata.create_all(bare)
    with pytest.raises(ConfigurationError, match="polymorphic_on"):
        Runs(sessionmaker(bare), Part, WorkStep).claim(1)


def test_receipts_of_a_sibling_or_of_something_else_are_refused(bare: Engine) -> None:
    class SendStep(ReceiptMixin[Send], Single):
        __tablename__ = "send_step"

    factory: sessionmaker[Session] = sessionmaker(bare)
    with pytest.raises(ConfigurationError, match="Fetch"):
        Runs(factory, Fetch, SendStep)
    with pytest.raises(ConfigurationError, match="receipts"):
        Runs(factory, Fetch, Fetch)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="not a mapped class"):
        Runs(factory, Task, JobStep)  # type: ignore[type-var]
    with suppress(KeyError):
        Single.metadata.remove(SendStep.__table__)  # type: ignore[arg-type]
