"""One worker for ordinary functions and coroutine functions: neither waits for the other, and they share all else."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import ConfigurationError, DurableError, Ending, Functions, Run, Runs, Worker
from sqla_durable.asyncio import AsyncFunctions, AsyncRun, AsyncRuns, AsyncWorker
from sqla_durable.asyncio import worker as async_worker
from sqla_durable.claims import Claims
from sqla_durable.room import Room, Wake
from tests.support import (
    DEADLINE,
    Background,
    Plan,
    PlanStatus,
    PlanStep,
    approved_plan,
    column,
    eventually,
)
from tests.support_async import Facade
from tests.support_deadline import Status, Timed, TimedBase, TimedStep, add, row
from tests.support_functions import DurableRun, DurableStep, tables
from tests.support_jobs import Patient, PatientStep, add_jobs
from tests.support_workers import MIXED, QUICK, Crew, plans_by, wait_for, working

BUDGET = timedelta(seconds=DEADLINE / 2)
HOUR = timedelta(hours=1)


def patients_by(handler: Callable[[Any], None]) -> Any:
    """What the first of a mixed crew's works is made of: it is done in threads."""
    return Patient, PatientStep, handler


def in_thread(run: Any) -> bool:
    return not isinstance(run, Facade)


def statuses(engine: Engine, table: str) -> Counter[str]:
    with engine.connect() as connection:
        return Counter(connection.scalars(text(f"SELECT status FROM {table}")))


def done(engine: Engine, *, threads: int, tasks: int) -> Callable[[], bool]:
    def are() -> bool:
        return (statuses(engine, "patient")["done"], statuses(engine, "plan")["executed"]) == (threads, tasks)

    return are


