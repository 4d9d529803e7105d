"""Runs with other lifecycles: failed when the holder dies, leased briefly, or in no hurry to try again."""

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


class Patient(RunMixin, JobBase):
    """It waits for a minute before its next attempt, and that to the microsecond."""

    __tablename__ = "patient"
    __lifecycle__ = job_lifecycle(
        lease=timedelta(seconds=30),
        retry=Retry(max_attempts=100, backoff=timedelta(minutes=1), factor=1, jitter=0),
        requeue={JobStatus.FAILED},
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[JobStatus] = __lifecycle__.machine.column()


class PatientStep(ReceiptMixin[Patient], JobBase):
    __tablename__ = "patient_step"


class StoppableStatus(StrEnum):
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


stoppable_statuses = StatusMachine(
    StoppableStatus,
    initial=StoppableStatus.READY,
    transitions={
        StoppableStatus.READY: {StoppableStatus.RUNNING},
        StoppableStatus.RUNNING: set(StoppableStatus) - {StoppableStatus.RUNNING},
    },
)


class Stoppable(RunMixin, JobBase):
    """It can be cancelled, but has no edge for that from ready."""

    __tablename__ = "stoppable"
    __lifecycle__ = Lifecycle(
        stoppable_statuses,
        ready=StoppableStatus.READY,
        running=StoppableStatus.RUNNING,
        done=StoppableStatus.DONE,
        failed=StoppableStatus.FAILED,
        cancelled=StoppableStatus.STOPPED,
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[StoppableStatus] = stoppable_statuses.column()


class StoppableStep(ReceiptMixin[Stoppable], JobBase):
    __tablename__ = "stoppable_step"


def add_jobs(engine: Engine, job: type[Any], count: int) -> list[int]:
    """Create the tables of the jobs, and that many ready ones."""
    JobBase.metadata.create_all(engine)
    if not count:
        return []
    with engine.begin() as connection:
        return list(connection.scalars(insert(job).returning(job.id), [{}] * count))
