"""A server of the test's own that restarts, takes no writes, or loses a connection while it is committing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, create_engine, make_url, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import DatabaseUnavailable, Ending, Outcome, Run, Runs, embedded
from sqla_durable.asyncio import AsyncRun, AsyncRuns
from tests.support import (
    Background,
    Base,
    Entry,
    Plan,
    PlanStatus,
    PlanStep,
    approved_plan,
    column,
    entries,
    eventually,
    let_lapse,
    write_entry,
)

WORKER, PROBE = "server_loss", "server_loss probe"


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[embedded.EmbeddedServer]:
    """A server that nobody else uses: these tests change its settings and stop it."""
    bin_dir = request.config.getoption("--postgres")
    with embedded.start(bin_dir=None if bin_dir is None else Path(bin_dir)) as server:
        yield server


@pytest.fixture
def engine(server: embedded.EmbeddedServer) -> Iterator[Engine]:
    """How the test looks at the database; its own commits wait for no standby."""
    engine = create_engine(make_url(server.url), connect_args={"options": "-c synchronous_commit=local"})
    Base.metadata.create_all(engine)
    yield engine
    Base.metadata.drop_all(engine)
    engine.dispose()


@pytest.fixture
def factory(engine: Engine) -> sessionmaker[Session]:
    return sessionmaker(engine)


@pytest.fixture
def plans(server: embedded.EmbeddedServer) -> Iterator[Runs[Plan]]:
    """The worker."""
    worker = create_engine(make_url(server.url), connect_args={"application_name": WORKER})
    yield Runs(sessionmaker(worker), Plan, PlanStep)
    worker.dispose()


def configure(engine: Engine, statement: str) -> None:
    """Change a setting of the whole server, for connections that are there already, too."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"ALTER SYSTEM {statement}"))
        connection.execute(text("SELECT pg_reload_conf()"))


# a connection lost while the server commits


@contextmanager
def commits_wait(engine: Engine) -> Iterator[None]:
    """Let commits wait while the block runs."""
    try:
        let_commits_wait(engine)
        yield
    finally:
        configure(engine, "RESET synchronous_standby_names")


def let_commits_wait(engine: Engine) -> None:
    """From now on every commit is made, but its answer waits for a standby that does not exist."""
    configure(engine, "SET synchronous_standby_names = 'nobody'")
    # The server takes the setting up in its own time: try commits until one waits, and end that one.
    probe = create_engine(engine.url, connect_args={"application_name": PROBE})

    def commit() -> None:
        with probe.connect() as connection:
            connection.execute(text("INSERT INTO entry (label) VALUES ('probe')"))
            connection.commit()

    def waits() -> bool:
        trial = Background(commit)
        eventually(lambda: not trial.is_alive() or committing(engine, PROBE), "a commit that ends or waits")
        if trial.is_alive():
            end(engine, PROBE)
            trial.join()
            return True
        return False

    eventually(waits, "a commit that waits for a standby")
    probe.dispose()
    with engine.begin() as connection:
        connection.execute(Entry.__table__.delete())


def committing(engine: Engine, name: str = WORKER) -> int | None:
    """The backend of ``name`` that has committed and waits for the standby, if there is one."""
    query = text("SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND application_name = :name")
    with engine.connect() as connection:
        return connection.scalar(query, {"name": name})


def end(engine: Engine, name: str = WORKER) -> int:
    """End the backend of ``name`` that waits for the standby."""
    pid = eventually(lambda: committing(engine, name), "a commit that waits")
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid})
    return pid


