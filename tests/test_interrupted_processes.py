"""Processes that end in the middle of a run: by Ctrl-C, which gives it back, or each time by the run's own doing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from uuid import UUID

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, Runs
from sqla_durable.testing import lapse, make_due
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, column, entries, eventually, let_lapse
from tests.support_brief import SPACED, ErrandStatus
from tests.support_points import check_given_back
from tests.support_processes import Program


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep)


def url_of(engine: Engine) -> str:
    return engine.url.render_as_string(hide_password=False)


@pytest.fixture
def interrupted(engine: Engine) -> Iterator[Callable[[str, str], Program]]:
    programs: list[Program] = []

    def start(form: str, place: str) -> Program:
        programs.append(Program("interrupted", url_of(engine), form, place))
        return programs[-1]

    yield start
    for program in programs:
        program.__exit__()


@pytest.mark.parametrize("form", ["sync", "async"])
@pytest.mark.parametrize("place", ["step", "call", "between"])
def test_ctrl_c_gives_the_run_back_before_the_process_ends(
    engine: Engine,
    session_factory: sessionmaker[Session],
    interrupted: Callable[[str, str], Program],
    form: str,
    place: str,
) -> None:
    ident = approved_plan(session_factory)
    program = interrupted(form, place)
    assert program.ask({"ident": str(ident)}) == "waiting"
    program.interrupt()
    assert program.receive() == "KeyboardInterrupt"
    assert program.wait() == 0
    assert entries(engine) == (["first", "second"] if place == "call" else ["first"])
    check_given_back(session_factory, ident)


@pytest.mark.parametrize("place", ["step", "call", "handler"])
def test_a_run_that_kills_its_process_each_time_is_dead_after_its_last_attempt(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], place: str
) -> None:
    ident = approved_plan(session_factory)
    allowed = Plan.__lifecycle__.retry.max_attempts
    assert allowed == 3
    for start in range(1, allowed + 1):
        with Program("self_killer", url_of(engine), place) as program:
            program.send({"ident": str(ident)})
            assert program.wait() < 0
        assert column(engine, ident, "attempts") == start
        assert column(engine, ident, "status") is PlanStatus.EXECUTING
        let_lapse(session_factory, ident)
        eventually(lambda: not _locked(engine), "the end of the dead process's transaction")
    with Program("self_killer", url_of(engine), place) as program:
        assert program.ask({"ident": str(ident)}) == [Ending.LANDED.value, PlanStatus.DEAD.value]
    check_dead(engine, session_factory, plans, ident, allowed)


@pytest.mark.parametrize("place", ["step", "call", "handler"])
def test_the_starts_of_a_run_that_kills_its_process_each_time_are_spaced_by_the_backoff(
    engine: Engine, session_factory: sessionmaker[Session], place: str
) -> None:
    SPACED.create(engine)
    ident = SPACED.new(session_factory)
    runs = SPACED.runs(session_factory)
    for backoff in 600, 1200, None:
        with Program("self_killer", url_of(engine), place, "spaced") as program:
            program.send({"ident": str(ident)})
            assert program.wait() < 0
        eventually(lambda: not _locked(engine), "the end of the dead process's transaction")
        with session_factory.begin() as session:
            lapse(session, SPACED.run, ident)
        assert runs.heal(ident)
        if backoff is not None:
            with Program("self_killer", url_of(engine), place, "spaced") as program:
                assert program.ask({"ident": str(ident)}) == [Ending.NOT_CLAIMABLE.value, ErrandStatus.READY.value]
            with engine.connect() as connection:
                query = text("SELECT EXTRACT(EPOCH FROM available_at - clock_timestamp()) FROM errand")
                assert backoff - 20 < connection.execute(query).scalar_one() < backoff
            with session_factory.begin() as session:
                make_due(session, SPACED.run, ident)
    row = runs.get(ident)
    assert row is not None
    assert (row.status, row.attempts, row.fence) == (ErrandStatus.DEAD, 3, 3)
    assert (row.error["type"], "lapsed" in row.error["message"]) == ("LeaseLapsed", True)
    assert entries(engine) == []


def _locked(engine: Engine) -> bool:
    query = text("SELECT count(*) FROM pg_stat_activity WHERE state = 'idle in transaction' AND datname = :name")
    with engine.connect() as connection:
        return bool(connection.scalar(query, {"name": engine.url.database}))


def check_dead(engine: Engine, factory: sessionmaker[Session], plans: Runs[Plan], ident: UUID, allowed: int) -> None:
    with factory() as session:
        plan = session.get_one(Plan, ident)
    assert (plan.status, plan.attempts, plan.fence) == (PlanStatus.DEAD, allowed, allowed)
    assert plan.error is not None
    assert plan.error["type"] == "LeaseLapsed"
    assert "lapsed" in plan.error["message"]
    assert f"attempt {allowed}" in plan.error["message"]
    assert [(failure["attempt"], failure["type"]) for failure in plan.failures] == [
        (attempt, "LeaseLapsed") for attempt in range(1, allowed + 1)
    ]
    assert entries(engine) == []
    outcome = plans.execute(ident, lambda run: pytest.fail("a dead run ran"))
    assert outcome.failure is not None
    assert (outcome.status, outcome.failure.type) == (PlanStatus.DEAD, "LeaseLapsed")
