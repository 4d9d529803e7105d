"""Columns of the user's own, or under other names, on a receipt class."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, Identity, Integer, String, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import ConfigurationError, Lifecycle, ReceiptMixin, RunMixin, Runs, StatusMachine
from tests.support import PlanStatus, plan_statuses


def classes(**columns: Any) -> tuple[type[Any], type[Any]]:
    """A run class and a receipt class with further columns."""
    statuses = StatusMachine(
        PlanStatus,
        initial=PlanStatus.PENDING,
        transitions=plan_statuses.transitions,
    )

    class Base(DeclarativeBase):
        pass

    class Task(RunMixin, Base):
        __tablename__ = "task"
        __lifecycle__ = Lifecycle(
            statuses,
            ready=PlanStatus.APPROVED,
            running=PlanStatus.EXECUTING,
            done=PlanStatus.EXECUTED,
            failed=PlanStatus.FAILED,
        )
        id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
        status: Mapped[PlanStatus] = statuses.column()

    made = type("TaskStep", (ReceiptMixin[Task], Base), {"__tablename__": "task_step", **columns})
    return Task, made


def carried_out(engine: Engine, run: type[Any], receipt: type[Any]) -> list[str]:
    run.metadata.create_all(engine)
    factory = sessionmaker(engine)
    with factory.begin() as session:
        task = run(status=PlanStatus.APPROVED)
        session.add(task)
        session.flush()
        ident = task.id
    runs: Runs[Any] = Runs(factory, run, receipt)

    def fails(_: Session) -> None:
        raise ValueError("on purpose")

    def carry_out(run: Any) -> None:
        run.step("one", lambda _: 1)
        run.external("two", lambda: 2)
        run.step("three", fails)

    outcome = runs.execute(ident, carry_out)
    assert str(outcome.exception) == "on purpose"
    assert runs.execute(ident, carry_out) == outcome
    return [receipt.outcome for receipt in outcome.receipts]


@pytest.mark.parametrize("default", [None, "me"])
def test_a_column_that_no_statement_of_the_library_fills_is_refused_at_definition(default: str | None) -> None:
    options: dict[str, Any] = {} if default is None else {"default": default}
    with pytest.raises(ConfigurationError, match=r"TaskStep\.who .* server_default"):
        classes(who=mapped_column(String, nullable=False, **options))


@pytest.mark.parametrize(
    "column",
    [
        lambda: mapped_column(String, nullable=False, server_default="me"),
        lambda: mapped_column(String, nullable=True),
        lambda: mapped_column(Integer, Identity(), nullable=False),
    ],
)
def test_a_column_that_the_database_fills_is_fine(engine: Engine, column: Any) -> None:
    assert carried_out(engine, *classes(who=column())) == ["succeeded", "succeeded", "failed"]
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM task_step")) == 3


@pytest.mark.parametrize("attribute", ["outcome", "error", "unsealed"])
def test_a_column_whose_key_is_not_its_name(engine: Engine, attribute: str) -> None:
    renamed = mapped_column("how it went", String(200), key="other")
    if attribute == "error":
        renamed = mapped_column("how it went", ReceiptMixin.error.column.type, key="other")
    assert carried_out(engine, *classes(**{attribute: renamed})) == ["succeeded", "succeeded", "failed"]
