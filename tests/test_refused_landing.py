"""A landing that the database refuses, or that the handler has made itself: what is told and what is recorded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, Run, Runs, UsageError
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, column

REFUSE = """
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF new.status = 'executed' THEN RAISE 'not today'; END IF;
        RETURN new;
    END $$;
"""
TRIGGERS = {
    "at once": "CREATE TRIGGER refuse BEFORE UPDATE ON plan FOR EACH ROW EXECUTE FUNCTION refuse()",
    "at commit": "CREATE CONSTRAINT TRIGGER refuse AFTER UPDATE ON plan DEFERRABLE INITIALLY DEFERRED"
    " FOR EACH ROW EXECUTE FUNCTION refuse()",
}


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep)


@pytest.mark.parametrize("when", TRIGGERS)
def test_a_run_whose_landing_a_trigger_refuses_lands_failed_with_the_reason(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], when: str
) -> None:
    with engine.begin() as connection:
        connection.execute(text(REFUSE))
        connection.execute(text(TRIGGERS[when]))
    ident = approved_plan(session_factory)
    outcome = plans.execute(ident, lambda _: None)
    assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.FAILED)
    assert outcome.failure is not None
    assert "not today" in outcome.failure.message
    assert column(engine, ident, "error")["message"] == outcome.failure.message


def finishes(run: Run[Plan]) -> None:
    run.finish()


def finishes_and_raises(run: Run[Plan]) -> None:
    run.finish()
    raise ValueError("after it")


def fails(run: Run[Plan]) -> None:
    run.fail(ValueError("its own"))


def fails_and_raises(run: Run[Plan]) -> None:
    run.fail(ValueError("its own"))
    raise TypeError("another")


@pytest.mark.parametrize("handler", [finishes, finishes_and_raises, fails, fails_and_raises])
def test_the_outcome_of_a_run_that_its_handler_landed_is_what_was_recorded(
    session_factory: sessionmaker[Session], plans: Runs[Plan], handler: Callable[[Run[Plan]], None]
) -> None:
    ident = approved_plan(session_factory)
    first = plans.execute(ident, handler)
    again = plans.execute(ident, handler)
    assert again.replayed
    assert first == again


@pytest.mark.parametrize("name", ["fence", "attempts", "failures", "lease_owner", "lease_expires_at"])
def test_a_handler_cannot_set_what_the_library_keeps(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], name: str
) -> None:
    ident = approved_plan(session_factory)
    run = plans.claim(ident)
    assert run is not None
    with pytest.raises(UsageError, match=name):
        run.finish(**{name: 0})
    assert (column(engine, ident, "fence"), column(engine, ident, "status")) == (1, PlanStatus.EXECUTING)
