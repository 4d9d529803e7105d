"""What a guard costs a step, as a ratio measured in one run on one server, call by call in turns.

Run it by hand, on the embedded PostgreSQL or on the one that ``DATABASE_URL`` names::

    python -m tests.benchmarks.guards
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

from sqlalchemy import Engine, create_engine, insert, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import Lifecycle, ReceiptMixin, Run, RunMixin, Runs, StatusMachine
from tests.benchmarks.server import database
from tests.support import PlanStatus, plan_statuses

BOUND = 1.15
ROUNDS = 1500
WARM = 100


class Kind:
    """A run of one kind that is carried out, guarded or not."""

    def __init__(self, engine: Engine, name: str, guarded: bool) -> None:
        machine = StatusMachine(PlanStatus, initial=PlanStatus.PENDING, transitions=plan_statuses.transitions)

        class Base(DeclarativeBase):
            pass

        class Job(RunMixin, Base):
            __tablename__ = name
            __guard__ = guarded
            __lifecycle__ = Lifecycle(
                machine,
                ready=PlanStatus.APPROVED,
                running=PlanStatus.EXECUTING,
                done=PlanStatus.EXECUTED,
                failed=PlanStatus.FAILED,
            )
            id: Mapped[uuid.UUID] = mapped_column(primary_key=True, default=uuid.uuid4)
            status: Mapped[PlanStatus] = machine.column()

        class JobStep(ReceiptMixin[Job], Base):
            __tablename__ = f"{name}_step"

        class Movement(Base):
            __tablename__ = f"{name}_movement"
            id: Mapped[uuid.UUID] = mapped_column(primary_key=True)
            amount: Mapped[int]

        Base.metadata.drop_all(engine)
        Base.metadata.create_all(engine)
        self._factory = sessionmaker(engine)
        self._job = Job
        self._movement = insert(Movement.__table__)
        self._runs: Runs[Any] = Runs(self._factory, Job, JobStep)
        self._counter = 0
        self._run: Run[Any] = self._claimed()
        with engine.begin() as connection:  # for the whole measurement
            connection.execute(text(f"UPDATE {name} SET lease_expires_at = now() + interval '1 day'"))

    def _ready(self) -> uuid.UUID:
        with self._factory.begin() as session:
            session.add(job := self._job(status=PlanStatus.APPROVED))
            session.flush()
            ident: uuid.UUID = job.id
            return ident

    def _claimed(self) -> Run[Any]:
        run = self._runs.claim(self._ready())
        assert run is not None
        return run

    def _body(self, session: Session, amount: int) -> int:
        session.execute(self._movement, {"id": uuid.uuid4(), "amount": amount})
        return amount

    def step(self) -> None:
        self._counter += 1
        self._run.step(self._counter, self._body, self._counter)

    def value_only(self) -> None:
        self._counter += 1
        self._run.external(self._counter, int)

    def whole_run(self) -> None:
        self._runs.execute(self._ready(), lambda run: run.step("only", self._body, 1))


def measure(without: Callable[[], None], with_: Callable[[], None], rounds: int) -> tuple[float, float]:
    """Return the median milliseconds of each, called in turns, so that whatever else the machine does meets both."""
    times: tuple[list[float], list[float]] = [], []
    gc.collect()
    for round_ in range(rounds + WARM):
        order = (0, 1) if round_ % 2 else (1, 0)
        for kind in order:
            start = time.perf_counter()
            (without, with_)[kind]()
            if round_ >= WARM:
                times[kind].append(time.perf_counter() - start)
    return statistics.median(times[0]) * 1000, statistics.median(times[1]) * 1000


def main() -> None:
    """Measure and print; exit with 1 where a step costs too much."""
    with database({"fsync": "off"}) as url:  # or a slow disk hides the cost
        engine = create_engine(url)
        bare, guarded = Kind(engine, "bare", False), Kind(engine, "guarded", True)
        costs = {
            "step": measure(bare.step, guarded.step, ROUNDS),
            "step, value only": measure(bare.value_only, guarded.value_only, ROUNDS),
            "run of one step": measure(bare.whole_run, guarded.whole_run, ROUNDS // 5),
        }
        engine.dispose()
    print(f"{'':20}{'bare':>10}{'guarded':>11}{'ratio':>8}")
    for name, (without, with_) in costs.items():
        print(f"{name:20}{without:8.3f}ms{with_:9.3f}ms{with_ / without:8.3f}")
    ratio = costs["step"][1] / costs["step"][0]
    print(f"\na guarded step costs {ratio:.3f} times one without; at most {BOUND}")
    sys.exit(ratio > BOUND)


if __name__ == "__main__":
    main()