class Gauge:
    """How many runs are under way, at the most, and which have begun."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0
        self.begun: list[bool] = []

    def carry_out(self, run: Any) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
            self.begun.append(in_thread(run))
        if in_thread(run):
            time.sleep(0.02)
        else:
            run.awaits(asyncio.sleep(0.02))
        with self._lock:
            self._now -= 1


# together


@pytest.mark.parametrize("concurrency", [1, 2, 3, 10])
def test_both_forms_are_carried_out_and_share_the_slots(
    engine: Engine, session_factory: sessionmaker[Session], concurrency: int
) -> None:
    add_jobs(engine, Patient, 25)
    for _ in range(25):
        approved_plan(session_factory)
    gauge = Gauge()
    crew = Crew(MIXED, engine.url, patients_by(gauge.carry_out), plans_by(gauge.carry_out), concurrency=concurrency)
    assert crew.run_due(BUDGET) == Counter({Ending.LANDED: 50})
    assert gauge.most <= concurrency
    assert Counter(gauge.begun) == {True: 25, False: 25}


@pytest.mark.parametrize("form", [True, False], ids=["threads", "tasks"])
def test_one_form_has_every_slot_where_the_other_has_nothing_to_do(
    engine: Engine, session_factory: sessionmaker[Session], form: bool
) -> None:
    add_jobs(engine, Patient, 4 if form else 0)
    for _ in range(0 if form else 4):
        approved_plan(session_factory)
    all_at_once, go = threading.Barrier(5, timeout=DEADLINE), threading.Event()

    def carry_out(run: Any) -> None:
        if in_thread(run):
            all_at_once.wait()
        else:
            run.awaits(asyncio.to_thread(all_at_once.wait))
        wait_for(go, run)

    with working(MIXED, engine, patients_by(carry_out), plans_by(carry_out), concurrency=4):
        all_at_once.wait()
        go.set()


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_long_queue_of_one_form_does_not_hold_the_other_up(
    engine: Engine, session_factory: sessionmaker[Session], concurrency: int
) -> None:
    add_jobs(engine, Patient, 30)
    for _ in range(30):
        approved_plan(session_factory)
    gauge = Gauge()
    crew = Crew(MIXED, engine.url, patients_by(gauge.carry_out), plans_by(gauge.carry_out), concurrency=concurrency)
    crew.run_due(BUDGET)
    begun = gauge.begun[max(gauge.begun.index(True), gauge.begun.index(False)) :][: 6 * concurrency]
    assert abs(begun.count(True) - begun.count(False)) <= concurrency + 2, gauge.begun


def test_a_handler_that_blocks_its_thread_holds_no_coroutine_up(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    add_jobs(engine, Patient, 2)
    blocked, go = threading.Semaphore(0), threading.Event()

    def blocks(run: Any) -> None:
        blocked.release()
        assert go.wait(DEADLINE)

    with working(MIXED, engine, patients_by(blocks), plans_by(lambda run: None), concurrency=4):
        for _ in range(2):
            assert blocked.acquire(timeout=DEADLINE)
        for _ in range(3):
            ident = approved_plan(session_factory)
            eventually(lambda ident=ident: column(engine, ident, "status") is PlanStatus.EXECUTED, "the coroutine")
        assert statuses(engine, "patient") == {"running": 2}
        go.set()


def test_a_coroutine_that_blocks_the_loop_holds_no_thread_up(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    add_jobs(engine, Patient, 0)
    approved_plan(session_factory)
    blocked, go = threading.Event(), threading.Event()

    def blocks(run: Any) -> None:
        blocked.set()
        assert go.wait(DEADLINE)

    with working(MIXED, engine, patients_by(lambda run: None), plans_by(blocks), concurrency=2):
        assert blocked.wait(DEADLINE)
        for count in (3, 6):
            add_jobs(engine, Patient, 3)
            eventually(done(engine, threads=count, tasks=0), "the runs in threads")
        go.set()


@pytest.mark.parametrize("concurrency", [1, 2, 3])
def test_a_loop_that_is_blocked_while_it_claims_leaves_slots_to_threads_and_never_has_too_many(
    engine: Engine, session_factory: sessionmaker[Session], concurrency: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_jobs(engine, Patient, 0)
    idents = [approved_plan(session_factory) for _ in range(concurrency)]
    blocked, go, used = threading.Event(), threading.Event(), threading.Event()
    due = Claims.due
    gauge = Gauge()

    def blocking(claims: Claims[Any], limit: int) -> Any:
        claimed = due(claims, limit)
        if claims.store.sessions.is_async and not blocked.is_set():
            assert len(claimed) == concurrency
            blocked.set()
            assert used.wait(DEADLINE)
        return claimed

    def carry_out(run: Any) -> None:
        gauge.carry_out(run)
        if in_thread(run):
            used.set()
            assert go.wait(DEADLINE)

    monkeypatch.setattr(Claims, "due", blocking)
    options: dict[str, Any] = {"concurrency": concurrency}
    with working(MIXED, engine, patients_by(carry_out), plans_by(carry_out), **options):
        assert blocked.wait(DEADLINE)
        add_jobs(engine, Patient, 1)
        assert used.wait(DEADLINE)
        if concurrency > 1:
            eventually(done(engine, threads=0, tasks=concurrency), "the others, in the slots that are left")
        else:
            eventually(lambda: column(engine, idents[0], "status") is PlanStatus.APPROVED, "the run to be handed back")
            assert column(engine, idents[0], "attempts") == 0
        go.set()
        eventually(done(engine, threads=1, tasks=concurrency), "the rest")
    assert gauge.most <= concurrency
    assert {column(engine, each, "attempts") for each in idents} == {1}
    assert sorted(column(engine, each, "fence") for each in idents) == [1] * (concurrency - 1) + [2], (
        "one is claimed anew"
    )


def test_a_claim_for_threads_that_waits_for_the_database_does_not_block_the_loop(
    engine: Engine, session_factory: sessionmaker[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_jobs(engine, Patient, 1)
    claiming, go = threading.Event(), threading.Event()
    due = Claims.due

    def slow(claims: Claims[Any], limit: int) -> Any:
        if not claims.store.sessions.is_async:
            claiming.set()
            assert go.wait(DEADLINE)
        return due(claims, limit)

    monkeypatch.setattr(Claims, "due", slow)

    async def main() -> float:
        async_engine = create_async_engine(engine.url)
        worker = AsyncWorker(
            Runs(session_factory, Patient, PatientStep).handled_by(lambda run: None),
            AsyncRuns(async_sessionmaker(async_engine), Plan, PlanStep).handled_by(lambda run: run.renew()),
            **QUICK,
        )
        working = asyncio.create_task(worker.run())
        longest, before = 0.0, time.monotonic()
        for _ in range(50):
            await asyncio.sleep(0.01)
            longest, before = max(longest, time.monotonic() - before), time.monotonic()
        assert claiming.is_set()
        go.set()
        await asyncio.to_thread(eventually, done(engine, threads=1, tasks=0), "the run in a thread")
        worker.stop()
        await working
        await async_engine.dispose()
        return longest

    assert Background(lambda: asyncio.run(main())).result() < 0.3


def counted_looks(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How often each form has looked for what is due, by whether it is the asyncio form."""
    looks: Counter[bool] = Counter()
    due = Claims.due

    def counting(claims: Claims[Any], limit: int) -> Any:
        found = due(claims, limit)
        looks[claims.store.sessions.is_async] += 1
        return found

    monkeypatch.setattr(Claims, "due", counting)
    return looks


