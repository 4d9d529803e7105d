"""Whoever waits for a run is told when it lands, whatever lands it; and learns of it, sooner or later, in any case."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, select, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from sqla_durable import (
    DatabaseUnavailable,
    FunctionHandle,
    FunctionRun,
    Functions,
    FunctionStatus,
    RunCancelled,
    RunFailed,
    RunNotFound,
    RunNotLanded,
    Worker,
    function_statuses,
)
from sqla_durable.asyncio import AsyncFunctions
from sqla_durable.functions import hearing, waiting
from sqla_durable.testing import lapse
from sqla_durable.wake import CHANNEL, LANDED
from tests.support import Background, eventually, wait_until_blocked
from tests.support_observe import (
    Job,
    JobStep,
    Observer,
    at_work,
    awaited,
    cancel,
    cut_listeners,
    double,
    functions_on,
    listeners,
    started,
    tables,
)

BOTH = ["sync", "async"]
HOUR = timedelta(hours=1)
DELAYED = {"run_at": HOUR}
SHORT = timedelta(seconds=0.3)


@pytest.fixture
def jobs(engine: Engine) -> Functions[Job]:
    tables(engine)
    return functions_on(engine)


@pytest.fixture(autouse=True)
def no_others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No connection listens longer than somebody waits."""
    monkeypatch.setattr(hearing, "_LINGER", 0.0)
    yield
    eventually(lambda: not hearing._hearings, "the end of every listener")


