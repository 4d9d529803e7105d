"""Runs of functions as operators see them: listed, counted, and dealt with many at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import FunctionRun, Functions, FunctionStatus, RunCancelled, Runs, UsageError, bulk
from sqla_durable.asyncio import AsyncFunctions
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, column
from tests.support_observe import Job, JobStep, cancel, double, functions_on, started, tables
from tests.support_statements import statements

HOUR = timedelta(hours=1)
NONE = dict.fromkeys(FunctionStatus, 0)


@pytest.fixture
def jobs(engine: Engine) -> Functions[Job]:
    tables(engine)
    return functions_on(engine)


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep)


def some(jobs: Functions[Job]) -> dict[str, Any]:
    """One run of each kind, by a name."""
    made = {
        "done": started(jobs, tenant="acme"),
        "failed": started(jobs, "refuse", key="f"),
        "cancelled": started(jobs, tenant="acme", run_at=HOUR),
        "waiting": started(jobs, "refuse", tenant="acme", run_at=HOUR),
        "due": started(jobs),
    }
    jobs.execute(made["done"])
    jobs.execute(made["failed"])
    cancel(jobs, made["cancelled"])
    return made


CONDITIONS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "function": ({"function": double}, {"done", "cancelled", "due"}),
    "its name": ({"function": "refuse"}, {"failed", "waiting"}),
    "key": ({"key": "f"}, {"failed"}),
    "tenant": ({"tenant": "acme"}, {"done", "cancelled", "waiting"}),
    "waiting": ({"waiting": True}, {"waiting"}),
    "not waiting": ({"waiting": False, "status": FunctionStatus.READY}, {"due"}),
    "error": ({"error": "NO 1"}, {"failed"}),
    "several": ({"tenant": "acme", "function": "refuse", "status": FunctionStatus.READY}, {"waiting"}),
    "nothing": ({"tenant": "nobody"}, set()),
}


@pytest.mark.parametrize("which", CONDITIONS)
def test_a_condition_lists_and_counts_those_that_meet_it(jobs: Functions[Job], which: str) -> None:
    made = some(jobs)
    conditions, expected = CONDITIONS[which]
    names = {handle.id: name for name, handle in made.items()}
    found = jobs.find(**conditions)
    assert {names[summary.identity[0]] for summary in found} == expected
    counted = jobs.counts(**conditions)
    assert sum(sum(each.values()) for each in counted.values()) == len(expected)
    for summary in found:
        assert counted[summary.function][summary.status] > 0
        assert summary.waiting is (names[summary.identity[0]] == "waiting")


def test_counts_are_by_function_and_status(jobs: Functions[Job]) -> None:
    assert jobs.counts() == {}
    some(jobs)
    ready, done = FunctionStatus.READY, FunctionStatus.DONE
    assert jobs.counts() == {
        "double": {**NONE, ready: 1, done: 1, FunctionStatus.CANCELLED: 1},
        "refuse": {**NONE, ready: 1, FunctionStatus.FAILED: 1},
    }


# requeued and cancelled by what they have in common


def test_all_that_failed_are_requeued_and_no_others(jobs: Functions[Job]) -> None:
    failed = [started(jobs, "refuse", given) for given in range(5)]
    for handle in failed:
        jobs.execute(handle)
    done, cancelled = started(jobs), started(jobs, run_at=HOUR)
    jobs.execute(done)
    cancel(jobs, cancelled)
    assert jobs.requeue_all(function="refuse", status=FunctionStatus.FAILED) == 5
    for handle in failed:
        summary = jobs.describe(handle)
        assert (summary.status, summary.attempts, summary.failure) == (FunctionStatus.READY, 0, None)
    assert jobs.describe(done).status is FunctionStatus.DONE
    assert jobs.describe(cancelled).status is FunctionStatus.CANCELLED
    assert jobs.requeue_all(everything=True) == 1


def test_a_limit_requeues_those_that_ended_first(jobs: Functions[Job]) -> None:
    handles = [started(jobs, "refuse", given) for given in range(5)]
    for handle in handles:
        jobs.execute(handle)
    assert jobs.requeue_all(function="refuse", limit=2) == 2
    assert [jobs.describe(handle).status.value for handle in handles] == ["ready"] * 2 + ["failed"] * 3


def test_failed_receipts_go_with_a_requeue_and_successful_ones_stay(jobs: Functions[Job]) -> None:
    def fails(session: Session) -> None:
        raise ValueError("for good")

    @jobs.function("half")
    def half(run: FunctionRun[Any]) -> int:
        run.step("good", lambda session: None)
        run.step("bad", fails)
        return 1

    with jobs.session_factory.begin() as session:
        handles = [jobs.start(session, half), jobs.start(session, half)]
    for handle in handles:
        jobs.execute(handle)
        assert [receipt.step for receipt in jobs.steps(handle)] == ["good", "bad"]
    assert jobs.requeue_all(function=half) == 2
    for handle in handles:
        assert [receipt.step for receipt in jobs.steps(handle)] == ["good"]


def test_one_that_fails_again_meanwhile_is_not_requeued_twice(
    engine: Engine, jobs: Functions[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    for given in range(4):
        jobs.execute(started(jobs, "refuse", given))
    monkeypatch.setattr(bulk, "_BATCH", 1)
    store, worker = jobs._verbs.store, functions_on(engine)
    execute = store.execute
    batches: list[int] = []

    def then_fail_again(work: Any) -> Any:
        batches.append(execute(work))
        assert len(batches) < 10
        for summary in worker.find(status=FunctionStatus.READY):
            worker.execute(summary.handle)
        return batches[-1]

    monkeypatch.setattr(store, "execute", then_fail_again)
    assert jobs.requeue_all(status=FunctionStatus.FAILED) == 4
    assert batches == [1, 1, 1, 1, 0]


def test_all_that_live_are_cancelled_and_a_running_one_is_asked(jobs: Functions[Job]) -> None:
    waiting = [started(jobs, tenant="acme", run_at=HOUR) for _ in range(3)]
    other, over = started(jobs, tenant="other"), started(jobs, tenant="acme")
    jobs.execute(over)
    running = started(jobs, tenant="acme")
    holder = jobs._verbs.claim(running.id, run_now=True)
    assert holder is not None
    with jobs.session_factory.begin() as session:
        loaded = session.get(Job, waiting[0].id)
        assert loaded is not None
        assert jobs.cancel_all(session, tenant="acme") == 4
        assert loaded.status is FunctionStatus.CANCELLED
        assert jobs.cancel_all(session, tenant="acme") == 0
    for handle in waiting:
        with pytest.raises(RunCancelled):
            jobs.result(handle)
    assert jobs.describe(other).cancel_requested_at is None
    assert jobs.describe(over).status is FunctionStatus.DONE
    asked = jobs.describe(running)
    assert asked.status is FunctionStatus.RUNNING
    assert asked.cancel_requested_at is not None
    holder.cancel()
    assert jobs.describe(running).status is FunctionStatus.CANCELLED


def test_a_cancel_of_many_is_undone_with_the_callers_transaction(jobs: Functions[Job]) -> None:
    handles = [started(jobs) for _ in range(3)]
    with jobs.session_factory() as session:
        assert jobs.cancel_all(session, everything=True, limit=2) == 2
        session.rollback()
    assert {jobs.describe(handle).status for handle in handles} == {FunctionStatus.READY}


def test_a_row_that_is_locked_is_left(engine: Engine, jobs: Functions[Job]) -> None:
    handles = [started(jobs, "refuse", given) for given in range(3)]
    with engine.begin() as connection:
        connection.execute(select(Job.__table__.c.id).where(Job.id == handles[0].id).with_for_update())
        with jobs.session_factory.begin() as session:
            assert jobs.cancel_all(session, function="refuse") == 2
    with jobs.session_factory.begin() as session:
        assert jobs.cancel_all(session, function="refuse") == 1
    with engine.begin() as connection:
        connection.execute(select(Job.__table__.c.id).where(Job.id == handles[0].id).with_for_update())
        assert jobs.requeue_all(function="refuse") == 2
    assert jobs.requeue_all(function="refuse") == 1


def test_nothing_is_done_to_all_runs_by_leaving_the_conditions_out(jobs: Functions[Job], plans: Runs[Plan]) -> None:
    with jobs.session_factory() as session:
        for call in (
            jobs.requeue_all,
            lambda: jobs.requeue_all(tenant=None),
            lambda: jobs.cancel_all(session),
            plans.requeue_all,
            lambda: plans.cancel_all(session, status=None),
        ):
            with pytest.raises(UsageError, match="no condition"):
                call()
        with pytest.raises(UsageError, match="tenant was given"):
            jobs.cancel_all(session, everything=True, tenant="acme")
        with pytest.raises(UsageError, match="at least 1"):
            jobs.requeue_all(everything=True, limit=0)


def test_many_plans_are_requeued_and_cancelled_likewise(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    failed, waiting = approved_plan(session_factory), approved_plan(session_factory)
    run = plans.claim(failed)
    assert run is not None
    run.fail(ValueError("no"))
    assert plans.requeue_all(error="no") == 1
    assert column(engine, failed, "status") is PlanStatus.APPROVED
    with session_factory.begin() as session:
        assert plans.cancel_all(session, status=PlanStatus.APPROVED) == 2
    assert column(engine, waiting, "status") is PlanStatus.CANCELLED


def test_over_asyncio_they_are_the_same_verbs(engine: Engine, jobs: Functions[Job]) -> None:
    some(jobs)

    async def observing() -> None:
        other = create_async_engine(engine.url)
        functions = AsyncFunctions(async_sessionmaker(other), Job, JobStep)
        assert await functions.counts() == jobs.counts()
        assert len(await functions.find(waiting=True)) == 1
        assert await functions.requeue_all(status=FunctionStatus.FAILED) == 1
        async with AsyncSession(other) as session, session.begin():
            assert await functions.cancel_all(session, tenant="acme") == 1
        assert await functions.reap() == 0
        assert await functions.purge(timedelta(0)) == 3
        await other.dispose()

    asyncio.run(observing())


# what a page costs


@pytest.fixture
def many(engine: Engine, jobs: Functions[Job]) -> Functions[Job]:
    """200,000 runs, of which one function has every hundredth."""
    with engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO job (id, function, tenant, status, created_at, finished_at)"
                " SELECT gen_random_uuid(), CASE WHEN n % 100 = 0 THEN 'refuse' ELSE 'double' END, 't' || n % 7,"
                " CASE WHEN n % 20 = 0 THEN 'ready' ELSE 'done' END, now() - n * interval '1 second',"
                " CASE WHEN n % 20 = 0 THEN NULL ELSE now() - n * interval '1 second' END"
                " FROM generate_series(1, 200000) n"
            )
        )
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE job"))
    return jobs


def read(engine: Engine, call: Callable[[], Any]) -> int:
    """How many rows of the run table the last statement of a call looks at."""
    with statements(engine) as sent:
        call()
    statement, parameters = sent[-1], sent.parameters[-1]
    with engine.connect() as connection:
        found = connection.exec_driver_sql(f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {statement}", parameters)
        plan: Any = found.scalar_one()
        connection.rollback()
    root = (json.loads(plan) if isinstance(plan, str) else plan)[0]["Plan"]
    return sum(rows_of(root))


def rows_of(plan: dict[str, Any]) -> list[int]:
    scans = plan.get("Relation Name") == "job" and plan["Node Type"] != "ModifyTable"
    own = [plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)] if scans else []
    own = [round(each * plan["Actual Loops"]) for each in own]
    return own + [each for below in plan.get("Plans", ()) for each in rows_of(below)]


def test_no_page_reads_the_whole_table(engine: Engine, many: Functions[Job]) -> None:
    first = many.find(limit=50)
    assert read(engine, lambda: many.find(limit=50)) <= 60
    assert read(engine, lambda: many.find(limit=50, after=first[-1].cursor)) <= 110
    deep = many.find(limit=1, older_than=timedelta(seconds=150_000))[0].cursor
    assert read(engine, lambda: many.find(limit=50, after=deep)) <= 110
    assert read(engine, lambda: many.find(limit=50, function="refuse")) <= 60
    assert read(engine, lambda: many.find(limit=50, function="refuse", after=deep)) <= 110
    assert read(engine, lambda: many.find(limit=50, function="refuse", older_than=timedelta(seconds=150_000))) <= 60
    assert read(engine, lambda: many.find(key="nobody's", function="refuse")) == 0


def test_purging_reads_what_it_deletes(engine: Engine, many: Functions[Job]) -> None:
    # What is deleted is read twice: as it is locked, and as it is found by its key.
    assert read(engine, lambda: many.purge(timedelta(seconds=190_000), batch=100, limit=100)) <= 2 * 100
    assert many.purge(timedelta(seconds=199_000)) + 100 >= 900
