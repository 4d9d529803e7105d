"""What a worker costs, as ratios measured interleaved in one run on one server.

Run it by hand, on the embedded PostgreSQL or on the one that ``DATABASE_URL`` names::

    python -m tests.benchmarks.workers [throughput] [latency] [claims]

Bare psycopg sends the very statements of the library, so that what is compared is everything around them.
*Throughput*: runs with bodies that do nothing, against the same batch claims and batch landings. *Latency*: from the
start of a run of three steps to its landing, on an idle worker, on the database's clock, against a loop that listens
likewise. *Claims*: what a claim costs with five million finished runs and a hundred thousand that are not due, against
ten thousand finished ones.
"""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
from sqlalchemy import Engine, create_engine, insert, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Run, Runs, Worker
from sqla_durable.prepared import Prepared
from sqla_durable.rows import arguments
from tests.benchmarks.server import database
from tests.support import Base, Entry, Plan, PlanStep

ROUNDS = 7


def fill(engine: Engine, runs: int) -> None:
    with engine.begin() as connection:
        connection.execute(text("TRUNCATE plan CASCADE"))
        rows = f"SELECT gen_random_uuid(), 'approved', '[]' FROM generate_series(1, {runs})"
        connection.execute(text(f"INSERT INTO plan (id, status, actions) {rows}"))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE plan"))
        connection.execute(text("CHECKPOINT"))


def timed(work: Callable[[], object]) -> float:
    before = time.perf_counter()
    work()
    return time.perf_counter() - before


def ratio(name: str, ours: list[float], bare: list[float], limit: str) -> None:
    each = [mine / theirs for mine, theirs in zip(ours, bare, strict=True)]
    print(f"  {name}: {statistics.median(each):.2f} times bare psycopg ({min(each):.2f} to {max(each):.2f}); {limit}")


# throughput


class Bare:
    """A worker by hand, on one connection: the statements of a library's worker without anything around them."""

    def __init__(self, plans: Runs[Plan], dsn: str) -> None:
        self._verbs = plans._verbs
        self._connection = psycopg.connect(dsn, autocommit=True)
        columns = list(self._verbs.runs.table.columns)
        self._key, self._fence = 1 + columns.index(self._verbs.runs.key[0]), 1 + columns.index(self._verbs.runs.fence)

    def execute(self, statement: Prepared, **parameters: Any) -> list[Any]:
        """Execute a statement of the library."""
        sql: Any = statement._sql
        return self._connection.execute(sql, {**statement._fixed, **arguments(**parameters)}).fetchall()

    def claim(self, limit: int) -> list[tuple[Any, int]]:
        """Claim a batch; return each run's key and fence."""
        rows = self.execute(self._verbs.claims._claim_due(limit), owner="bare")
        return [(row[self._key], row[self._fence]) for row in rows if row[self._fence] is not None]

    def land(self, runs: list[tuple[Any, int]]) -> None:
        """Land a batch."""
        keys, fences = zip(*runs, strict=True)
        if len(runs) == 1:
            self.execute(self._verbs.claims.landings._one, key_0=keys[0], fence=fences[0])
        else:
            self.execute(self._verbs.claims.landings._many, key_0=list(keys), fence=list(fences))

    def step(self, key: Any, fence: int, name: str) -> None:
        """Carry out a step in a transaction with its receipt."""
        steps = self._verbs.claims.steps
        known = {"key_0": key, "fence": fence, "owner": "bare", "step": name}
        with self._connection.transaction():
            (opened,) = self.execute(steps.open, **known, effect="transactional")
            self._connection.execute("INSERT INTO entry (label) VALUES ('bare') RETURNING id").fetchone()
            self.execute(steps.seal, **known, result="1", renew_at=opened[1])

    def until_idle(self, limit: int) -> None:
        """Claim and land until nothing is due."""
        while runs := self.claim(limit):
            self.land(runs)

    def work(self, dsn: str, stopped: threading.Event) -> None:
        """Listen, claim, carry out three steps, and land, until stopped."""
        with psycopg.connect(dsn, autocommit=True) as listening:
            listening.execute("LISTEN sqla_durable")
            while not stopped.is_set():
                for run in self.claim(1):
                    for position in range(3):
                        self.step(*run, str(position))
                    self.land([run])
                list(listening.notifies(timeout=0.2, stop_after=1))

    def close(self) -> None:
        self._connection.close()


def throughput(engine: Engine, dsn: str) -> None:
    plans: Runs[Plan] = Runs(sessionmaker(engine), Plan, PlanStep)
    bare = Bare(plans, dsn)
    for concurrency, runs, limit in ((10, 5000, 0.5), (1, 1000, 0.6)):
        print(f"throughput at concurrency {concurrency}, bodies that do nothing, {runs} runs, {ROUNDS} rounds")
        worker = Worker(plans.handled_by(lambda run: None), concurrency=concurrency)
        rates: dict[str, list[float]] = {"ours": [], "bare": []}
        for _ in range(ROUNDS + 1):
            fill(engine, runs)
            rates["ours"].append(runs / timed(lambda: worker.run_due(timedelta(minutes=1))))  # noqa: B023
            fill(engine, runs)
            rates["bare"].append(runs / timed(lambda: bare.until_idle(concurrency)))  # noqa: B023
        for name, values in rates.items():
            print(f"  {name}: {statistics.median(values[1:]):,.0f} runs per second")
        ratio("runs per second", rates["ours"][1:], rates["bare"][1:], f"asked: at least {limit}")
    bare.close()


