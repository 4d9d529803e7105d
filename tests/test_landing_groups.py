"""Runs that finish while a landing is under way land with the next one; each is told what became of it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.exc import DBAPIError, ProgrammingError
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Cancelled, DatabaseUnavailable, LostLease, Run, Runs
from sqla_durable.asyncio import AsyncRun, AsyncRuns
from tests.support import (
    Background,
    Plan,
    PlanStatus,
    PlanStep,
    approved_plan,
    column,
    eventually,
    let_lapse,
    locked,
    wait_until_blocked,
)
from tests.support_races import closed_gate, install_gate
from tests.support_statements import Sent, statements


@pytest.fixture
def first(engine: Engine) -> Iterator[Engine]:
    """The engine of what lands, whose updates wait while the gate is closed."""
    install_gate(engine)
    first = create_engine(engine.url, connect_args={"application_name": "first"}, pool_size=20)
    yield first
    first.dispose()


@pytest.fixture
def plans(first: Engine) -> Runs[Plan]:
    return Runs(sessionmaker(first), Plan, PlanStep)


def claimed(plans: Runs[Plan], factory: sessionmaker[Session], count: int, **values: Any) -> list[Run[Plan]]:
    for _ in range(count):
        approved_plan(factory, **values)
    return plans.claim_due(count)


def landings(sent: Sent) -> list[str]:
    return [sql for sql in sent if "SET status='executed'" in sql]


def waiting(plans: Runs[Plan], count: int) -> None:
    landing = plans._verbs.claims.landings
    eventually(lambda: len(landing._waiting) == count, f"{count} runs that wait for the next landing")


def statuses(engine: Engine, runs: list[Run[Plan]]) -> list[PlanStatus]:
    return [column(engine, run.lease.identity[0], "status") for run in runs]


def told(runs: list[Run[Plan]], plans: Runs[Plan], engine: Engine, meanwhile: Callable[[], None]) -> tuple[Any, Sent]:
    """Land the first run, and the others while that is under way; say what each of them was told."""

    def finish(run: Run[Plan]) -> Any:
        try:
            run.finish()
        except (LostLease, Cancelled, DatabaseUnavailable, DBAPIError) as error:
            return type(error)
        return run.row.status

    with statements(plans._verbs.store.engine) as sent, closed_gate(engine) as open_gate:
        ahead = Background(lambda: finish(runs[0]))
        wait_until_blocked(engine)
        behind = [Background(lambda run=run: finish(run)) for run in runs[1:]]  # type: ignore[misc]
        waiting(plans, len(runs) - 1)
        meanwhile()
        open_gate()
        results = [each.result() for each in (ahead, *behind)]
    return results, sent


def test_what_finishes_while_a_landing_is_under_way_shares_the_next_one(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    runs = claimed(plans, session_factory, 6)
    results, sent = told(runs, plans, engine, lambda: None)
    assert results == [PlanStatus.EXECUTED] * 6
    assert statuses(engine, runs) == [PlanStatus.EXECUTED] * 6
    assert len(landings(sent)) == 2
    assert plans._verbs.claims.landings._led is False


def test_nothing_waits_for_a_group_to_fill(
    session_factory: sessionmaker[Session], plans: Runs[Plan], first: Engine
) -> None:
    runs = claimed(plans, session_factory, 3)
    with statements(first) as sent:
        for run in runs:
            run.finish()
    assert len(landings(sent)) == 3


def test_each_of_a_group_is_fenced_on_its_own_and_told_what_became_of_it(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    runs = claimed(plans, session_factory, 5)
    other: Runs[Plan] = Runs(session_factory, Plan, PlanStep, owner="other")
    lost, asked, reaped = (run.lease.identity[0] for run in runs[1:4])

    def meanwhile() -> None:
        let_lapse(session_factory, lost)
        assert other.claim(lost) is not None
        with session_factory.begin() as session:
            assert other.request_cancel(session, asked)
        let_lapse(session_factory, reaped)
        assert other.heal(reaped)

    results, _ = told(runs, plans, engine, meanwhile)
    done = PlanStatus.EXECUTED
    assert results == [done, LostLease, Cancelled, done, done], "reaped and not claimed again is not lost"
    assert statuses(engine, runs) == [done, PlanStatus.EXECUTING, PlanStatus.EXECUTING, done, done]
    assert column(engine, lost, "lease_owner") == "other"


def test_a_trigger_that_refuses_one_of_a_group_fails_that_one_only(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS"
            " 'BEGIN RAISE undefined_object USING MESSAGE = ''out of stock''; END'"
        )
        connection.exec_driver_sql(
            "CREATE TRIGGER refuse BEFORE UPDATE ON plan FOR EACH ROW"
            " WHEN (OLD.note = 'bad' AND NEW.status = 'executed') EXECUTE FUNCTION refuse()"
        )
    for note in ("first", "good", "bad", "good"):
        approved_plan(session_factory, note=note)
    runs = plans.claim_due(4)
    results, _ = told(runs, plans, engine, lambda: None)
    by_note = dict(zip((run.row.note for run in runs), results, strict=True))
    assert by_note == {"first": PlanStatus.EXECUTED, "good": PlanStatus.EXECUTED, "bad": ProgrammingError}
    bad = next(run for run in runs if run.row.note == "bad")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bad.holder, "claimed_at", time.monotonic())
        outcome = plans.execute(bad, lambda run: None)
    assert (outcome.status, "out of stock" in str(outcome.exception)) == (PlanStatus.FAILED, True)


def test_a_run_whose_row_is_locked_makes_no_other_wait(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    runs = claimed(plans, session_factory, 3)
    with locked(engine, runs[0].lease.identity[0]):
        ahead = Background(runs[0].finish)
        wait_until_blocked(engine)
        for run in runs[1:]:
            Background(run.finish).result()
        assert ahead.is_alive()
    ahead.result()
    assert statuses(engine, runs) == [PlanStatus.EXECUTED] * 3


def test_a_run_of_a_group_whose_row_is_locked_makes_no_other_of_the_group_wait(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    runs = claimed(plans, session_factory, 4)
    with locked(engine, runs[1].lease.identity[0]):
        with closed_gate(engine) as open_gate:
            ahead = Background(runs[0].finish)
            wait_until_blocked(engine)
            behind = [Background(run.finish) for run in runs[1:]]
            waiting(plans, 3)
            open_gate()
            for background in (ahead, *behind[1:]):
                background.result()
        assert behind[0].is_alive()
    behind[0].result()
    assert statuses(engine, runs) == [PlanStatus.EXECUTED] * 4


def test_a_backend_that_ends_in_a_group_landing_leaves_none_of_the_group_waiting(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    runs = claimed(plans, session_factory, 3)

    def meanwhile() -> None:
        end_waiting(engine)
        wait_until_blocked(engine)  # the next one leads
        end_waiting(engine)

    results, _ = told(runs, plans, engine, meanwhile)
    assert results == [DatabaseUnavailable] * 3
    assert plans._verbs.claims.landings._led is False
    assert plans._verbs.claims.landings._waiting == []
    assert [plans.execute(run, lambda run: None).status for run in runs] == [PlanStatus.EXECUTED] * 3


def end_waiting(engine: Engine) -> None:
    """End the backends of what lands that wait at the gate, and return when they are gone."""
    with engine.connect() as connection:
        ended = connection.exec_driver_sql(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
            " WHERE application_name = 'first' AND wait_event_type = 'Lock'"
        ).all()
    assert ended


def test_of_two_holders_of_one_run_in_a_group_the_stale_one_is_told_that_it_lost(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ahead, stale = claimed(plans, session_factory, 2)
    let_lapse(session_factory, stale.lease.identity[0])
    current = plans.claim(stale.lease.identity)
    assert current is not None
    results, _ = told([ahead, stale, current], plans, engine, lambda: None)
    assert results == [PlanStatus.EXECUTED, LostLease, PlanStatus.EXECUTED]


# over asyncio


@pytest.fixture
def async_first(first: Engine) -> AsyncEngine:
    return create_async_engine(first.url, connect_args={"application_name": "first"}, pool_size=20)


def scenario(
    async_first: AsyncEngine, idents: list[UUID], cancelled: int, engine: Engine
) -> tuple[list[Any], AsyncRuns[Plan]]:
    """Land the first while the gate is closed, the others behind it, and cancel one; return what each was told."""

    async def main() -> tuple[list[Any], AsyncRuns[Plan]]:
        plans = AsyncRuns(async_sessionmaker(async_first), Plan, PlanStep)
        runs = await plans.claim_due(len(idents))
        queue = plans._verbs.claims.landings

        async def until(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(20):
                while not condition():
                    await asyncio.sleep(0.01)

        with closed_gate(engine) as open_gate:
            tasks = [asyncio.create_task(runs[0].finish())]
            await asyncio.to_thread(wait_until_blocked, engine)
            tasks += [asyncio.create_task(run.finish()) for run in runs[1:]]
            await until(lambda: len(queue._waiting) == len(runs) - 1)
            tasks[cancelled].cancel()
            await asyncio.sleep(0.05)
            open_gate()
            results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        await async_first.dispose()
        return [
            run.row.status if result is None else type(result) for run, result in zip(runs, results, strict=True)
        ], plans

    return asyncio.run(main())


@pytest.mark.parametrize("cancelled", [0, 1, 2], ids=["the one that leads", "the next to lead", "one of the group"])
def test_whoever_is_cancelled_takes_no_other_with_it(
    engine: Engine, session_factory: sessionmaker[Session], async_first: AsyncEngine, cancelled: int
) -> None:
    idents = [approved_plan(session_factory) for _ in range(4)]
    results, plans = scenario(async_first, idents, cancelled, engine)
    assert results[cancelled] is asyncio.CancelledError
    assert [result for at, result in enumerate(results) if at != cancelled] == [PlanStatus.EXECUTED] * 3
    landed = [column(engine, ident, "status") for ident in idents]
    assert landed.count(PlanStatus.EXECUTED) >= 3
    assert plans._verbs.claims.landings._led is False
    assert plans._verbs.claims.landings._waiting == []


def test_one_whose_group_was_written_by_a_cancelled_task_learns_that_it_has_landed(
    engine: Engine, session_factory: sessionmaker[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    idents = [approved_plan(session_factory) for _ in range(3)]

    async def main() -> list[Any]:
        async_engine = create_async_engine(engine.url)
        plans = AsyncRuns(async_sessionmaker(async_engine), Plan, PlanStep)
        runs = await plans.claim_due(3)
        landing = plans._verbs.claims.landings
        land = type(landing)._land
        tasks: list[asyncio.Task[None]] = []

        def cut_off(self: Any, connection: Any, leases: Any) -> Any:
            landed = land(self, connection, leases)
            if len(leases) == 2:
                raise asyncio.CancelledError  # its answer arrives together with a cancellation
            return landed

        monkeypatch.setattr(type(landing), "_land", cut_off)
        tasks += [asyncio.create_task(run.finish()) for run in runs]
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        await async_engine.dispose()
        return [run.row.status if result is None else type(result) for run, result in zip(runs, results, strict=True)]

    results = asyncio.run(main())
    assert sorted(map(str, results)) == sorted(map(str, [asyncio.CancelledError, *[PlanStatus.EXECUTED] * 2]))
    assert {column(engine, ident, "status") for ident in idents} == {PlanStatus.EXECUTED}


def test_one_that_is_cancelled_when_it_is_just_to_lead_hands_the_lead_on(
    engine: Engine, session_factory: sessionmaker[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    idents = [approved_plan(session_factory) for _ in range(4)]

    async def main() -> list[Any]:
        async_engine = create_async_engine(engine.url)
        plans = AsyncRuns(async_sessionmaker(async_engine), Plan, PlanStep)
        runs = await plans.claim_due(4)
        landing = plans._verbs.claims.landings
        hand_over = type(landing)._hand_over
        tasks: list[asyncio.Task[None]] = []

        def handed_over(self: Any) -> None:
            hand_over(self)
            tasks[1].cancel()

        monkeypatch.setattr(type(landing), "_hand_over", handed_over)
        tasks += [asyncio.create_task(run.finish()) for run in runs]
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        assert landing._led is False
        await async_engine.dispose()
        return [type(result) for result in results]

    results = asyncio.run(main())
    assert results == [type(None), asyncio.CancelledError, type(None), type(None)]
    assert [column(engine, ident, "status") for ident in idents].count(PlanStatus.EXECUTED) == 3


# many


def test_many_threads_land_many_runs_and_each_is_told_the_truth(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    runs = claimed(plans, session_factory, 120)
    other: Runs[Plan] = Runs(session_factory, Plan, PlanStep, owner="other")
    stolen = {run.lease.identity[0] for run in random.sample(runs, 30)}
    answers: dict[UUID, str] = {}
    queue = iter(runs)
    lock = threading.Lock()

    def land() -> None:
        while True:
            with lock:
                run = next(queue, None)
            if run is None:
                return
            ident = run.lease.identity[0]
            if ident in stolen:
                let_lapse(session_factory, ident)
                other.claim(ident)
            try:
                run.finish()
                answers[ident] = "won"
            except LostLease:
                answers[ident] = "lost"

    threads = [Background(land) for _ in range(8)]
    for thread in threads:
        thread.result()
    assert Counter(answers.values()) == {"won": 90, "lost": 30}
    assert {ident for ident, answer in answers.items() if answer == "lost"} == stolen
    found = Counter(statuses(engine, runs))
    assert found == {PlanStatus.EXECUTED: 90, PlanStatus.EXECUTING: 30}


def test_many_tasks_land_while_some_are_cancelled_and_none_is_left_waiting(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    idents = [approved_plan(session_factory) for _ in range(120)]

    async def main() -> None:
        async_engine = create_async_engine(engine.url)
        plans = AsyncRuns(async_sessionmaker(async_engine), Plan, PlanStep)
        runs = await plans.claim_due(120)

        async def land(run: AsyncRun[Plan]) -> None:
            await asyncio.sleep(random.random() / 5)
            await run.finish()

        tasks = [asyncio.create_task(land(run)) for run in runs]
        for task in random.sample(tasks, 40):
            await asyncio.sleep(0.004)
            task.cancel()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        assert {type(result) for result in results} <= {type(None), asyncio.CancelledError}
        for run, result in zip(runs, results, strict=True):
            if result is None:
                assert column(engine, run.lease.identity[0], "status") is PlanStatus.EXECUTED
        assert plans._verbs.claims.landings._led is False
        assert plans._verbs.claims.landings._waiting == []
        await async_engine.dispose()

    asyncio.run(main())
    assert len(idents) == 120
