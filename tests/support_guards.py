"""One model twice, with a guard and without, and runs of it in every state that a guard knows."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from enum import StrEnum
from functools import cache
from typing import Any
from uuid import UUID, uuid4

from sqlalchemy import Engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import (
    PENDING,
    DeadlineMixin,
    ExpiryMixin,
    KeyMixin,
    Lifecycle,
    OperationFailed,
    OperationUnknown,
    ReceiptMixin,
    Retry,
    Run,
    RunMixin,
    Runs,
    SignalMixin,
    StatusMachine,
    WaitMixin,
)
from sqla_durable.testing import lapse

HOUR = timedelta(hours=1)


class Status(StrEnum):
    DRAFT = "draft"
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    DEAD = "dead"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed out"
    EXPIRED = "expired"


ENDS = {Status.DONE, Status.FAILED, Status.DEAD, Status.CANCELLED, Status.TIMED_OUT}


class Models:
    """The classes of one kind."""

    def __init__(self, guarded: bool) -> None:
        self.guarded = guarded
        machine = StatusMachine(
            Status,
            initial=Status.DRAFT,
            transitions={
                Status.DRAFT: {Status.READY, Status.CANCELLED, Status.EXPIRED},
                Status.READY: {Status.RUNNING, Status.CANCELLED, Status.EXPIRED},
                Status.RUNNING: {*ENDS, Status.READY},
            },
        )

        class Base(DeclarativeBase):
            pass

        class Job(DeadlineMixin, ExpiryMixin, KeyMixin, WaitMixin, RunMixin, Base):
            __tablename__ = "job"
            __guard__ = guarded
            __lifecycle__ = Lifecycle(
                machine,
                ready=Status.READY,
                running=Status.RUNNING,
                done=Status.DONE,
                failed=Status.FAILED,
                dead=Status.DEAD,
                cancelled=Status.CANCELLED,
                timed_out=Status.TIMED_OUT,
                expired=Status.EXPIRED,
                lease=timedelta(seconds=30),
                retry=Retry(max_attempts=2, backoff=timedelta(0), cap=timedelta(0)),
                requeue={Status.FAILED, Status.DEAD, Status.CANCELLED},
            )
            id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
            status: Mapped[Status] = machine.column()
            note: Mapped[str | None]

        class JobStep(ReceiptMixin[Job], Base):
            __tablename__ = "job_step"
            tag: Mapped[str | None]

        class JobSignal(SignalMixin[Job], Base):
            __tablename__ = "job_signal"

        self.machine, self.base, self.job, self.step, self.signal = machine, Base, Job, JobStep, JobSignal


models = cache(Models)


class World:
    """A database with the tables of one kind, and runs of it in whatever state is asked for."""

    def __init__(self, engine: Engine, guarded: bool) -> None:
        self.engine = engine
        self.models = models(guarded)
        self.guarded = guarded
        self.factory = sessionmaker(engine)
        self.models.base.metadata.create_all(engine)
        self.runs: Runs[Any] = Runs(
            self.factory, self.models.job, self.models.step, signals=self.models.signal, owner="me"
        )

    def execute(self, sql: str, **values: Any) -> int:
        """Execute a statement of an attacker's and commit; return how many rows it wrote."""
        with self.engine.begin() as connection:
            return connection.execute(text(sql), values).rowcount

    def scalar(self, sql: str, **values: Any) -> Any:
        with self.engine.connect() as connection:
            return connection.scalar(text(sql), values)

    def row(self, ident: UUID) -> Any:
        with self.factory() as session:
            return session.get_one(self.models.job, ident)

    # runs by what has become of them

    def draft(self, **values: Any) -> UUID:
        return self.ready(status=Status.DRAFT, **values)

    def ready(self, **values: Any) -> UUID:
        with self.factory.begin() as session:
            job = self.models.job(**{"status": Status.READY, **values})
            session.add(job)
            session.flush()
            ident: UUID = job.id
            return ident

    def claimed(self, ident: UUID | None = None, **values: Any) -> Run[Any]:
        run = self.runs.claim(self.ready(**values) if ident is None else ident, run_now=True)
        assert run is not None
        return run

    def running(self) -> UUID:
        return self.claimed().row.id

    def released(self) -> UUID:
        run = self.claimed()
        run.release()
        return run.row.id

    def reaped_run(self) -> Run[Any]:
        """A run whose owner may take it back."""
        run = self.claimed()
        self.lapse(run.row.id)
        assert self.runs.reap() == 1
        return run

    def reaped(self) -> UUID:
        return self.reaped_run().row.id

    def done(self) -> UUID:
        run = self.claimed()
        run.step("a", write, 1)
        run.finish()
        return run.row.id

    def failed(self) -> UUID:
        run = self.claimed()
        run.step("a", write, 1)
        with suppress(ValueError):
            run.step("b", refuse)
        run.fail(ValueError("no"))
        return run.row.id

    def issued(self) -> UUID:
        """A running run with an operation of which nobody knows whether it was issued."""
        run = self.claimed()
        with suppress(OperationUnknown):
            run.operation("op", start=crash, poll=pending)
        return run.row.id

    def polled(self) -> UUID:
        """A ready run with an operation under way."""
        ident = self.ready()
        self.runs.execute(ident, operate)
        return ident

    def operation_failed(self) -> UUID:
        ident = self.ready()
        self.runs.execute(ident, operate_and_fail)
        return ident

    def waiting(self) -> UUID:
        ident = self.ready()
        self.runs.execute(ident, lambda run: run.wait("go", timeout=HOUR))
        return ident

    def asleep(self) -> UUID:
        ident = self.ready()
        self.runs.execute(ident, lambda run: run.sleep("nap", HOUR))
        return ident

    def lapse(self, ident: UUID) -> None:
        with self.factory.begin() as session:
            lapse(session, self.models.job, ident)


def write(session: Session, value: int) -> int:
    return value


def refuse(session: Session) -> None:
    raise ValueError("no")


def crash() -> dict[str, int]:
    raise RuntimeError


def number() -> dict[str, int]:
    return {"number": 1}


def pending(ids: dict[str, int]) -> Any:
    return PENDING


def operate(run: Run[Any]) -> Any:
    return run.operation("op", start=number, poll=pending, every=HOUR)


def operate_and_fail(run: Run[Any]) -> Any:
    def poll(ids: dict[str, int]) -> Any:
        raise OperationFailed("no")

    return run.operation("op", start=number, poll=poll, every=HOUR)