@pytest.fixture
def never_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever hears looks once in an hour only."""
    monkeypatch.setattr(waiting, "_LONGEST_HEARING", HOUR.total_seconds())


@pytest.fixture(params=BOTH)
def observe(request: pytest.FixtureRequest, engine: Engine) -> Observer:
    return Observer(request.param, engine)


@pytest.fixture
def heard(engine: Engine) -> Iterator[Callable[[], list[tuple[str, str]]]]:
    """What is notified of, on any channel."""
    listening = create_engine(engine.url, isolation_level="AUTOCOMMIT")
    with listening.connect() as connection:
        for channel in CHANNEL, LANDED:
            connection.exec_driver_sql(f"LISTEN {channel}")
        driver: Any = connection.connection.driver_connection
        yield lambda: [(each.channel, each.payload) for each in driver.notifies(timeout=0.2)]
    listening.dispose()


def waits_for(engine: Engine, handle: FunctionHandle) -> Callable[[], bool]:
    """Somebody has marked the run, and listens."""
    return lambda: awaited(engine, handle.id)() and listeners(engine) > 0


# what a landing tells


def test_a_result_that_is_there_is_read_with_one_statement(engine: Engine, jobs: Functions[Job]) -> None:
    handle = started(jobs, given=4, key="k")
    jobs.execute(handle)
    seen: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *args: seen.append(args[2]))
    assert jobs.result(handle) == 8
    assert len(seen) == 1
    assert jobs.result(jobs.handle(double, key="k")) == 8
    assert len(seen) == 2


def land_done(jobs: Functions[Job], handle: FunctionHandle) -> None:
    jobs.execute(handle, run_now=True)


def land_cancelled(jobs: Functions[Job], handle: FunctionHandle) -> None:
    assert cancel(jobs, handle)


def land_cancelled_while_running(jobs: Functions[Job], handle: FunctionHandle) -> None:
    holder = jobs._verbs.claim(handle.id, run_now=True)
    assert holder is not None
    assert cancel(jobs, handle)
    holder.cancel()


def land_released_after_a_request(jobs: Functions[Job], handle: FunctionHandle) -> None:
    holder = jobs._verbs.claim(handle.id, run_now=True)
    assert holder is not None
    assert cancel(jobs, handle)
    holder.release()


def land_parked_after_a_request(jobs: Functions[Job], handle: FunctionHandle) -> None:
    holder = jobs._verbs.claim(handle.id, run_now=True)
    assert holder is not None
    assert cancel(jobs, handle)
    with pytest.raises(Exception, match="cancelled"):
        holder.park(HOUR, "something")


def land_timed_out(jobs: Functions[Job], handle: FunctionHandle) -> None:
    holder = jobs._verbs.claim(handle.id, run_now=True)
    assert holder is not None
    holder.land(FunctionStatus.TIMED_OUT, {})


def land_reaped(jobs: Functions[Job], handle: FunctionHandle) -> None:
    assert jobs._verbs.claim(handle.id, run_now=True)
    with jobs.session_factory.begin() as session:
        lapse(session, Job, handle.id)
    assert jobs._verbs.reap(1) == 1


def land_reaped_by_a_claim(jobs: Functions[Job], handle: FunctionHandle) -> None:
    assert jobs._verbs.claim(handle.id, run_now=True)
    with jobs.session_factory.begin() as session:
        lapse(session, Job, handle.id)
    assert not jobs._verbs.claim_due(1)


def land_with_others(jobs: Functions[Job], handle: FunctionHandle) -> None:
    verbs = jobs._verbs
    holders = [verbs.claim(each, run_now=True) for each in (handle.id, started(jobs).id)]
    group = [landing_of(holder) for holder in holders]
    with jobs.session_factory.kw["bind"].begin() as connection:
        assert len(verbs.claims.landings._land(connection, group)) == 2


def landing_of(holder: Any) -> Any:
    from sqla_durable.landing import _Landing

    return _Landing(holder.lease, "2")


def land_by_transition(jobs: Functions[Job], handle: FunctionHandle) -> None:
    with jobs.session_factory.begin() as session:
        assert function_statuses.transition(session, (Job, handle.id), FunctionStatus.CANCELLED)


LANDINGS = [
    land_done,
    land_cancelled,
    land_cancelled_while_running,
    land_released_after_a_request,
    land_parked_after_a_request,
    land_timed_out,
    land_reaped,
    land_reaped_by_a_claim,
    land_with_others,
    land_by_transition,
]


@pytest.mark.usefixtures("never_looks")
@pytest.mark.parametrize("land", LANDINGS, ids=lambda land: land.__name__.removeprefix("land_"))
def test_a_waiter_is_told_of_a_landing_of_any_kind(
    engine: Engine, jobs: Functions[Job], land: Callable[[Functions[Job], FunctionHandle], None]
) -> None:
    handle = started(jobs, **DELAYED)
    waiter = Background(lambda: Observer("sync", engine)("wait", handle))
    eventually(waits_for(engine, handle), "a waiter")
    land(jobs, handle)
    assert waiter.result() is jobs.describe(handle).status
    assert awaited(engine, handle.id)() is (land is land_by_transition)


@pytest.mark.usefixtures("never_looks")
def test_a_waiter_is_told_of_a_failure(engine: Engine, jobs: Functions[Job], observe: Observer) -> None:
    handle = started(jobs, "refuse", **DELAYED)
    waiter = Background(lambda: observe("result", handle))
    eventually(waits_for(engine, handle), "a waiter")
    jobs.execute(handle, run_now=True)
    with pytest.raises(RunFailed, match="Refused: no 1"):
        waiter.result()


@pytest.mark.usefixtures("never_looks")
def test_a_waiter_hears_of_a_worker_elsewhere(engine: Engine, jobs: Functions[Job], observe: Observer) -> None:
    handle = started(jobs, given=21, run_at=timedelta(seconds=0.5))
    waiter = Background(lambda: observe("result", handle))
    eventually(waits_for(engine, handle), "a waiter")
    with at_work(engine):
        assert waiter.result() == 42


def test_nobody_is_told_where_nobody_waits(jobs: Functions[Job], heard: Callable[[], Any]) -> None:
    for land in LANDINGS:
        land(jobs, started(jobs, **DELAYED))
    assert [channel for channel, _ in heard() if channel == LANDED] == []


def test_a_landing_that_is_rolled_back_tells_nobody(
    engine: Engine, jobs: Functions[Job], heard: Callable[[], Any]
) -> None:
    handle = started(jobs, **DELAYED)
    mark(jobs, handle)
    with Session(engine) as session:
        assert jobs.request_cancel(session, handle)
        session.rollback()
    assert heard() == []
    assert cancel(jobs, handle)
    assert heard() == [(LANDED, str(handle.id))]


def mark(jobs: Functions[Job], handle: FunctionHandle) -> Any:
    return jobs._verbs.waiting.marked(handle.id, handle)


def test_a_mark_survives_a_failed_attempt_and_goes_with_a_requeue(engine: Engine, jobs: Functions[Job]) -> None:
    handle = started(jobs)
    mark(jobs, handle)
    holder = jobs._verbs.claim(handle.id, run_now=True)
    assert holder is not None
    holder.release()
    assert awaited(engine, handle.id)()
    land_by_transition(jobs, handle)
    assert awaited(engine, handle.id)()
    assert jobs.requeue(handle)
    assert not awaited(engine, handle.id)()


def test_a_worker_that_passed_by_a_run_being_marked_is_told_to_look_again(
    jobs: Functions[Job], heard: Callable[[], Any]
) -> None:
    handle = started(jobs)
    assert heard() == [(CHANNEL, "job")]
    mark(jobs, handle)
    assert heard() == [(CHANNEL, "job")]
    mark(jobs, handle)
    assert heard() == []


# many who wait, and one connection


@pytest.mark.usefixtures("never_looks")
def test_many_waiters_of_a_process_share_one_connection(engine: Engine, jobs: Functions[Job]) -> None:
    handles = [started(jobs, given=given, **DELAYED) for given in range(3)]
    others = functions_on(engine)
    waiters = [
        Background(lambda handle=handle, waits=waits: waits.result(handle))
        for handle in handles
        for waits in (jobs, others)
        for _ in range(4)
    ]
    for handle in handles:
        eventually(waits_for(engine, handle), "a waiter")
    eventually(lambda: sum(map(len, shared(engine)._waiters.values())) == 24, "every waiter")
    assert listeners(engine) == 1
    for handle in handles:
        jobs.execute(handle, run_now=True)
    assert [waiter.result() for waiter in waiters] == [0] * 8 + [2] * 8 + [4] * 8
    assert not shared(engine)._waiters


def shared(engine: Engine) -> hearing.Hearing:
    (found,) = [each for each in hearing._hearings.values() if each._pool is engine.pool]
    return found


def test_the_connection_is_closed_when_nobody_has_waited_for_a_while(engine: Engine, jobs: Functions[Job]) -> None:
    for _ in range(2):
        with pytest.raises(RunNotLanded):
            jobs.wait(started(jobs, **DELAYED), timeout=SHORT)
        eventually(lambda: not listeners(engine), "no listener")
        eventually(lambda: not [each for each in hearing._hearings.values() if each._pool is engine.pool], "no entry")


def test_a_process_that_was_forked_listens_for_itself(
    engine: Engine, jobs: Functions[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hearing, "_LINGER", 1.0)
    handle = started(jobs, **DELAYED)
    with pytest.raises(RunNotLanded):
        jobs.wait(handle, timeout=SHORT)
    eventually(lambda: listeners(engine) == 1, "the parent's connection")
    child = os.fork()
    if child == 0:  # pragma: no cover - what it says is its exit status
        status = 1
        try:
            engine.dispose(close=False)
            status = 0 if jobs.result(handle) == 2 else 2
        finally:
            os._exit(status)
    try:
        eventually(lambda: listeners(engine) == 2, "the child's connection")
        eventually(awaited(engine, handle.id), "the mark")
    finally:
        jobs.execute(handle, run_now=True)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# whatever happens to the connection


@pytest.mark.usefixtures("never_looks")
def test_a_waiter_whose_connection_is_cut_hears_again(engine: Engine, jobs: Functions[Job], observe: Observer) -> None:
    handle = started(jobs, **DELAYED)
    waiter = Background(lambda: observe("result", handle))
    eventually(waits_for(engine, handle), "a waiter")
    assert cut_listeners(engine) == 1
    eventually(lambda: listeners(engine), "another connection")
    jobs.execute(handle, run_now=True)
    assert waiter.result() == 2


@pytest.mark.usefixtures("never_looks")
def test_a_landing_while_nobody_could_hear_it_is_found_on_listening_again(
    engine: Engine, jobs: Functions[Job], observe: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sqla_durable import listener

    handle = started(jobs, **DELAYED)
    waiter = Background(lambda: observe("result", handle))
    eventually(waits_for(engine, handle), "a waiter")
    is_pooled, back = listener.is_pooled, threading.Event()

    def late(connection: Any) -> bool:
        assert back.wait(20)
        return is_pooled(connection)

    monkeypatch.setattr(listener, "is_pooled", late)
    assert cut_listeners(engine) == 1
    jobs.execute(handle, run_now=True)
    back.set()
    assert waiter.result() == 2


def test_behind_a_pooler_a_waiter_looks(
    engine: Engine, jobs: Functions[Job], observe: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sqla_durable import listener

    monkeypatch.setattr(listener, "is_pooled", lambda connection: True)
    handle = started(jobs, **DELAYED)
    waiter = Background(lambda: observe("result", handle))
    eventually(awaited(engine, handle.id), "a waiter")
    jobs.execute(handle, run_now=True)
    assert waiter.result() == 2
    assert listeners(engine) == 0


@pytest.mark.parametrize("form", BOTH)
def test_who_may_only_read_waits_too(engine: Engine, jobs: Functions[Job], form: str) -> None:
    observe = Observer(form, engine, connect_args={"options": "-c default_transaction_read_only=on"})
    handle = started(jobs, **DELAYED)
    waiter = Background(lambda: observe("result", handle))
    eventually(lambda: listeners(engine), "a waiter")
    time.sleep(0.3)  # it has tried to mark the run as often as it does
    assert not awaited(engine, handle.id)()
    jobs.execute(handle, run_now=True)
    assert waiter.result() == 2


def test_a_waiter_outlives_the_loss_of_every_connection(
    engine: Engine, jobs: Functions[Job], observe: Observer
) -> None:
    handle = started(jobs, **DELAYED)
    waiter = Background(lambda: observe("result", handle))
    eventually(waits_for(engine, handle), "a waiter")
    admin = create_engine(engine.url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        for _ in range(20):
            connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            )
            time.sleep(0.05)
    admin.dispose()
    engine.dispose()
    jobs.execute(handle, run_now=True)
    assert waiter.result() == 2


def test_a_waiter_whose_database_is_away_says_so_when_its_time_is_up(
    engine: Engine, jobs: Functions[Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = started(jobs, **DELAYED)
    waiter = Background(lambda: jobs.wait(handle, timeout=timedelta(seconds=5)))
    eventually(waits_for(engine, handle), "a waiter")
    admin = create_engine(engine.url.set(database="postgres"), isolation_level="AUTOCOMMIT")
    name = engine.url.database
    with admin.connect() as connection:
        connection.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false"))
        try:
            connection.execute(
                text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"), {"name": name}
            )
            with pytest.raises(DatabaseUnavailable):
                waiter.result()
            with pytest.raises(DatabaseUnavailable):
                jobs.wait(handle)
        finally:
            connection.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true"))
    admin.dispose()


# steps, locks and transactions


def test_a_waiter_never_waits_for_a_step(engine: Engine, jobs: Functions[Job], observe: Observer) -> None:
    handle = started(jobs, **DELAYED)
    with engine.begin() as connection:
        connection.execute(select(Job.__table__.c.id).where(Job.id == handle.id).with_for_update())
        waiter = Background(lambda: observe("wait", handle, timeout=SHORT))
        with pytest.raises(RunNotLanded, match="is ready still after"):
            waiter.result()
        waiter = Background(lambda: observe("wait", handle))
        eventually(lambda: listeners(engine), "a waiter")
        connection.rollback()
    eventually(awaited(engine, handle.id), "the mark, made after the step")
    jobs.execute(handle, run_now=True)
    assert waiter.result() is FunctionStatus.DONE


def test_in_two_phases_nothing_is_notified_and_waiters_look(
    engine: Engine, jobs: Functions[Job], heard: Callable[[], Any]
) -> None:
    in_two = functions_on(engine, twophase=True)
    handle = started(jobs, **DELAYED)
    mark(jobs, handle)
    with in_two.session_factory.begin() as session:
        assert in_two.request_cancel(session, handle)
    asked = started(jobs, **DELAYED)
    mark(jobs, asked)
    with jobs.session_factory(twophase=True) as session, session.begin():
        assert jobs.request_cancel(session, asked)
    other = started(in_two, **DELAYED)
    waiter = Background(lambda: in_two.result(other))
    mark(jobs, other)
    in_two.execute(other, run_now=True)
    assert waiter.result() == 2
    assert heard() == []


def test_a_time_that_is_up_at_once_looks_once(jobs: Functions[Job], observe: Observer) -> None:
    handle = started(jobs, **DELAYED)
    with pytest.raises(TimeoutError):
        observe("result", handle, timeout=timedelta(0))
    jobs.execute(handle, run_now=True)
    assert observe("result", handle, timeout=timedelta(0)) == 2


def test_a_run_that_is_deleted_meanwhile_is_not_waited_for(engine: Engine, jobs: Functions[Job]) -> None:
    handle = started(jobs, **DELAYED)
    waiter = Background(lambda: jobs.wait(handle))
    eventually(awaited(engine, handle.id), "a waiter")
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM job"))
    with pytest.raises(RunNotFound):
        waiter.result()


def test_a_task_that_waits_does_not_hold_up_its_loop_and_can_be_cancelled(engine: Engine, jobs: Functions[Job]) -> None:
    handle = started(jobs, **DELAYED)

    async def observing() -> int:
        other = create_async_engine(engine.url)
        functions = AsyncFunctions(async_sessionmaker(other), Job, JobStep)
        task = asyncio.create_task(functions.wait(handle))
        ticks = 0
        async with asyncio.timeout(20):
            while not await asyncio.to_thread(waits_for(engine, handle)):
                ticks += 1
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not shared(other.sync_engine)._waiters
        await other.dispose()
        return ticks

    assert asyncio.run(observing()) > 0


@pytest.mark.usefixtures("never_looks")
def test_tasks_of_one_loop_are_woken_through_it(engine: Engine, jobs: Functions[Job]) -> None:
    handles = [started(jobs, given=given, **DELAYED) for given in range(5)]

    async def observing() -> list[int]:
        other = create_async_engine(engine.url)
        functions = AsyncFunctions(async_sessionmaker(other), Job, JobStep)

        @functions.function("double")
        async def double(run: Any, given: int) -> int:
            return given

        tasks = [asyncio.create_task(functions.result(handle)) for handle in handles for _ in range(3)]
        async with asyncio.timeout(20):
            for handle in handles:
                while not await asyncio.to_thread(waits_for(engine, handle)):
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(jobs.execute, handle, run_now=True)
            results = await asyncio.gather(*tasks)
        await other.dispose()
        return list(results)

    assert asyncio.run(observing()) == [given * 2 for given in range(5) for _ in range(3)]


# the caller's session


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ"])
def test_a_callers_session_sees_its_own_start_and_cancel(engine: Engine, jobs: Functions[Job], level: str) -> None:
    with Session(engine) as session:
        session.connection(execution_options={"isolation_level": level})
        handle = jobs.start(session, double, 3, key="own")
        assert jobs.describe(handle, session=session).status is FunctionStatus.READY
        assert jobs.describe(jobs.handle(double, key="own"), session=session).identity == (handle.id,)
        with pytest.raises(RunNotFound):
            jobs.describe(handle)
        with pytest.raises(RunNotLanded):
            jobs.result(handle, session=session)
        assert jobs.steps(handle, session=session) == ()
        assert jobs.request_cancel(session, handle)
        with pytest.raises(RunCancelled):
            jobs.result(handle, session=session)
        session.rollback()
    with pytest.raises(RunNotFound):
        jobs.result(handle)


def test_in_a_snapshot_a_run_stays_as_it_was(engine: Engine, jobs: Functions[Job]) -> None:
    handle = started(jobs, given=3)
    with Session(engine) as session:
        session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
        assert jobs.describe(handle, session=session).status is FunctionStatus.READY
        jobs.execute(handle)
        assert jobs.result(handle) == 6
        with pytest.raises(RunNotLanded):
            jobs.result(handle, session=session)
        session.commit()
        assert jobs.result(handle, session=session) == 6


def test_a_callers_asyncio_session_sees_its_own_start(engine: Engine, jobs: Functions[Job]) -> None:
    async def observing() -> None:
        other = create_async_engine(engine.url)
        functions = AsyncFunctions(async_sessionmaker(other), Job, JobStep)

        @functions.function("double")
        async def double(run: Any, given: int) -> int:
            return given

        async with AsyncSession(other) as session:
            handle = await functions.start(session, double, 3)
            assert (await functions.describe(handle, session=session)).status is FunctionStatus.READY
            assert await functions.steps(handle, session=session) == ()
            with pytest.raises(RunNotLanded):
                await functions.result(handle, session=session)
            with pytest.raises(RunNotFound):
                await functions.describe(handle)
        await other.dispose()

    asyncio.run(observing())


# cancelling one that is waited for


def test_a_cancel_between_two_steps_ends_the_run_and_what_waits_for_it(engine: Engine, jobs: Functions[Job]) -> None:
    between, asked = threading.Event(), threading.Event()
    taken: list[str] = []

    @jobs.function("two-steps")
    def two_steps(run: FunctionRun[Any]) -> int:
        run.step("one", lambda session: taken.append("one"))
        between.set()
        assert asked.wait(20)
        run.step("two", lambda session: taken.append("two"))
        return 1

    with jobs.session_factory.begin() as session:
        handle = jobs.start(session, two_steps)
    waiter = Background(lambda: jobs.result(handle))
    carried_out = Background(lambda: jobs.execute(handle))
    assert between.wait(20)
    assert cancel(jobs, handle)
    asked.set()
    with pytest.raises(RunCancelled):
        waiter.result()
    assert carried_out.result().status is FunctionStatus.CANCELLED
    assert not cancel(jobs, handle)
    assert [receipt.step for receipt in jobs.steps(handle)] == taken == ["one", "two"][: len(taken)]


def test_a_cancel_that_waits_for_a_landing_has_come_too_late(engine: Engine, jobs: Functions[Job]) -> None:
    handle = started(jobs)
    holder = jobs._verbs.claim(handle.id, run_now=True)
    group = [landing_of(holder)]
    with engine.begin() as connection:
        assert jobs._verbs.claims.landings._land(connection, group)
        late = Background(lambda: cancel(jobs, handle))
        wait_until_blocked(engine)
    assert late.result() is False
    assert jobs.result(handle) == 2
    assert jobs.describe(handle).cancel_requested_at is None


def test_a_landing_that_waits_for_a_cancel_lands_cancelled(engine: Engine, jobs: Functions[Job]) -> None:
    asking = threading.Event()

    @jobs.function("asked")
    def asked(run: FunctionRun[Any]) -> int:
        asking.set()
        wait_until_locked()
        return 1

    locked = threading.Event()

    def wait_until_locked() -> None:
        assert locked.wait(20)

    with jobs.session_factory.begin() as session:
        handle = jobs.start(session, asked)
    carried_out = Background(lambda: jobs.execute(handle))
    assert asking.wait(20)
    with Session(engine) as session, session.begin():
        assert jobs.request_cancel(session, handle)
        locked.set()
        wait_until_blocked(engine)
    assert carried_out.result().status is FunctionStatus.CANCELLED
    with pytest.raises(RunCancelled):
        jobs.result(handle)


def test_a_worker_is_heard_by_those_who_wait_for_many_runs(engine: Engine, jobs: Functions[Job]) -> None:
    with jobs.session_factory.begin() as session:
        handles = jobs.start_many(session, double, list(range(100)))
    worker = Worker(*functions_on(engine).works(), concurrency=5)
    waiters = [Background(lambda handle=handle: jobs.result(handle)) for handle in handles[::10]]
    background = Background(worker.run)
    assert [waiter.result() for waiter in waiters] == [given * 2 for given in range(100)][::10]
    worker.stop()
    background.result()
