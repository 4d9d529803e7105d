"""Every way of declaring a run model, taken through every verb."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any, ClassVar
from uuid import UUID, uuid4

import pytest
from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Engine,
    Index,
    LargeBinary,
    String,
    Text,
    create_engine,
    text,
)
from sqlalchemy.orm import (
    DeclarativeBase,
    DeclarativeBaseNoMeta,
    Mapped,
    MappedAsDataclass,
    declarative_base,
    declared_attr,
    mapped_column,
    registry,
)

from sqla_durable import ReceiptMixin, RunMixin
from tests.support_models import JobStatus, definitions, drive, jobs, lifecycle

Classes = tuple[type[Any], type[Any], Callable[[JobStatus], Any]]


@pytest.fixture
def bare(empty_url: str) -> Iterator[Engine]:
    """An engine on a database without tables."""
    engine = create_engine(empty_url)
    yield engine
    engine.dispose()


def plain() -> Classes:
    class Base(DeclarativeBase):
        pass

    class Job(RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = lifecycle()
        id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
        status: Mapped[JobStatus] = jobs.column()

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    return Job, JobStep, lambda status: Job(status=status)


def mixin_last() -> Classes:
    class Base(DeclarativeBase):
        pass

    class Job(Base, RunMixin):
        __tablename__ = "job"
        __lifecycle__ = lifecycle()
        id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
        status: Mapped[JobStatus] = jobs.column()

    class JobStep(Base, ReceiptMixin[Job]):
        __tablename__ = "job_step"

    return Job, JobStep, lambda status: Job(status=status)


def no_meta() -> Classes:
    class Base(DeclarativeBaseNoMeta):
        pass

    class Job(RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = lifecycle()
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[JobStatus] = jobs.column()

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    return Job, JobStep, lambda status: Job(status=status)


def dataclass_base() -> Classes:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Job(RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = lifecycle()
        label: Mapped[str]
        id: Mapped[UUID] = mapped_column(primary_key=True, default_factory=uuid4)
        status: Mapped[JobStatus] = jobs.column()
        note: Mapped[str | None] = mapped_column(default=None)

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    assert Job("a").status is JobStatus.WAITING
    return Job, JobStep, lambda status: Job("a", status=status)


def dataclass_without_status_in_init() -> Classes:
    class Base(MappedAsDataclass, DeclarativeBase, kw_only=True):
        pass

    class Job(RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = lifecycle()
        id: Mapped[UUID] = mapped_column(primary_key=True, default_factory=uuid4)
        status: Mapped[JobStatus] = jobs.column(init=False)
        label: Mapped[str]

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    def new(status: JobStatus) -> Job:
        job = Job(label="a")
        job.status = status
        return job

    return Job, JobStep, new


def dataclass_mixin_last() -> Classes:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Job(Base, RunMixin):
        __tablename__ = "job"
        __lifecycle__ = lifecycle()
        id: Mapped[UUID] = mapped_column(primary_key=True, default_factory=uuid4, init=False)
        status: Mapped[JobStatus] = jobs.column()

    class JobStep(Base, ReceiptMixin[Job]):
        __tablename__ = "job_step"

    return Job, JobStep, lambda status: Job(status=status)


def dataclass_decorator() -> Classes:
    mapping = registry()

    @mapping.mapped_as_dataclass
    class Job(RunMixin):
        __tablename__ = "job"
        __lifecycle__ = lifecycle()
        id: Mapped[UUID] = mapped_column(primary_key=True, default_factory=uuid4)
        status: Mapped[JobStatus] = jobs.column()

    @mapping.mapped_as_dataclass
    class JobStep(ReceiptMixin[Job]):
        __tablename__ = "job_step"

    Job.metadata = mapping.metadata  # type: ignore[attr-defined]
    return Job, JobStep, lambda status: Job(status=status)


def declarative_base_function() -> Classes:
    base: Any = declarative_base()

    class Job(RunMixin, base):
        __tablename__ = "job"
        __lifecycle__ = lifecycle()
        id = mapped_column(BigInteger, primary_key=True)
        status = jobs.column()

    class JobStep(ReceiptMixin[Job], base):
        __tablename__ = "job_step"

    return Job, JobStep, lambda status: Job(status=status)


def declarative_base_function_mixin_last() -> Classes:
    base: Any = declarative_base()

    class Job(base, RunMixin):
        __tablename__ = "job"
        __lifecycle__ = lifecycle()
        id = mapped_column(BigInteger, primary_key=True)
        status = jobs.column()

    class JobStep(base, ReceiptMixin[Job]):
        __tablename__ = "job_step"

    return Job, JobStep, lambda status: Job(status=status)


def mapped_decorator() -> Classes:
    mapping = registry()

    @mapping.mapped
    class Job(RunMixin):
        __tablename__ = "job"
        __lifecycle__ = lifecycle()
        id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
        status: Mapped[JobStatus] = jobs.column()

    @mapping.mapped
    class JobStep(ReceiptMixin[Job]):
        __tablename__ = "job_step"

    Job.metadata = mapping.metadata  # type: ignore[attr-defined]
    return Job, JobStep, lambda status: Job(status=status)


def abstract_base() -> Classes:
    class Base(DeclarativeBase):
        pass

    class AnyJob(RunMixin, Base):
        __abstract__ = True
        __lifecycle__ = lifecycle()
        id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
        status: Mapped[JobStatus] = jobs.column()

        @declared_attr.directive
        def __tablename__(cls) -> str:
            return cls.__name__.lower()

    class Job(AnyJob):
        pass

    class OtherJob(AnyJob):
        other: Mapped[str | None]

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    class OtherStep(ReceiptMixin[OtherJob], Base):
        __tablename__ = "other_step"

    return Job, JobStep, lambda status: Job(status=status)


def base_that_is_a_run() -> Classes:
    class Base(RunMixin, DeclarativeBase):
        __lifecycle__ = lifecycle()
        id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
        status: Mapped[JobStatus] = jobs.column()

    class Job(Base):
        __tablename__ = "job"

    class StepBase(DeclarativeBase):
        metadata = Base.metadata

    class JobStep(ReceiptMixin[Job], StepBase):
        __tablename__ = "job_step"

    return Job, JobStep, lambda status: Job(status=status)


def mixin_of_the_users_own() -> Classes:
    class Base(DeclarativeBase):
        pass

    class Work(RunMixin):
        __lifecycle__ = lifecycle()
        status: Mapped[JobStatus] = jobs.column()

    class Named:
        name: Mapped[str | None] = mapped_column(String(50))

        @declared_attr.directive
        def __table_args__(cls) -> Any:
            return (Index(None, "name"),)

    class Job(Work, Named, Base):
        __tablename__ = "job"
        id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    return Job, JobStep, lambda status: Job(status=status)


def own_type_map() -> Classes:
    class Base(DeclarativeBase):
        type_annotation_map: ClassVar[dict[Any, Any]] = {
            str: LargeBinary,
            int: Text,
            datetime: String(3),
            dict: JSON,
            dict[str, Any]: JSON,
            list[dict[str, Any]]: JSON,
            JobStatus: Text,
        }

    class Job(RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = lifecycle()
        id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
        status: Mapped[JobStatus] = jobs.column()

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    return Job, JobStep, lambda status: Job(status=status)


def own_created_at() -> Classes:
    class Base(DeclarativeBase):
        pass

    class Job(RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = lifecycle()
        id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
        status: Mapped[JobStatus] = jobs.column()
        created_at: Mapped[datetime] = mapped_column(
            "made_at", DateTime(timezone=True), server_default=text("'2001-01-01'"), index=True
        )

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    return Job, JobStep, lambda status: Job(status=status)


STYLES = [
    plain,
    mixin_last,
    no_meta,
    dataclass_base,
    dataclass_without_status_in_init,
    dataclass_mixin_last,
    dataclass_decorator,
    declarative_base_function,
    declarative_base_function_mixin_last,
    mapped_decorator,
    abstract_base,
    base_that_is_a_run,
    mixin_of_the_users_own,
    own_type_map,
    own_created_at,
]


@pytest.mark.parametrize("style", STYLES)
def test_every_verb_on_a_model_declared_as(bare: Engine, style: Callable[[], Classes]) -> None:
    job, step, new = style()
    drive(bare, job, step, new)


@pytest.mark.parametrize("style", STYLES)
def test_indexes_checks_and_columns_are_the_same_however_it_is_declared(
    bare: Engine, style: Callable[[], Classes]
) -> None:
    job, step, _ = style()
    job.metadata.create_all(bare)
    job.metadata.create_all(bare)
    own = {"ix_job_name", "ix_job_made_at"}
    assert set(definitions(bare, job.__table__)) - own == {
        "job_pkey",
        "ck_job_status_values",
        "ck_job_lease",
        "ix_job_available_at",
        "ix_job_started_at",
    }
    assert set(definitions(bare, step.__table__)) == {
        "job_step_pkey",
        "ck_job_step_outcome",
        "fk_job_step_job_id",
        "fk_job_step_unsealed_job_id",
    }
    with bare.connect() as connection:
        types = dict(
            connection.execute(
                text("SELECT column_name, data_type FROM information_schema.columns WHERE table_name = 'job'")
            ).all()
        )
    zoned = "timestamp with time zone"
    assert {name: types[name] for name in ("fence", "attempts", "lease_owner", "lease_expires_at", "error")} == {
        "fence": "bigint",
        "attempts": "integer",
        "lease_owner": "character varying",
        "lease_expires_at": zoned,
        "error": "jsonb",
    }
    assert types["status"] == "character varying"
    assert types["failures"] == "jsonb"
    assert types["available_at"] == types["started_at"] == types["finished_at"] == zoned
