"""A worker of both forms as a process: told to stop by real signals, and really killed."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import sessionmaker

from tests.support import eventually
from tests.support_brief import BRIEF
from tests.support_jobs import Brief, BriefStep, add_jobs
from tests.support_processes import Program
from tests.support_workers import MIXED, working

LEAVES = 5.0  # an idle machine needs a tenth of a second; the grace time is 20 s
BOTH_STARTED = [["started", "in a task"], ["started", "in a thread"]]


@pytest.fixture
def runs(engine: Engine) -> None:
    """One that is carried out in a thread, and one in a task."""
    add_jobs(engine, Brief, 1)
    BRIEF.create(engine)
    BRIEF.new(sessionmaker(engine))


def found(engine: Engine) -> list[tuple[str, int, Any]]:
    query = "SELECT status::text, attempts, lease_owner"
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(f"{query} FROM brief UNION ALL {query} FROM errand"))]


@pytest.fixture
def started(engine: Engine, runs: None) -> Iterator[Any]:
    programs: list[Program] = []

    def start(behaviour: str, **options: Any) -> Program:
        given = {"behaviour": behaviour, "poll": 0.05, "listen": False, "grace": 20, "releasing": 1, **options}
        url = engine.url.render_as_string(hide_password=False)
        programs.append(Program("worker", url, "mixed", json.dumps(given)))
        assert sorted(programs[-1].receive() for _ in BOTH_STARTED) == BOTH_STARTED
        return programs[-1]

    yield start
    for program in programs:
        program.__exit__()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_lets_both_runs_finish(engine: Engine, started: Any, number: signal.Signals) -> None:
    program = started("takes a second")
    program.process.send_signal(number)
    assert [program.receive() for _ in range(3)] == ["finished", "finished", "stopped"]
    assert program.wait() == 0
    assert Counter(status for status, *_ in found(engine)) == {"done": 2}


def test_what_hangs_is_given_back_and_keeps_the_process_no_longer(engine: Engine, started: Any) -> None:
    program = started("hangs", grace=0.2)
    before = time.monotonic()
    program.process.terminate()
    assert program.receive() == "stopped"
    assert program.wait() == 0, "nobody waits for the thread"
    assert time.monotonic() - before < LEAVES
    assert [each[0] for each in found(engine)] == ["ready", "ready"]
    assert {each[2] for each in found(engine)} == {None}


def test_a_second_signal_ends_the_process_at_once(started: Any) -> None:
    program = started("hangs")
    program.process.terminate()
    time.sleep(0.3)  # one signal each: two of a kind that are pending are one
    assert program.process.poll() is None
    program.process.terminate()
    before = time.monotonic()
    assert program.wait() != 0
    assert time.monotonic() - before < LEAVES


def test_a_signal_drains_the_threads_though_a_coroutine_blocks_the_loop(engine: Engine, started: Any) -> None:
    program = started("blocks", grace=0.2)
    program.process.terminate()
    eventually(lambda: found(engine)[0][0] == "ready", "the run of the thread to be given back")
    assert found(engine)[1][0] == "running"


def test_the_runs_of_a_killed_worker_are_taken_over_by_the_next(engine: Engine, started: Any) -> None:
    program = started("hangs")
    program.kill()
    assert Counter(status for status, *_ in found(engine)) == {"running": 2}
    handled = (Brief, BriefStep, lambda run: None), (BRIEF.run, BRIEF.receipt, lambda run: None)
    with working(MIXED, engine, *handled):
        eventually(lambda: [each[:2] for each in found(engine)] == [("done", 2)] * 2, "the next attempts")