def test_a_step_whose_commit_was_cut_off_is_found_done_by_the_retry(
    engine: Engine, factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(factory)
    run = plans.claim(ident)
    assert run is not None
    with commits_wait(engine):
        step = Background(lambda: run.step("only", write_entry, "a"))
        end(engine)
        with pytest.raises(DatabaseUnavailable):
            step.result()
    assert entries(engine) == ["a"]
    assert column(engine, ident, "status") is PlanStatus.EXECUTING
    assert column(engine, ident, "error") is None
    # The holder of the run tries again in place, and another copy of its lease does.
    assert run.step("only", lambda session: pytest.fail("the body ran again")) == "a"
    copy = plans.hold(run.lease)
    assert copy.step("only", lambda session: pytest.fail("the body ran again")) == "a"
    assert [(receipt.step, receipt.result) for receipt in plans.receipts(ident)] == [("only", "a")]
    assert entries(engine) == ["a"]


def test_a_claim_whose_commit_was_cut_off_is_left_to_its_lease(
    engine: Engine, factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(factory)

    def carry_out(run: Run[Plan]) -> None:
        run.step("first", write_entry, "a")
        run.step("second", write_entry, "b")

    with commits_wait(engine):
        carried = Background(lambda: plans.execute(ident, carry_out))
        end(engine)
        with pytest.raises(DatabaseUnavailable):
            carried.result()
    assert column(engine, ident, "status") is PlanStatus.EXECUTING, "claimed, though nobody knows"
    assert plans.execute(ident, carry_out).ending is Ending.LOST_RACE
    let_lapse(factory, ident)
    assert plans.execute(ident, carry_out).status is PlanStatus.EXECUTED
    assert (column(engine, ident, "fence"), column(engine, ident, "attempts")) == (2, 2)
    assert entries(engine) == ["a", "b"]


@contextmanager
def second_wait(engine: Engine) -> Iterator[None]:
    """Cut the first commit that waits off, and let the next one have its answer."""
    try:
        yield
        first = end(engine)
        eventually(lambda: committing(engine) not in {None, first}, "the commit after the lost one")
    finally:
        configure(engine, "RESET synchronous_standby_names")


def test_execute_never_takes_a_lost_commit_for_a_failed_step(
    engine: Engine, factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(factory)

    def carry_out(run: Run[Plan]) -> None:
        if run.lease.attempt == 1:
            let_commits_wait(engine)
        run.step("only", write_entry, "a")

    with second_wait(engine):
        carried = Background(lambda: plans.execute(ident, carry_out))
    outcome: Outcome = carried.result()
    assert (outcome.ending, outcome.status) == (Ending.INTERRUPTED, PlanStatus.APPROVED)
    assert isinstance(outcome.exception, DatabaseUnavailable)
    receipts = plans.receipts(ident)
    assert [(receipt.step, receipt.failure) for receipt in receipts] == [("only", None)]
    again = plans.execute(ident, carry_out)
    assert (again.ending, again.status, again.receipts) == (Ending.LANDED, PlanStatus.EXECUTED, receipts)
    assert entries(engine) == ["a"]


def test_a_message_whose_receipt_lost_its_commit_is_not_sent_again(
    engine: Engine, factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(factory)
    calls: list[str] = []

    def call() -> str:
        calls.append("sent")
        return "sent"

    def carry_out(run: Run[Plan]) -> None:
        if run.lease.attempt == 1:
            let_commits_wait(engine)
        run.external("only", call)

    with second_wait(engine):
        carried = Background(lambda: plans.execute(ident, carry_out))
    outcome: Outcome = carried.result()
    if outcome.ending is Ending.INTERRUPTED:
        outcome = plans.execute(ident, carry_out)
    assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.EXECUTED)
    assert [(receipt.step, receipt.result) for receipt in outcome.receipts] == [("only", "sent")]
    assert calls == ["sent"]


def test_a_landing_whose_commit_was_cut_off_is_found_landed(
    engine: Engine, factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(factory)

    def carry_out(run: Run[Plan]) -> None:
        run.step("only", write_entry, "a")
        let_commits_wait(engine)

    try:
        carried = Background(lambda: plans.execute(ident, carry_out))
        end(engine)
        outcome: Outcome = carried.result()
    finally:
        configure(engine, "RESET synchronous_standby_names")
    assert outcome.ending is Ending.INTERRUPTED
    assert isinstance(outcome.exception, DatabaseUnavailable)
    again = plans.execute(ident, lambda run: pytest.fail("a landed run ran"))
    assert (again.ending, again.status, again.failure) == (Ending.LANDED, PlanStatus.EXECUTED, None)
    assert again.replayed


# a server that goes away


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_run_is_carried_on_after_the_server_restarted_in_the_middle_of_a_step(
    server: embedded.EmbeddedServer, engine: Engine, factory: sessionmaker[Session], plans: Runs[Plan], mode: Any
) -> None:
    ident = approved_plan(factory)

    def body(session: Session, attempt: int) -> str:
        write_entry(session, "b")
        session.flush()
        if attempt == 1:
            server.restart(mode)
        return "b"

    def carry_out(run: Run[Plan]) -> None:
        run.step("first", write_entry, "a")
        run.step("second", body, run.lease.attempt)

    outcome = plans.execute(ident, carry_out)
    engine.dispose()
    assert (outcome.ending, outcome.status) == (Ending.INTERRUPTED, PlanStatus.APPROVED)
    assert isinstance(outcome.exception, DatabaseUnavailable)
    assert entries(engine) == ["a"]
    assert plans.execute(ident, carry_out).status is PlanStatus.EXECUTED
    assert entries(engine) == ["a", "b"]


@pytest.mark.parametrize("kind", ["step", "external"])
def test_a_run_is_left_to_its_lease_while_the_server_is_away_and_then_carried_on(
    server: embedded.EmbeddedServer, engine: Engine, factory: sessionmaker[Session], plans: Runs[Plan], kind: str
) -> None:
    ident = approved_plan(factory)

    def carry_out(run: Run[Plan]) -> None:
        run.step("first", write_entry, "a")
        if run.lease.attempt == 1:
            server.stop()
        if kind == "step":
            run.step("second", write_entry, "b")
        else:
            run.external("second", lambda: "b")

    try:
        outcome = plans.execute(ident, carry_out)
        assert (outcome.ending, outcome.status) == (Ending.INTERRUPTED, PlanStatus.EXECUTING)
        assert isinstance(outcome.exception, DatabaseUnavailable)
        for verb in (plans.claim, plans.get, plans.receipts, plans.heal):
            with pytest.raises(DatabaseUnavailable):
                verb(ident)
        with pytest.raises(DatabaseUnavailable):
            plans.execute(ident, carry_out)
        with pytest.raises(DatabaseUnavailable):
            plans.reap()
    finally:
        server.restart()
        engine.dispose()
    assert [receipt.step for receipt in plans.receipts(ident)] == ["first"]
    let_lapse(factory, ident)
    again = plans.execute(ident, carry_out)
    assert (again.status, [receipt.step for receipt in again.receipts]) == (PlanStatus.EXECUTED, ["first", "second"])


@pytest.mark.parametrize("form", ["sync", "asyncio"])
def test_a_message_that_was_sent_while_the_server_restarted_is_recorded_when_it_is_back(
    server: embedded.EmbeddedServer, engine: Engine, factory: sessionmaker[Session], plans: Runs[Plan], form: str
) -> None:
    ident = approved_plan(factory)
    sent: list[Background] = []

    def send() -> str:
        server.stop("immediate")
        sent.append(Background(server.restart))
        return "sent"

    async def send_async() -> str:
        return send()

    async def over_asyncio() -> Outcome:
        worker = create_async_engine(server.url)
        runs: AsyncRuns[Plan] = AsyncRuns(async_sessionmaker(worker), Plan, PlanStep)

        async def carry_out(run: AsyncRun[Plan]) -> None:
            await run.external("only", send_async)

        try:
            return await runs.execute(ident, carry_out)
        finally:
            await worker.dispose()

    if form == "sync":
        outcome = plans.execute(ident, lambda run: run.external("only", send))
    else:
        outcome = asyncio.run(over_asyncio())
    sent[0].result()
    engine.dispose()
    assert outcome.ending is Ending.LANDED
    assert [receipt.result for receipt in plans.receipts(ident)] == ["sent"]
    assert len(sent) == 1


def test_a_step_that_cannot_connect_for_a_moment_is_not_a_failed_step(
    server: embedded.EmbeddedServer, engine: Engine, factory: sessionmaker[Session]
) -> None:
    ident = approved_plan(factory)
    # Without a pool, so that the first sign of the outage is a connection refused, not one that broke.
    plans: Runs[Plan] = Runs(sessionmaker(create_engine(server.url, poolclass=NullPool)), Plan, PlanStep)

    def carry_out(run: Run[Plan]) -> None:
        if run.lease.attempt == 1:
            server.stop()
            try:
                run.step("only", write_entry, "a")
            finally:
                server.restart()
                engine.dispose()
        run.step("only", write_entry, "a")

    outcome = plans.execute(ident, carry_out)
    assert isinstance(outcome.exception, DatabaseUnavailable)
    assert outcome.ending is Ending.INTERRUPTED
    if column(engine, ident, "status") is PlanStatus.EXECUTING:
        let_lapse(factory, ident)
    assert plans.execute(ident, carry_out).status is PlanStatus.EXECUTED
    assert entries(engine) == ["a"]


def test_a_run_is_carried_on_by_the_same_connections_when_the_server_takes_writes_again(
    engine: Engine, factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(factory)

    def carry_out(run: Run[Plan]) -> None:
        run.step("first", write_entry, "a")
        if run.lease.attempt == 1:
            configure(engine, "SET default_transaction_read_only = on")
            eventually(lambda: _reads_only(plans), "the worker's connections to take no writes")
        run.step("second", write_entry, "b")

    try:
        outcome = plans.execute(ident, carry_out)
        assert outcome.ending is Ending.INTERRUPTED
        assert isinstance(outcome.exception, DatabaseUnavailable)
        with pytest.raises(DatabaseUnavailable):
            plans.execute(ident, carry_out)
    finally:
        configure(engine, "RESET default_transaction_read_only")
        eventually(lambda: not _reads_only(plans), "the worker's connections to take writes")
    assert [receipt.step for receipt in plans.receipts(ident)] == ["first"]
    let_lapse(factory, ident)
    assert plans.execute(ident, carry_out).status is PlanStatus.EXECUTED
    assert entries(engine) == ["a", "b"]


def _reads_only(plans: Runs[Plan]) -> bool:
    with plans._verbs.store.engine.connect() as connection:
        return connection.scalar(text("SHOW default_transaction_read_only")) == "on"
