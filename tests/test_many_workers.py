"""Many runs and several workers of both forms at once: each run is carried out once, whoever is killed meanwhile."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Engine, func, insert, select
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import RunNotFound, Runs
from tests.support import Background, Plan, PlanStatus, PlanStep, column, entries, eventually, let_lapse, write_entry
from tests.support_brief import BRIEF, ErrandStatus
from tests.support_processes import Program
from tests.support_workers import plans_by, working


def many_plans(engine: Engine, count: int) -> None:
    with engine.begin() as connection:
        connection.execute(insert(Plan), [{"status": PlanStatus.APPROVED}] * count)


def executed(engine: Engine) -> int:
    with engine.connect() as connection:
        query = select(func.count()).select_from(Plan).where(Plan.status == PlanStatus.EXECUTED)
        return connection.scalar(query) or 0


def test_five_hundred_runs_are_each_carried_out_once_by_workers_of_both_forms(engine: Engine) -> None:
    many_plans(engine, 500)
    bodies: Counter[Any] = Counter()
    by_form: Counter[str] = Counter()
    lock = threading.Lock()

    def counted(form: str) -> Any:
        def carry_out(run: Any) -> None:
            with lock:
                bodies[run.row.id] += 1
                by_form[form] += 1
            run.step("only", write_entry, str(run.row.id))

        return plans_by(carry_out)

    with (
        working("sync", engine, counted("sync"), concurrency=6),
        working("async", engine, counted("async"), concurrency=20),
        working("sync", engine, counted("sync"), concurrency=1, listen=True),
    ):
        eventually(lambda: executed(engine) == 500, "all of them")
    assert set(bodies.values()) == {1}
    assert len(bodies) == 500
    assert len(set(entries(engine))) == len(entries(engine)) == 500
    with engine.connect() as connection:
        assert connection.execute(select(Plan.fence, Plan.attempts).distinct()).all() == [(1, 1)]
    assert set(by_form) == {"sync", "async"}


def test_a_run_lands_once_however_often_its_lease_lapses_under_it(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    """The reaper gives up for dead what is alive: one of the two lands it, and the other is told."""
    many_plans(engine, 60)
    reaper: Runs[Plan] = Runs(session_factory, Plan, PlanStep)
    landed: Counter[Any] = Counter()
    lock = threading.Lock()
    stop = threading.Event()

    def lapses() -> None:
        while not stop.is_set():
            with session_factory() as session:
                held = session.scalars(select(Plan.id).where(Plan.status == PlanStatus.EXECUTING)).all()
            for ident in random.sample(held, min(2, len(held))):
                with suppress(RunNotFound):  # it has landed
                    let_lapse(session_factory, ident)
            reaper.reap(10)

    def carry_out(run: Any) -> None:
        run.step("only", write_entry, str(run.row.id))
        time.sleep(0.01)
        run.finish()
        with lock:
            landed[run.row.id] += 1

    lapsing = Background(lapses)
    with working("sync", engine, plans_by(carry_out), concurrency=3), working("sync", engine, plans_by(carry_out)):

        def all_over() -> bool:
            with engine.connect() as connection:
                live = Plan.status.in_([PlanStatus.APPROVED, PlanStatus.EXECUTING])
                return connection.scalar(select(func.count()).select_from(Plan).where(live)) == 0

        eventually(all_over, "the end of all")
        stop.set()
    lapsing.result()
    assert set(landed.values()) <= {1}
    assert len(landed) == executed(engine)
    assert len(set(entries(engine))) == len(entries(engine))
    for ident in landed:
        assert column(engine, ident, "status") is PlanStatus.EXECUTED


@pytest.mark.slow
@pytest.mark.parametrize("form", ["sync", "async"])
def test_each_effect_is_made_once_though_workers_are_killed_at_random(
    engine: Engine, session_factory: sessionmaker[Session], form: str
) -> None:
    BRIEF.create(engine)
    url = engine.url.render_as_string(hide_password=False)
    given = {"model": "errand", "behaviour": "two steps", "poll": 0.05, "listen": False, "releasing": 1}
    idents: list[Any] = []

    def over() -> bool:
        query = select(func.count()).where(BRIEF.run.status.in_([ErrandStatus.DONE, ErrandStatus.DEAD]))
        with engine.connect() as connection:
            return connection.scalar(query) == len(idents)

    for _ in range(4):
        idents += [BRIEF.new(session_factory) for _ in range(30)]
        with Program("worker", url, form, json.dumps(given)) as program:
            program.receive()
            time.sleep(random.random() / 2)
            program.kill()
    with Program("worker", url, form, json.dumps(given)):
        eventually(over, "the end of all")
    labels = entries(engine)
    assert len(set(labels)) == len(labels)
    with engine.connect() as connection:
        done = connection.scalars(select(BRIEF.run.id).where(BRIEF.run.status == ErrandStatus.DONE)).all()
    assert {f"{ident} {step}" for ident in done for step in ("one", "two")} <= set(labels)
