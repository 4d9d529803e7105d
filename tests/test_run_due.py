"""run_due() carries out what fits into its budget, and leaves the rest to the next call."""

from __future__ import annotations

import threading
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import DatabaseUnavailable, Ending, RetryableError
from sqla_durable.verbs import Verbs
from tests.support import PlanStatus, approved_plan, column, entries, write_entry
from tests.support_jobs import Patient, PatientStep, add_jobs
from tests.support_workers import BOTH, Crew, plans_by, wait_for

LONG = timedelta(seconds=20)
NEVER = threading.Event()


def one_step(run: Any) -> None:
    run.step("only", write_entry, str(run.row.id))


@pytest.fixture(params=BOTH)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_it_returns_at_once_when_nothing_is_due(engine: Engine, form: str) -> None:
    before = time.monotonic()
    assert Crew(form, engine.url, plans_by(one_step)).run_due(LONG) == Counter()
    assert time.monotonic() - before < 5


def test_it_carries_out_all_that_is_due_and_counts_how_it_ended(
    engine: Engine, session_factory: sessionmaker[Session], form: str
) -> None:
    idents = [approved_plan(session_factory) for _ in range(25)]

    def carry_out(run: Any) -> None:
        if run.row.id == idents[0]:
            raise ValueError("no")
        one_step(run)

    assert Crew(form, engine.url, plans_by(carry_out), concurrency=4).run_due(LONG) == {Ending.LANDED: 25}
    assert len(entries(engine)) == 24
    assert column(engine, idents[0], "status") is PlanStatus.FAILED


def test_what_becomes_due_meanwhile_is_carried_out_too(
    engine: Engine, session_factory: sessionmaker[Session], form: str
) -> None:
    approved_plan(session_factory)
    more = [3]

    def carry_out(run: Any) -> None:
        one_step(run)
        if more[0]:
            more[0] -= 1
            approved_plan(session_factory)

    assert Crew(form, engine.url, plans_by(carry_out)).run_due(LONG) == {Ending.LANDED: 4}


def test_what_is_not_due_is_left_alone(engine: Engine, form: str) -> None:
    add_jobs(engine, Patient, 1)
    attempts: list[int] = []

    def carry_out(run: Any) -> None:
        attempts.append(run.lease.attempt)
        raise RetryableError("not yet")

    # It goes back to ready, due in a minute.
    assert Crew(form, engine.url, (Patient, PatientStep, carry_out)).run_due(LONG) == {Ending.INTERRUPTED: 1}
    assert Crew(form, engine.url, (Patient, PatientStep, carry_out)).run_due(LONG) == {}
    assert attempts == [1]


def test_a_budget_of_zero_does_nothing(engine: Engine, session_factory: sessionmaker[Session], form: str) -> None:
    ident = approved_plan(session_factory)
    assert Crew(form, engine.url, plans_by(one_step)).run_due(timedelta(0)) == {}
    assert (column(engine, ident, "status"), column(engine, ident, "attempts")) == (PlanStatus.APPROVED, 0)


def test_what_does_not_fit_is_released_for_the_next_call(
    engine: Engine, session_factory: sessionmaker[Session], form: str
) -> None:
    quick, slow = approved_plan(session_factory), approved_plan(session_factory, note="slow")
    left = [approved_plan(session_factory, note="slow") for _ in range(3)]

    def carry_out(run: Any) -> None:
        run.step("first", write_entry, f"{run.row.id} first")
        if run.row.note == "slow" and run.lease.attempt == 1:
            wait_for(NEVER, run)
        run.step("second", write_entry, f"{run.row.id} second")

    crew = Crew(form, engine.url, plans_by(carry_out), concurrency=2)
    before = time.monotonic()
    counted = crew.run_due(timedelta(seconds=1))
    assert time.monotonic() - before < 8
    assert counted == {Ending.LANDED: 1, Ending.INTERRUPTED: 2}
    assert column(engine, quick, "status") is PlanStatus.EXECUTED
    assert column(engine, slow, "status") is PlanStatus.APPROVED
    assert column(engine, slow, "lease_owner") is None
    assert counted == {Ending.LANDED: 1, Ending.INTERRUPTED: 2}, "nothing is added to it afterwards"
    again = Crew(form, engine.url, plans_by(one_step), concurrency=4).run_due(LONG)
    assert again == {Ending.LANDED: 4}
    assert {column(engine, ident, "status") for ident in left} == {PlanStatus.EXECUTED}


def test_stop_ends_it_before_its_budget(engine: Engine, session_factory: sessionmaker[Session], form: str) -> None:
    idents = [approved_plan(session_factory) for _ in range(2)]
    crew = Crew(form, engine.url, plans_by(lambda run: crew.stop()), concurrency=1)
    assert crew.run_due(LONG) == {Ending.LANDED: 1}
    assert [column(engine, ident, "status") for ident in idents].count(PlanStatus.APPROVED) == 1


def test_an_outage_is_waited_for_as_long_as_the_budget_lasts(
    engine: Engine, session_factory: sessionmaker[Session], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    approved_plan(session_factory)
    claim_due, refused = Verbs.claim_due, [3]

    def away(verbs: Any, limit: int) -> Any:
        if refused[0]:
            refused[0] -= 1
            raise DatabaseUnavailable("away")
        return claim_due(verbs, limit)

    monkeypatch.setattr(Verbs, "claim_due", away)
    assert Crew(form, engine.url, plans_by(one_step)).run_due(LONG) == {Ending.LANDED: 1}
    refused[0] = 1000
    before = time.monotonic()
    assert Crew(form, engine.url, plans_by(one_step)).run_due(timedelta(seconds=0.5)) == {}
    assert time.monotonic() - before >= 0.5
