"""What a beginner gets wrong is refused with the remedy, and never lands a run as done."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import BigInteger, Engine, String, event, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import ConfigurationError, Lifecycle, ReceiptMixin, Retry, RunMixin, Runs, StatusMachine
from sqla_durable.asyncio import AsyncRun, AsyncRuns
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, entries, plan_statuses, write_entry

ROLES: dict[str, Any] = {
    "ready": PlanStatus.APPROVED,
    "running": PlanStatus.EXECUTING,
    "done": PlanStatus.EXECUTED,
    "failed": PlanStatus.FAILED,
}


async def write(session: AsyncSession, label: str) -> str:
    return await session.run_sync(write_entry, label)


def test_a_step_that_was_never_awaited_fails_the_run(engine: Engine, session_factory: sessionmaker[Session]) -> None:
    ident = approved_plan(session_factory)

    async def main() -> Any:
        asynchronous = create_async_engine(engine.url)

        async def carry_out(run: AsyncRun[Plan]) -> None:
            await run.step("awaited", write, "a")
            run.step("forgotten", write, "b")  # type: ignore[unused-coroutine] # pyright: ignore - the mistake itself

        outcome = await AsyncRuns(async_sessionmaker(asynchronous), Plan, PlanStep).execute(ident, carry_out)
        await asynchronous.dispose()
        return outcome

    outcome = asyncio.run(main())
    assert outcome.status is PlanStatus.FAILED
    assert "'forgotten' was never awaited" in outcome.failure.message
    assert entries(engine) == ["a"]


def test_a_handler_that_yields_fails_the_run(session_factory: sessionmaker[Session]) -> None:
    ident = approved_plan(session_factory)

    def carry_out(run: Any) -> Any:
        yield run.step("never", write_entry, "a")

    outcome = Runs(session_factory, Plan, PlanStep).execute(ident, carry_out)
    assert outcome.status is PlanStatus.FAILED
    assert outcome.failure is not None
    assert "returned a generator" in outcome.failure.message


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Lifecycle(plan_statuses, **ROLES, lease=30), "lease=30"),
        (lambda: Lifecycle(plan_statuses, **ROLES, step_timeout=5), "step_timeout=5"),
        (lambda: Retry(backoff=5), "backoff=5"),  # type: ignore[arg-type] # the mistake itself
        (lambda: Retry(cap=5), "cap=5"),  # type: ignore[arg-type] # the mistake itself
    ],
    ids=["lease", "step_timeout", "backoff", "cap"],
)
def test_a_number_in_place_of_a_duration_is_refused(build: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{words}.*a duration is a timedelta"):
        build()


def test_a_transition_to_a_status_without_braces_is_refused() -> None:
    edges: Any = {PlanStatus.PENDING: PlanStatus.APPROVED}
    with pytest.raises(ConfigurationError, match="write a set"):
        StatusMachine(PlanStatus, initial=PlanStatus.PENDING, transitions=edges)


def test_receipts_of_no_run_class_are_refused() -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match="does not say whose receipts it holds"):

        class Steps(ReceiptMixin, Base):  # type: ignore[type-arg] # the mistake itself
            __tablename__ = "steps"
            id: Mapped[int] = mapped_column(primary_key=True)


def test_receipts_of_a_class_that_is_no_run_are_refused() -> None:
    class Base(DeclarativeBase):
        pass

    class Order(Base):
        __tablename__ = "order"
        id: Mapped[int] = mapped_column(primary_key=True)

    with pytest.raises(ConfigurationError, match="not a mapped class with RunMixin"):
        ReceiptMixin[Order]


@pytest.mark.parametrize(
    ("name", "column"), [("error", String()), ("fence", String()), ("finished_at", BigInteger())], ids=str
)
def test_a_column_of_ones_own_under_a_name_of_the_mixins_is_refused(name: str, column: Any) -> None:
    class Base(DeclarativeBase):
        pass

    body = {
        "__tablename__": "job",
        "__lifecycle__": Lifecycle(plan_statuses, **ROLES, lease=timedelta(seconds=30)),
        "id": mapped_column(BigInteger, primary_key=True),
        "status": plan_statuses.column(),
        name: mapped_column(column),
    }
    with pytest.raises(ConfigurationError, match=rf"Job\.{name} is .*another name"):
        type("Job", (RunMixin, Base), body)


def test_a_batch_of_claimed_runs_reads_its_receipts_in_one_statement(
    session_factory: sessionmaker[Session], engine: Engine
) -> None:
    plans = Runs(session_factory, Plan, PlanStep)
    idents = {approved_plan(session_factory) for _ in range(3)}
    for run in plans.claim_due(3):
        run.step("first", write_entry, str(run.row.id))
        run.release()
    reads: list[str] = []

    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        reads.extend([statement] if "FROM plan_step" in statement else [])

    event.listen(engine, "before_cursor_execute", note)
    again = plans.claim_due(3)
    event.remove(engine, "before_cursor_execute", note)
    assert len(reads) == 1
    assert {run.row.id: [receipt.result for receipt in run.receipts] for run in again} == {
        ident: [str(ident)] for ident in idents
    }
    with session_factory() as session:
        assert len(session.scalars(select(PlanStep.step)).all()) == len(idents)
