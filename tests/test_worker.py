"""A worker carries out what is due: in the slots it has, whatever one of the runs does to it."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, func, select
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import ConfigurationError, Outcome, Run, Runs, SchemaMismatch, UsageError, Worker
from sqla_durable.asyncio import AsyncRuns, AsyncWorker
from sqla_durable.holder import Holder
from sqla_durable.verbs import Verbs
from tests.support import (
    Background,
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
from tests.support_jobs import Brief, BriefStep, JobStatus, Patient, PatientStep, add_jobs
from tests.support_workers import BOTH, Crew, plans_by, wait_for, working

SECOND = timedelta(seconds=1)


def in_status(engine: Engine, status: PlanStatus) -> int:
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(Plan).where(Plan.status == status)) or 0


def all_are(engine: Engine, status: PlanStatus, count: int) -> None:
    eventually(lambda: in_status(engine, status) == count, f"{count} runs that are {status}")


def one_step(run: Any) -> None:
    run.step("only", write_entry, str(run.row.id))


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """For each claim: of what, how many it asked for, and how many it got."""
    seen: list[tuple[str, int, int]] = []
    claim_due = Verbs.claim_due

    def noted(verbs: Verbs[Any], limit: int) -> list[Holder[Any]]:
        claimed = claim_due(verbs, limit)
        seen.append((verbs.runs.entity.__name__, limit, len(claimed)))
        return claimed

    monkeypatch.setattr(Verbs, "claim_due", noted)
    return seen


# carrying out


@pytest.mark.parametrize("form", BOTH)
def test_what_is_due_is_carried_out_once_and_what_becomes_due_later_too(
    engine: Engine, session_factory: sessionmaker[Session], form: str
) -> None:
    idents = [approved_plan(session_factory) for _ in range(25)]
    with working(form, engine, plans_by(one_step), concurrency=4):
        all_are(engine, PlanStatus.EXECUTED, 25)
        idents += [approved_plan(session_factory) for _ in range(3)]
        all_are(engine, PlanStatus.EXECUTED, 28)
    assert sorted(entries(engine)) == sorted(map(str, idents))
    assert {column(engine, ident, "attempts") for ident in idents} == {1}


@pytest.mark.parametrize("form", BOTH)
def test_no_batch_is_larger_than_the_number_of_free_slots(
    engine: Engine, session_factory: sessionmaker[Session], form: str, limits: list[tuple[str, int, int]]
) -> None:
    for _ in range(9):
        approved_plan(session_factory)
    gates = [threading.Event() for _ in range(9)]
    under_way: list[UUID] = []

    def carry_out(run: Any) -> None:
        gate = gates[len(under_way)]
        under_way.append(run.row.id)
        wait_for(gate, run)

    with working(form, engine, plans_by(carry_out), concurrency=3):
        for ended in range(7):
            eventually(lambda full=3 + ended: len(under_way) == full, "full slots")  # type: ignore[misc]
            assert in_status(engine, PlanStatus.EXECUTING) <= 3
            gates[ended].set()
            all_are(engine, PlanStatus.EXECUTED, ended + 1)
        for gate in gates:
            gate.set()
        all_are(engine, PlanStatus.EXECUTED, 9)
    assert [limit for _, limit, claimed in limits if claimed][:3] == [3, 1, 1]


@pytest.mark.parametrize("form", BOTH)
def test_a_worker_whose_slots_are_taken_does_not_claim(
    engine: Engine, session_factory: sessionmaker[Session], form: str, limits: list[tuple[str, int, int]]
) -> None:
    for _ in range(2):
        approved_plan(session_factory)
    gate = threading.Event()
    with working(form, engine, plans_by(lambda run: wait_for(gate, run)), concurrency=1):
        eventually(lambda: len(limits) == 1, "a claim")
        time.sleep(0.3)  # six polls
        assert limits == [("Plan", 1, 1)]
        gate.set()
        all_are(engine, PlanStatus.EXECUTED, 2)


@pytest.mark.parametrize("form", BOTH)
def test_runs_of_several_classes_take_turns(
    engine: Engine, session_factory: sessionmaker[Session], form: str, limits: list[tuple[str, int, int]]
) -> None:
    add_jobs(engine, Brief, 6)
    add_jobs(engine, Patient, 6)
    order: list[str] = []

    def carry_out(run: Any) -> None:
        order.append(type(run.row).__name__)

    done = (
        select(func.count()).where(Brief.status == JobStatus.DONE),
        select(func.count()).where(Patient.status == JobStatus.DONE),
    )

    def all_done() -> bool:
        with engine.connect() as connection:
            return [connection.scalar(query) for query in done] == [6, 6]

    with working(form, engine, (Brief, BriefStep, carry_out), (Patient, PatientStep, carry_out), concurrency=1):
        eventually(all_done, "all of both classes")
    assert {tuple(sorted(order[at : at + 2])) for at in range(0, 12, 2)} == {("Brief", "Patient")}


# what a run may do


class Abort(BaseException):
    """Neither an error nor one of Python's own interruptions."""


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), Abort(), KeyboardInterrupt(), GeneratorExit()], ids=repr
)
def test_a_handler_that_raises_stops_no_other(
    engine: Engine, session_factory: sessionmaker[Session], form: str, error: BaseException
) -> None:
    if form == "async" and isinstance(error, KeyboardInterrupt | GeneratorExit):
        return  # over asyncio these two are what ends a loop and a coroutine
    bad = approved_plan(session_factory)
    good = [approved_plan(session_factory) for _ in range(5)]
    gate = threading.Event()

    def carry_out(run: Any) -> None:
        if run.row.id == bad and run.lease.attempt == 1:
            raise error
        wait_for(gate, run)

    with working(form, engine, plans_by(carry_out), concurrency=3):
        eventually(lambda: column(engine, bad, "failures"), "the end of the bad one")
        gate.set()
        all_are(engine, PlanStatus.EXECUTED, 5 if isinstance(error, ValueError) else 6)
    assert {column(engine, ident, "status") for ident in good} == {PlanStatus.EXECUTED}
    assert column(engine, bad, "attempts") == (1 if isinstance(error, ValueError) else 2)


