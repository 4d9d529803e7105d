"""What a step costs, as ratios measured interleaved in one run on one server.

Run it by hand, on the embedded PostgreSQL or on the one that ``DATABASE_URL`` names::

    python -m tests.benchmarks.steps

Each line sets a step of this library against the same work written by hand. Blocks of one kind take turns, so that a
drift of the machine's speed meets all kinds alike; only the ratios mean something.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
import uuid
from collections.abc import Callable
from typing import Any

import psycopg
from sqlalchemy import Engine, create_engine, insert, make_url, select, text, update
from sqlalchemy.orm import Mapped, Session, mapped_column, sessionmaker

from sqla_durable import Run, Runs
from tests.benchmarks.server import database
from tests.support import Base, Plan, PlanStatus, PlanStep, approved_plan

BLOCKS = 24
BLOCK = 50


class Movement(Base):
    """The effect of each step."""

    __tablename__ = "movement"
    id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)
    amount: Mapped[int]


INSERT_MOVEMENT = insert(Movement.__table__)


def orm_body(session: Session, amount: int) -> int:
    session.add(Movement(amount=amount))
    return amount


def core_body(session: Session, amount: int) -> int:
    session.execute(INSERT_MOVEMENT, {"id": uuid.uuid4(), "amount": amount})
    return amount


class Rival:
    """The same work by hand, on one claimed run of its own."""

    def __init__(self, factory: sessionmaker[Session], run: Run[Plan], dsn: dict[str, Any]) -> None:
        self.factory = factory
        self.ident = run.row.id
        self.fence = run.lease.fence
        self.raw = psycopg.connect(**dsn)
        self.autocommit = psycopg.connect(**dsn, autocommit=True)
        self.counter = 0

    def step(self) -> str:
        self.counter += 1
        return f"hand {self.counter}"

    def orm_session(self) -> None:
        """Lock, fence check, effect and receipt with an ORM session, as one would write it."""
        with self.factory.begin() as session:
            held = (Plan.id == self.ident, Plan.status == PlanStatus.EXECUTING, Plan.fence == self.fence)
            session.execute(select(Plan.fence).where(*held).with_for_update(key_share=True)).one()
            session.add(Movement(amount=self.counter))
            session.add(
                PlanStep(
                    plan_id=self.ident,
                    step=self.step(),
                    outcome="succeeded",
                    result=self.counter,
                    effect="transactional",
                    fence=self.fence,
                )
            )

    def bare_psycopg(self) -> None:
        """The library's protocol, lock, open receipt, effect, seal, in bare psycopg."""
        values = {"id": self.ident, "fence": self.fence, "step": self.step(), "result": json.dumps(self.counter)}
        cursor = self.raw.cursor()
        cursor.execute(OPEN, values).fetchone()
        cursor.execute(MOVE, {"id": uuid.uuid4(), "amount": self.counter})
        cursor.execute(SEAL, values).fetchone()
        self.raw.commit()

    def fused_statement(self) -> None:
        """The fused statement of a value-only step, in bare psycopg."""
        values = {"id": self.ident, "fence": self.fence, "step": self.step(), "result": json.dumps(self.counter)}
        self.autocommit.execute(FUSED, values).fetchone()

    def close(self) -> None:
        self.raw.close()
        self.autocommit.close()


HELD = """WITH held AS (SELECT id, fence, cancel_requested_at, lease_expires_at FROM plan
    WHERE id = %(id)s AND fence = %(fence)s AND status = 'executing' FOR NO KEY UPDATE)"""
OPEN = f"""{HELD},
    opened AS (INSERT INTO plan_step (plan_id, step, effect, fence, unsealed)
        SELECT id, %(step)s, 'transactional', fence, '' FROM held
        ON CONFLICT (plan_id, step) DO NOTHING RETURNING recorded_at)
    SELECT cancel_requested_at, lease_expires_at, (SELECT count(*) FROM opened),
        set_config('idle_in_transaction_session_timeout', '30000', true) FROM held"""
SEAL = """UPDATE plan_step SET unsealed = NULL, outcome = 'succeeded', result = %(result)s::jsonb,
    recorded_at = clock_timestamp() WHERE plan_id = %(id)s AND step = %(step)s AND unsealed IS NOT NULL
    RETURNING recorded_at"""
FUSED = f"""{HELD},
    recorded AS (INSERT INTO plan_step (plan_id, step, effect, fence, outcome, result, recorded_at)
        SELECT id, %(step)s, 'external', fence, 'succeeded', %(result)s::jsonb, clock_timestamp() FROM held
        ON CONFLICT (plan_id, step) DO NOTHING RETURNING recorded_at)
    SELECT cancel_requested_at, (SELECT recorded_at FROM recorded) FROM held"""
MOVE = "INSERT INTO movement (id, amount) VALUES (%(id)s, %(amount)s)"


class Steps:
    """The steps of one run of this library."""

    def __init__(self, run: Run[Plan]) -> None:
        self.run = run
        self.counter = 0

    def orm(self) -> None:
        self.counter += 1
        self.run.step(self.counter, orm_body, self.counter)

    def core(self) -> None:
        self.counter += 1
        self.run.step(self.counter, core_body, self.counter)

    def value_only(self) -> None:
        self.counter += 1
        self.run.external(self.counter, self.value)

    def value(self) -> int:
        return self.counter


def measure(kinds: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Return the median milliseconds of each kind."""
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for block in range(BLOCKS + 2):
        for name, call in kinds.items():
            gc.collect()
            for _ in range(BLOCK):
                start = time.perf_counter()
                call()
                if block > 1:
                    times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1000 for name, values in times.items()}


def prepared(engine: Engine) -> tuple[Rival, Steps]:
    Base.metadata.drop_all(engine)
    Base.metadata.create_all(engine)
    factory = sessionmaker(engine)
    plans = Runs(factory, Plan, PlanStep)
    ours, theirs = (plans.claim(approved_plan(factory)) for _ in range(2))
    assert ours is not None
    assert theirs is not None
    with engine.begin() as connection:  # hold the rival's lease for the whole measurement
        far = text("now() + interval '1 day'")
        connection.execute(update(Plan.__table__).values(lease_expires_at=far))
    query = {key: str(value) for key, value in make_url(engine.url).query.items()}
    url = engine.url
    dsn = {"dbname": url.database, "user": url.username, "password": url.password, "host": url.host, "port": url.port}
    return Rival(factory, theirs, {**{k: v for k, v in dsn.items() if v is not None}, **query}), Steps(ours)


def main() -> None:
    """Measure and print."""
    with database() as url:
        engine = create_engine(url)
        rival, steps = prepared(engine)
        cost = measure(
            {
                "by hand, ORM session": rival.orm_session,
                "step, ORM body": steps.orm,
                "by hand, bare psycopg": rival.bare_psycopg,
                "step, Core body": steps.core,
                "fused statement, bare psycopg": rival.fused_statement,
                "step, value only": steps.value_only,
            }
        )
        rival.close()
        engine.dispose()
    for name, milliseconds in cost.items():
        print(f"{name:32}{milliseconds:8.3f} ms")
    print()
    for title, share, bound in (
        ("ORM body / ORM session by hand", cost["step, ORM body"] / cost["by hand, ORM session"], "at most 1.05"),
        ("Core body / bare psycopg", cost["step, Core body"] / cost["by hand, bare psycopg"], "at most 1.5"),
        (
            "value only, throughput / bare psycopg",
            cost["fused statement, bare psycopg"] / cost["step, value only"],
            "at least 0.7",
        ),
    ):
        print(f"{title:40}{share:6.2f}   ({bound})")


if __name__ == "__main__":
    main()
