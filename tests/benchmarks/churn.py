"""What autovacuum and the fillfactor do for a table of runs: claimed, renewed and landed all the time.

Run it by hand, on the embedded PostgreSQL or on the one that ``DATABASE_URL`` names::

    python -m tests.benchmarks.churn [seconds]

Each kind of settings has a table of its own making with 100,000 finished runs, and then that many seconds of a worker.
The embedded server looks for tables to vacuum every second rather than every minute, so that seconds will do.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import sessionmaker

from sqla_durable import Run, Runs, Worker
from tests.benchmarks.server import database
from tests.support import Base, Plan, PlanStep

FINISHED, BATCH = 100_000, 2_000
DUE = "INSERT INTO plan (id, status, actions) SELECT gen_random_uuid(), 'approved', '[]' FROM generate_series(1, {})"
DONE = (
    "INSERT INTO plan (id, status, actions, finished_at)"
    f" SELECT gen_random_uuid(), 'executed', '[]', now() FROM generate_series(1, {FINISHED})"
)
NEXT = (
    "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT id FROM plan WHERE status = 'approved'"
    " AND available_at <= statement_timestamp() ORDER BY available_at LIMIT 1"
)
SEEN = text(
    "SELECT n_tup_upd, n_tup_hot_upd, n_dead_tup, autovacuum_count, pg_table_size(relid) AS size,"
    " pg_relation_size('ix_plan_available_at') AS index_size FROM pg_stat_user_tables WHERE relname = 'plan'"
)
OFTEN = {"autovacuum_vacuum_scale_factor": "0.01", "autovacuum_vacuum_cost_delay": "0"}
KINDS: list[tuple[str, Mapping[str, str], bool]] = [
    ("fillfactor 100, PostgreSQL's autovacuum", {"fillfactor": "100"}, False),
    ("fillfactor 80, PostgreSQL's autovacuum", {"fillfactor": "80"}, False),
    ("fillfactor 80, scale factor 0.01", {"fillfactor": "80", **OFTEN}, False),
    ("the same, and a transaction that stays open", {"fillfactor": "80", **OFTEN}, True),
]


def renew(run: Run[Plan]) -> None:
    """What a heartbeat does, three times."""
    for _ in range(3):
        run.renew()


@contextmanager
def open_transaction(engine: Engine) -> Iterator[None]:
    with engine.connect() as connection:
        connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
        connection.execute(text("SELECT 1 FROM plan LIMIT 1"))
        yield


def churn(engine: Engine, seconds: float) -> int:
    """Carry out runs for that long; return how many."""
    plans: Runs[Plan] = Runs(sessionmaker(engine), Plan, PlanStep)
    worker = Worker(plans.handled_by(renew), concurrency=10)
    count, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        with engine.begin() as connection:
            connection.execute(text(DUE.format(BATCH)))
        worker.run_due(timedelta(minutes=1))
        count += BATCH
    return count


def prepare(engine: Engine, storage: Mapping[str, str]) -> None:
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    settings = ", ".join(f"{name} = {value}" for name, value in storage.items())
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(f"ALTER TABLE plan SET ({settings})"))
        connection.execute(text(DONE))
        connection.execute(text("VACUUM ANALYZE plan"))
        connection.execute(text("SELECT pg_stat_reset()"))


def pages_of_next(engine: Engine) -> int:
    """How many pages PostgreSQL looks at to find the next run that is due."""
    with engine.begin() as connection:
        connection.execute(text(DUE.format(1)))
    with engine.connect() as connection:
        seen: list[int] = []
        for _ in range(5):
            plan: Any = connection.scalar(text(NEXT))
            seen.append(plan[0]["Plan"]["Shared Hit Blocks"] + plan[0]["Plan"]["Shared Read Blocks"])
    return int(statistics.median(seen))


def measure(engine: Engine, name: str, storage: Mapping[str, str], seconds: float, *, held: bool) -> None:
    prepare(engine, storage)
    with open_transaction(engine) if held else nullcontext():
        count = churn(engine, seconds)
        pages = pages_of_next(engine)
        time.sleep(1.5)  # until all backends have told what they did
        with engine.connect() as connection:
            seen = connection.execute(SEEN).one()
    print(
        f"{name}: {count / seconds:,.0f} runs per second; HOT {seen.n_tup_hot_upd / seen.n_tup_upd:.0%} of "
        f"{seen.n_tup_upd:,} updates; vacuumed {seen.autovacuum_count} times; {seen.n_dead_tup:,} dead rows; "
        f"table {seen.size / 2**20:.0f} MiB; ix_plan_available_at {seen.index_size / 2**10:.0f} KiB; "
        f"the next run is found on {pages} pages",
        flush=True,
    )


if __name__ == "__main__":
    with database({"autovacuum_naptime": "1s", "max_connections": "100", "fsync": "off"}) as url:
        engine = create_engine(url, pool_size=20)
        for name, storage, held in KINDS:
            measure(engine, name, storage, float(sys.argv[1]) if sys.argv[1:] else 20.0, held=held)
        engine.dispose()
