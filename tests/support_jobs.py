"""A run that is failed, not resumed, when its holder dies, and one whose lease is short enough to outlive."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy import Engine, insert
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqla_durable import Lifecycle, ReceiptMixin, Retry, RunMixin, StatusMachine


class JobStatus(StrEnum):
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


def job_statuses() -> StatusMachine[JobStatus]:
    return StatusMachine(
        JobStatus,
        initial=JobStatus.READY,
        transitions={
            JobStatus.READY: {JobStatus.RUNNING},
            JobStatus.RUNNING: {JobStatus.DONE, JobStatus.FAILED, JobStatus.READY},
        },
    )


def job_lifecycle(**options: Any) -> Lifecycle[JobStatus]:
    return Lifecycle(
        job_statuses(),
        ready=JobStatus.READY,
        running=JobStatus.RUNNING,
        done=JobStatus.DONE,
        failed=JobStatus.FAILED,
        **options,
    )


class JobBase(DeclarativeBase):
    pass


class OneShot(RunMixin, JobBase):
    """Its holder's death fails it."""

    __tablename__ = "one_shot"
    __lifecycle__ = job_lifecycle(lapsed=JobStatus.FAILED, lease=timedelta(seconds=30))
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[JobStatus] = __lifecycle__.machine.column()


class OneShotStep(ReceiptMixin[OneShot], JobBase):
    __tablename__ = "one_shot_step"


class Brief(RunMixin, JobBase):
    """Its lease is shorter than what a test can wait for."""

    __tablename__ = "brief"
    __lifecycle__ = job_lifecycle(
        lease=timedelta(seconds=1.5), retry=Retry(max_attempts=100, backoff=timedelta(0), cap=timedelta(0))
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[JobStatus] = __lifecycle__.machine.column()


class BriefStep(ReceiptMixin[Brief], JobBase):
    __tablename__ = "brief_step"


def add_jobs(engine: Engine, job: type[Any], count: int) -> list[int]:
    """Create the tables of the jobs, and that many ready ones."""
    JobBase.metadata.create_all(engine)
    with engine.begin() as connection:
        return list(connection.scalars(insert(job).returning(job.id), [{}] * count))
