"""Names of tables, columns, constraints and indexes: renamed, quoted, long, and under naming conventions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any
from uuid import UUID, uuid4

import pytest
import sqlalchemy
from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    DateTime,
    Engine,
    ForeignKeyConstraint,
    Index,
    Integer,
    MetaData,
    String,
    UniqueConstraint,
    create_engine,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, declared_attr, mapped_column, sessionmaker
from sqlalchemy.schema import CreateSchema

from sqla_durable import ConfigurationError, ReceiptMixin, RunMixin, Runs, StatusMachine, TransactionEnded
from tests.support_models import JobStatus, definitions, drive, job_machine, jobs, leave, lifecycle, make_effects

USUAL = {
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


@pytest.fixture
def bare(empty_url: str) -> Iterator[Engine]:
    """An engine on a database without tables."""
    engine = create_engine(empty_url)
    yield engine
    engine.dispose()


def classes(
    convention: dict[str, Any] | None = None,
    table: str = "job",
    schema: str | None = None,
    arguments: Any = None,
    machine: StatusMachine[JobStatus] = jobs,
    key: str = "id",
) -> tuple[type[Any], type[Any]]:
    class Base(DeclarativeBase):
        metadata = MetaData(naming_convention=convention, schema=schema)

    own: dict[str, Any] = {} if arguments is None else {"__table_args__": arguments}

    class Job(RunMixin, Base):
        __tablename__ = table
        __lifecycle__ = lifecycle(machine)
        locals().update(own)
        id: Mapped[UUID] = mapped_column(key, primary_key=True, default=uuid4)
        status: Mapped[JobStatus] = machine.column()
        place: Mapped[int | None]

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = f"{table}_step"

    return Job, JobStep


# --- naming conventions (what create_all makes)

KEYS = {"pk": "job_pkey", "step_pk": "job_step_pkey"}
CONVENTIONS: dict[str, tuple[dict[str, Any] | None, set[str], set[str]]] = {
    "none": (
        None,
        {"job_pkey", "ck_job_status_values", "ck_job_lease", "ix_job_available_at", "ix_job_started_at"},
        {"job_step_pkey", "ck_job_step_outcome", "fk_job_step_job_id", "fk_job_step_unsealed_job_id"},
    ),
    "the usual one": (
        USUAL,
        {"pk_job", "ck_job_status_values", "ck_job_lease", "ix_job_available_at", "ix_job_started_at"},
        {"pk_job_step", "ck_job_step_outcome", "fk_job_step_job_id_job", "fk_job_step_unsealed_job_step"},
    ),
    "constraint names everywhere": (
        {kind: f"{kind}__%(table_name)s__%(constraint_name)s" for kind in ("ix", "uq", "ck", "fk")},
        {"job_pkey", "ck__job__status_values", "ck__job__lease", "ix__job__available_at", "ix__job__started_at"},
        {"job_step_pkey", "ck__job_step__outcome", "fk__job_step__job_id", "fk__job_step__unsealed_job_id"},
    ),
    "all columns, upper case": (
        {
            "ix": "IX_%(table_name)s_%(column_0_N_name)s",
            "ck": "CK_%(table_name)s_%(constraint_name)s",
            "fk": "FK_%(table_name)s_%(column_0_N_name)s",
            "pk": "PK %(table_name)s",
        },
        {"PK job", "CK_job_status_values", "CK_job_lease", "IX_job_available_at", "IX_job_started_at"},
        {"PK job_step", "CK_job_step_outcome", "FK_job_step_job_id", "FK_job_step_unsealed_job_id"},
    ),
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_names_follow_the_convention_and_carry_its_prefix_once(bare: Engine, name: str) -> None:
    convention, of_run, of_receipts = CONVENTIONS[name]
    job, step = classes(convention)
    job.metadata.create_all(bare)
    made = definitions(bare, job.__table__)
    assert set(made) == of_run
    assert set(definitions(bare, step.__table__)) == of_receipts
    assert sum("lease_expires_at" in definition for definition in made.values()) == 1
    assert sum("available_at" in definition for definition in made.values()) == 1


@pytest.mark.parametrize(
    "convention",
    [
        {"ck": "ck_%(table_name)s_%(constraint_name)s"},
        {"pk": "pk_%(table_name)s"},
        {"ix": "ix_%(table_name)s_%(column_0_name)s"},
        {"fk": "fk_%(table_name)s_%(constraint_name)s"},
        {"ck": "ck_%(table_name)s"},
        {CheckConstraint: "ck_%(table_name)s_%(constraint_name)s", Index: "ix_%(table_name)s_%(column_0_name)s"},
        {ForeignKeyConstraint: "fk_%(table_name)s_%(column_0_N_name)s", "ix": "ix_%(column_0_N_label)s"},
        {"token": lambda constraint, table: "t", "ck": "ck_%(token)s_%(constraint_name)s", "ix": "%(column_0_label)s"},
    ],
    ids=[
        "ck",
        "pk",
        "ix",
        "fk by name",
        "ck without a name",
        "ck and ix by class",
        "fk by class",
        "a token of its own",
    ],
)
def test_every_verb_under_a_partial_or_unusual_convention(bare: Engine, convention: dict[Any, Any]) -> None:
    job, step = classes(convention)
    drive(bare, job, step)
    for table in (job.__table__, step.__table__):
        assert all("None" not in name for name in definitions(bare, table))


@pytest.mark.parametrize("convention", [None, USUAL], ids=["none", "usual"])
def test_a_slipped_commit_is_recognised_under_a_convention_and_with_long_names(
    bare: Engine, convention: dict[str, Any] | None
) -> None:
    job, step = classes(convention, table="a_table_of_work_that_has_a_rather_long_name_of_56")
    job.metadata.create_all(bare)
    factory = sessionmaker(bare)
    runs = Runs(factory, job, step)
    with factory.begin() as session:
        session.add(row := job(status=JobStatus.READY))
        session.flush()
        ident = row.id
    run = runs.claim(ident)
    assert run is not None

    def body(session: Session) -> None:
        session.execute(text("COMMIT"))

    with pytest.raises(TransactionEnded):
        run.step("only", body)
    assert runs.receipts(ident) == ()


# --- names that must be quoted, escaped or cut

NAMES = {
    "mixed case": "JobTable",
    "a reserved word": "user",
    "spaces and quotes": 'my "job" table',
    "percent signs": "50% of %s %(jobs)s",
    "colons and dots": "a.job:list",
    "an apostrophe": "bob's jobs",
    "not ASCII": "tâches_工作",
    "63 characters less the suffix": "j" * 58,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["id", "The %s Key"])
def test_every_verb_on_a_table_whose_name_has(bare: Engine, name: str, key: str) -> None:
    drive(bare, *classes(table=NAMES[name], key=key))


@pytest.mark.parametrize("name", ["Mixed Case", "100% app", 'with "quotes"', "my.app"])
def test_every_verb_in_a_schema_named(bare: Engine, name: str) -> None:
    with bare.begin() as connection:
        connection.execute(CreateSchema(name))
    drive(bare, *classes(schema=name, table="Job"))


# --- columns that are named otherwise than their attributes


class Renamed(DeclarativeBase):
    pass


renamed_machine = job_machine()


class Job(RunMixin, Renamed):
    __tablename__ = "job"
    __lifecycle__ = lifecycle(renamed_machine)
    ident: Mapped[UUID] = mapped_column("the key", primary_key=True, default=uuid4)
    status: Mapped[JobStatus] = renamed_machine.column("run_state")
    fence: Mapped[int] = mapped_column("run_fence", BigInteger, nullable=False, server_default="0")
    attempts: Mapped[int] = mapped_column("run (attempts)", Integer, nullable=False, server_default="0")
    lease_owner: Mapped[str | None] = mapped_column("holder:name", String)
    lease_expires_at: Mapped[Any | None] = mapped_column("expires%", DateTime(timezone=True))
    available_at: Mapped[Any] = mapped_column(
        "due", DateTime(timezone=True), nullable=False, server_default=text("now()")
    )
    cancel_requested_at: Mapped[Any | None] = mapped_column("cancel", DateTime(timezone=True))
    error: Mapped[Any | None] = mapped_column("ERROR", JSONB(none_as_null=True))
    failures: Mapped[Any] = mapped_column("all.failures", JSONB, nullable=False, server_default=text("'[]'"))
    started_at: Mapped[Any | None] = mapped_column("started", DateTime(timezone=True))
    finished_at: Mapped[Any | None] = mapped_column("fence", DateTime(timezone=True))  # another attribute's name


class JobStep(ReceiptMixin[Job], Renamed):
    __tablename__ = "job_step"
    step: Mapped[str] = mapped_column("step key", String(200), primary_key=True)
    outcome: Mapped[str | None] = mapped_column("how it went", String(20))
    result: Mapped[Any | None] = mapped_column("step", JSONB(none_as_null=True))  # another attribute's name
    fence: Mapped[int] = mapped_column("run_fence", BigInteger, nullable=False)
    unsealed: Mapped[str | None] = mapped_column("open?", String(200))


def test_every_verb_on_a_model_whose_columns_are_renamed(bare: Engine) -> None:
    drive(bare, Job, JobStep)
    made = definitions(bare, Job.__table__)  # type: ignore[arg-type]
    assert any("(due) WHERE" in definition and "run_state" in definition for definition in made.values())
    assert "expires%" in made["ck_job_lease"]
    assert "run_fence" in made["ck_job_lease"]


def test_the_library_claims_no_attribute_that_sqlalchemy_reserves() -> None:
    assert not {"metadata", "registry"} & (set(vars(RunMixin)) | set(vars(ReceiptMixin[Job])))


def test_a_column_made_twice_or_not_at_all_is_refused_at_class_definition() -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match=r"NoStatus has 0 columns"):

        class NoStatus(RunMixin, Base):
            __tablename__ = "no_status"
            __lifecycle__ = lifecycle()
            id: Mapped[int] = mapped_column(primary_key=True)

    with pytest.raises(ConfigurationError, match=r"PlainStatus has 0 columns"):

        class PlainStatus(RunMixin, Base):
            __tablename__ = "plain_status"
            __lifecycle__ = lifecycle()
            id: Mapped[int] = mapped_column(primary_key=True)
            status: Mapped[JobStatus]

    with pytest.raises(ConfigurationError, match=r"Twice has 2 columns"):

        class Twice(RunMixin, Base):
            __tablename__ = "twice"
            __lifecycle__ = lifecycle()
            id: Mapped[int] = mapped_column(primary_key=True)
            status: Mapped[JobStatus] = jobs.column()
            again: Mapped[JobStatus] = jobs.column()

    with pytest.raises(ConfigurationError, match=r"Bare.*__lifecycle__"):

        class Bare(RunMixin, Base):
            __tablename__ = "bare"
            id: Mapped[int] = mapped_column(primary_key=True)
            status: Mapped[JobStatus] = jobs.column()


def test_a_second_machine_on_the_model_is_the_users_own_matter(bare: Engine) -> None:
    class Base(DeclarativeBase):
        pass

    reviews = job_machine()

    class Task(RunMixin, Base):
        __tablename__ = "task"
        __lifecycle__ = lifecycle()
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[JobStatus] = jobs.column()
        review: Mapped[JobStatus] = reviews.column("review_state")

    class TaskStep(ReceiptMixin[Task], Base):
        __tablename__ = "task_step"

    driver = drive(bare, Task, TaskStep)
    ident = driver.add()
    with driver.factory.begin() as session:
        assert reviews.transition(session, (Task, ident), JobStatus.READY)
    assert driver.row(ident)["review"] is JobStatus.READY
    assert driver.status(ident) is JobStatus.READY
    assert driver.row(ident)["lease_owner"] is None


# --- the user's own __table_args__

# SQLAlchemy 2.0 has no storage parameters of its own.
FULL: dict[str, Any] = (
    {"postgresql_using": "heap WITH (fillfactor = 55)"}
    if sqlalchemy.__version__.startswith("2.0.")
    else {"postgresql_with": {"fillfactor": 55}}
)
TABLE_ARGUMENTS: dict[str, Callable[[], Any]] = {
    "a dict": lambda: {"comment": "mine", **FULL},
    "a tuple": lambda: (UniqueConstraint("place", name="own_place"), Index("own_index", "place")),
    "a tuple that ends with a dict": lambda: (
        UniqueConstraint("place", name="own_place"),
        Index("own_index", "place"),
        FULL,
    ),
    "a declared_attr": lambda: declared_attr.directive(lambda cls: (UniqueConstraint("place", name="own_place"),)),
    "an empty tuple": lambda: (),
}


@pytest.mark.parametrize("form", TABLE_ARGUMENTS)
def test_the_users_own_table_arguments_are_kept_beside_the_librarys(bare: Engine, form: str) -> None:
    job, step = classes(arguments=TABLE_ARGUMENTS[form]())
    drive(bare, job, step)
    made = set(definitions(bare, job.__table__))
    assert made >= {"ck_job_lease", "ck_job_status_values", "ix_job_available_at", "ix_job_started_at"}
    assert ("own_place" in made) == (form in {"a tuple", "a tuple that ends with a dict", "a declared_attr"})
    with bare.connect() as connection:
        options = connection.scalar(text("SELECT reloptions::text FROM pg_class WHERE relname = 'job'"))
    assert options == ("{fillfactor=55}" if "dict" in form else "{fillfactor=80}")


# --- copies and repetitions


def test_a_copy_of_the_tables_in_another_metadata_makes_the_same_database(bare: Engine) -> None:
    job, step = classes(USUAL)
    copy = MetaData()
    for table in (job.__table__, step.__table__):
        table.to_metadata(copy)
    copy.create_all(bare)
    copied = [definitions(bare, table) for table in (job.__table__, step.__table__)]
    copy.drop_all(bare)
    job.metadata.create_all(bare)
    assert copied == [definitions(bare, table) for table in (job.__table__, step.__table__)]
    with suppress(Exception):
        make_effects(bare)
    factory = sessionmaker(bare)
    with factory.begin() as session:
        session.add(row := job(status=JobStatus.READY))
        session.flush()
        ident = row.id
    assert Runs(factory, job, step).execute(ident, lambda run: run.step(1, leave, "a")).status is JobStatus.DONE


def test_create_all_twice_and_drop_all_work(bare: Engine) -> None:
    job, step = classes()
    job.metadata.create_all(bare)
    before = definitions(bare, step.__table__)
    job.metadata.create_all(bare)
    assert definitions(bare, step.__table__) == before
    job.metadata.drop_all(bare)
    assert definitions(bare, step.__table__) == {}
