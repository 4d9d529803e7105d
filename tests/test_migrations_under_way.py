"""A migration that changes tables while workers hold statements that were prepared before it."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, Runs
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, write_entry

MIGRATIONS = {
    "a table of the user's": "ALTER TABLE entry ADD COLUMN extra integer",
    "the run": "ALTER TABLE plan ALTER COLUMN note TYPE varchar(500)",
    "the receipts": "ALTER TABLE plan_step ALTER COLUMN recorded_at TYPE timestamptz(3)",
}


def body(session: Session) -> int:
    write_entry(session, "a")
    session.flush()
    return len(session.execute(text("SELECT * FROM entry")).all())


@pytest.mark.unguarded
@pytest.mark.parametrize("migrated", MIGRATIONS)
def test_a_statement_prepared_before_a_migration_of(
    engine: Engine, session_factory: sessionmaker[Session], migrated: str
) -> None:
    """It is prepared again, unseen: PostgreSQL's "cached plan must not change result type" is no failure of a run."""
    plans = Runs(session_factory, Plan, PlanStep)

    def carried_out() -> None:
        ident = approved_plan(session_factory)
        run = plans.claim(ident)
        assert run is not None
        run.external("sent", lambda: None)
        assert run.step("counted", body) > 0
        run.renew()
        run.release()
        outcome = plans.execute(ident, lambda again: (again.step("counted", body), again.step("more", body)))
        assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.EXECUTED), outcome.exception
        assert len(plans.receipts(ident)) == 3

    for _ in range(7):  # psycopg prepares what it has executed five times
        carried_out()
    other = create_engine(engine.url, poolclass=NullPool)
    with other.begin() as connection:
        connection.execute(text(MIGRATIONS[migrated]))
    carried_out()
