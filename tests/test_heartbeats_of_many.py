"""The heartbeats of several runs in one process, of a batch, and of a process that forks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, select, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, Run, Runs
from tests.support import Background, eventually
from tests.support_brief import Errands, errands

LEASE = timedelta(seconds=0.6)
REFUSE = """
    CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF new.id = '{ident}' AND {when} THEN RAISE 'refused' USING ERRCODE = '{code}'; END IF;
        RETURN new;
    END $$;
    CREATE TRIGGER refuse BEFORE UPDATE ON errand FOR EACH ROW EXECUTE FUNCTION refuse();
"""


@pytest.fixture
def brief(engine: Engine) -> Errands:
    made = errands(lease=LEASE)
    made.create(engine)
    return made


@pytest.fixture
def runs(session_factory: sessionmaker[Session], brief: Errands) -> Runs[Any]:
    return brief.runs(session_factory)


def expiry(engine: Engine, ident: object) -> Any:
    with engine.connect() as connection:
        return connection.scalar(text("SELECT lease_expires_at FROM errand WHERE id = :id"), {"id": ident})


def let_lapse(engine: Engine, ident: object) -> Any:
    """Let the lease have run out long ago; return since when."""
    with engine.begin() as connection:
        past = (
            "UPDATE errand SET lease_expires_at = now() - interval '1 hour' WHERE id = :id RETURNING lease_expires_at"
        )
        return connection.scalar(text(past), {"id": ident})


def renewed(engine: Engine, ident: object, times: int) -> Callable[[], bool]:
    seen = {expiry(engine, ident)}

    def condition() -> bool:
        seen.add(expiry(engine, ident))
        return len(seen) > times

    return condition


def refuse(engine: Engine, ident: object, when: str, code: str = "P0001") -> None:
    with engine.begin() as connection:
        connection.execute(text(REFUSE.format(ident=ident, when=when, code=code).replace(":", "\\:")))


def test_a_run_whose_renewal_raises_takes_no_heartbeat_from_the_others(
    engine: Engine, session_factory: sessionmaker[Session], brief: Errands, runs: Runs[Any]
) -> None:
    refused, healthy = brief.new(session_factory), brief.new(session_factory)
    refuse(engine, refused, "old.status = 'running' AND new.status = 'running'")
    started, over = threading.Event(), threading.Event()

    def wait(_: Run[Any]) -> None:
        started.set()
        over.wait(20)

    first = Background(lambda: runs.execute(refused, wait))
    assert started.wait(20)
    try:
        outcome = runs.execute(healthy, lambda _: eventually(renewed(engine, healthy, 2), "two renewals"))
    finally:
        over.set()
    assert outcome.status == "done", outcome.exception
    first.result()


def test_a_run_of_a_batch_that_was_left_to_its_lease_is_not_kept_alive_by_the_others(
    engine: Engine, session_factory: sessionmaker[Session], brief: Errands, runs: Runs[Any]
) -> None:
    for _ in range(2):
        brief.new(session_factory)
    left, other = runs.claim_due(2)
    # Neither its landing nor its release comes through, as in an outage.
    refuse(engine, left.row.id, "new.status <> 'running'", code="57P03")
    assert runs.execute(left, lambda _: None).ending is Ending.INTERRUPTED

    since = let_lapse(engine, left.row.id)
    outcome = runs.execute(other, lambda run: eventually(renewed(engine, run.row.id, 2), "two renewals"))
    assert outcome.status == "done", outcome.exception
    assert expiry(engine, left.row.id) == since


def test_a_forked_child_does_not_keep_the_runs_of_its_dead_parent_alive(
    engine: Engine, session_factory: sessionmaker[Session], brief: Errands
) -> None:
    parents, childs = brief.new(session_factory), brief.new(session_factory)
    url = engine.url
    engine.dispose()  # a fork takes no open connection along
    fork = multiprocessing.get_context("fork")
    go_on = fork.Event()

    def parent() -> None:
        theirs = create_engine(url)
        runs = brief.runs(sessionmaker(theirs))

        def child() -> None:
            theirs.dispose(close=False)
            runs.execute(childs, lambda _: go_on.wait(30))
            os._exit(0)

        def carry_out(_: Run[Any]) -> None:
            fork.Process(target=child).start()
            threading.Event().wait(30)

        runs.execute(parents, carry_out)

    process = fork.Process(target=parent)
    process.start()
    assert process.pid is not None
    try:
        eventually(lambda: expiry(engine, childs), "the child's claim")
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        since = let_lapse(engine, parents)
        eventually(renewed(engine, childs, 2), "two heartbeats of the child")
        assert expiry(engine, parents) == since
    finally:
        go_on.set()
        with engine.connect() as connection:
            statuses = select(brief.run.__table__.c.status).where(brief.run.__table__.c.id == childs)
            eventually(lambda: connection.execute(statuses).scalar_one() == "done", "the end of the child")
