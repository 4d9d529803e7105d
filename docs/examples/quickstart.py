# quickstart.py
import os
from enum import StrEnum

from sqlalchemy import create_engine
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import Lifecycle, ReceiptMixin, Run, RunMixin, Runs, StatusMachine


class PlanStatus(StrEnum):
    PENDING = "pending"
    APPROVED = "approved"
    EXECUTING = "executing"
    EXECUTED = "executed"
    FAILED = "failed"


plan_statuses = StatusMachine(
    PlanStatus,
    initial=PlanStatus.PENDING,
    transitions={
        PlanStatus.PENDING: {PlanStatus.APPROVED},
        PlanStatus.APPROVED: {PlanStatus.EXECUTING},
        PlanStatus.EXECUTING: {PlanStatus.EXECUTED, PlanStatus.FAILED, PlanStatus.APPROVED},
    },
)


class Base(DeclarativeBase):
    pass


class Plan(RunMixin, Base):  # your table; the mixin adds a lease, a fence and a few more columns
    __tablename__ = "quickstart_plan"
    __lifecycle__ = Lifecycle(
        plan_statuses,
        ready=PlanStatus.APPROVED,
        running=PlanStatus.EXECUTING,
        done=PlanStatus.EXECUTED,
        failed=PlanStatus.FAILED,
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[PlanStatus] = plan_statuses.column()
    lines: Mapped[list[str]] = mapped_column(JSONB)


class PlanStep(ReceiptMixin[Plan], Base):  # one row for each step that is done
    __tablename__ = "quickstart_plan_step"


class Entry(Base):  # what the steps are for
    __tablename__ = "quickstart_entry"

    id: Mapped[int] = mapped_column(primary_key=True)
    text: Mapped[str]


def write_entry(session: Session, text: str) -> int:
    entry = Entry(text=text)
    session.add(entry)
    session.flush()
    return entry.id  # kept in the receipt, which commits together with the entry


def carry_out(run: Run[Plan]) -> None:
    for position, line in enumerate(run.row.lines):
        run.step(position, write_entry, line)


def main() -> None:
    engine = create_engine(os.environ["DATABASE_URL"])  # postgresql+psycopg://...
    Base.metadata.create_all(engine)
    new_session = sessionmaker(engine)
    with new_session.begin() as session:
        plan = Plan(lines=["first", "second", "third"])
        session.add(plan)
        session.flush()
        assert plan_statuses.transition(session, plan, PlanStatus.APPROVED)  # False would be a lost race
        plan_id = plan.id

    outcome = Runs(new_session, Plan, PlanStep).execute(plan_id, carry_out)
    print(outcome.status, [receipt.result for receipt in outcome.receipts])
    if outcome.failure is not None:  # execute() does not raise what the handler raises
        print(outcome.failure.type, outcome.failure.message)


if __name__ == "__main__":
    main()
