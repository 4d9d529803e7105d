"""Leases under a worker: kept alive while it works, lost by a frozen process, and used up by one that keeps dying."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, Outcome
from tests.support import entries, eventually, write_entry
from tests.support_brief import BRIEF, ErrandStatus, errands
from tests.support_jobs import Brief, BriefStep, JobStatus, add_jobs
from tests.support_processes import Program
from tests.support_workers import BOTH, ONE_AND_SLOWLY_THE_OTHER, wait_for, working

LEASE = Brief.__lifecycle__.lease.total_seconds()


def jobs_done(engine: Engine, count: int) -> None:
    query = select(func.count()).select_from(Brief).where(Brief.status == JobStatus.DONE)

    def done() -> bool:
        with engine.connect() as connection:
            return connection.scalar(query) == count

    eventually(done, f"{count} jobs that are done")


def attempts(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.scalars(select(Brief.attempts).order_by(Brief.id)))


@pytest.mark.parametrize("form", BOTH)
def test_a_run_outlives_its_lease_while_another_worker_polls(engine: Engine, form: str) -> None:
    add_jobs(engine, Brief, 1)

    def carry_out(run: Any) -> None:
        gate = threading.Event()
        threading.Timer(1.5 * LEASE, gate.set).start()
        wait_for(gate, run)
        run.step("only", write_entry, "once")

    handled = Brief, BriefStep, carry_out
    with working(form, engine, handled), working(form, engine, handled):
        jobs_done(engine, 1)
    assert (entries(engine), attempts(engine)) == (["once"], [1])


def blocks(session: Session, label: str) -> str:
    write_entry(session, label)
    session.flush()
    time.sleep(2)
    return label


@pytest.mark.parametrize("place", ["in a step", "between steps"])
def test_a_body_that_blocks_the_loop_for_two_leases_has_its_effect_once(
    engine: Engine, session_factory: sessionmaker[Session], place: str
) -> None:
    slow = errands(lease=timedelta(seconds=1), step_timeout=None)
    slow.create(engine)
    ident = slow.new(session_factory)
    started: list[int] = []

    def carry_out(run: Any) -> None:
        started.append(run.lease.fence)
        if place == "in a step":
            run.step("only", blocks, "once")
        else:
            time.sleep(2)
            run.step("only", write_entry, "once")

    handled = slow.run, slow.receipt, carry_out
    with working("async", engine, handled), working("async", engine, handled):
        eventually(lambda: slow.runs(session_factory).get(ident).status is ErrandStatus.DONE, "the run's end")
    assert (entries(engine), started) == (["once"], [1])


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_batch_of_three_that_takes_longer_than_a_lease_is_not_reclaimed(
    engine: Engine, form: str, concurrency: int
) -> None:
    add_jobs(engine, Brief, 3)

    def carry_out(run: Any) -> None:
        gate = threading.Event()
        threading.Timer(0.6 * LEASE, gate.set).start()
        wait_for(gate, run)
        run.step("only", write_entry, str(run.row.id))

    handled = Brief, BriefStep, carry_out
    with working(form, engine, handled, concurrency=concurrency), working(form, engine, handled, concurrency=1):
        jobs_done(engine, 3)
    assert sorted(entries(engine)) == ["1", "2", "3"]
    assert attempts(engine) == [1, 1, 1]


# processes


@pytest.fixture
def started(engine: Engine) -> Iterator[Callable[..., Program]]:
    BRIEF.create(engine)
    programs: list[Program] = []

    def start(form: str, behaviour: str, **options: Any) -> Program:
        given = {"model": "errand", "behaviour": behaviour, "poll": 0.05, "listen": False, "releasing": 1, **options}
        url = engine.url.render_as_string(hide_password=False)
        programs.append(Program("worker", url, form, json.dumps(given)))
        return programs[-1]

    yield start
    for program in programs:
        program.__exit__()


def errand(engine: Engine, ident: Any) -> Any:
    with Session(engine) as session:
        return session.get_one(BRIEF.run, ident)


@pytest.mark.parametrize("form", ONE_AND_SLOWLY_THE_OTHER)
def test_a_run_that_kills_its_worker_each_time_is_dead_after_exactly_its_attempts(
    engine: Engine, session_factory: sessionmaker[Session], started: Callable[..., Program], form: str
) -> None:
    ident = BRIEF.new(session_factory)
    for attempt in (1, 2, 3):
        program = started(form, "kills")
        assert program.receive() == ["started", attempt]
        assert program.wait() < 0
    started(form, "kills")  # one that only reaps it
    eventually(lambda: errand(engine, ident).status is ErrandStatus.DEAD, "its death")
    found = errand(engine, ident)
    assert (found.attempts, found.fence, found.error["type"]) == (3, 3, "LeaseLapsed")
    assert "lapsed" in found.error["message"]


@pytest.mark.parametrize("form", ONE_AND_SLOWLY_THE_OTHER)
def test_a_worker_frozen_past_the_lease_of_its_run_commits_nothing_when_it_thaws(
    engine: Engine, session_factory: sessionmaker[Session], started: Callable[..., Program], form: str
) -> None:
    ident = BRIEF.new(session_factory)
    frozen = started(form, "asks, then writes")
    assert frozen.receive() == ["started", 1]
    frozen.freeze()
    taken_over(session_factory, ident)
    frozen.thaw()
    frozen.send("go on")
    assert frozen.receive() == ["lost", "LostLease"]
    assert entries(engine) == ["the new holder"]
    assert errand(engine, ident).lease_owner is None


@pytest.mark.parametrize("form", ONE_AND_SLOWLY_THE_OTHER)
def test_a_worker_frozen_between_a_claim_and_the_start_starts_nothing_that_another_took(
    engine: Engine, session_factory: sessionmaker[Session], started: Callable[..., Program], form: str
) -> None:
    ident = BRIEF.new(session_factory)
    frozen = started(form, "short", stops_when_claimed=True)
    assert frozen.receive() == "claimed"
    frozen.wait_until_frozen()
    taken_over(session_factory, ident)
    frozen.thaw()
    later = BRIEF.new(session_factory)
    assert frozen.receive() == ["started", 1], "the later one"
    assert frozen.receive() == "finished"
    eventually(lambda: errand(engine, later).status is ErrandStatus.DONE, "the later one")
    assert entries(engine) == ["the new holder", str(later)]
    assert errand(engine, ident).fence == 2


def taken_over(factory: sessionmaker[Session], ident: Any) -> None:
    """Another holder carries the run out, as soon as it can be had."""
    errands = BRIEF.runs(factory)

    def tried() -> Outcome | None:
        outcome = errands.execute(ident, lambda run: run.step("only", write_entry, "the new holder"))
        return outcome if outcome.ending is Ending.LANDED else None

    assert eventually(tried, "the end of the lease").status is ErrandStatus.DONE


def test_what_a_killed_worker_left_is_done_by_the_next_when_its_lease_has_lapsed(
    engine: Engine, session_factory: sessionmaker[Session], started: Callable[..., Program]
) -> None:
    idents = [BRIEF.new(session_factory) for _ in range(3)]
    program = started("sync", "hangs")
    for _ in idents:
        assert program.receive() == ["started", 1]
    program.kill()
    handled = BRIEF.run, BRIEF.receipt, lambda run: run.step("only", write_entry, str(run.row.id))
    with working("async", engine, handled):
        eventually(lambda: len(entries(engine)) == 3, "all of them")
    assert {errand(engine, ident).attempts for ident in idents} == {2}