def test_notifications_of_either_engine_wake_it_up(
    engine: Engine, session_factory: sessionmaker[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    add_jobs(engine, Patient, 0)
    query = text("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query ~ '^LISTEN'")

    def listeners() -> int:
        with engine.connect() as connection:
            return connection.scalar(query) or 0

    def notify(table: str) -> None:
        with engine.begin() as connection:
            connection.execute(text("SELECT pg_notify('sqla_durable', :table)"), {"table": table})

    looks = counted_looks(monkeypatch)
    handler = patients_by(lambda run: None), plans_by(lambda run: None)
    with working(MIXED, engine, *handler, listen=True, poll=HOUR):
        eventually(lambda: listeners() == 2, "a listener for each engine")
        # So that it is not found by the look right after it began to listen.
        before = looks.copy()
        notify("patient")
        notify("plan")
        eventually(lambda: all(looks[form] > before[form] for form in (False, True)), "another look for each form")
        add_jobs(engine, Patient, 1)
        notify("patient")
        eventually(done(engine, threads=1, tasks=0), "the run in a thread")
        approved_plan(session_factory)
        notify("plan")
        eventually(done(engine, threads=1, tasks=1), "the run in a task")


@pytest.mark.parametrize("first", ["thread", "task"])
def test_what_a_run_of_one_form_starts_for_the_other_is_carried_out_by_the_same_call(
    engine: Engine, session_factory: sessionmaker[Session], first: str
) -> None:
    add_jobs(engine, Patient, 1 if first == "thread" else 0)
    if first == "task":
        approved_plan(session_factory)
    left = [3]

    def carry_out(run: Any) -> None:
        time.sleep(0.05)
        left[0] -= 1
        if left[0] <= 0:
            return
        if in_thread(run):
            approved_plan(session_factory)
        else:
            add_jobs(engine, Patient, 1)

    crew = Crew(MIXED, engine.url, patients_by(carry_out), plans_by(carry_out))
    assert crew.run_due(BUDGET) == Counter({Ending.LANDED: 3})


def test_functions_of_both_forms_in_the_same_tables_are_given_to_one_worker(engine: Engine) -> None:
    tables(engine)
    sync_engine, async_engine = create_engine(engine.url), create_async_engine(engine.url)
    functions: Functions[DurableRun] = Functions(sessionmaker(sync_engine), DurableRun, DurableStep)
    coroutines: AsyncFunctions[DurableRun] = AsyncFunctions(async_sessionmaker(async_engine), DurableRun, DurableStep)

    @functions.function("in-thread")
    def in_a_thread(run: Any, number: int) -> str:
        return f"{threading.current_thread().name} {number}"

    @coroutines.function("in-task")
    async def in_a_task(run: Any, number: int) -> str:
        assert asyncio.current_task()
        return f"task {number}"

    async def main() -> Counter[Ending]:
        with functions.session_factory.begin() as session:
            handle = functions.start(session, in_a_thread, 1)
        async with coroutines.session_factory.begin() as async_session:
            other = await coroutines.start(async_session, in_a_task, 2)
        endings = await AsyncWorker(functions, coroutines).run_due(BUDGET)
        assert functions.result(handle).startswith("sqla_durable slot")
        assert await coroutines.result(other) == "task 2"
        await async_engine.dispose()
        return endings

    assert Background(lambda: asyncio.run(main())).result() == Counter({Ending.LANDED: 2})
    with functions.session_factory.begin() as session:
        handle = functions.start(session, in_a_thread, 3)
    assert Worker(functions, **QUICK).run_due(BUDGET) == Counter({Ending.LANDED: 1})
    assert functions.result(handle).endswith(" 3")
    sync_engine.dispose()


def test_a_form_that_has_found_nothing_before_the_other_has_begun_waits_for_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was due for the other form was left, and the call returned as if there had been nothing."""
    tables(engine)
    async_engine = create_async_engine(engine.url)
    functions: Functions[DurableRun] = Functions(sessionmaker(engine), DurableRun, DurableStep)
    coroutines: AsyncFunctions[DurableRun] = AsyncFunctions(async_sessionmaker(async_engine), DurableRun, DurableStep)

    @functions.function("in-thread")
    def in_a_thread(run: Any) -> None: ...

    @coroutines.function("in-task")
    async def in_a_task(run: Any) -> None: ...

    in_thread = async_worker._in_thread

    def in_thread_first(work: Callable[[], None]) -> asyncio.Future[None]:
        returned = threading.Event()

        def do() -> None:
            work()
            returned.set()

        ended = in_thread(do)
        returned.wait(timeout=0.5)
        return ended

    async def main() -> Counter[Ending]:
        async with coroutines.session_factory.begin() as session:
            await coroutines.start(session, in_a_task)
        monkeypatch.setattr(async_worker, "_in_thread", in_thread_first)
        endings = await AsyncWorker(functions, coroutines).run_due(BUDGET)
        await async_engine.dispose()
        return endings

    assert Background(lambda: asyncio.run(main())).result() == Counter({Ending.LANDED: 1})


# faults


@pytest.mark.parametrize("fails", ["thread", "task"])
def test_a_fault_in_the_claims_of_one_form_drains_both_and_is_raised(
    engine: Engine, session_factory: sessionmaker[Session], fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_jobs(engine, Patient, 1)
    approved_plan(session_factory)
    under_way, go = threading.Semaphore(0), threading.Event()
    due = Claims.due
    fault = threading.Event()

    def faulty(claims: Claims[Any], limit: int) -> Any:
        if fault.is_set() and claims.store.sessions.is_async == (fails == "task"):
            threading.Timer(0.2, go.set).start()
            raise LookupError("a fault")
        return due(claims, limit)

    def carry_out(run: Any) -> None:
        under_way.release()
        wait_for(go, run)

    monkeypatch.setattr(Claims, "due", faulty)
    background = Background(Crew(MIXED, engine.url, patients_by(carry_out), plans_by(carry_out)).run)
    for _ in range(2):
        assert under_way.acquire(timeout=DEADLINE)
    fault.set()
    with pytest.raises(LookupError, match="a fault"):
        background.result()
    assert done(engine, threads=1, tasks=1)()


@pytest.mark.parametrize("away", ["thread", "task"])
def test_an_outage_of_the_database_of_one_form_stops_only_its_own_runs(
    engine: Engine, session_factory: sessionmaker[Session], away: str
) -> None:
    add_jobs(engine, Patient, 1)
    approved_plan(session_factory)
    nowhere = engine.url.set(host="127.0.0.1", port=1, query={})
    sync_url, async_url = (nowhere, engine.url) if away == "thread" else (engine.url, nowhere)

    async def main() -> None:
        sync_engine, async_engine = create_engine(sync_url), create_async_engine(async_url)
        worker = AsyncWorker(
            Runs(sessionmaker(sync_engine), Patient, PatientStep).handled_by(lambda run: None),
            AsyncRuns(async_sessionmaker(async_engine), Plan, PlanStep).handled_by(lambda run: asyncio.sleep(0)),
            **QUICK,
        )
        working = asyncio.create_task(worker.run())
        landed = done(engine, threads=int(away == "task"), tasks=int(away == "thread"))
        await asyncio.to_thread(eventually, landed, "the others")
        worker.stop()
        await working
        await async_engine.dispose()

    Background(lambda: asyncio.run(main())).result()


# stopping


def stuck(go: threading.Event) -> tuple[Callable[[Any], None], threading.Semaphore]:
    under_way = threading.Semaphore(0)

    def carry_out(run: Any) -> None:
        under_way.release()
        wait_for(go, run)

    return carry_out, under_way


def test_told_to_stop_it_lets_runs_of_both_forms_finish_and_claims_no_more(
    engine: Engine, session_factory: sessionmaker[Session], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sqla_durable.worker")
    add_jobs(engine, Patient, 2)
    for _ in range(2):
        approved_plan(session_factory)
    go = threading.Event()
    carry_out, under_way = stuck(go)
    crew = Crew(MIXED, engine.url, patients_by(carry_out), plans_by(carry_out))
    background = Background(crew.run)
    for _ in range(4):
        assert under_way.acquire(timeout=DEADLINE)
    with caplog.at_level(logging.INFO, "sqla_durable.worker"):
        crew.stop()
        eventually(lambda: caplog.messages.count("draining: 2 run(s) under way") == 2, "both forms to claim no more")
    add_jobs(engine, Patient, 1)
    later = approved_plan(session_factory)
    assert background.is_alive()
    go.set()
    background.result()
    assert statuses(engine, "patient") == {"done": 2, "ready": 1}
    assert statuses(engine, "plan") == {"executed": 2, "approved": 1}
    assert column(engine, later, "attempts") == 0


def given_back(engine: Engine) -> None:
    eventually(lambda: statuses(engine, "patient") == {"ready": 1}, "the run of a thread to be given back")
    eventually(lambda: statuses(engine, "plan") == {"approved": 1}, "the run of a task to be given back")


def test_what_does_not_finish_within_the_grace_time_is_given_back_in_both_forms(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    add_jobs(engine, Patient, 1)
    approved_plan(session_factory)
    go = threading.Event()
    carry_out, under_way = stuck(go)
    crew = Crew(MIXED, engine.url, patients_by(carry_out), plans_by(carry_out), grace=timedelta(seconds=0.1))
    background = Background(crew.run)
    for _ in range(2):
        assert under_way.acquire(timeout=DEADLINE)
    crew.stop()
    background.result()
    given_back(engine)
    go.set()


def test_what_is_under_way_when_the_budget_is_used_up_is_given_back_and_counted_in_both_forms(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    add_jobs(engine, Patient, 1)
    approved_plan(session_factory)
    go = threading.Event()
    carry_out, _ = stuck(go)
    crew = Crew(MIXED, engine.url, patients_by(carry_out), plans_by(carry_out))
    assert crew.run_due(timedelta(seconds=1)) == Counter({Ending.INTERRUPTED: 2})
    given_back(engine)
    go.set()


def test_a_cancelled_worker_gives_back_at_once_what_is_under_way_in_both_forms(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    add_jobs(engine, Patient, 1)
    approved_plan(session_factory)
    go = threading.Event()
    under_way = threading.Semaphore(0)

    def hangs(run: Run[Patient]) -> None:
        under_way.release()
        assert go.wait(DEADLINE)

    async def main() -> float:
        async_engine = create_async_engine(engine.url)

        async def hangs_too(run: AsyncRun[Plan]) -> None:
            under_way.release()
            await asyncio.sleep(3600)

        worker = AsyncWorker(
            Runs(session_factory, Patient, PatientStep).handled_by(hangs),
            AsyncRuns(async_sessionmaker(async_engine), Plan, PlanStep).handled_by(hangs_too),
            grace=HOUR,
        )
        working = asyncio.create_task(worker.run())
        for _ in range(2):
            assert await asyncio.to_thread(under_way.acquire, timeout=DEADLINE)
        before = time.monotonic()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working
        took = time.monotonic() - before
        await async_engine.dispose()
        return took

    assert Background(lambda: asyncio.run(main())).result() < 5
    given_back(engine)
    go.set()


def test_a_worker_with_ordinary_functions_only_needs_no_coroutines(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    add_jobs(engine, Patient, 3)
    crew = Crew(MIXED, engine.url, patients_by(lambda run: None), listen=True)
    background = Background(crew.run)
    eventually(lambda: statuses(engine, "patient") == {"done": 3}, "the runs")
    crew.stop()
    background.result()


# what it is given


class Declared:
    def __init__(self, *works: Any) -> None:
        self._works = works

    def works(self) -> Any:
        return self._works


def pair(engine: Engine) -> tuple[Any, Any, AsyncEngine]:
    async_engine = create_async_engine(engine.url)
    runs = Runs(sessionmaker(engine), Patient, PatientStep)
    return (
        runs.handled_by(print),
        AsyncRuns(async_sessionmaker(async_engine), Plan, PlanStep).handled_by(lambda run: run.renew()),
        async_engine,
    )


def test_a_worker_takes_whatever_has_works_beside_works(engine: Engine) -> None:
    work, async_work, _ = pair(engine)
    assert Worker(Declared(work))._works == [work]
    assert AsyncWorker(async_work, Declared(work))._works == [async_work, work]
    assert AsyncWorker(Declared(work, async_work))._works == [work, async_work]
    with pytest.raises(ConfigurationError, match="two handlers for the same runs"):
        Worker(work, Declared(work))
    with pytest.raises(ConfigurationError, match="needs something to carry out"):
        Worker(Declared())
    for kind in (Worker, AsyncWorker):
        for wrong in (Declared("text"), "text", Declared):
            with pytest.raises(ConfigurationError, match=r"is not what .* carries out; pass what handled_by\(\)"):
                kind(wrong)  # type: ignore[arg-type]


def test_a_worker_without_a_loop_refuses_coroutine_functions_and_names_the_one_that_has(engine: Engine) -> None:
    work, async_work, _ = pair(engine)
    for given in ((async_work,), (work, async_work), (Declared(work, async_work),)):
        with pytest.raises(ConfigurationError, match=r"AsyncWorker, of sqla_durable.asyncio, which takes both"):
            Worker(*given)


# a slot that is given up


def landed_from_elsewhere(run: Any) -> None:
    """Have the run land by its own lease in another thread, and the heartbeat tell so."""
    holder = run.holder
    holder.fail(TimeoutError("it took too long"), {})
    told(run)()


def told(run: Any) -> Callable[[], None]:
    heartbeat = HEARTBEATS[run.holder.store.runs.entity]
    on_lost = heartbeat._carried_out[run.holder]
    assert on_lost is not None
    return on_lost


HEARTBEATS: dict[Any, Any] = {}


def noted_slots(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many slots a worker has found free, each time it looked."""
    found: list[int] = []
    free = Room.free

    def noting(room: Room, share: Any) -> int:
        found.append(free(room, share))
        return found[-1]

    monkeypatch.setattr(Room, "free", noting)
    return found


def look_again(worker: Any, found: list[int]) -> None:
    """Wake a worker that waits for a free slot, and return when it has looked at what is free since."""
    for _ in range(2):  # the first may have been under way
        before = len(found)
        for share in worker._room._shares:
            share.wake(Wake.DUE)
        eventually(lambda before=before: len(found) > before, "another look")


@pytest.mark.parametrize("kind", [Worker, AsyncWorker])
def test_a_blocked_handler_whose_run_has_been_landed_gives_its_slot_up(
    engine: Engine,
    session_factory: sessionmaker[Session],
    kind: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = noted_slots(monkeypatch)
    blocked = approved_plan(session_factory, note="blocks")
    blocking: list[Run[Plan]] = []
    go, returned = threading.Event(), threading.Event()
    refused: list[Exception] = []
    threads: set[str] = set()

    def carry_out(run: Run[Plan]) -> None:
        if run.row.note != "blocks":
            threads.add(threading.current_thread().name)
            return
        blocking.append(run)
        assert go.wait(DEADLINE)
        try:
            run.step("late", lambda session: None)
        except DurableError as error:
            refused.append(error)
        returned.set()

    plans = Runs(session_factory, Plan, PlanStep)
    HEARTBEATS[Plan] = plans._verbs.heartbeat
    worker = kind(plans.handled_by(carry_out), **QUICK, concurrency=1)
    background = Background(worker.run if kind is Worker else lambda: asyncio.run(worker.run()))
    eventually(lambda: blocking, "the blocked handler")
    others = [approved_plan(session_factory) for _ in range(3)]
    free.clear()
    look_again(worker, free)
    assert set(free) == {0}, "there is no slot for them"
    assert {column(engine, ident, "attempts") for ident in others} == {0}, "there is no slot for them"

    told(blocking[0])()  # the lease is lost, or the run is to be cancelled: it may still write how it ended
    look_again(worker, free)
    assert set(free) == {0}, "that does not end the handler"
    assert {column(engine, ident, "attempts") for ident in others} == {0}, "that does not end the handler"

    with caplog.at_level(logging.INFO, "sqla_durable.worker"):
        landed_from_elsewhere(blocking[0])
        for ident in others:
            eventually(lambda ident=ident: column(engine, ident, "status") is PlanStatus.EXECUTED, "the others")
        room = worker._room
        eventually(lambda: room.endings == Counter({Ending.LANDED: 4}), "the count")
        # Handlers of other tests may end meanwhile, and be warned of.
        told_of = [record for record in caplog.records if record.getMessage().endswith("its slot is given up")]
        assert [str(blocked) in record.getMessage() for record in told_of] == [True]
        go.set()
        assert returned.wait(DEADLINE)
        assert len(refused) == 1
        eventually(lambda: "has returned, long after" in caplog.text, "the end of the thread")
    more = approved_plan(session_factory)
    eventually(lambda: column(engine, more, "status") is PlanStatus.EXECUTED, "one more")
    worker.stop()
    background.result()
    assert room.endings == Counter({Ending.LANDED: 5}), "it is counted once"
    assert column(engine, blocked, "status") is PlanStatus.FAILED
    assert len(threads) == 1
    eventually(lambda: not slots(), "every thread to end")


def slots() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sqla_durable slot")]


@pytest.mark.parametrize("kind", [Worker, AsyncWorker])
def test_handlers_that_are_blocked_past_their_deadline_hold_no_slot(engine: Engine, kind: Any) -> None:
    TimedBase.metadata.create_all(engine)
    blocked = [add(engine, timedelta(seconds=0.2)) for _ in range(3)]
    go = threading.Event()

    def carry_out(run: Run[Timed]) -> None:
        if run.row.max_duration is not None:
            assert go.wait(DEADLINE)

    runs = Runs(sessionmaker(engine), Timed, TimedStep)
    worker = kind(runs.handled_by(carry_out), **QUICK, concurrency=1)
    background = Background(worker.run if kind is Worker else lambda: asyncio.run(worker.run()))
    ident = add(engine, None)
    eventually(lambda: row(engine, ident).status is Status.DONE, "the run behind them")
    assert {row(engine, each).status for each in blocked} == {Status.TIMED_OUT}
    eventually(lambda: worker._room.endings == Counter({Ending.LANDED: 4}), "the count")
    worker.stop()
    background.result()
    go.set()
    eventually(lambda: not slots(), "every thread to end")
    assert {row(engine, each).status for each in blocked} == {Status.TIMED_OUT}


def test_blocked_handlers_one_after_the_other_hold_no_slot_for_ever(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    go = threading.Event()
    blocking: list[Run[Plan]] = []

    def carry_out(run: Run[Plan]) -> None:
        if run.row.note == "blocks":
            blocking.append(run)
            assert go.wait(DEADLINE)

    for _ in range(6):
        approved_plan(session_factory, note="blocks")
    plans = Runs(session_factory, Plan, PlanStep)
    HEARTBEATS[Plan] = plans._verbs.heartbeat
    worker = Worker(plans.handled_by(carry_out), **QUICK, concurrency=2)
    background = Background(lambda: worker.run_due(BUDGET))
    for count in range(1, 7):
        eventually(lambda count=count: len(blocking) >= count, "the next")
        landed_from_elsewhere(blocking[count - 1])
    assert background.result() == Counter({Ending.LANDED: 6})
    go.set()
    eventually(lambda: not slots(), "every thread to end")


def test_a_handler_that_returns_while_its_slot_is_given_up_is_counted_once(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    for _ in range(60):
        approved_plan(session_factory)

    def carry_out(run: Run[Plan]) -> None:
        on_lost = told(run)
        run.finish()
        threading.Thread(target=on_lost).start()

    plans = Runs(session_factory, Plan, PlanStep)
    HEARTBEATS[Plan] = plans._verbs.heartbeat
    worker = Worker(plans.handled_by(carry_out), **QUICK, concurrency=3)
    assert Background(lambda: worker.run_due(BUDGET)).result() == Counter({Ending.LANDED: 60})
    eventually(lambda: not slots(), "every thread to end")
