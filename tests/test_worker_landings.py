"""What a worker lands later: no slot is lost to a landing that fails oddly, or held by that of another run."""

from __future__ import annotations

import threading
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.types import String, TypeDecorator

from sqla_durable import Ending, ReceiptMixin, Run, RunMixin, Runs, Worker
from sqla_durable.verbs import Verbs
from tests.support import (
    DEADLINE,
    Background,
    Plan,
    PlanStatus,
    PlanStep,
    approved_plan,
    column,
    eventually,
    locked,
    plan_statuses,
    wait_until_blocked,
)
from tests.support_races import closed_gate, install_gate
from tests.support_workers import QUICK


@pytest.mark.parametrize("when", ["before_cursor_execute", "after_cursor_execute"])
def test_a_hook_that_raises_in_a_landing_costs_the_worker_no_slot(
    engine: Engine, session_factory: sessionmaker[Session], when: str
) -> None:
    idents = [approved_plan(session_factory) for _ in range(6)]
    own = create_engine(engine.url)
    raised: list[str] = []

    def hook(_: Any, __: Any, statement: str, *___: Any) -> None:
        if "SET status='executed'" in statement and len(raised) < 3:
            raised.append(statement)
            raise ValueError("a hook of the user's")

    event.listen(own, when, hook)
    plans = Runs(sessionmaker(own), Plan, PlanStep)
    worker = Worker(plans.handled_by(lambda run: None), **{**QUICK, "concurrency": 1})
    endings = Background(lambda: worker.run_due(timedelta(seconds=DEADLINE / 2))).result()
    own.dispose()
    landed = [column(engine, ident, "status") for ident in idents]
    assert set(landed) <= {PlanStatus.EXECUTED, PlanStatus.FAILED}
    assert landed.count(PlanStatus.EXECUTED) >= 3
    assert endings == Counter({Ending.LANDED: 6})
    assert not plans._verbs.heartbeat._carried_out


def test_a_lock_on_one_row_holds_the_slot_of_no_other_run(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    install_gate(engine)
    idents = [approved_plan(session_factory) for _ in range(5)]
    at_work, go = threading.Semaphore(0), threading.Event()
    first = threading.Event()

    def carry_out(run: Run[Plan]) -> None:
        at_work.release()
        (first if run.lease.identity[0] == idents[0] else go).wait(DEADLINE)

    own = create_engine(engine.url, connect_args={"application_name": "first"})
    plans = Runs(sessionmaker(own), Plan, PlanStep)
    worker = Worker(plans.handled_by(carry_out), **{**QUICK, "concurrency": 5})
    background = Background(worker.run)
    for _ in idents:
        assert at_work.acquire(timeout=DEADLINE)
    with locked(engine, idents[1]), locked(engine, idents[2]):
        with closed_gate(engine) as open_gate:
            first.set()
            wait_until_blocked(engine)
            go.set()
            eventually(lambda: len(plans._verbs.claims.landings._waiting) == 4, "the others behind the first")
            open_gate()
        wait_until_blocked(engine, 2)
        assert worker._room is not None
        [share] = worker._room._shares
        eventually(lambda: len(share.active) == 2, "the slots of the others")
        assert {holder.lease.identity[0] for holder in share.active} == set(idents[1:3])
    worker.stop()
    background.result()
    own.dispose()
    assert {column(engine, ident, "status") for ident in idents} == {PlanStatus.EXECUTED}


def test_what_a_run_started_that_ended_during_a_claim_is_carried_out_by_the_same_call(
    engine: Engine, session_factory: sessionmaker[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    for note in ("first", "fast"):
        approved_plan(session_factory, note=note)
    claimed_nothing = threading.Event()
    claim_due = Verbs.claim_due

    def slow(verbs: Verbs[Any], limit: int) -> Any:
        claimed = claim_due(verbs, limit)
        if not claimed and not claimed_nothing.is_set():
            claimed_nothing.set()
            eventually(lambda: worker._room and not worker._room._shares[0].active, "the end of the first")
        return claimed

    def carry_out(run: Run[Plan]) -> None:
        if run.row.note == "first":
            assert claimed_nothing.wait(DEADLINE)
            approved_plan(session_factory, note="second")

    monkeypatch.setattr(Verbs, "claim_due", slow)
    worker = Worker(Runs(session_factory, Plan, PlanStep).handled_by(carry_out), **{**QUICK, "concurrency": 3})
    assert worker.run_due(timedelta(seconds=DEADLINE / 2)) == Counter({Ending.LANDED: 3})


class Picky(TypeDecorator[str]):
    impl = String
    cache_ok = True

    def process_result_value(self, value: str | None, _: Any) -> str | None:
        if value == "unreadable":
            raise ValueError("this value cannot be read")
        return value


def test_a_row_that_cannot_be_loaded_fails_its_own_run_only(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    class Base(DeclarativeBase):
        pass

    class Job(RunMixin, Base):
        __tablename__ = "picky_job"
        __lifecycle__ = Plan.__lifecycle__
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[PlanStatus] = plan_statuses.column()
        note: Mapped[str] = mapped_column(Picky)

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "picky_job_step"

    Base.metadata.create_all(engine)
    with session_factory.begin() as session:
        session.add_all(Job(status=PlanStatus.APPROVED, note=note) for note in ("readable", "unreadable", "readable"))

    def carry_out(run: Run[Job]) -> None:
        assert run.row.note == "readable"

    jobs = Runs(session_factory, Job, JobStep)
    started = time.monotonic()
    try:
        endings = Worker(jobs.handled_by(carry_out), **QUICK).run_due(timedelta(seconds=DEADLINE / 2))
        assert endings == Counter({Ending.LANDED: 3})
        assert (jobs.counts()[PlanStatus.EXECUTED], jobs.counts()[PlanStatus.FAILED]) == (2, 1)
        assert time.monotonic() - started < DEADLINE / 2
    finally:
        Base.metadata.drop_all(engine)
