"""PostgreSQL's timeouts inside a step: a typed, retryable error, no receipt, and a pool that goes on working."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import DatabaseUnavailable, Ending, Run, Runs, StepTimeout
from tests.support import (
    Background,
    Plan,
    PlanStatus,
    PlanStep,
    approved_plan,
    column,
    entries,
    eventually,
    locked,
    wait_until_blocked,
    write_entry,
)
from tests.support_brief import errands
from tests.support_forms import FORMS

NAME = "timeouts"


def worker(engine: Engine, **settings: str) -> Engine:
    """An engine whose connections have settings of their own, and of which there are no more than two."""
    options = " ".join(f"-c {name}={value}" for name, value in settings.items())
    arguments = {"application_name": NAME, "options": options}
    return create_engine(engine.url, connect_args=arguments, pool_size=2, max_overflow=0, pool_timeout=0.1)


def wait_until_cut_off(session: Session) -> None:
    """Leave the step's connection idle until PostgreSQL has ended it."""
    pid = session.scalar(text("SELECT pg_backend_pid()"))
    bind = session.get_bind()
    watch = create_engine(bind.engine.url)
    query = text("SELECT count(*) FROM pg_stat_activity WHERE pid = :pid")

    def gone() -> bool:
        with watch.connect() as connection:
            return connection.scalar(query, {"pid": pid}) == 0

    eventually(gone, "the end of the idle connection")
    watch.dispose()


def idles(session: Session) -> str:
    write_entry(session, "a")
    session.flush()
    wait_until_cut_off(session)
    return "a"


def idles_and_asks(session: Session) -> str:
    idles(session)
    session.scalar(text("SELECT 1"))
    return "a"


def computes(session: Session) -> str:
    write_entry(session, "a")
    session.flush()
    session.execute(text("SELECT pg_sleep(60)"))
    return "a"


def waits_for_a_lock(session: Session) -> str:
    write_entry(session, "a")
    session.flush()
    session.execute(text("SELECT pg_advisory_xact_lock(1)"))
    return "a"


@contextmanager
def advisory_lock(engine: Engine) -> Iterator[None]:
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(1)"))
        yield


def nothing(engine: Engine) -> AbstractContextManager[None]:
    return nullcontext()