# latency


INSERT_ENTRY = insert(Entry.__table__).returning(Entry.__table__.c.id)


def write_entry(session: Session, label: str) -> int:
    return int(session.execute(INSERT_ENTRY, {"label": label}).scalar_one())


def three_steps(run: Run[Plan]) -> None:
    for position in range(3):
        run.step(position, write_entry, "ours")


@contextmanager
def bare_worker(bare: Bare, dsn: str) -> Iterator[None]:
    stopped = threading.Event()
    thread = threading.Thread(target=bare.work, args=(dsn, stopped))
    thread.start()
    time.sleep(0.5)
    yield
    stopped.set()
    thread.join()


@contextmanager
def our_worker(plans: Runs[Plan]) -> Iterator[None]:
    worker = Worker(plans.handled_by(three_steps))
    thread = threading.Thread(target=worker.run)
    thread.start()
    time.sleep(0.5)
    yield
    worker.stop()
    thread.join()


def start_to_finish(engine: Engine, starts: int) -> list[float]:
    """Start runs one after the other; return how many milliseconds each took, on the database's clock."""
    taken: list[float] = []
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for _ in range(starts):
            begun = text(
                "WITH run AS (INSERT INTO plan (id, status, actions, created_at) VALUES"
                " (gen_random_uuid(), 'approved', '[]', clock_timestamp()) RETURNING id)"
                " SELECT id, pg_notify('sqla_durable', 'plan') FROM run"
            )
            ident = connection.execute(begun).scalar_one()
            took = text(
                "SELECT extract(epoch FROM finished_at - created_at) * 1000 FROM plan WHERE id = :id AND"
                " finished_at IS NOT NULL"
            )
            time.sleep(0.02)
            while (milliseconds := connection.execute(took, {"id": ident}).scalar()) is None:
                time.sleep(0.002)
            taken.append(float(milliseconds))
    return taken


def latency(engine: Engine, dsn: str) -> None:
    plans: Runs[Plan] = Runs(sessionmaker(engine), Plan, PlanStep)
    fill(engine, 0)
    by_hand = Bare(plans, dsn)
    ours: list[float] = []
    bare: list[float] = []
    for _ in range(ROUNDS):
        with our_worker(plans):
            ours.append(statistics.median(start_to_finish(engine, 60)[10:]))
        with bare_worker(by_hand, dsn):
            bare.append(statistics.median(start_to_finish(engine, 60)[10:]))
    by_hand.close()
    print(f"start to finish of a run of three steps on an idle worker, p50 of 50, {ROUNDS} rounds")
    print(f"  ours: {statistics.median(ours):.2f} ms; bare: {statistics.median(bare):.2f} ms")
    ratio("p50", ours, bare, "asked: at most 1.5")


# claims


def claims(engine: Engine, dsn: str) -> None:
    plans: Runs[Plan] = Runs(sessionmaker(engine), Plan, PlanStep)
    figures: dict[str, float] = {}
    for name, finished, later in (("small", 10_000, 0), ("large", 5_000_000, 100_000)):
        fill(engine, 0)
        columns = "(id, status, fence, attempts, available_at, started_at, finished_at, actions)"
        with engine.begin() as connection:
            for rows in (
                f"'executed', 1, 1, now(), now(), now(), '[]' FROM generate_series(1, {finished})",
                f"'approved', 0, 0, now() + i * interval '1 min', NULL, NULL, '[]' FROM generate_series(1, {later})",
                "'approved', 0, 0, now() - i * interval '1 ms', NULL, NULL, '[]' FROM generate_series(1, 2000)",
            ):
                connection.execute(text(f"INSERT INTO plan {columns} SELECT gen_random_uuid(), {rows} AS i"))
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM ANALYZE plan"))
            connection.execute(text("CHECKPOINT"))
        times = [timed(lambda: plans.claim_due(1)) for _ in range(400)]
        figures[name] = statistics.median(times[50:]) * 1000
        print(f"a claim of one run among {finished:,} finished and {later:,} not due: {figures[name]:.2f} ms (p50)")
    print(f"  {figures['large'] / figures['small']:.2f} times; asked: at most 1.3")


def main() -> None:
    """Measure what the arguments name, or everything."""
    wanted = sys.argv[1:] or ["throughput", "latency", "claims"]
    with database({"shared_buffers": "512MB", "max_wal_size": "4GB"}) as url:
        engine = create_engine(url, pool_size=20)
        Base.metadata.create_all(engine)
        dsn = url.set(drivername="postgresql").render_as_string(hide_password=False)
        for measure in (throughput, latency, claims):
            if measure.__name__ in wanted:
                measure(engine, dsn)
        engine.dispose()


if __name__ == "__main__":
    main()
