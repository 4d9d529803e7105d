"""Races that are run many times over: landing against reaping, two recoverers, reapers and claimers in bulk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, func, select, text, update
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Cancelled, Ending, LostLease, Outcome, Run, Runs
from sqla_durable.testing import lapse
from tests.support import Background, Plan, PlanStatus, PlanStep, approved_plan, entries, let_lapse, write_entry
from tests.support_jobs import JobStatus, OneShot, OneShotStep, add_jobs

ROUNDS = 200


def test_a_run_that_is_failed_by_a_reaper_while_it_is_finished_ends_once(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    jobs: Runs[OneShot] = Runs(session_factory, OneShot, OneShotStep)
    ended = {JobStatus.DONE: 0, JobStatus.FAILED: 0}
    for ident in add_jobs(engine, OneShot, ROUNDS):
        run = jobs.claim(ident)
        assert run is not None
        with session_factory.begin() as session:
            lapse(session, OneShot, ident)
        finished, reaped = both_at_once(lambda run=run: told(run.finish), lambda ident=ident: jobs.heal(ident))
        assert finished != reaped
        row = row_of(engine, ident)
        assert row.status is (JobStatus.DONE if finished else JobStatus.FAILED)
        assert row.lease_expires_at is None
        assert (row.error is None) == finished
        assert not jobs.heal(ident)
        assert not told(jobs_of_a_copy(run, jobs).finish)
        assert row_of(engine, ident) == row
        ended[row.status] += 1
    assert sum(ended.values()) == ROUNDS


@pytest.mark.parametrize("how", ["finish", "fail"])
def test_a_request_to_cancel_a_run_while_it_is_landed_is_recorded_or_refused_and_never_both(
    engine: Engine, session_factory: sessionmaker[Session], how: str
) -> None:
    plans: Runs[Plan] = Runs(session_factory, Plan, PlanStep)
    for _ in range(ROUNDS // 2):
        ident = approved_plan(session_factory)
        run = plans.claim(ident)
        assert run is not None

        def land(run: Run[Plan] = run) -> bool:
            try:
                run.finish() if how == "finish" else run.fail(ValueError("no stock"))
            except Cancelled:
                return False
            return True

        def ask(ident: UUID = ident) -> bool:
            with session_factory.begin() as session:
                return plans.request_cancel(session, ident)

        landed, recorded = both_at_once(land, ask)
        assert landed != recorded
        with Session(engine) as session:
            plan = session.get_one(Plan, ident)
            assert (plan.cancel_requested_at is not None) == recorded
            landed_in = PlanStatus.EXECUTED if how == "finish" else PlanStatus.FAILED
            assert plan.status is (landed_in if landed else PlanStatus.EXECUTING)
        if recorded:
            assert plans.execute(run, lambda run: pytest.fail("cancelled")).status is PlanStatus.CANCELLED
        assert not ask()


def test_of_two_recoverers_with_the_same_list_one_runs_the_body(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    dead: Runs[Plan] = Runs(session_factory, Plan, PlanStep, owner="dead")
    for position in range(20):
        ident = approved_plan(session_factory)
        assert dead.claim(ident) is not None
        let_lapse(session_factory, ident)
        answered = threading.Event()

        def recover(owner: str, ident: UUID = ident, answered: threading.Event = answered) -> Outcome:
            def body(run: Run[Plan]) -> None:
                assert answered.wait(20), "the other recoverer got no answer while this one holds the run"
                run.step("only", write_entry, owner)

            outcome = Runs(session_factory, Plan, PlanStep, owner=owner).execute(ident, body)
            answered.set()
            return outcome

        outcomes = both_at_once(lambda: recover("one"), lambda: recover("other"))
        assert sorted(outcome.ending for outcome in outcomes) == [Ending.LANDED, Ending.LOST_RACE]
        assert len(entries(engine)) == position + 1


@pytest.mark.parametrize("seconds", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_reapers_and_batch_claimers_over_the_same_rows_never_deadlock(
    engine: Engine, session_factory: sessionmaker[Session], seconds: float
) -> None:
    idents = [approved_plan(session_factory) for _ in range(200)]
    busy = create_engine(engine.url, pool_size=8)
    deadlocks: list[Any] = []
    event.listen(busy, "handle_error", lambda context: deadlocks.append(context.original_exception))
    plans: Runs[Plan] = Runs(sessionmaker(busy), Plan, PlanStep)
    claimed: set[tuple[UUID, int]] = set()
    guard = threading.Lock()

    until = time.monotonic() + seconds

    def on() -> bool:
        return time.monotonic() < until or len(claimed) <= len(idents)

    def claimer() -> None:
        while on():
            runs = plans.claim_due(30)
            with guard:
                for run in runs:
                    issued = run.lease.identity[0], run.lease.fence
                    assert issued not in claimed, "a fence was issued twice"
                    claimed.add(issued)
            with busy.begin() as connection:
                let_all_lapse(connection)

    def reaper() -> None:
        while on():
            plans.reap(40)

    for worker in [Background(call) for call in (claimer, claimer, reaper, reaper)]:
        worker.join(seconds)
        worker.result()
    busy.dispose()
    assert deadlocks == []
    with engine.connect() as connection:
        fences = dict(connection.execute(select(Plan.id, Plan.fence)).all())
    assert len(claimed) == sum(fences.values()) > len(idents)


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_claimers_that_keep_a_snapshot_carry_out_every_run_once_and_hear_of_no_conflict(
    engine: Engine, session_factory: sessionmaker[Session], isolation: str
) -> None:
    idents = {approved_plan(session_factory) for _ in range(60)}
    keeping = create_engine(engine.url, isolation_level=isolation)
    plans: Runs[Plan] = Runs(sessionmaker(keeping), Plan, PlanStep)
    together = threading.Barrier(4)

    def claimer() -> list[UUID]:
        done: list[UUID] = []
        together.wait(20)
        while runs := plans.claim_due(5):
            for run in runs:
                run.step("only", write_entry, str(run.lease.identity[0]))
                run.finish()
                done.append(run.lease.identity[0])
        return done

    done = [ident for worker in [Background(claimer) for _ in range(4)] for ident in worker.result()]
    keeping.dispose()
    assert len(done) == len(idents)
    assert set(done) == idents
    assert sorted(entries(engine)) == sorted(map(str, idents))


def let_all_lapse(connection: Connection) -> None:
    running = (
        select(Plan.id).where(Plan.status == PlanStatus.EXECUTING).with_for_update(skip_locked=True).cte("running")
    )
    past = {Plan.lease_expires_at: func.clock_timestamp() - text("interval '1 second'"), Plan.attempts: 0}
    connection.execute(update(Plan).where(Plan.id.in_(select(running.c.id))).values(past))


def both_at_once(one: Callable[[], Any], other: Callable[[], Any]) -> tuple[Any, Any]:
    barrier = threading.Barrier(2)

    def together(call: Callable[[], Any]) -> Any:
        barrier.wait(20)
        return call()

    first, second = Background(lambda: together(one)), Background(lambda: together(other))
    return first.result(), second.result()


def told(write: Callable[[], None]) -> bool:
    try:
        write()
    except LostLease:
        return False
    return True


def jobs_of_a_copy(run: Run[OneShot], jobs: Runs[OneShot]) -> Any:
    """A second process's handle on the same lease, which has not been told anything yet."""
    from sqla_durable.holder import Holder

    holder = run.holder
    return Run(Holder(holder.steps, holder.landings, run.lease, OneShot, (), cancel_requested=False, created_at=None))


def row_of(engine: Engine, ident: int) -> Any:
    with engine.connect() as connection:
        return connection.execute(select(OneShot.__table__).where(OneShot.id == ident)).one()
