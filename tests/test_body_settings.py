"""What a body SETs for its transaction must not be taken for a failure of its own, nor for an outage."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, Run, Runs, TransactionEnded
from tests.support import Plan, PlanStep, approved_plan, column, entries, write_entry

HINDERING = {
    "search_path": "SET LOCAL search_path TO nowhere",
    "role": "SET LOCAL ROLE pg_monitor",
    "read only": "SET TRANSACTION READ ONLY",
    "constraints": "SET CONSTRAINTS ALL IMMEDIATE",
}
HARMLESS = {
    "zone": "SET LOCAL TIME ZONE 'Asia/Kathmandu'",
    "intervals": "SET LOCAL IntervalStyle TO sql_standard",
    "strings": "SET LOCAL standard_conforming_strings TO off",
    "plans": "SET LOCAL plan_cache_mode TO force_generic_plan",
    "prepared": "DEALLOCATE ALL",
    "lock": "LOCK TABLE plan IN ACCESS EXCLUSIVE MODE",
    "column": "ALTER TABLE plan ADD COLUMN extra integer",
}


@pytest.fixture
def run(session_factory: sessionmaker[Session]) -> Run[Plan]:
    run = Runs(session_factory, Plan, PlanStep).claim(approved_plan(session_factory))
    assert run is not None
    return run


def body(session: Session, statement: str) -> None:
    write_entry(session, "a")
    session.flush()
    session.execute(text(statement))


@pytest.mark.parametrize("what", HINDERING)
def test_a_setting_under_which_the_receipt_cannot_be_written_is_told_and_no_receipt_is_left(
    engine: Engine, run: Run[Plan], what: str
) -> None:
    with pytest.raises(TransactionEnded, match=r"SET"):
        run.step("one", body, HINDERING[what])
    assert (run.receipts, entries(engine)) == ((), [])
    assert run.step("one", write_entry, "again") == "again"


@pytest.mark.parametrize("what", HARMLESS)
def test_a_setting_that_hinders_nothing_does_no_harm(engine: Engine, run: Run[Plan], what: str) -> None:
    run.step("one", body, HARMLESS[what])
    run.step("two", write_entry, "b")
    run.finish()
    assert entries(engine) == ["a", "b"]


def test_a_constraint_of_the_users_can_be_checked_early_by_its_name(engine: Engine, run: Run[Plan]) -> None:
    with engine.begin() as connection:
        unique = "ALTER TABLE entry ADD CONSTRAINT one_label UNIQUE (label) DEFERRABLE INITIALLY DEFERRED"
        connection.execute(text(unique))
    run.step("one", body, "SET CONSTRAINTS one_label IMMEDIATE")
    assert entries(engine) == ["a"]


# what the server raises for once


def test_a_renewal_that_conflicts_with_another_transaction_is_made_again(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    ident = approved_plan(session_factory)
    with engine.begin() as connection:
        # A sequence is not rolled back, so that this happens once.
        connection.execute(
            text(
                "CREATE SEQUENCE times; CREATE FUNCTION conflict() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
                " IF old.status = new.status AND nextval('times') = 1 THEN RAISE USING ERRCODE = '40001'; END IF;"
                " RETURN new; END $$;"
                " CREATE TRIGGER conflict BEFORE UPDATE ON plan FOR EACH ROW EXECUTE FUNCTION conflict()"
            )
        )
    outcome = Runs(session_factory, Plan, PlanStep).execute(ident, lambda run: run.renew())
    assert outcome.ending is Ending.LANDED, outcome.exception
    assert column(engine, ident, "attempts") == 1


def test_a_run_that_is_due_at_infinity_is_not_claimable(engine: Engine, session_factory: sessionmaker[Session]) -> None:
    plans = Runs(session_factory, Plan, PlanStep)
    parked, ready = approved_plan(session_factory), approved_plan(session_factory)
    with engine.begin() as connection:
        connection.execute(text("UPDATE plan SET available_at = 'infinity' WHERE id = :id"), {"id": parked})
    assert plans.claim(parked) is None
    assert plans.execute(parked, lambda _: None).ending is Ending.NOT_CLAIMABLE
    assert [run.row.id for run in plans.claim_due(5)] == [ready]
