"""Connections that are cut while they wait, commit or lie in the pool: retryable errors, and no run that is stuck."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, event, select, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import DatabaseUnavailable, Ending, Outcome, Run, Runs
from tests.support import (
    Background,
    Plan,
    PlanStatus,
    PlanStep,
    approved_plan,
    column,
    entries,
    eventually,
    let_lapse,
    locked,
    wait_until_blocked,
    write_entry,
)
from tests.support_brief import BRIEF

NAME = "connection_loss"


@pytest.fixture
def worker(engine: Engine) -> Iterator[Engine]:
    """The engine whose connections are cut."""
    worker = create_engine(engine.url, connect_args={"application_name": NAME})
    yield worker
    worker.dispose()


@pytest.fixture
def plans(worker: Engine) -> Runs[Plan]:
    return Runs(sessionmaker(worker), Plan, PlanStep)


def cut(engine: Engine, condition: str = "true") -> int:
    """End the worker's connections that meet a condition, and return once they have ended."""
    query = text(
        "SELECT count(*) FILTER (WHERE pg_terminate_backend(pid, 10000)) FROM pg_stat_activity"
        f" WHERE application_name = :name AND datname = current_database() AND {condition}"
    )
    with engine.connect() as connection:
        return connection.scalar(query, {"name": NAME}) or 0


WAITING = "wait_event_type = 'Lock'"


# while waiting


