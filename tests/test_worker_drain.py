"""Workers that are told to stop, as processes by real signals: they drain, give back what is left, and leave."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import DurableError, Runs
from sqla_durable.asyncio import AsyncRun, AsyncRuns, AsyncWorker
from sqla_durable.dispatch import Dispatcher
from sqla_durable.room import Wake
from tests.support import (
    Background,
    Plan,
    PlanStatus,
    PlanStep,
    approved_plan,
    column,
    entries,
    eventually,
    locked,
    wait_until_blocked,
    write_entry,
)
from tests.support_processes import Program
from tests.support_workers import BOTH, ONE_AND_SLOWLY_THE_OTHER, Crew, plans_by, wait_for

LEAVES = 5.0  # an idle machine needs a tenth of a second; the grace time is 20 s
SIGNALS = [signal.SIGTERM, signal.SIGINT]


def listeners(engine: Engine) -> int:
    listens = "datname = current_database() AND query = 'LISTEN sqla_durable'"
    query = text(f"SELECT count(*) FROM pg_stat_activity WHERE {listens}")
    with engine.connect() as connection:
        return connection.scalar(query) or 0


Start = Callable[..., Program]


@pytest.fixture
def started(engine: Engine) -> Iterator[Start]:
    """Start a worker as a process."""
    programs: list[Program] = []

    def start(form: str, behaviour: str, **options: Any) -> Program:
        given = {
            "model": "plan",
            "behaviour": behaviour,
            "poll": 0.05,
            "listen": False,
            "grace": 20,
            "releasing": 1,
            **options,
        }
        url = engine.url.render_as_string(hide_password=False)
        programs.append(Program("worker", url, form, json.dumps(given)))
        return programs[-1]

    yield start
    for program in programs:
        program.__exit__()


def taken_at_once(engine: Engine, factory: sessionmaker[Session], ident: Any) -> None:
    """The run was given back, so that the next worker need not wait for a lease."""
    eventually(lambda: column(engine, ident, "status") is PlanStatus.APPROVED, "the run to be given back")
    assert column(engine, ident, "lease_owner") is None
    run = Runs(factory, Plan, PlanStep).claim(ident)
    assert run is not None
    run.finish()


@pytest.mark.parametrize(("form", "number"), list(zip(BOTH, SIGNALS, strict=True)))
def test_told_to_stop_it_claims_no_more_and_lets_what_is_under_way_finish(
    engine: Engine, session_factory: sessionmaker[Session], started: Start, form: str, number: signal.Signals
) -> None:
    ident = approved_plan(session_factory)
    program = started(form, "asks")
    assert program.receive() == ["started", 1]
    program.process.send_signal(number)
    time.sleep(0.2)  # it has heard of it, and has polled no more
    later = approved_plan(session_factory)
    program.send("go on")
    assert program.receive() == "finished"
    assert program.receive() == "stopped"
    assert program.wait() == 0
    assert column(engine, ident, "status") is PlanStatus.EXECUTED
    assert (column(engine, later, "status"), column(engine, later, "attempts")) == (PlanStatus.APPROVED, 0)


@pytest.mark.parametrize("form", BOTH)
def test_a_worker_with_nothing_to_do_leaves_at_once(engine: Engine, started: Start, form: str) -> None:
    program = started(form, "short", listen=True, poll=3600)
    eventually(lambda: listeners(engine), "a listener")
    before = time.monotonic()
    program.process.terminate()
    assert program.receive() == "stopped"
    assert program.wait() == 0
    assert time.monotonic() - before < LEAVES


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize("behaviour", ["hangs", "hangs in step"])
def test_what_does_not_finish_within_the_grace_time_is_given_back(
    engine: Engine, session_factory: sessionmaker[Session], started: Start, form: str, behaviour: str
) -> None:
    ident = approved_plan(session_factory)
    program = started(form, behaviour, grace=0.2)
    assert program.receive() == ["started", 1]
    if behaviour == "hangs in step":
        assert program.receive() == "in step"
    program.process.terminate()
    assert program.receive() == "stopped"
    assert program.wait() == 0
    taken_at_once(engine, session_factory, ident)
    assert entries(engine) == []


def test_a_task_that_swallows_its_cancellation_has_its_run_given_back_all_the_same(
    engine: Engine, session_factory: sessionmaker[Session], started: Start
) -> None:
    ident = approved_plan(session_factory)
    program = started("async", "swallows", grace=0.1)
    assert program.receive() == ["started", 1]
    program.process.terminate()
    taken_at_once(engine, session_factory, ident)


@pytest.mark.parametrize(
    ("form", "behaviour"),
    [("sync", "hangs"), ("sync", "hangs in step"), ("async", "hangs"), ("async", "hangs in step"), ("async", "blocks")],
)
def test_a_second_signal_ends_the_process_at_once(
    engine: Engine, session_factory: sessionmaker[Session], started: Start, form: str, behaviour: str
) -> None:
    number = signal.SIGINT if behaviour == "hangs" else signal.SIGTERM
    approved_plan(session_factory)
    program = started(form, behaviour)
    assert program.receive() == ["started", 1]
    if behaviour == "hangs in step":
        assert program.receive() == "in step"
    program.process.send_signal(number)
    time.sleep(0.3)  # one signal each: two of a kind that are pending are one
    assert program.process.poll() is None
    program.process.send_signal(number)
    before = time.monotonic()
    assert program.wait() != 0
    assert time.monotonic() - before < LEAVES


def test_a_released_body_goes_on_in_its_thread_and_can_write_nothing(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    ident = approved_plan(session_factory)
    started, gate, ended = threading.Event(), threading.Event(), threading.Event()
    told: list[BaseException] = []

    def carry_out(run: Any) -> None:
        run.step("first", write_entry, "first")
        started.set()
        wait_for(gate, run)
        for write in (lambda: run.step("second", write_entry, "second"), run.finish, run.renew, run.release):
            try:
                write()
            except DurableError as error:
                told.append(error)
        ended.set()

    crew = Crew("sync", engine.url, plans_by(carry_out), grace=timedelta(0))
    background = Background(crew.run)
    assert started.wait(20)
    crew.stop()
    background.result()
    taken_at_once(engine, session_factory, ident)
    gate.set()
    assert ended.wait(20)
    assert len(told) == 4
    assert entries(engine) == ["first"]
    assert (column(engine, ident, "status"), column(engine, ident, "attempts")) == (PlanStatus.EXECUTED, 2)


@pytest.mark.parametrize("form", ONE_AND_SLOWLY_THE_OTHER)
def test_a_release_that_waits_for_a_lock_holds_the_drain_up_for_seconds_only_and_is_made_in_the_end(
    engine: Engine, session_factory: sessionmaker[Session], started: Start, form: str
) -> None:
    ident = approved_plan(session_factory)
    program = started(form, "hangs", grace=0.1)
    assert program.receive() == ["started", 1]
    with locked(engine, ident):
        program.process.terminate()
        wait_until_blocked(engine)
        assert program.receive() == "stopped"
        assert program.wait() == 0
    # Over asyncio the waiting statement was cancelled when the loop was closed; then the lease is left.
    if form == "sync":
        taken_at_once(engine, session_factory, ident)


@pytest.mark.parametrize("form", BOTH)
def test_what_was_claimed_but_not_started_is_given_back_too(
    engine: Engine, session_factory: sessionmaker[Session], form: str
) -> None:
    idents = [approved_plan(session_factory) for _ in range(4)]
    crew = Crew(form, engine.url, plans_by(lambda run: wait_for(threading.Event(), run)), grace=timedelta(0))

    def stop_while_claiming(*_: object) -> None:
        crew.worker.stop()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sqla_durable.dispatch._Source.rest", lambda source: stop_while_claiming() or 0.0)
        Background(crew.run).result()
    for ident in idents:
        taken_at_once(engine, session_factory, ident)


def test_a_cancelled_worker_gives_back_at_once_what_is_under_way(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    idents = [approved_plan(session_factory) for _ in range(3)]

    async def main() -> float:
        async_engine = create_async_engine(engine.url)
        started = asyncio.Semaphore(0)

        async def hangs(run: AsyncRun[Plan]) -> None:
            started.release()
            await asyncio.sleep(3600)

        plans = AsyncRuns(async_sessionmaker(async_engine), Plan, PlanStep)
        working = asyncio.create_task(AsyncWorker(plans.handled_by(hangs), grace=timedelta(hours=1)).run())
        for _ in idents:
            await started.acquire()
        before = time.monotonic()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        took = time.monotonic() - before
        assert asyncio.all_tasks() == {asyncio.current_task()}
        await async_engine.dispose()
        return took

    assert Background(lambda: asyncio.run(main())).result() < LEAVES
    for ident in idents:
        taken_at_once(engine, session_factory, ident)


def test_a_worker_among_other_tasks_lets_them_go_on_while_it_stops(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    async def main() -> float:
        async_engine = create_async_engine(engine.url)
        plans = AsyncRuns(async_sessionmaker(async_engine), Plan, PlanStep)
        worker = AsyncWorker(plans.handled_by(lambda run: run.renew()), listen=True)
        working = asyncio.create_task(worker.run())
        await asyncio.to_thread(eventually, lambda: listeners(engine), "a listener")
        longest, before = 0.0, time.monotonic()
        worker.stop()
        while not working.done():
            await asyncio.sleep(0.01)
            longest, before = max(longest, time.monotonic() - before), time.monotonic()
        await working
        await async_engine.dispose()
        return longest

    assert asyncio.run(main()) < 0.3


@pytest.mark.parametrize("turns", range(4))
def test_a_cancellation_that_comes_together_with_a_wake_up_is_not_lost(engine: Engine, turns: int) -> None:
    async def main() -> None:
        async_engine = create_async_engine(engine.url)
        plans = AsyncRuns(async_sessionmaker(async_engine), Plan, PlanStep)
        worker = AsyncWorker(plans.handled_by(lambda run: run.renew()), listen=False, poll=timedelta(hours=1))
        working = asyncio.create_task(worker.run())
        await asyncio.sleep(0.3)
        assert worker._room is not None
        worker._room._shares[0].wake.__self__._wake(Wake.FREED)  # type: ignore[attr-defined]
        for _ in range(turns):
            await asyncio.sleep(0)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(working, 10)
        await async_engine.dispose()

    asyncio.run(main())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), LookupError("a fault")], ids=repr)
def test_no_slot_claims_any_more_after_the_worker_was_interrupted_or_has_failed(
    engine: Engine, session_factory: sessionmaker[Session], error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    idents = [approved_plan(session_factory) for _ in range(4)]
    started, gate = threading.Event(), threading.Event()

    def carry_out(run: Any) -> None:
        started.set()
        wait_for(gate, run)

    def fails(*_: object, **__: object) -> None:
        assert started.wait(20)
        threading.Timer(0.2, gate.set).start()
        raise error

    monkeypatch.setattr(Dispatcher, "_wait", fails)
    with pytest.raises(type(error)):
        Background(Crew("sync", engine.url, plans_by(carry_out), concurrency=1).run).result()
    done = PlanStatus.EXECUTED
    eventually(lambda: done in [column(engine, ident, "status") for ident in idents], "the end of what was under way")
    time.sleep(0.2)  # in which the slot would have claimed the next
    assert sorted(column(engine, ident, "attempts") for ident in idents) == [0, 0, 0, 1]
