"""Heartbeats keep a lease alive whatever the handler does with its time, its connections or its event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, func, select, text, update
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, LostLease, Run, Runs
from sqla_durable.asyncio import AsyncRun, AsyncRuns
from tests.support import Background, Entry, entries, eventually, write_entry
from tests.support_jobs import Brief, BriefStep, JobBase, JobStatus, add_jobs

LEASE = Brief.__lifecycle__.lease
THREAD = "sqla_durable heartbeat"
HOUR = timedelta(hours=1)


@pytest.fixture
def jobs(session_factory: sessionmaker[Session]) -> Runs[Brief]:
    return Runs(session_factory, Brief, BriefStep, owner="one")


@pytest.fixture
def other(session_factory: sessionmaker[Session]) -> Runs[Brief]:
    return Runs(session_factory, Brief, BriefStep, owner="other")


@pytest.fixture(autouse=True)
def beating() -> Iterator[Callable[[], list[threading.Thread]]]:
    """The heartbeat threads of this test, which must not reach the next one."""
    before = set(threading.enumerate())

    def found() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name == THREAD and thread not in before]

    yield found
    eventually(lambda: not found(), "the end of the heartbeat thread")


def read(engine: Engine, ident: int, name: str) -> Any:
    with engine.connect() as connection:
        return connection.scalar(select(getattr(Brief, name)).where(Brief.id == ident))


def move_lease(engine: Engine, ident: int, by: timedelta) -> None:
    with engine.begin() as connection:
        expires = func.clock_timestamp() + by
        connection.execute(update(Brief).where(Brief.id == ident).values(lease_expires_at=expires))


def lapsed(engine: Engine, ident: int) -> bool:
    with engine.connect() as connection:
        expired = Brief.lease_expires_at < func.clock_timestamp()
        return bool(connection.scalar(select(expired).where(Brief.id == ident)))


def wait_for_a_beat(engine: Engine, ident: int) -> None:
    """Let the lease have run out, and wait until a heartbeat renews it."""
    move_lease(engine, ident, -HOUR)
    eventually(lambda: not lapsed(engine, ident), "a heartbeat")


# alive


def test_a_lease_outlives_itself_while_its_handler_runs(engine: Engine, jobs: Runs[Brief], other: Runs[Brief]) -> None:
    (ident,) = add_jobs(engine, Brief, 1)

    def carry_out(run: Run[Brief]) -> None:
        ends = time.monotonic() + 1.5 * LEASE.total_seconds()
        while time.monotonic() < ends:
            assert other.claim(ident) is None
            time.sleep(0.05)

    assert jobs.execute(ident, carry_out).status is JobStatus.DONE
    assert (read(engine, ident, "fence"), read(engine, ident, "attempts")) == (1, 1)


def test_a_heartbeat_needs_no_connection_of_the_users_pool(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    narrow = create_engine(engine.url, pool_size=1, max_overflow=0, pool_timeout=0.1)
    (ident,) = add_jobs(engine, Brief, 1)

    def carry_out(run: Run[Brief]) -> None:
        with narrow.connect() as connection:
            connection.execute(text("SELECT 1"))
            wait_for_a_beat(engine, ident)

    jobs: Runs[Brief] = Runs(sessionmaker(narrow), Brief, BriefStep)
    with caplog.at_level(logging.WARNING, "sqla_durable"):
        assert jobs.execute(ident, carry_out).status is JobStatus.DONE
    assert caplog.text == ""
    narrow.dispose()


def test_a_heartbeat_survives_the_end_of_its_backend(
    engine: Engine, jobs: Runs[Brief], caplog: pytest.LogCaptureFixture
) -> None:
    (ident,) = add_jobs(engine, Brief, 1)

    def carry_out(run: Run[Brief]) -> None:
        wait_for_a_beat(engine, ident)
        with engine.connect() as connection:
            ended = connection.scalars(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
                )
            ).all()
        assert ended
        wait_for_a_beat(engine, ident)

    with caplog.at_level(logging.WARNING, "sqla_durable"):
        assert jobs.execute(ident, carry_out).status is JobStatus.DONE
    assert "heartbeats wait for the database" in caplog.text


def test_a_heartbeat_survives_whatever_a_hook_of_the_users_raises(
    engine: Engine, session_factory: sessionmaker[Session], jobs: Runs[Brief]
) -> None:
    (ident,) = add_jobs(engine, Brief, 1)
    raised: list[str] = []

    def fetch_a_token(*_: Any) -> None:
        if threading.current_thread().name == THREAD and not raised:
            raised.append("once")
            raise OSError("the token service is away")

    event.listen(engine, "do_connect", fetch_a_token)

    def carry_out(run: Run[Brief]) -> None:
        wait_for_a_beat(engine, ident)

    assert jobs.execute(ident, carry_out).status is JobStatus.DONE
    assert raised == ["once"]


def test_a_reaped_run_is_resumed_by_its_heartbeat(engine: Engine, jobs: Runs[Brief], other: Runs[Brief]) -> None:
    (ident,) = add_jobs(engine, Brief, 1)

    def carry_out(run: Run[Brief]) -> None:
        eventually(lambda: reap_it(engine, other, ident), "the reaping")
        eventually(lambda: read(engine, ident, "status") is JobStatus.RUNNING, "the resumption")

    assert jobs.execute(ident, carry_out).status is JobStatus.DONE
    assert read(engine, ident, "fence") == 1


# of several runs


def test_a_run_of_a_batch_keeps_its_heartbeat_when_another_of_them_ends_in_another_thread(
    engine: Engine, jobs: Runs[Brief]
) -> None:
    add_jobs(engine, Brief, 2)
    quick, slow = jobs.claim_due(2)
    started, ended = threading.Event(), threading.Event()

    def carry_out(run: Run[Brief]) -> None:
        started.set()
        assert ended.wait(20)
        wait_for_a_beat(engine, run.lease.identity[0])

    def first(run: Run[Brief]) -> None:
        running.append(Background(lambda: jobs.execute(slow, carry_out)))
        assert started.wait(20)

    running: list[Background] = []
    assert jobs.execute(quick, first).status is JobStatus.DONE
    ended.set()
    assert running[0].result().status is JobStatus.DONE


def test_a_run_of_a_batch_has_a_heartbeat_while_it_waits_for_its_turn(engine: Engine, jobs: Runs[Brief]) -> None:
    add_jobs(engine, Brief, 2)
    first, second = jobs.claim_due(2)
    waiting = second.lease.identity[0]
    assert jobs.execute(first, lambda run: wait_for_a_beat(engine, waiting)).status is JobStatus.DONE
    assert jobs.execute(second, lambda run: None).status is JobStatus.DONE


def test_one_thread_beats_for_all_runs_and_ends_when_there_is_none(
    engine: Engine, jobs: Runs[Brief], beating: Callable[[], list[threading.Thread]]
) -> None:
    idents = add_jobs(engine, Brief, 3)
    assert beating() == []
    together = threading.Barrier(3)

    def carry_out(run: Run[Brief]) -> None:
        together.wait(20)
        assert len(beating()) == 1
        together.wait(20)

    threads = [Background(lambda ident=ident: jobs.execute(ident, carry_out)) for ident in idents]
    assert [thread.result().status for thread in threads] == [JobStatus.DONE] * 3
    eventually(lambda: not beating(), "the end of the thread")
    (later,) = add_jobs(engine, Brief, 1)
    assert jobs.execute(later, lambda run: wait_for_a_beat(engine, later)).status is JobStatus.DONE


# lost


def test_a_holder_learns_of_a_lost_lease_from_its_heartbeat_without_a_statement_of_its_own(
    engine: Engine, jobs: Runs[Brief], other: Runs[Brief]
) -> None:
    (ident,) = add_jobs(engine, Brief, 1)

    def carry_out(run: Run[Brief]) -> None:
        eventually(lambda: take_over(engine, other, ident), "the takeover")
        eventually(lambda: run.holder.lost, "the heartbeat to notice")
        with pytest.raises(LostLease, match="under fence 2, held by other; the holder with fence 1 may write nothing"):
            run.step("late", write_entry, "late")

    assert jobs.execute(ident, carry_out).ending is Ending.LOST_LEASE
    assert entries(engine) == []


def test_a_lost_lease_is_noticed_in_a_translated_schema_too(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA tenant"))
    translated = create_engine(engine.url, execution_options={"schema_translate_map": {None: "tenant"}})
    JobBase.metadata.create_all(translated)
    jobs: Runs[Brief] = Runs(sessionmaker(translated), Brief, BriefStep, owner="one")
    other: Runs[Brief] = Runs(sessionmaker(translated), Brief, BriefStep, owner="other")
    with sessionmaker(translated).begin() as session:
        session.add(Brief(id=1))

    def carry_out(run: Run[Brief]) -> None:
        eventually(lambda: take_over(translated, other, 1), "the takeover")
        eventually(lambda: run.holder.lost, "the heartbeat to notice")

    assert jobs.execute(1, carry_out).ending is Ending.LOST_LEASE
    translated.dispose()


def take_over(engine: Engine, other: Runs[Brief], ident: int) -> bool:
    """Claim a run that is held; a heartbeat may come in between."""
    move_lease(engine, ident, -HOUR)
    return other.claim(ident) is not None


def reap_it(engine: Engine, other: Runs[Brief], ident: int) -> bool:
    """Reap a run that is held; a heartbeat may come in between."""
    move_lease(engine, ident, -HOUR)
    return other.heal(ident)


# asyncio


def run_async(engine: Engine, main: Callable[[AsyncRuns[Brief]], Any]) -> Any:
    async def with_jobs() -> Any:
        through = create_async_engine(engine.url)
        try:
            return await main(AsyncRuns(async_sessionmaker(through), Brief, BriefStep, owner="one"))
        finally:
            await through.dispose()

    return asyncio.run(with_jobs())


def test_a_handler_that_blocks_the_event_loop_does_not_starve_the_heartbeat(engine: Engine, other: Runs[Brief]) -> None:
    (ident,) = add_jobs(engine, Brief, 1)
    claimed: list[Any] = []

    async def effect(session: AsyncSession) -> str:
        session.add(Entry(label="once"))
        return "once"

    async def carry_out(run: AsyncRun[Brief]) -> None:
        ends = time.monotonic() + 2 * LEASE.total_seconds()
        while time.monotonic() < ends:
            claimed.append(other.claim(ident))
            time.sleep(0.05)
        await run.step("only", effect)

    async def main(jobs: AsyncRuns[Brief]) -> Any:
        return await jobs.execute(ident, carry_out)

    assert run_async(engine, main).status is JobStatus.DONE
    assert set(claimed) == {None}
    assert entries(engine) == ["once"]
    assert read(engine, ident, "fence") == 1


def test_a_step_that_blocks_the_event_loop_has_its_effect_once(engine: Engine, other: Runs[Brief]) -> None:
    (ident,) = add_jobs(engine, Brief, 1)

    async def blocks(session: AsyncSession) -> str:
        session.add(Entry(label="once"))
        await session.flush()
        ends = time.monotonic() + 0.7 * LEASE.total_seconds()
        while time.monotonic() < ends:
            assert other.claim_due(1) == []
            time.sleep(0.05)
        move = text("UPDATE brief SET lease_expires_at = now() - interval '1 hour'")
        await session.execute(move)
        assert other.claim_due(1) == []
        return "once"

    async def carry_out(run: AsyncRun[Brief]) -> None:
        await run.step("only", blocks)

    async def main(jobs: AsyncRuns[Brief]) -> Any:
        return await jobs.execute(ident, carry_out)

    assert run_async(engine, main).status is JobStatus.DONE
    assert entries(engine) == ["once"]


def test_a_lost_lease_cancels_an_asyncio_handler_that_waits(engine: Engine, other: Runs[Brief]) -> None:
    (ident,) = add_jobs(engine, Brief, 1)
    seen: list[str] = []

    async def carry_out(run: AsyncRun[Brief]) -> None:
        eventually(lambda: take_over(engine, other, ident), "the takeover")
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def main(jobs: AsyncRuns[Brief]) -> Any:
        outcome = await jobs.execute(ident, carry_out)
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()
        await asyncio.sleep(0)
        return outcome

    assert run_async(engine, main).ending is Ending.LOST_LEASE
    assert seen == ["cancelled"]
    assert read(engine, ident, "lease_owner") == "other"


def test_runs_of_an_asyncio_batch_that_are_carried_out_together_all_keep_their_heartbeat(engine: Engine) -> None:
    add_jobs(engine, Brief, 2)

    async def main(jobs: AsyncRuns[Brief]) -> list[Any]:
        quick, slow = await jobs.claim_due(2)
        done = asyncio.Event()

        async def nothing(run: AsyncRun[Brief]) -> None:
            await asyncio.sleep(0)

        async def waits(run: AsyncRun[Brief]) -> None:
            await done.wait()
            await asyncio.to_thread(wait_for_a_beat, engine, run.lease.identity[0])

        async def first() -> Any:
            outcome = await jobs.execute(quick, nothing)
            done.set()
            return outcome

        return list(await asyncio.gather(first(), jobs.execute(slow, waits)))

    assert [outcome.status for outcome in run_async(engine, main)] == [JobStatus.DONE] * 2