@pytest.mark.parametrize("form", BOTH)
def test_a_handler_that_always_exits_is_started_no_more_often_than_its_attempts(
    engine: Engine, session_factory: sessionmaker[Session], form: str
) -> None:
    ident = approved_plan(session_factory)
    started: list[int] = []

    def carry_out(run: Any) -> None:
        started.append(run.lease.attempt)
        sys.exit("no more")

    with working(form, engine, plans_by(carry_out)):
        all_are(engine, PlanStatus.DEAD, 1)
    assert started == [1, 2, 3]
    assert "SystemExit('no more')" in column(engine, ident, "error")["message"]


@pytest.mark.parametrize("form", BOTH)
def test_a_landing_that_the_database_refuses_for_good_stops_no_other(
    engine: Engine, session_factory: sessionmaker[Session], form: str
) -> None:
    bad = approved_plan(session_factory, note="bad")
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''never''; END'"
        )
        connection.exec_driver_sql(
            "CREATE TRIGGER refuse BEFORE UPDATE ON plan FOR EACH ROW"
            " WHEN (OLD.note = 'bad' AND NEW.status IN ('executed', 'failed')) EXECUTE FUNCTION refuse()"
        )
    with working(form, engine, plans_by(one_step), concurrency=1):
        eventually(lambda: column(engine, bad, "status") is PlanStatus.EXECUTING, "its claim")
        for _ in range(3):
            approved_plan(session_factory)
        all_are(engine, PlanStatus.EXECUTED, 3)
    assert column(engine, bad, "status") is PlanStatus.EXECUTING, "left to its lease"


# between the claim and the start


@pytest.fixture
def delayed(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[Holder[Any]], None]]:
    """What happens between the claim of a run and its start, with more than a moment gone by."""
    meanwhile: list[Callable[[Holder[Any]], None]] = []
    begin = Verbs.begin

    def late(verbs: Verbs[Any], holder: Holder[Any], *arguments: Any, **options: Any) -> Outcome | None:
        if meanwhile:
            meanwhile[0](holder)
            time.sleep(0.06)  # longer than the moment of a claim
        return begin(verbs, holder, *arguments, **options)

    monkeypatch.setattr(Verbs, "begin", late)
    return meanwhile


