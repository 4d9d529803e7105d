"""Connections that are cut at any point: only retryable errors, no run stuck beyond its lease, each effect once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, delete, event, select, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import DatabaseUnavailable, Ending, Outcome, Run, Runs
from sqla_durable.asyncio import AsyncRuns
from tests.support import (
    Background,
    Entry,
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
from tests.support_points import EFFECTS, STEPS, Points, carry_out, carry_out_async, commits

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


# at every point


class Worker:
    """Carries plans out, all with one pool of connections."""

    def __init__(self, url: str, ledger: Path) -> None:
        self.engine = create_engine(url)
        self._ledger = ledger
        self._plans = Runs(sessionmaker(self.engine), Plan, PlanStep)

    def carry_out(self, ident: UUID) -> Outcome:
        return self._plans.execute(ident, partial(carry_out, ledger=self._ledger))

    def close(self) -> None:
        self.engine.dispose()


class AsyncWorker:
    def __init__(self, url: str, ledger: Path) -> None:
        self._loop = asyncio.Runner()
        self._engine = create_async_engine(url)
        self.engine = self._engine.sync_engine
        self._ledger = ledger
        self._plans = AsyncRuns(async_sessionmaker(self._engine), Plan, PlanStep)

    def carry_out(self, ident: UUID) -> Outcome:
        return self._loop.run(self._plans.execute(ident, partial(carry_out_async, ledger=self._ledger)))

    def close(self) -> None:
        self._loop.run(self._engine.dispose())
        self._loop.close()


AnyWorker = Worker | AsyncWorker


@pytest.mark.parametrize("form", [Worker, AsyncWorker], ids=["sync", "async"])
def test_a_connection_cut_at_any_point_leaves_a_run_that_is_carried_on(
    engine: Engine, session_factory: sessionmaker[Session], tmp_path: Path, form: Callable[[str, Path], AnyWorker]
) -> None:
    ledger = tmp_path / "ledger"
    with closing(form(engine.url.render_as_string(hide_password=False), ledger)) as worker:
        worker.carry_out(approved_plan(session_factory))  # connects
        undisturbed = Points()
        with undisturbed.of(worker.engine):
            worker.carry_out(approved_plan(session_factory))
        assert commits(undisturbed.labels) == len(STEPS) + 2
        for point, label in enumerate(undisturbed.labels):
            with engine.begin() as connection:
                connection.execute(delete(Entry))
            ledger.write_text("")
            try:
                check_recovery(engine, session_factory, worker, point)
                assert ledger.read_text().count("charged") in {1, 2}
            except AssertionError as error:
                error.add_note(f"cut at point {point} of {len(undisturbed.labels)}, {label!r}")
                raise


def cut_at(engine: Engine, worker: AnyWorker, ident: UUID, point: int) -> Outcome | None:
    """Carry a plan out whose connection is cut at one of its points; None where nothing was decided."""

    def visit(number: int, _: str) -> None:
        if number == point:
            with engine.connect() as connection:
                connection.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": points.backend})

    points = Points(visit)
    with points.of(worker.engine):
        return carried_out(worker, ident)


def carried_out(worker: AnyWorker, ident: UUID) -> Outcome | None:
    try:
        return worker.carry_out(ident)
    except DatabaseUnavailable:
        return None


def check_recovery(engine: Engine, session_factory: sessionmaker[Session], worker: AnyWorker, point: int) -> None:
    """One call of ``execute`` loses its connection; the next ones, of the same process, bring the run to its end."""
    ident = approved_plan(session_factory)
    outcome = cut_at(engine, worker, ident, point)
    status = column(engine, ident, "status")
    if outcome is not None:
        assert outcome.ending in {Ending.LANDED, Ending.INTERRUPTED}
        assert outcome.ending is Ending.INTERRUPTED or status is PlanStatus.EXECUTED
    assert status in {PlanStatus.APPROVED, PlanStatus.EXECUTING, PlanStatus.EXECUTED}
    if status is PlanStatus.EXECUTING:
        let_lapse(session_factory, ident)
    # A connection that was cut while it lay in the pool is found out by one more call.
    outcome = carried_out(worker, ident) or carried_out(worker, ident)
    assert outcome is not None
    if outcome.ending is not Ending.LANDED:
        outcome = worker.carry_out(ident)
    assert (outcome.ending, outcome.status, outcome.failure) == (Ending.LANDED, PlanStatus.EXECUTED, None)
    assert [receipt.step for receipt in outcome.receipts] == STEPS
    assert entries(engine) == EFFECTS
    assert column(engine, ident, "note") == "x"


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
    assert "a heartbeat failed and will be tried again" in caplog.text


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
    # The pool may hold connections to what was read-only, such as a former primary: one call finds that out.
    with pytest.raises(DatabaseUnavailable):
        plans.execute(ident, carry_out)
    assert plans.execute(ident, carry_out).ending is Ending.LANDED
    assert entries(engine) == ["a", "b"]


def set_read_only_in_new_sessions_off(engine: Engine) -> None:
    with engine.connect() as connection:
        connection.execute(text(f"ALTER DATABASE {engine.url.database} RESET default_transaction_read_only"))
        connection.commit()
