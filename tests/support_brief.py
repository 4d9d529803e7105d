"""Run classes made to measure: leases so short that they run out for real, and lifecycles that few have."""

from __future__ import annotations

from datetime import timedelta
from enum import StrEnum
from typing import Any, Literal, NamedTuple
from uuid import UUID, uuid4

from sqlalchemy import Engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import Lifecycle, ReceiptMixin, Retry, RunMixin, Runs, StatusMachine


class ErrandStatus(StrEnum):
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    DEAD = "dead"


class Errands(NamedTuple):
    """A run class and its receipts."""

    run: type[Any]
    receipt: type[Any]

    def create(self, engine: Engine) -> None:
        """Create the two tables."""
        self.run.metadata.create_all(engine)

    def runs(self, factory: sessionmaker[Session], owner: str | None = None) -> Runs[Any]:
        """The helper for them."""
        return Runs(factory, self.run, self.receipt, owner=owner)

    def new(self, factory: sessionmaker[Session]) -> UUID:
        """A run that may be claimed."""
        with factory.begin() as session:
            run = self.run()
            session.add(run)
            session.flush()
            return run.id


def errands(
    *,
    lease: timedelta = timedelta(seconds=30),
    step_timeout: timedelta | Literal["lease"] | None = "lease",
    max_attempts: int = 3,
    releases: bool = True,
    retry: Retry | None = None,
) -> Errands:
    """Make a run class.

    :param releases: whether the machine has an edge from running to ready; without it a lapsed run fails.
    :param retry: by default up to ``max_attempts`` starts, each at once.
    """
    ready, running, done, failed, dead = ErrandStatus
    statuses = StatusMachine(
        ErrandStatus,
        initial=ready,
        transitions={ready: {running}, running: {done, failed, dead, *([ready] if releases else [])}},
    )

    class Base(DeclarativeBase):
        pass

    class Errand(RunMixin, Base):
        __tablename__ = "errand"
        __lifecycle__ = Lifecycle(
            statuses,
            ready=ready,
            running=running,
            done=done,
            failed=failed,
            dead=dead,
            lapsed=None if releases else failed,
            lease=lease,
            step_timeout=step_timeout,
            retry=retry or Retry(max_attempts=max_attempts, backoff=timedelta(0), cap=timedelta(0)),
        )
        id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
        status: Mapped[ErrandStatus] = statuses.column()

    class ErrandStep(ReceiptMixin[Errand], Base):
        __tablename__ = "errand_step"

    return Errands(Errand, ErrandStep)


BRIEF = errands(lease=timedelta(seconds=1))
"""What programs and their tests share: a holder is presumed dead after one second."""

SPACED = errands(retry=Retry(max_attempts=3, backoff=timedelta(minutes=10), factor=2, cap=timedelta(hours=1), jitter=0))
"""It waits for ten minutes after its first attempt, and for twenty after its second."""
