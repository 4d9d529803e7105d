"""A process killed at every statement and commit in the life of a function: the next one ends with the same answer."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, delete, select, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import FunctionStatus
from sqla_durable.testing import lapse
from tests.support import eventually
from tests.support_function_points import EFFECTS, LIVES, NAME, SIGNALS, STEPS, functions_of
from tests.support_functions import DurableRun, DurableSignal, DurableStep, Entry, labels, tables
from tests.support_processes import Program

pytestmark = pytest.mark.slow


@dataclass
class Ground:
    """The database, the ledger of payments, and the program that is killed again and again."""

    engine: Engine
    ledger: Path
    program: Program
    keys: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.factory = sessionmaker(self.engine)
        self.url = self.engine.url.render_as_string(hide_password=False)

    def new(self) -> str:
        with self.engine.begin() as connection:
            for table in (DurableSignal, DurableStep, DurableRun, Entry):
                connection.execute(delete(table))
        self.ledger.write_text("")
        return f"key {next(self.keys)}"

    def live(self, form: str, key: str, kill_at: int | None = None) -> tuple[list[str], str | None]:
        number, points, result = self.program.ask([form, key, kill_at])
        assert number == (None if kill_at is None else signal.SIGKILL)
        eventually(self._is_rid_of_the_dead, "the end of the dead process's backends")
        return points, result

    def _is_rid_of_the_dead(self) -> bool:
        query = text("SELECT count(*) FROM pg_stat_activity WHERE application_name = :name")
        with self.engine.connect() as connection:
            return connection.scalar(query, {"name": NAME}) == 0

    def finish(self, form: str, key: str) -> str:
        """Let the dead holder's lease lapse, and live on here."""
        with self.factory.begin() as session:
            run = session.scalars(select(DurableRun)).one_or_none()
            if run is not None and run.status is FunctionStatus.RUNNING:
                lapse(session, DurableRun, run.id)
        return LIVES[form](self.url, self.ledger, key)

    def check_the_end(self, result: str | None) -> None:
        """The answer is the one, every effect in the database exists once, and each signal was taken once."""
        assert result == "shipped by ada"
        assert labels(self.engine) == EFFECTS
        payments = [line for line in self.ledger.read_text().splitlines() if line.startswith("paid ")]
        assert len(set(payments)) == 1, "however often it was paid, it was by one and the same key"
        with Session(self.engine) as session:
            (run,) = session.scalars(select(DurableRun)).all()
            assert (run.status, run.output, run.waits_for) == (FunctionStatus.DONE, "shipped by ada", None)
            signals = session.scalars(select(DurableSignal).order_by(DurableSignal.id)).all()
            assert [(each.name, each.step) for each in signals] == [(name, name) for name, _ in SIGNALS]
            assert signals[1].reply == 2
        receipts = functions_of(self.engine).steps(run.id)
        assert [receipt.step for receipt in receipts] == STEPS


@pytest.fixture
def ground(engine: Engine, tmp_path: Path) -> Iterator[Ground]:
    tables(engine)
    ledger = tmp_path / "ledger"
    with Program("crash_functions", engine.url.render_as_string(hide_password=False), str(ledger)) as program:
        yield Ground(engine, ledger, program)


@pytest.mark.parametrize("form", list(LIVES))
def test_a_function_killed_at_any_point_ends_with_the_same_answer(ground: Ground, form: str) -> None:
    key = ground.new()
    points, result = ground.live(form, key)
    ground.check_the_end(result)
    assert len(points) > 100
    for point, label in enumerate(points):
        key = ground.new()
        reached: Any = ground.live(form, key, kill_at=point)[0]
        try:
            assert reached == points[: point + 1]
            ground.check_the_end(ground.finish(form, key))
        except AssertionError as error:
            error.add_note(f"killed at point {point} of {len(points)}, {label!r}")
            raise
