"""All time that decides anything is the database's: exact as SQL, and untouched by a clock of Python's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, Integer, func, literal, select
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, Retry, Run, Runs, clock
from sqla_durable.testing import lapse, make_due
from tests.support import Background
from tests.support_consent import ConsentBase, Status, add_consent, database_clock, stored
from tests.support_jobs import Brief, BriefStep, JobBase, JobStatus, Patient, add_jobs
from tests.support_processes import Program

HOUR = 3600
BACKOFF, LEASE = timedelta(minutes=1), timedelta(seconds=30)


# a worker whose clock is wrong


@pytest.fixture(params=[HOUR, -HOUR], ids=["an hour ahead", "an hour behind"])
def worker(engine: Engine, request: pytest.FixtureRequest) -> Iterator[Program]:
    JobBase.metadata.create_all(engine)
    with Program("wrong_clock", engine.url.render_as_string(hide_password=False), str(request.param)) as program:
        for told in program.ask(["clocks", None]):
            assert abs(told - time.time() - request.param) < 60, "the clock of the worker is not wrong"
        yield program
        assert program.ask(["suspicious", None]) == []


class Watched:
    """A job whose columns are compared with the database clock around what a worker does."""

    def __init__(self, engine: Engine, worker: Program) -> None:
        self._engine = engine
        self._worker = worker
        (self.ident,) = add_jobs(engine, Patient, 1)

    def after(self, verb: str, answer: object = None, **expected: timedelta) -> None:
        """Let the worker do something, and expect columns to be that far ahead of when it did it."""
        before = self.now()
        assert self._worker.ask([verb, self.ident]) == answer
        ended = self.now()
        with Session(self._engine) as session:
            job = session.get_one(Patient, self.ident)
            for name, ahead in expected.items():
                at = datetime.fromisoformat(job.failures[-1]["at"]) if name == "failed_at" else getattr(job, name)
                assert before + ahead <= at <= ended + ahead, name

    def read(self, name: str) -> datetime:
        with Session(self._engine) as session:
            at: datetime = getattr(session.get_one(Patient, self.ident), name)
            return at

    def now(self) -> datetime:
        with self._engine.connect() as connection:
            return connection.execute(select(func.clock_timestamp())).scalar_one()

    def let(self, move: Callable[..., None]) -> None:
        with Session(self._engine) as session, session.begin():
            move(session, Patient, self.ident)


NOW = timedelta(0)


def test_a_wrong_clock_changes_no_lease_heartbeat_or_landing(engine: Engine, worker: Program) -> None:
    job = Watched(engine, worker)
    job.after("claim", True, started_at=NOW, lease_expires_at=LEASE)
    job.after("claim_due", 0)
    job.after("reap", 0)
    job.after("renew", lease_expires_at=LEASE)
    job.let(lapse)
    job.after("step", lease_expires_at=LEASE)
    job.after("external")
    job.after("finish", finished_at=NOW)


def test_a_wrong_clock_changes_no_backoff_schedule_or_reaping(engine: Engine, worker: Program) -> None:
    job = Watched(engine, worker)
    job.after("retry", Ending.INTERRUPTED, available_at=BACKOFF, failed_at=NOW)
    job.after("claim", False)
    job.after("claim_due", 0)
    job.let(make_due)
    job.after("claim_due", 1, started_at=NOW, lease_expires_at=LEASE)
    job.after("reap", 0)
    job.let(lapse)
    lapsed_at = job.read("lease_expires_at")
    job.after("reap", 1, failed_at=NOW)
    assert job.read("available_at") == lapsed_at + BACKOFF
    job.let(make_due)
    job.after("claim", True, lease_expires_at=LEASE)
    job.after("transition", True, finished_at=NOW)
    job.after("requeue", True, available_at=NOW)
    job.after("claim", True, started_at=NOW)
    job.after("release")


def test_a_wrong_clock_changes_no_expiry(engine: Engine, worker: Program) -> None:
    ConsentBase.metadata.create_all(engine)
    half_an_hour = timedelta(minutes=30)
    ahead, passed = func.clock_timestamp() + half_an_hour, func.clock_timestamp() - half_an_hour
    asked, late, ready, overdue = (
        add_consent(engine, status, expires_at=expires_at)
        for status in (Status.PENDING, Status.APPROVED)
        for expires_at in (ahead, passed)
    )
    before = database_clock(engine)
    assert worker.ask(["approve", asked]) is True
    assert before + half_an_hour <= stored(engine, asked).expires_at <= database_clock(engine) + half_an_hour
    assert worker.ask(["approve", late]) is False
    assert worker.ask(["claim_consent", ready]) is True
    assert worker.ask(["sweep", 0]) == 2
    assert worker.ask(["claim_consent", overdue]) is False
    found = [stored(engine, ident).status for ident in (asked, late, ready, overdue)]
    assert found == [Status.APPROVED, Status.EXPIRED, Status.EXECUTING, Status.EXPIRED]
    assert stored(engine, late).finished_at >= before


# a batch whose last run starts after its lease would have ended


def test_runs_claimed_together_keep_their_leases_while_they_wait_for_each_other(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    lease = Brief.__lifecycle__.lease.total_seconds()
    add_jobs(engine, Brief, 3)
    jobs: Runs[Brief] = Runs(session_factory, Brief, BriefStep, owner="one")
    other: Runs[Brief] = Runs(session_factory, Brief, BriefStep, owner="other")
    batch = jobs.claim_due(3)
    taken: list[Run[Brief]] = []
    over = False

    def poll() -> None:
        while not over:
            taken.extend(other.claim_due(3))
            time.sleep(0.02)

    poller = Background(poll)

    def carry_out(run: Run[Brief]) -> None:
        run.external("slow", lambda: time.sleep(0.6 * lease))

    try:
        outcomes = [jobs.execute(run, carry_out) for run in batch]
    finally:
        over = True
        poller.result()
    assert [outcome.status for outcome in outcomes] == [JobStatus.DONE] * 3
    assert taken == []
    with engine.connect() as connection:
        assert connection.execute(select(Brief.fence, Brief.attempts)).all() == [(1, 1)] * 3


# as SQL


@pytest.mark.parametrize(
    "duration",
    [
        timedelta(0),
        timedelta(microseconds=1),
        timedelta(microseconds=-1),
        timedelta(seconds=1, microseconds=999_999),
        timedelta(days=-3, seconds=5),
        timedelta(days=36_500, seconds=86_399, microseconds=123_457),
        timedelta(seconds=120) / 7,
    ],
    ids=str,
)
def test_a_duration_is_exact_to_the_microsecond(engine: Engine, duration: timedelta) -> None:
    with engine.connect() as connection:
        assert connection.scalar(select(clock.interval(duration))) == duration


def delays(engine: Engine, retry: Retry, *attempts: int) -> list[float]:
    columns = [clock.backoff(retry, literal(attempt, Integer)).label(f"d{n}") for n, attempt in enumerate(attempts)]
    with engine.connect() as connection:
        return [delay.total_seconds() for delay in connection.execute(select(*columns)).one()]


def test_a_delay_doubles_from_the_first_attempt_until_its_cap(engine: Engine) -> None:
    retry = Retry(backoff=timedelta(seconds=1.5), cap=timedelta(seconds=20), jitter=0)
    assert delays(engine, retry, 0, 1, 2, 3, 4, 5, 6) == [1.5, 1.5, 3, 6, 12, 20, 20]


def test_a_cap_of_the_delay_itself_keeps_every_delay_the_same(engine: Engine) -> None:
    retry = Retry(backoff=timedelta(seconds=7), cap=timedelta(seconds=7), jitter=0)
    assert delays(engine, retry, 1, 2, 50) == [7, 7, 7]


def test_no_delay_stays_none(engine: Engine) -> None:
    assert delays(engine, Retry(backoff=timedelta(0)), 1, 2, 10**6) == [0, 0, 0]


@pytest.mark.parametrize("factor", [1, 1.0000001, 2, 10, 1e300])
@pytest.mark.parametrize("cap", [timedelta(minutes=5), timedelta(days=36_500)], ids=str)
def test_a_million_attempts_overflow_nothing(engine: Engine, factor: float, cap: timedelta) -> None:
    retry = Retry(max_attempts=None, backoff=timedelta(microseconds=1), cap=cap, factor=factor, jitter=0)
    found = delays(engine, retry, 10**6, 2**31 - 1)
    if factor >= 2:
        assert found == [cap.total_seconds()] * 2
    assert all(0 <= delay <= cap.total_seconds() for delay in found)


def test_jitter_moves_a_delay_by_no_more_than_its_share_and_both_ways(engine: Engine) -> None:
    retry = Retry(backoff=timedelta(seconds=10), cap=timedelta(seconds=10), jitter=0.2)
    with engine.connect() as connection:
        many = select(clock.backoff(retry, literal(1))).select_from(func.generate_series(1, 500))
        found = [delay.total_seconds() for delay in connection.scalars(many)]
    assert 8 <= min(found) < 9
    assert 11 < max(found) <= 12
    assert len(set(found)) > 400


def test_a_stamp_moves_on_within_a_transaction_and_a_comparison_within_none_of_its_statements(engine: Engine) -> None:
    def both(session: Session) -> Any:
        query = select(clock.stamp(), clock.now(), func.pg_sleep(0.002), clock.stamp(), clock.now(), func.now())
        return session.execute(query).one()

    with Session(engine) as session:
        first, second = both(session), both(session)
    for stamp, compared, _, later, compared_later, start in (first, second):
        assert stamp < later
        assert compared == compared_later
        assert start == first[5]
    assert first[4] < second[1]
