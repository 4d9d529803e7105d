"""Workers outlive their database: restarts, ended backends, intervals without writes, and timeouts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, func, make_url, select, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Worker, embedded
from sqla_durable.claims import Claims
from tests.support import (
    Background,
    Base,
    Entry,
    Plan,
    PlanStatus,
    approved_plan,
    column,
    entries,
    eventually,
    write_entry,
)
from tests.support_brief import Errands, ErrandStatus, errands
from tests.support_workers import BOTH, ONE_AND_SLOWLY_THE_OTHER, plans_by, wait_for, working

NAME = "outages"
GATE = 7302
OPTIONS: dict[str, Any] = {"connect_args": {"application_name": NAME}}
SHORT = errands(lease=timedelta(seconds=1.5), max_attempts=50)


@pytest.fixture(scope="module")
def own_server(request: pytest.FixtureRequest) -> Iterator[embedded.EmbeddedServer]:
    """A server that nobody else uses: these tests change its settings and stop it."""
    bin_dir = request.config.getoption("--postgres")
    with embedded.start(bin_dir=None if bin_dir is None else Path(bin_dir), settings={"fsync": "off"}) as server:
        yield server


@pytest.fixture
def own(own_server: embedded.EmbeddedServer) -> Iterator[Engine]:
    engine = create_engine(make_url(own_server.url), pool_pre_ping=True)
    Base.metadata.create_all(engine)
    SHORT.create(engine)
    yield engine
    Base.metadata.drop_all(engine)
    SHORT.run.metadata.drop_all(engine)
    engine.dispose()


def steps(run: Any) -> None:
    for step in ("one", "two", "three"):
        run.step(step, write_entry, f"{run.row.id} {step}")
        pause = threading.Event()
        threading.Timer(0.02, pause.set).start()
        wait_for(pause, run)


def handled(carry_out: Callable[[Any], None] = steps) -> tuple[type[Any], type[Any], Callable[[Any], None]]:
    return SHORT.run, SHORT.receipt, carry_out


def all_done(engine: Engine, count: int, model: Errands = SHORT) -> None:
    query = select(func.count()).select_from(model.run).where(model.run.status == ErrandStatus.DONE)

    def done() -> bool:
        with engine.connect() as connection:
            return connection.scalar(query) == count

    eventually(done, f"{count} runs that are done")


def none_outlives_its_lease(engine: Engine) -> None:
    overdue = SHORT.run.lease_expires_at < func.clock_timestamp() - timedelta(seconds=3)
    query = select(func.count()).select_from(SHORT.run).where(SHORT.run.status == ErrandStatus.RUNNING, overdue)
    with engine.connect() as connection:
        assert connection.scalar(query) == 0


def each_effect_once(engine: Engine, idents: list[Any]) -> None:
    assert sorted(entries(engine)) == sorted(f"{ident} {step}" for ident in idents for step in ("one", "two", "three"))


@pytest.mark.parametrize("form", ONE_AND_SLOWLY_THE_OTHER)
def test_it_goes_on_after_the_server_was_restarted(own_server: embedded.EmbeddedServer, own: Engine, form: str) -> None:
    factory = sessionmaker(own)
    idents = [SHORT.new(factory) for _ in range(30)]
    with working(form, own, handled(), concurrency=4, listen=True, engine_options=OPTIONS):
        eventually(lambda: len(entries(own)) >= 10, "some steps")
        own_server.restart("immediate")
        own.dispose()
        all_done(own, 30)
        idents.append(SHORT.new(factory))
        all_done(own, 31)
    each_effect_once(own, idents)


def test_a_worker_that_starts_while_the_server_is_away_waits_for_it(
    own_server: embedded.EmbeddedServer, own: Engine
) -> None:
    idents = [SHORT.new(sessionmaker(own)) for _ in range(3)]
    own_server.stop()
    try:
        with working("sync", own, handled(), listen=True):
            time.sleep(0.5)
            own_server.restart()
            own.dispose()
            all_done(own, 3)
    finally:
        own_server.restart()
    each_effect_once(own, idents)


def terminate(engine: Engine, condition: str = "true") -> int:
    query = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = :name"
        f" AND datname = current_database() AND {condition}"
    )
    with engine.connect() as connection:
        return len(connection.scalars(text(query), {"name": NAME}).all())


@pytest.mark.parametrize("form", ONE_AND_SLOWLY_THE_OTHER)
def test_it_goes_on_while_all_of_its_backends_are_ended_again_and_again(engine: Engine, form: str) -> None:
    SHORT.create(engine)
    factory = sessionmaker(engine)
    idents = [SHORT.new(factory) for _ in range(40)]
    ended = 0
    with working(form, engine, handled(), concurrency=4, listen=True, engine_options=OPTIONS):
        until = time.monotonic() + 3
        while time.monotonic() < until:
            ended += terminate(engine)
            none_outlives_its_lease(engine)
            time.sleep(0.1)
        all_done(engine, 40)
    assert ended > 10
    each_effect_once(engine, idents)


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize("moment", ["claim", "reap", "landing"])
def test_it_goes_on_after_its_backend_was_ended_in_the_middle_of_a_write(
    engine: Engine, form: str, moment: str
) -> None:
    SHORT.create(engine)
    factory = sessionmaker(engine)
    old, new = {"claim": ("ready", "running"), "reap": ("running", "ready"), "landing": ("running", "done")}[moment]
    ident = SHORT.new(factory)
    if moment == "reap":
        run = SHORT.runs(factory).claim(ident)
        assert run is not None
        with engine.begin() as connection:
            past = func.clock_timestamp() - timedelta(hours=1)
            connection.execute(SHORT.run.__table__.update().values(lease_expires_at=past))
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS"
            f" 'BEGIN PERFORM pg_advisory_xact_lock_shared({GATE}); RETURN NULL; END'"
        )
        connection.exec_driver_sql(
            "CREATE TRIGGER gate AFTER UPDATE ON errand FOR EACH ROW"
            f" WHEN (OLD.status = '{old}' AND NEW.status = '{new}') EXECUTE FUNCTION wait_at_gate()"
        )
    with closed(engine) as open_gate, working(form, engine, handled(), engine_options=OPTIONS):
        for _ in range(2 if moment == "claim" else 1):
            eventually(lambda: terminate(engine, "wait_event_type = 'Lock'"), f"the {moment}")
        open_gate()
        all_done(engine, 1)
    each_effect_once(engine, [ident])


@contextmanager
def closed(engine: Engine) -> Iterator[Callable[[], None]]:
    """Close the gate, and yield what opens it."""
    with engine.connect() as connection:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({GATE})")
        yield connection.rollback


def configure(engine: Engine, statement: str) -> None:
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"ALTER SYSTEM {statement}"))
        connection.execute(text("SELECT pg_reload_conf()"))


@pytest.mark.parametrize("form", ONE_AND_SLOWLY_THE_OTHER)
def test_it_goes_on_after_two_seconds_in_which_the_server_takes_no_writes(own: Engine, form: str) -> None:
    idents = [SHORT.new(sessionmaker(own)) for _ in range(30)]
    with working(form, own, handled(), concurrency=4, engine_options=OPTIONS):
        eventually(lambda: len(entries(own)) >= 10, "some steps")
        configure(own, "SET default_transaction_read_only = on")
        try:
            time.sleep(2)
        finally:
            configure(own, "RESET default_transaction_read_only")
        all_done(own, 30)
    each_effect_once(own, idents)


def test_an_outage_of_one_database_holds_the_runs_of_another_up_for_no_moment(
    own_server: embedded.EmbeddedServer, own: Engine, engine: Engine
) -> None:
    SHORT.create(engine)
    here, there = sessionmaker(engine), sessionmaker(own)
    works = [SHORT.runs(factory).handled_by(steps) for factory in (there, here)]
    worker = Worker(*works, poll=timedelta(seconds=0.05))
    lost = SHORT.new(there)
    own_server.stop()
    try:
        background = Background(worker.run)
        for count in range(1, 6):
            SHORT.new(here)
            before = time.monotonic()
            all_done(engine, count)
            assert time.monotonic() - before < 3
    finally:
        own_server.restart()
        own.dispose()
    all_done(own, 1)
    worker.stop()
    background.result()
    each_effect_once(own, [lost])


# claims that succeed in part


@pytest.mark.parametrize("form", BOTH)
def test_what_one_statement_of_a_claim_has_committed_is_carried_out_though_the_next_one_fails(
    engine: Engine, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = errands(max_attempts=5)
    model.create(engine)
    factory = sessionmaker(engine)
    lapsed, ready = model.new(factory), model.new(factory)
    assert model.runs(factory).claim(lapsed) is not None
    with engine.begin() as connection:
        past = func.clock_timestamp() - timedelta(hours=1)
        connection.execute(model.run.__table__.update().where(model.run.id == lapsed).values(lease_expires_at=past))
    claim_once = Claims._claim_once
    cut_off: list[int] = []

    def second_fails(claims: Claims[Any], connection: Any, limit: int) -> Any:
        if limit < 10 and not cut_off:
            cut_off.append(limit)
            with engine.connect() as other:
                pid = connection.connection.driver_connection.info.backend_pid
                assert other.scalar(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": pid})
        return claim_once(claims, connection, limit)

    monkeypatch.setattr(Claims, "_claim_once", second_fails)
    with working(form, engine, (model.run, model.receipt, lambda run: None)):
        all_done(engine, 2, model)
    assert cut_off == [9]
    found = model.runs(factory).get(ready)
    assert (found.attempts, found.fence) == (1, 1), "nobody waited for its lease"


# timeouts of the server


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize("setting", ["idle_in_transaction_session_timeout", "statement_timeout", "lock_timeout"])
def test_a_body_that_a_timeout_cuts_off_is_tried_again_and_neither_worker_nor_pool_suffers(
    engine: Engine, session_factory: sessionmaker[Session], form: str, setting: str
) -> None:
    ident = approved_plan(session_factory)
    with session_factory.begin() as session:
        session.add(Entry(id=1000, label="locked"))
    options = {"connect_args": {"options": f"-c {setting}=300ms"}, "pool_size": 2, "max_overflow": 0}

    def body(session: Session, of: UUID, attempt: int) -> str:
        write_entry(session, f"attempt {attempt}")
        session.flush()
        if (of, attempt) == (ident, 1):
            if setting == "statement_timeout":
                session.execute(text("SELECT pg_sleep(5)"))
            elif setting == "lock_timeout":
                session.execute(text("SELECT 1 FROM entry WHERE id = 1000 FOR UPDATE"))
            else:
                time.sleep(1)
        return "done"

    def carry_out(run: Any) -> None:
        run.step("only", body, run.row.id, run.lease.attempt)

    with engine.connect() as blocker:
        blocker.execute(text("SELECT 1 FROM entry WHERE id = 1000 FOR UPDATE"))
        with working(form, engine, plans_by(carry_out), concurrency=2, engine_options=options):
            eventually(lambda: column(engine, ident, "status") is PlanStatus.EXECUTED, "its end")
            later = approved_plan(session_factory)
            eventually(lambda: column(engine, later, "status") is PlanStatus.EXECUTED, "the next one")
    with Session(engine) as session:
        plan = session.get_one(Plan, ident)
    assert (plan.attempts, plan.failures[0]["type"]) == (2, "sqla_durable.exc.StepTimeout")
    assert entries(engine) == ["attempt 2", "attempt 1", "locked"]