KINDS: dict[str, tuple[dict[str, str], Callable[[Session], str], Callable[[Engine], AbstractContextManager[None]]]] = {
    "idle_in_transaction_session_timeout": ({"idle_in_transaction_session_timeout": "100ms"}, idles, nothing),
    "idle, and noticed inside the body": ({"idle_in_transaction_session_timeout": "100ms"}, idles_and_asks, nothing),
    "statement_timeout": ({"statement_timeout": "500ms"}, computes, nothing),
    "lock_timeout": ({"lock_timeout": "100ms"}, waits_for_a_lock, advisory_lock),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_cut_off_is_retried_and_leaves_no_receipt(
    engine: Engine, session_factory: sessionmaker[Session], kind: str
) -> None:
    settings, body, obstacle = KINDS[kind]
    cut_off = worker(engine, **settings)
    plans: Runs[Plan] = Runs(sessionmaker(cut_off), Plan, PlanStep)
    ident = approved_plan(session_factory)

    def carry_out(run: Run[Plan]) -> None:
        run.step("only", body if run.lease.attempt == 1 else write_entry_a)

    with obstacle(engine):
        outcome = plans.execute(ident, carry_out)
    assert (outcome.ending, outcome.status) == (Ending.INTERRUPTED, PlanStatus.APPROVED)
    assert isinstance(outcome.exception, StepTimeout)
    assert outcome.failure is not None
    assert next(iter(settings)) in str(outcome.exception)
    assert plans.receipts(ident) == ()
    assert entries(engine) == []
    assert plans.execute(ident, carry_out).status is PlanStatus.EXECUTED
    assert entries(engine) == ["a"]
    # No connection was leaked: the pool has two, and gives out two.
    with cut_off.connect(), cut_off.connect():
        pass
    cut_off.dispose()


def write_entry_a(session: Session) -> str:
    return write_entry(session, "a")


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_is_cut_off_may_be_retried_in_place(
    engine: Engine, session_factory: sessionmaker[Session], kind: str
) -> None:
    settings, body, obstacle = KINDS[kind]
    cut_off = worker(engine, **settings)
    plans: Runs[Plan] = Runs(sessionmaker(cut_off), Plan, PlanStep)
    run = plans.claim(approved_plan(session_factory))
    assert run is not None
    for _ in range(3):
        with obstacle(engine), pytest.raises(StepTimeout):
            run.step("only", body)
    assert run.step("only", write_entry_a) == "a"
    run.finish()
    assert entries(engine) == ["a"]
    cut_off.dispose()


def test_a_step_that_waits_too_long_for_its_own_row_is_retryable(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    impatient = worker(engine, lock_timeout="100ms")
    plans: Runs[Plan] = Runs(sessionmaker(impatient), Plan, PlanStep)
    ident = approved_plan(session_factory)
    run = plans.claim(ident)
    assert run is not None
    with locked(engine, ident):
        for write in (
            lambda: run.step("first", write_entry_a),
            lambda: run.external("second", lambda: "sent"),
            run.finish,
            run.release,
        ):
            with pytest.raises(StepTimeout):
                write()
    assert plans.receipts(ident) == ()
    run.step("first", write_entry_a)
    run.finish()
    assert column(engine, ident, "status") is PlanStatus.EXECUTED
    impatient.dispose()


def test_a_claim_that_waits_too_long_for_the_row_claims_nothing(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    impatient = worker(engine, lock_timeout="100ms")
    plans: Runs[Plan] = Runs(sessionmaker(impatient), Plan, PlanStep)
    ident = approved_plan(session_factory)
    with locked(engine, ident), pytest.raises(StepTimeout):
        plans.claim(ident)
    assert column(engine, ident, "fence") == 0
    assert plans.claim(ident) is not None
    impatient.dispose()


def test_a_step_that_finds_no_free_connection_is_retryable(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    narrow = worker(engine)
    plans: Runs[Plan] = Runs(sessionmaker(narrow), Plan, PlanStep)
    ident = approved_plan(session_factory)

    def carry_out(run: Run[Plan]) -> None:
        if run.lease.attempt == 1:
            with narrow.connect(), narrow.connect():
                run.step("only", write_entry_a)
        run.step("only", write_entry_a)

    outcome = plans.execute(ident, carry_out)
    assert (outcome.ending, outcome.status) == (Ending.INTERRUPTED, PlanStatus.APPROVED)
    assert isinstance(outcome.exception, DatabaseUnavailable)
    assert plans.execute(ident, carry_out).status is PlanStatus.EXECUTED
    assert entries(engine) == ["a"]
    narrow.dispose()


# the lifecycle's own limit


def idle_limit(engine: Engine, step_timeout: Any, **settings: str) -> str:
    """What a step's transaction has its idle time limited to."""
    model = errands(lease=timedelta(seconds=30), step_timeout=step_timeout)
    model.create(engine)
    limited = worker(engine, **settings)
    run = model.runs(sessionmaker(limited)).claim(model.new(sessionmaker(engine)))
    assert run is not None

    def show(session: Session) -> str:
        return str(session.scalar(text("SHOW idle_in_transaction_session_timeout")))

    shown: str = run.step("only", show)
    with limited.connect() as connection:
        # Not a property of the session, which the pool hands on to others.
        default = settings.get("idle_in_transaction_session_timeout", "0")
        assert connection.scalar(text("SHOW idle_in_transaction_session_timeout")) == default
    limited.dispose()
    return shown


@pytest.mark.parametrize(
    ("step_timeout", "server", "limit"),
    [
        ("lease", "0", "30s"),
        ("lease", "10s", "10s"),
        ("lease", "1min", "30s"),
        ("lease", "1d", "30s"),
        ("lease", "2500ms", "2500ms"),
        (timedelta(seconds=5), "0", "5s"),
        (timedelta(seconds=5), "3s", "3s"),
        (timedelta(seconds=4.25), "0", "4250ms"),
        (timedelta(hours=2), "0", "2h"),
        (timedelta(hours=2), "30min", "30min"),
        (None, "0", "0"),
        (None, "7s", "7s"),
    ],
)
def test_the_tighter_limit_on_idle_time_holds_for_the_step_and_only_for_it(
    engine: Engine, step_timeout: Any, server: str, limit: str
) -> None:
    assert idle_limit(engine, step_timeout, idle_in_transaction_session_timeout=server) == limit


@pytest.mark.parametrize("form", FORMS)
def test_a_step_timeout_of_the_lifecycle_cuts_an_idle_step_off(
    engine: Engine, session_factory: sessionmaker[Session], form: str
) -> None:
    model = errands(step_timeout=timedelta(milliseconds=300))
    model.create(engine)
    holder = FORMS[form](engine.url.render_as_string(hide_password=False), model.run, model.receipt)
    run = holder.claim(model.new(session_factory))
    plans = model.runs(session_factory)
    copy = plans.hold(run.lease)
    with pytest.raises(StepTimeout):
        copy.step("only", idles)
    assert entries(engine) == []
    assert holder.step(run, "only", "a") == "a"
    holder.finish(run)
    holder.close()


def test_without_a_step_timeout_an_idle_step_is_left_alone_for_longer_than_its_lease(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    model = errands(lease=timedelta(milliseconds=200), step_timeout=None)
    model.create(engine)
    runs = model.runs(session_factory)
    ident: UUID = model.new(session_factory)
    run = runs.claim(ident)
    assert run is not None

    def idles_past_the_lease(session: Session) -> str:
        with engine.connect() as connection:
            passed = text("SELECT lease_expires_at + interval '300 ms' < clock_timestamp() FROM errand")
            eventually(lambda: connection.scalar(passed), "the end of the lease")
            connection.rollback()
        rival = model.runs(session_factory)
        assert rival.reap() == 0
        waiting.append(Background(lambda: rival.claim_due(1)))
        assert waiting[0].result() == []
        return write_entry(session, "a")

    waiting: list[Background] = []
    assert run.step("only", idles_past_the_lease) == "a"
    run.finish()
    assert entries(engine) == ["a"]


def test_time_spent_inside_sql_does_not_count_as_idle(engine: Engine, session_factory: sessionmaker[Session]) -> None:
    model = errands(step_timeout=timedelta(milliseconds=300))
    model.create(engine)
    run = model.runs(session_factory).claim(model.new(session_factory))
    assert run is not None

    def long_query(session: Session) -> str:
        session.execute(text("SELECT pg_advisory_xact_lock(1)"))
        return write_entry(session, "a")

    with advisory_lock(engine):
        step = Background(lambda: run.step("only", long_query))
        wait_until_blocked(engine)
        with engine.connect() as connection:
            passed = text(
                "SELECT max(clock_timestamp() - query_start) > interval '1 s' FROM pg_stat_activity"
                " WHERE wait_event = 'advisory'"
            )
            eventually(lambda: connection.scalar(passed), "a second of waiting")
    assert step.result() == "a"