@pytest.mark.parametrize("form", BOTH)
def test_a_run_that_was_lost_before_it_could_start_is_not_started(
    engine: Engine,
    session_factory: sessionmaker[Session],
    form: str,
    delayed: list[Callable[[Holder[Any]], None]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    other: Runs[Plan] = Runs(session_factory, Plan, PlanStep, owner="other")
    ident = approved_plan(session_factory)
    started: list[UUID] = []

    def steal(holder: Holder[Any]) -> None:
        let_lapse(session_factory, ident)
        assert other.claim(ident) is not None

    delayed.append(steal)
    with working(form, engine, plans_by(lambda run: started.append(run.row.id)), concurrency=1):
        eventually(lambda: "lost lease" in caplog.text, "the report of the loss")
    assert started == []
    assert (column(engine, ident, "lease_owner"), column(engine, ident, "fence")) == ("other", 2)


@pytest.mark.parametrize("form", BOTH)
def test_a_run_that_was_asked_to_be_cancelled_before_it_could_start_lands_cancelled_unstarted(
    engine: Engine,
    session_factory: sessionmaker[Session],
    form: str,
    delayed: list[Callable[[Holder[Any]], None]],
) -> None:
    plans: Runs[Plan] = Runs(session_factory, Plan, PlanStep)
    ident = approved_plan(session_factory)
    started: list[UUID] = []

    def cancel(holder: Holder[Any]) -> None:
        with session_factory.begin() as session:
            assert plans.request_cancel(session, ident)

    delayed.append(cancel)
    with working(form, engine, plans_by(lambda run: started.append(run.row.id))):
        all_are(engine, PlanStatus.CANCELLED, 1)
    assert started == []


@pytest.mark.parametrize("form", BOTH)
def test_a_run_that_lapsed_before_it_could_start_is_renewed_and_carried_out(
    engine: Engine,
    session_factory: sessionmaker[Session],
    form: str,
    delayed: list[Callable[[Holder[Any]], None]],
) -> None:
    ident = approved_plan(session_factory)

    def lapse(holder: Holder[Any]) -> None:
        let_lapse(session_factory, ident)

    def carry_out(run: Any) -> None:
        with engine.connect() as connection:
            assert connection.scalar(select(Plan.lease_expires_at > func.clock_timestamp()).where(Plan.id == ident))

    delayed.append(lapse)
    with working(form, engine, plans_by(carry_out), concurrency=1):  # no slot to take it over itself
        all_are(engine, PlanStatus.EXECUTED, 1)
    assert column(engine, ident, "attempts") == 1


def test_over_asyncio_runs_that_wait_behind_a_blocked_loop_are_fenced_again(
    engine: Engine, session_factory: sessionmaker[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sqla_durable.tenure._MOMENT", 0.5)
    other: Runs[Plan] = Runs(session_factory, Plan, PlanStep, owner="other")
    idents = [approved_plan(session_factory) for _ in range(2)]
    started: list[UUID] = []

    def carry_out(run: Any) -> None:
        started.append(run.row.id)
        if len(started) == 1:
            (waiting,) = set(idents) - set(started)
            let_lapse(session_factory, waiting)
            assert other.claim(waiting) is not None
            time.sleep(0.6)  # blocks the loop for longer than the moment of the claim

    with working("async", engine, plans_by(carry_out), concurrency=2):
        all_are(engine, PlanStatus.EXECUTED, 1)
    assert len(started) == 1


# starting and stopping


@pytest.mark.parametrize("form", BOTH)
def test_a_worker_that_is_told_to_stop_before_it_runs_claims_nothing(
    engine: Engine, session_factory: sessionmaker[Session], form: str
) -> None:
    ident = approved_plan(session_factory)
    if form == "sync":
        worker = Worker(Runs(session_factory, Plan, PlanStep).handled_by(one_step))
        worker.stop()
        worker.run()
    else:

        async def main() -> None:
            async_engine = create_async_engine(engine.url)
            runs = AsyncRuns(async_sessionmaker(async_engine), Plan, PlanStep)
            worker = AsyncWorker(runs.handled_by(lambda run: run.renew()))
            worker.stop()
            await worker.run()
            await async_engine.dispose()

        asyncio.run(main())
    assert column(engine, ident, "status") is PlanStatus.APPROVED


def test_a_worker_is_at_work_once_at_a_time_and_may_run_again(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    worker = Worker(Runs(session_factory, Plan, PlanStep).handled_by(one_step), listen=False, poll=SECOND / 20)
    for round_ in range(2):
        background = Background(worker.run)
        approved_plan(session_factory)
        all_are(engine, PlanStatus.EXECUTED, round_ + 1)
        with pytest.raises(UsageError, match="at work already"):
            worker.run()
        with pytest.raises(UsageError, match="at work already"):
            worker.run_due(SECOND)
        worker.stop()
        background.result()


def test_an_asyncio_worker_is_at_work_once_at_a_time(engine: Engine, session_factory: sessionmaker[Session]) -> None:
    async def main() -> None:
        async_engine = create_async_engine(engine.url)
        runs = AsyncRuns(async_sessionmaker(async_engine), Plan, PlanStep)
        worker = AsyncWorker(runs.handled_by(lambda run: run.renew()), listen=False)
        first = asyncio.create_task(worker.run())
        await asyncio.sleep(0)
        with pytest.raises(UsageError, match="at work already"):
            await worker.run()
        worker.stop()
        await first
        await async_engine.dispose()

    asyncio.run(main())


@pytest.mark.parametrize("form", BOTH)
def test_outside_of_the_main_thread_no_signal_is_touched(
    engine: Engine, session_factory: sessionmaker[Session], form: str
) -> None:
    numbers = signal.SIGTERM, signal.SIGINT
    before = [signal.getsignal(number) for number in numbers]
    with working(form, engine, plans_by(one_step)):
        approved_plan(session_factory)
        all_are(engine, PlanStatus.EXECUTED, 1)
        assert [signal.getsignal(number) for number in numbers] == before


@pytest.mark.parametrize("form", BOTH)
def test_in_the_main_thread_the_signal_handlers_of_before_are_put_back(
    engine: Engine, session_factory: sessionmaker[Session], form: str
) -> None:
    def mine(*_: object) -> None: ...

    numbers = signal.SIGTERM, signal.SIGINT
    before = [signal.signal(number, mine) for number in numbers]
    during: list[Any] = []
    try:
        crew = Crew(form, engine.url, plans_by(lambda run: during.append(signal.getsignal(signal.SIGTERM))))
        approved_plan(session_factory)

        def stop() -> None:
            all_are(engine, PlanStatus.EXECUTED, 1)
            crew.stop()

        stopper = Background(stop)
        crew.run()
        stopper.result()
        assert [signal.getsignal(number) for number in numbers] == [mine, mine]
        assert during
        assert during[0] is not mine
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


# what cannot be right


def test_what_a_worker_cannot_carry_out_is_refused_with_the_remedy(session_factory: sessionmaker[Session]) -> None:
    plans: Runs[Plan] = Runs(session_factory, Plan, PlanStep)
    async_plans = AsyncRuns(async_sessionmaker(create_async_engine("postgresql+psycopg://")), Plan, PlanStep)
    wrong: list[tuple[Any, Any]] = [
        (Worker, async_plans.handled_by(lambda run: run.renew())),
        (Worker, plans),
        (AsyncWorker, async_plans),
        (Worker, one_step),
    ]
    for kind, work in wrong:
        with pytest.raises(ConfigurationError, match=r"handled_by\(\)"):
            kind(work)
    with pytest.raises(ConfigurationError, match=r"needs something to carry out"):
        Worker()
    with pytest.raises(ConfigurationError, match=r"two handlers for the same runs"):
        Worker(plans.handled_by(one_step), plans.handled_by(one_step))


@pytest.mark.parametrize("kind", [Worker, AsyncWorker])
@pytest.mark.parametrize(
    ("parameter", "value", "remedy"),
    [
        ("concurrency", 0, "at least 1"),
        ("concurrency", -1, "at least 1"),
        ("concurrency", "10", "at least 1"),
        ("concurrency", 2.5, "at least 1"),
        ("poll", 1, "a timedelta"),
        ("poll", timedelta(0), "without a pause"),
        ("poll", -SECOND, "negative"),
        ("grace", 30, "a timedelta"),
        ("grace", -SECOND, "negative"),
    ],
)
def test_a_value_out_of_its_range_is_refused_by_name(
    session_factory: sessionmaker[Session], kind: type[Any], parameter: str, value: Any, remedy: str
) -> None:
    if kind is Worker:
        work: Any = Runs(session_factory, Plan, PlanStep).handled_by(one_step)
    else:
        factory = async_sessionmaker(create_async_engine("postgresql+psycopg://"))
        work = AsyncRuns(factory, Plan, PlanStep).handled_by(lambda run: run.renew())
    with pytest.raises(ConfigurationError, match=rf"{kind.__name__}\({parameter}=.*{remedy}"):
        kind(work, **{parameter: value})


@pytest.mark.parametrize("budget", [5, -SECOND])
def test_a_budget_that_is_none_is_refused(session_factory: sessionmaker[Session], budget: Any) -> None:
    with pytest.raises(ConfigurationError, match="budget="):
        Worker(Runs(session_factory, Plan, PlanStep).handled_by(one_step)).run_due(budget)


def test_a_fault_in_the_tables_ends_the_worker_after_what_is_under_way(
    engine: Engine, session_factory: sessionmaker[Session], caplog: pytest.LogCaptureFixture
) -> None:
    ident = approved_plan(session_factory)
    gate, started = threading.Event(), threading.Event()

    def carry_out(run: Run[Plan]) -> None:
        started.set()
        wait_for(gate, run)

    caplog.set_level(logging.INFO, "sqla_durable.worker")
    background = Background(Crew("sync", engine.url, plans_by(carry_out), concurrency=2).run)
    assert started.wait(20)
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE plan RENAME available_at TO due")
    eventually(lambda: "draining: 1 run" in caplog.text, "the drain")
    with engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE plan RENAME due TO available_at")
    gate.set()
    with pytest.raises(SchemaMismatch, match="available_at"):
        background.result()
    assert column(engine, ident, "status") is PlanStatus.EXECUTED