def test_a_claim_that_is_cut_off_claims_nothing_and_the_next_one_does(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    with locked(engine, ident):
        waiting = Background(lambda: plans.claim(ident))
        wait_until_blocked(engine)
        assert cut(engine, WAITING) == 1
        with pytest.raises(DatabaseUnavailable):
            waiting.result()
    assert column(engine, ident, "fence") == 0
    assert plans.execute(ident, lambda run: run.step("only", write_entry, "a")).ending is Ending.LANDED


@contextmanager
def table_locked(engine: Engine, table: str) -> Iterator[None]:
    """Nobody reads or writes a table, as while it is altered."""
    with engine.begin() as connection:
        connection.execute(text(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"))
        yield


@pytest.mark.parametrize(
    "verb",
    [
        lambda plans, ident: plans.reap(),
        lambda plans, ident: plans.heal(ident),
        lambda plans, ident: plans.get(ident),
        lambda plans, ident: plans.claim_due(1),
        lambda plans, ident: plans.receipts(ident),
    ],
    ids=["reap", "heal", "get", "claim_due", "receipts"],
)
def test_a_verb_that_is_cut_off_changes_nothing_and_works_the_next_time(
    engine: Engine,
    session_factory: sessionmaker[Session],
    plans: Runs[Plan],
    verb: Callable[[Runs[Plan], UUID], object],
) -> None:
    ident = approved_plan(session_factory)
    run = plans.claim(ident)
    assert run is not None
    run.step("only", write_entry, "a")
    let_lapse(session_factory, ident)
    with table_locked(engine, "plan, plan_step"):
        waiting = Background(lambda: verb(plans, ident))
        wait_until_blocked(engine)
        assert cut(engine, WAITING) == 1
        with pytest.raises(DatabaseUnavailable):
            waiting.result()
    assert column(engine, ident, "status") is PlanStatus.EXECUTING
    assert verb(plans, ident)


def test_a_step_that_is_cut_off_inside_its_body_leaves_no_trace_and_is_done_the_next_time(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)

    def waits(session: Session, label: str) -> str:
        write_entry(session, label)
        session.execute(text("SELECT pg_advisory_xact_lock(1)"))
        return label

    with engine.begin() as connection:
        connection.execute(text("SELECT pg_advisory_xact_lock(1)"))
        waiting = Background(lambda: plans.execute(ident, lambda run: run.step("only", waits, "a")))
        wait_until_blocked(engine)
        assert cut(engine, WAITING) == 1
        outcome: Outcome = waiting.result()
    assert (outcome.ending, outcome.status) == (Ending.INTERRUPTED, PlanStatus.APPROVED)
    assert isinstance(outcome.exception, DatabaseUnavailable)
    assert plans.receipts(ident) == ()
    assert entries(engine) == []
    assert plans.execute(ident, lambda run: run.step("only", waits, "a")).status is PlanStatus.EXECUTED
    assert entries(engine) == ["a"]


def test_a_heartbeat_that_is_cut_off_is_taken_up_again(
    engine: Engine, session_factory: sessionmaker[Session], worker: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    BRIEF.create(engine)
    errands = BRIEF.runs(sessionmaker(worker))
    ident = BRIEF.new(session_factory)
    beating = threading.Event()

    def expiry() -> datetime:
        with engine.connect() as connection:
            found = connection.scalar(select(BRIEF.run.lease_expires_at))
        assert found is not None
        return found

    def carry_out(run: Run[Any]) -> None:
        run.external("only", lambda: beating.wait(60))

    running = Background(lambda: errands.execute(ident, carry_out))
    eventually(lambda: cut(engine, "false") == 0 and _status(engine) == "running", "the claim")
    with table_locked(engine, "errand"):
        wait_until_blocked(engine)
        assert cut(engine, WAITING) == 1
    stand = expiry()
    eventually(lambda: expiry() > stand, "the next heartbeat")
    beating.set()
    assert running.result().ending is Ending.LANDED
    assert "heartbeats wait for the database" in caplog.text


def _status(engine: Engine) -> str | None:
    with engine.connect() as connection:
        return connection.scalar(select(BRIEF.run.status))


@pytest.mark.parametrize("savepoints", [0, 1, 2])
def test_a_failed_commit_is_never_taken_for_an_after_commit_error(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], savepoints: int
) -> None:
    ident = approved_plan(session_factory)

    def body(session: Session, attempt: int) -> str:
        for number in range(savepoints):
            with session.begin_nested():
                write_entry(session, f"savepoint {number}")
        if attempt == 1:
            # As late as can be: right before the COMMIT is sent.
            event.listen(session, "before_commit", lambda _: cut(engine))
        return write_entry(session, "done")

    def carry_out(run: Run[Plan]) -> None:
        run.step("only", body, run.lease.attempt)

    outcome = plans.execute(ident, carry_out)
    assert (outcome.ending, outcome.status) == (Ending.INTERRUPTED, PlanStatus.APPROVED)
    assert isinstance(outcome.exception, DatabaseUnavailable)
    assert entries(engine) == []
    assert plans.execute(ident, carry_out).status is PlanStatus.EXECUTED
    assert entries(engine) == [*(f"savepoint {number}" for number in range(savepoints)), "done"]


# what lay in the pool


def fill_pool(worker: Engine) -> None:
    connections = [worker.connect() for _ in range(4)]
    for connection in connections:
        connection.close()


def test_one_call_is_enough_to_find_out_that_every_pooled_connection_is_dead(
    engine: Engine, session_factory: sessionmaker[Session], worker: Engine, plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    fill_pool(worker)
    assert cut(engine) == 4
    with pytest.raises(DatabaseUnavailable):
        plans.execute(ident, lambda run: run.step("only", write_entry, "a"))
    assert plans.execute(ident, lambda run: run.step("only", write_entry, "a")).ending is Ending.LANDED


def test_a_run_whose_pool_died_between_two_steps_is_given_back_at_once(
    engine: Engine, session_factory: sessionmaker[Session], worker: Engine, plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)

    def carry_out(run: Run[Plan]) -> None:
        run.step("first", write_entry, "a")
        if run.lease.attempt == 1:
            fill_pool(worker)
            assert cut(engine) >= 4
        run.step("second", write_entry, "b")

    outcome = plans.execute(ident, carry_out)
    assert (outcome.ending, outcome.status) == (Ending.INTERRUPTED, PlanStatus.APPROVED)
    assert plans.execute(ident, carry_out).ending is Ending.LANDED
    assert entries(engine) == ["a", "b"]


def test_a_message_is_not_sent_again_because_the_pool_died_while_it_was_sent(
    engine: Engine, session_factory: sessionmaker[Session], worker: Engine, plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    sent: list[str] = []

    def send() -> str:
        sent.append("a message")
        fill_pool(worker)
        cut(engine)
        return "sent"

    def carry_out(run: Run[Plan]) -> None:
        run.external("only", send)

    for _ in range(2):
        if plans.execute(ident, carry_out).ending is Ending.LANDED:
            break
    assert [receipt.result for receipt in plans.receipts(ident)] == ["sent"]
    assert len(sent) == 1


# a server that takes no writes


def test_a_run_is_carried_on_when_the_database_takes_writes_again(
    engine: Engine, session_factory: sessionmaker[Session], worker: Engine, plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    name = engine.url.database

    def carry_out(run: Run[Plan]) -> None:
        run.step("first", write_entry, "a")
        if run.lease.attempt == 1:
            set_read_only("on")
        run.step("second", write_entry, "b")

    def set_read_only(value: str) -> None:
        with engine.connect() as connection:
            connection.execute(text(f"ALTER DATABASE {name} SET default_transaction_read_only = {value}"))
            connection.commit()
        cut(engine)

    try:
        plans.execute(ident, carry_out)
        for _ in range(2):
            with pytest.raises(DatabaseUnavailable):
                plans.execute(ident, carry_out)
    finally:
        set_read_only_in_new_sessions_off(engine)
    assert column(engine, ident, "status") in {PlanStatus.APPROVED, PlanStatus.EXECUTING}
    assert [receipt.step for receipt in plans.receipts(ident)] == ["first"]
    if column(engine, ident, "status") is PlanStatus.EXECUTING:
        let_lapse(session_factory, ident)
    # Connections to what was read-only, such as a former primary, are not kept in the pool.
    assert plans.execute(ident, carry_out).ending is Ending.LANDED
    assert entries(engine) == ["a", "b"]


def set_read_only_in_new_sessions_off(engine: Engine) -> None:
    with engine.connect() as connection:
        connection.execute(text(f"ALTER DATABASE {engine.url.database} RESET default_transaction_read_only"))
        connection.commit()
