"""A connection cut before and after every statement and commit of a run: the run is carried on, exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, delete, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import DatabaseUnavailable, Ending, Outcome, Runs
from sqla_durable.asyncio import AsyncRuns
from tests.support import Entry, Plan, PlanStatus, PlanStep, approved_plan, column, entries, let_lapse
from tests.support_points import EFFECTS, STEPS, Points, carry_out, carry_out_async, commits

pytestmark = pytest.mark.slow


class Worker:
    """Carries plans out, all with one pool of connections."""

    def __init__(self, url: str, ledger: Path) -> None:
        self.engine = create_engine(url)
        self._ledger = ledger
        self._plans = Runs(sessionmaker(self.engine), Plan, PlanStep)

    def carry_out(self, ident: UUID) -> Outcome:
        return self._plans.execute(ident, partial(carry_out, ledger=self._ledger))

    def close(self) -> None:
        self.engine.dispose()


class AsyncWorker:
    def __init__(self, url: str, ledger: Path) -> None:
        self._loop = asyncio.Runner()
        self._engine = create_async_engine(url)
        self.engine = self._engine.sync_engine
        self._ledger = ledger
        self._plans = AsyncRuns(async_sessionmaker(self._engine), Plan, PlanStep)

    def carry_out(self, ident: UUID) -> Outcome:
        return self._loop.run(self._plans.execute(ident, partial(carry_out_async, ledger=self._ledger)))

    def close(self) -> None:
        self._loop.run(self._engine.dispose())
        self._loop.close()


AnyWorker = Worker | AsyncWorker


@pytest.mark.parametrize("form", [Worker, AsyncWorker], ids=["sync", "async"])
def test_a_connection_cut_at_any_point_leaves_a_run_that_is_carried_on(
    engine: Engine, session_factory: sessionmaker[Session], tmp_path: Path, form: Callable[[str, Path], AnyWorker]
) -> None:
    ledger = tmp_path / "ledger"
    with closing(form(engine.url.render_as_string(hide_password=False), ledger)) as worker:
        worker.carry_out(approved_plan(session_factory))  # connects
        undisturbed = Points()
        with undisturbed.of(worker.engine):
            worker.carry_out(approved_plan(session_factory))
        assert commits(undisturbed.labels) == len(STEPS) + 2
        for point, label in enumerate(undisturbed.labels):
            with engine.begin() as connection:
                connection.execute(delete(Entry))
            ledger.write_text("")
            try:
                check_recovery(engine, session_factory, worker, point)
                assert ledger.read_text().count("charged") in {1, 2}
            except AssertionError as error:
                error.add_note(f"cut at point {point} of {len(undisturbed.labels)}, {label!r}")
                raise


def cut_at(engine: Engine, worker: AnyWorker, ident: UUID, point: int) -> Outcome | None:
    """Carry a plan out whose connection is cut at one of its points; None where nothing was decided."""

    def visit(number: int, _: str) -> None:
        if number == point:
            with engine.connect() as connection:
                connection.execute(text("SELECT pg_terminate_backend(:pid, 10000)"), {"pid": points.backend})

    points = Points(visit)
    with points.of(worker.engine):
        return carried_out(worker, ident)


def carried_out(worker: AnyWorker, ident: UUID) -> Outcome | None:
    try:
        return worker.carry_out(ident)
    except DatabaseUnavailable:
        return None


def check_recovery(engine: Engine, session_factory: sessionmaker[Session], worker: AnyWorker, point: int) -> None:
    """One call of ``execute`` loses its connection; the next ones, of the same process, bring the run to its end."""
    ident = approved_plan(session_factory)
    outcome = cut_at(engine, worker, ident, point)
    status = column(engine, ident, "status")
    if outcome is not None:
        assert outcome.ending in {Ending.LANDED, Ending.INTERRUPTED}
        assert outcome.ending is Ending.INTERRUPTED or status is PlanStatus.EXECUTED
    assert status in {PlanStatus.APPROVED, PlanStatus.EXECUTING, PlanStatus.EXECUTED}
    if status is PlanStatus.EXECUTING:
        let_lapse(session_factory, ident)
    # A connection that was cut while it lay in the pool is found out by one more call.
    outcome = carried_out(worker, ident) or carried_out(worker, ident)
    assert outcome is not None
    if outcome.ending is not Ending.LANDED:
        outcome = worker.carry_out(ident)
    assert (outcome.ending, outcome.status, outcome.failure) == (Ending.LANDED, PlanStatus.EXECUTED, None)
    assert [receipt.step for receipt in outcome.receipts] == STEPS
    assert entries(engine) == EFFECTS
    assert column(engine, ident, "note") == "x"
