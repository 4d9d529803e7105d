"""A database that lacks a table or column: one clear error, which stops a worker and fails no run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, Run, Runs, SchemaMismatch, call
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, column, entries, eventually, write_entry
from tests.support_cli import ROOT
from tests.support_jobs import Brief, BriefStep, add_jobs
from tests.support_workers import Crew, plans_by

FORMS = ["sync", "async", "mixed"]
LACKS = {
    "ALTER TABLE plan DROP COLUMN lease_owner CASCADE": "lease_owner",
    "ALTER TABLE plan DROP COLUMN note": "note",
    "ALTER TABLE plan_step DROP COLUMN unsealed CASCADE": "unsealed",
    "DROP TABLE plan_step": "plan_step",
    "DROP TABLE plan CASCADE": "plan",
}


def migrate(engine: Engine, statement: str) -> None:
    with engine.begin() as connection:
        connection.execute(text(statement))


def state(engine: Engine, ident: Any) -> tuple[Any, ...]:
    return tuple(column(engine, ident, name) for name in ("status", "attempts", "lease_expires_at"))


@pytest.mark.parametrize("form", ["sync", "async"])
@pytest.mark.parametrize("lack", LACKS)
def test_a_worker_refuses_to_start_and_says_what_is_lacking(
    engine: Engine, session_factory: sessionmaker[Session], form: str, lack: str
) -> None:
    ident = approved_plan(session_factory)
    migrate(engine, lack)
    options = {"model": "plan", "behaviour": "short", "poll": 0.05, "grace": 5, "releasing": 5}
    url = engine.url.render_as_string(hide_password=False)
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.worker", url, form, json.dumps(options)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert done.stdout == "", "no run was begun"
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("sqla_durable.exc.SchemaMismatch: "), done.stderr
    assert LACKS[lack] in last
    assert "sqla-durable check" in last
    if "DROP TABLE plan C" not in lack and "lease_owner" not in lack:
        assert state(engine, ident) == (PlanStatus.APPROVED, 0, None)


@pytest.mark.parametrize("form", FORMS)
def test_a_worker_under_which_a_column_vanishes_stops_and_hands_its_run_back(
    engine: Engine, session_factory: sessionmaker[Session], form: str
) -> None:
    ident = approved_plan(session_factory)
    started: list[int] = []

    def handler(run: Any) -> None:
        started.append(1)
        migrate(engine, "ALTER TABLE plan_step DROP COLUMN unsealed CASCADE")
        run.step("one", write_entry, "a")

    with pytest.raises(SchemaMismatch, match="unsealed"):
        Crew(form, engine.url, plans_by(handler)).run()
    assert started == [1]
    assert state(engine, ident) == (PlanStatus.APPROVED, 0, None)
    assert column(engine, ident, "error") is None
    assert entries(engine) == []


def test_a_landing_that_meets_it_fails_no_run(engine: Engine, session_factory: sessionmaker[Session]) -> None:
    ident = approved_plan(session_factory)

    def handler(run: Any) -> None:
        run.step("one", write_entry, "a")
        migrate(engine, "ALTER TABLE plan DROP COLUMN finished_at CASCADE")

    with pytest.raises(SchemaMismatch, match="finished_at"):
        Crew("sync", engine.url, plans_by(handler)).run()
    assert state(engine, ident)[0] == PlanStatus.EXECUTING, "left to its lease, as nothing can be written to it"


@pytest.mark.parametrize("how", ["one", "several"])
def test_gathered_calls_that_meet_it_fail_no_run(
    engine: Engine, session_factory: sessionmaker[Session], how: str
) -> None:
    ident = approved_plan(session_factory)

    def handler(run: Run[Plan]) -> None:
        migrate(engine, "ALTER TABLE plan_step DROP COLUMN effect CASCADE")
        run.gather(*[call(name, lambda: 1) for name in ("a", "b")[: 1 if how == "one" else 2]])

    outcome = Runs(session_factory, Plan, PlanStep).execute(ident, handler)
    assert (outcome.ending, outcome.status) == (Ending.INTERRUPTED, PlanStatus.APPROVED)
    assert isinstance(outcome.exception, SchemaMismatch)
    assert state(engine, ident) == (PlanStatus.APPROVED, 0, None)


VERBS: dict[str, Callable[[Runs[Plan], Any], object]] = {
    "claim": lambda plans, ident: plans.claim(ident),
    "claim_due": lambda plans, ident: plans.claim_due(1),
    "execute": lambda plans, ident: plans.execute(ident, lambda run: None),
    "reap": lambda plans, ident: plans.reap(),
    "find": lambda plans, ident: plans.find(),
    "counts": lambda plans, ident: plans.counts(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_raises_it(engine: Engine, session_factory: sessionmaker[Session], verb: str) -> None:
    ident = approved_plan(session_factory)
    migrate(engine, "ALTER TABLE plan RENAME COLUMN status TO state")
    with pytest.raises(SchemaMismatch, match="status"):
        VERBS[verb](Runs(session_factory, Plan, PlanStep), ident)


def test_what_is_started_in_the_callers_transaction_raises_it(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    migrate(engine, "ALTER TABLE plan DROP COLUMN cancel_requested_at CASCADE")
    with session_factory() as session, pytest.raises(SchemaMismatch, match="cancel_requested_at"):
        Runs(session_factory, Plan, PlanStep).request_cancel(session, "0" * 32)


def of_no_table(session: Session) -> None:
    session.execute(text("SELECT * FROM of_the_user"))


def of_no_column(session: Session) -> None:
    session.execute(text("SELECT of_the_user FROM plan"))


@pytest.mark.parametrize("body", [of_no_table, of_no_column])
def test_an_error_of_a_bodys_own_sql_is_the_steps_failure(
    engine: Engine, session_factory: sessionmaker[Session], body: Callable[[Session], None]
) -> None:
    ident = approved_plan(session_factory)
    outcome = Runs(session_factory, Plan, PlanStep).execute(ident, lambda run: run.step("one", body))
    assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.FAILED)
    assert isinstance(outcome.exception, ProgrammingError)
    assert "of_the_user" in str(outcome.exception)


def test_an_error_of_a_trigger_of_the_users_is_not_taken_for_it(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    ident = approved_plan(session_factory)
    migrate(
        engine,
        "CREATE FUNCTION count_plans() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN INSERT INTO of_the_user VALUES (1); RETURN NEW; END'",
    )
    migrate(engine, "CREATE TRIGGER counting AFTER UPDATE ON plan FOR EACH ROW EXECUTE FUNCTION count_plans()")
    with pytest.raises(ProgrammingError, match="of_the_user"):
        Runs(session_factory, Plan, PlanStep).claim(ident)


def test_a_heartbeat_that_meets_it_says_so_in_one_line(
    engine: Engine, session_factory: sessionmaker[Session], caplog: pytest.LogCaptureFixture
) -> None:
    (ident,) = add_jobs(engine, Brief, 1)

    def handler(run: Run[Brief]) -> None:
        migrate(engine, "ALTER TABLE brief DROP COLUMN lease_expires_at CASCADE")
        eventually(lambda: [each for each in caplog.records if "heartbeats fail" in each.getMessage()])

    outcome = Runs(session_factory, Brief, BriefStep).execute(ident, handler)
    assert isinstance(outcome.exception, SchemaMismatch)
    assert {each.exc_info for each in caplog.records} == {None}
    assert "lease_expires_at" in caplog.text
