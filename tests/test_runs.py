"""A run claimed, carried out step by step and landed."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, Run, Runs, StepFailed
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, column, entries, write_entry


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep)


def test_each_step_runs_once_and_the_run_lands_done(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory, actions=["a", "b"])

    def carry_out(run: Run[Plan]) -> None:
        for position, action in enumerate(run.row.actions):
            assert run.step(position, write_entry, action) == action

    outcome = plans.execute(ident, carry_out)
    assert outcome.ending is Ending.LANDED
    assert outcome.status is PlanStatus.EXECUTED
    assert [receipt.step for receipt in outcome.receipts] == ["0", "1"]
    assert entries(engine) == ["a", "b"]
    assert column(engine, ident, "lease_expires_at") is None


def test_a_terminal_run_answers_from_its_receipts_and_runs_nothing(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    first = plans.execute(ident, lambda run: run.step("only", write_entry, "a"))
    again = plans.execute(ident, lambda run: pytest.fail("a terminal run ran"))
    assert again == first
    assert again.replayed
    assert entries(engine) == ["a"]


def test_a_failed_step_is_a_receipt_and_earlier_steps_stay(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)

    def fails(session: Session) -> None:
        write_entry(session, "never")
        session.flush()
        raise ValueError("no stock")

    def carry_out(run: Run[Plan]) -> None:
        run.step("first", write_entry, "a")
        run.step("second", fails)

    outcome = plans.execute(ident, carry_out)
    assert outcome.status is PlanStatus.FAILED
    assert outcome.failure is not None
    assert (outcome.failure.type, outcome.failure.message) == ("ValueError", "no stock")
    assert entries(engine) == ["a"]
    assert plans.execute(ident, carry_out) == outcome


def test_a_replayed_failed_step_raises_the_recorded_error(
    session_factory: sessionmaker[Session], plans: Runs[Plan], engine: Engine
) -> None:
    ident = approved_plan(session_factory)
    seen: list[Exception] = []

    def fails(session: Session) -> None:
        raise ValueError("no stock")

    first = plans.claim(ident)
    assert first is not None
    with pytest.raises(ValueError, match="no stock"):
        first.step("second", fails)
    first.release()

    def carry_out(run: Run[Plan]) -> None:
        try:
            run.step("second", fails)
        except StepFailed as error:
            seen.append(error)

    assert plans.execute(ident, carry_out).status is PlanStatus.EXECUTED
    assert "no stock" in str(seen[0])
