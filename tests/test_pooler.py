"""Behind a pooler that gives each transaction another backend, everything works; only notifications are not heard."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, LostLease, Runs
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, column, entries, eventually, let_lapse, write_entry
from tests.support_async import RunsFacade
from tests.support_jobs import Brief, BriefStep, JobStatus, add_jobs
from tests.support_pooler import Pooler
from tests.support_workers import BOTH, ONE_AND_SLOWLY_THE_OTHER, plans_by, wait_for, working

UNPREPARED: dict[str, Any] = {"connect_args": {"prepare_threshold": None}}
MakeRuns = Callable[[type[Any], type[Any]], Any]


@pytest.fixture
def pooler(engine: Engine) -> Iterator[Pooler]:
    pooler = Pooler(engine.url)
    yield pooler
    pooler.close()


@pytest.fixture(params=BOTH)
def make_runs(request: pytest.FixtureRequest, pooler: Pooler) -> Iterator[MakeRuns]:
    if request.param == "sync":
        engine = create_engine(pooler.url, **UNPREPARED)
        yield lambda run, receipt: Runs(sessionmaker(engine), run, receipt)
        engine.dispose()
        return
    with asyncio.Runner() as runner:
        async_engine = create_async_engine(pooler.url, **UNPREPARED)
        yield lambda run, receipt: RunsFacade(runner, async_engine, run, receipt)
        runner.run(async_engine.dispose())


def test_the_pooler_of_these_tests_gives_each_transaction_another_backend(pooler: Pooler) -> None:
    engine = create_engine(pooler.url, **UNPREPARED)
    with engine.connect() as connection:
        seen: list[set[int]] = []
        for _ in range(3):
            with connection.begin():
                pids = [connection.scalar(text("SELECT pg_backend_pid()")) for _ in range(2)]
            seen.append(set(pids))
    assert [len(pids) for pids in seen] == [1, 1, 1]
    assert seen[0] != seen[1] != seen[2]
    engine.dispose()


def test_every_verb_works_behind_a_pooler(
    engine: Engine, session_factory: sessionmaker[Session], make_runs: MakeRuns
) -> None:
    plans = make_runs(Plan, PlanStep)
    ident = approved_plan(session_factory)
    run = plans.claim(ident)
    assert run.step("first", write_entry, "a") == "a"
    assert run.external("second", lambda: "b") == "b"
    run.renew()
    copy = plans.hold(run.lease)
    assert copy.step("first", write_entry, "again") == "a"
    let_lapse(session_factory, ident)
    assert plans.heal(ident)
    assert run.step("third", write_entry, "c") == "c", "resumed"
    let_lapse(session_factory, ident)
    assert plans.reap(10) == 1
    (again,) = plans.claim_due(10)
    with pytest.raises(LostLease):
        run.step("fourth", write_entry, "stale")
    again.release()
    outcome = plans.execute(ident, lambda run: run.step("fourth", write_entry, "d"))
    assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.EXECUTED)
    assert plans.get(ident).status is PlanStatus.EXECUTED
    assert [receipt.step for receipt in plans.receipts(ident)] == ["first", "second", "third", "fourth"]
    assert plans.execute(ident, lambda run: None).replayed
    failing = approved_plan(session_factory)
    assert plans.execute(failing, lambda run: 1 / 0).status is PlanStatus.FAILED
    assert plans.requeue(failing)
    held = plans.claim(failing)
    with session_factory() as session:
        assert plans.request_cancel(session, failing)
        session.commit()
    assert plans.execute(held, lambda run: None).status is PlanStatus.CANCELLED
    in_hand = plans.claim(approved_plan(session_factory))
    with session_factory() as session:
        plans.fence(session, in_hand.lease)
        session.rollback()
        plans.record(session, in_hand.lease, "by hand", 1)
        session.commit()
    in_hand.finish()
    assert entries(engine) == ["a", "c", "d"]


@pytest.mark.parametrize("form", BOTH)
def test_a_worker_behind_a_pooler_polls_and_does_not_listen(
    engine: Engine,
    session_factory: sessionmaker[Session],
    pooler: Pooler,
    form: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "sqla_durable.worker")
    idents = [approved_plan(session_factory) for _ in range(20)]
    by_pooler = Engine(engine.pool, engine.dialect, pooler.url)
    handled = plans_by(lambda run: run.step("only", write_entry, str(run.row.id)))
    with working(form, by_pooler, handled, listen=True, engine_options=UNPREPARED):
        eventually(lambda: len(entries(engine)) == 20, "twenty runs")
        eventually(lambda: "a pooler before" in caplog.text, "the word of a pooler")
        with engine.connect() as connection:
            query = text("SELECT count(*) FROM pg_stat_activity WHERE query = 'LISTEN sqla_durable'")
            assert connection.scalar(query) == 0
        later = approved_plan(session_factory)
        eventually(lambda: column(engine, later, "status") is PlanStatus.EXECUTED, "a later one")
    assert sorted(entries(engine)) == sorted(map(str, [*idents, later]))


@pytest.mark.parametrize("form", ONE_AND_SLOWLY_THE_OTHER)
def test_heartbeats_work_behind_a_pooler(engine: Engine, pooler: Pooler, form: str) -> None:
    add_jobs(engine, Brief, 1)

    def carry_out(run: Any) -> None:
        gate = threading.Event()
        threading.Timer(2 * Brief.__lifecycle__.lease.total_seconds(), gate.set).start()
        wait_for(gate, run)

    by_pooler = Engine(engine.pool, engine.dialect, pooler.url)
    handled = Brief, BriefStep, carry_out
    with working(form, by_pooler, handled, engine_options=UNPREPARED), working("sync", engine, handled):
        jobs: Runs[Brief] = Runs(sessionmaker(engine), Brief, BriefStep)
        eventually(lambda: (job := jobs.get(1)) and job.status is JobStatus.DONE, "the job")
        job = jobs.get(1)
    assert job is not None
    assert job.attempts == 1


def test_without_a_pool_of_its_own_a_program_works_behind_a_pooler(
    engine: Engine, session_factory: sessionmaker[Session], pooler: Pooler
) -> None:
    unpooled = create_engine(pooler.url, poolclass=NullPool, **UNPREPARED)
    plans: Runs[Plan] = Runs(sessionmaker(unpooled), Plan, PlanStep)
    ident = approved_plan(session_factory)
    assert plans.execute(ident, lambda run: run.step("only", write_entry, "a")).status is PlanStatus.EXECUTED
    unpooled.dispose()
