"""Plans that need a consent: it can expire, and what was consented to is frozen."""

from __future__ import annotations

from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any

from sqlalchemy import Engine, func, insert, select
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.mutable import MutableList
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqla_durable import ExpiryMixin, Lifecycle, ReceiptMixin, Retry, RunMixin, StatusMachine


class Status(StrEnum):
    """Names and values differ, so that whatever is stored or compared by name shows."""

    DRAFT = "a draft"
    PENDING = "asked 'for' 100%"
    APPROVED = "may start"
    EXECUTING = "under way"
    EXECUTED = "all done"
    FAILED = "no luck"
    REJECTED = "not wanted"
    CANCELLED = "called 'off'"
    EXPIRED = "too late: 100%"


consent_statuses = StatusMachine(
    Status,
    initial=Status.DRAFT,
    transitions={
        Status.DRAFT: {Status.PENDING},
        Status.PENDING: {Status.APPROVED, Status.REJECTED, Status.EXPIRED},
        Status.APPROVED: {Status.EXECUTING, Status.REJECTED, Status.CANCELLED, Status.EXPIRED},
        Status.EXECUTING: {Status.EXECUTED, Status.FAILED, Status.CANCELLED, Status.APPROVED},
    },
)


def consent_lifecycle(**options: Any) -> Lifecycle[Status]:
    given: dict[str, Any] = {
        "expired": Status.EXPIRED,
        "lease": timedelta(seconds=30),
        "retry": Retry(max_attempts=3, backoff=timedelta(0), cap=timedelta(0)),
        "requeue": {Status.FAILED, Status.EXPIRED},
        **options,
    }
    return Lifecycle(
        consent_statuses,
        ready=Status.APPROVED,
        running=Status.EXECUTING,
        done=Status.EXECUTED,
        failed=Status.FAILED,
        cancelled=Status.CANCELLED,
        **given,
    )


class ConsentBase(DeclarativeBase):
    pass


class Consent(ExpiryMixin, RunMixin, ConsentBase):
    __tablename__ = "consent"
    __lifecycle__ = consent_lifecycle(frozen=("actions", "title"))
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[Status] = consent_statuses.column()
    actions: Mapped[list[Any]] = mapped_column(MutableList.as_mutable(JSONB), default=list)
    title: Mapped[str | None]
    note: Mapped[str | None]


class ConsentStep(ReceiptMixin[Consent], ConsentBase):
    __tablename__ = "consent_step"


HOUR, SECOND = timedelta(hours=1), timedelta(seconds=1)
AHEAD, PASSED = func.clock_timestamp() + HOUR, func.clock_timestamp() - SECOND


def add_consent(engine: Engine, status: Status = Status.PENDING, **values: Any) -> int:
    """A consent with these values, inserted below the ORM."""
    with engine.begin() as connection:
        given = {"actions": ["a"], **values, "status": status}
        return connection.execute(insert(Consent).values(given).returning(Consent.id)).scalar_one()


def stored(engine: Engine, ident: int) -> Any:
    """A consent's row as it is committed."""
    with engine.connect() as connection:
        return connection.execute(select(Consent.__table__).where(Consent.id == ident)).one()


def status_of(engine: Engine, ident: int) -> Status:
    found: Status = stored(engine, ident).status
    return found


def database_clock(engine: Engine) -> datetime:
    with engine.connect() as connection:
        return connection.execute(select(func.clock_timestamp())).scalar_one()
