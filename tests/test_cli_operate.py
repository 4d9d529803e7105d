"""``sqla-durable requeue``, ``cancel`` and ``reap``: what they do, what they say of it, and with which exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, create_engine, select
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import Lifecycle, ReceiptMixin, RunMixin, Runs
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, let_lapse
from tests.support_cli import FORMS, answered, call, importable, lines, made, real, refused
from tests.support_models import JobStatus, jobs
from tests.test_models_keys import Base as Keys
from tests.test_models_keys import Pair, PairStep


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep, owner="me")


@pytest.fixture(params=FORMS)
def target(request: pytest.FixtureRequest, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> str:
    return f"{importable(monkeypatch, plans=made(request.param, engine))}:plans"


def fails(run: Any) -> None:
    run.step("done", lambda session: None)
    raise ValueError("no")


def statuses(engine: Engine, *idents: object) -> list[PlanStatus]:
    with Session(engine) as session:
        return [session.scalars(select(Plan.status).where(Plan.id == ident)).one() for ident in idents]


# requeue


def test_runs_are_requeued_and_what_is_refused_is_said(
    target: str, engine: Engine, plans: Runs[Plan], session_factory: sessionmaker[Session]
) -> None:
    failed, other, done, missing = *(approved_plan(session_factory) for _ in range(3)), uuid4()
    plans.execute(failed, fails)
    plans.execute(other, fails)
    plans.execute(done, lambda run: None)
    assert answered("requeue", target, failed) == f"{failed}: requeued; it is approved\n"
    assert statuses(engine, failed) == [PlanStatus.APPROVED]
    assert [receipt.step for receipt in plans.receipts(failed)] == ["done"]
    ended = call("requeue", target, done, other, missing, failed)
    assert (ended.exit_code, ended.stderr) == (1, "")
    assert ended.stdout.splitlines() == [
        f"{done}: not requeued; it is executed; its lifecycle allows this from dead, failed",
        f"{other}: requeued; it is approved",
        f"{missing}: not requeued; there is no such Plan",
        f"{failed}: not requeued; it is approved; its lifecycle allows this from dead, failed",
    ]
    assert statuses(engine, done, other) == [PlanStatus.EXECUTED, PlanStatus.APPROVED]


def test_the_json_of_a_requeue_is_a_line_for_each(
    target: str, plans: Runs[Plan], session_factory: sessionmaker[Session]
) -> None:
    failed, missing = approved_plan(session_factory), uuid4()
    plans.execute(failed, fails)
    ended = call("requeue", "--json", target, failed, missing)
    assert ended.exit_code == 1
    assert [json.loads(line) for line in ended.stdout.splitlines()] == [
        {"ident": str(failed), "requeued": True, "status": "approved"},
        {"ident": str(missing), "requeued": False, "status": None},
    ]


def test_nothing_is_requeued_where_one_argument_is_no_key(
    target: str, engine: Engine, plans: Runs[Plan], session_factory: sessionmaker[Session]
) -> None:
    failed = approved_plan(session_factory)
    plans.execute(failed, fails)
    exit_code, line = refused("requeue", target, failed, "7")
    assert exit_code == 2
    assert "'7' cannot be the id of a Plan" in line
    assert statuses(engine, failed) == [PlanStatus.FAILED]


# cancel


def test_live_runs_are_asked_to_be_cancelled(
    target: str, engine: Engine, plans: Runs[Plan], session_factory: sessionmaker[Session]
) -> None:
    ready, running, done, missing = *(approved_plan(session_factory) for _ in range(3)), uuid4()
    run = plans.claim(running)
    plans.execute(done, lambda run: None)
    assert answered("cancel", target, ready) == f"{ready}: cancel requested; it is cancelled\n"
    ended = call("cancel", target, running, done, missing)
    assert (ended.exit_code, ended.stderr) == (1, "")
    assert ended.stdout.splitlines() == [
        f"{running}: cancel requested; it is executing",
        f"{done}: cancel refused; it is executed",
        f"{missing}: cancel refused; there is no such Plan",
    ]
    assert run is not None
    assert plans.execute(run, lambda run: None).status is PlanStatus.CANCELLED
    assert statuses(engine, ready, done) == [PlanStatus.CANCELLED, PlanStatus.EXECUTED]


def test_the_json_of_a_cancel_is_a_line_for_each(target: str, session_factory: sessionmaker[Session]) -> None:
    ident = approved_plan(session_factory)
    assert lines("cancel", target, ident) == [{"ident": str(ident), "cancel_requested": True, "status": "cancelled"}]


# reap


def test_lapsed_runs_are_reaped(
    target: str, engine: Engine, plans: Runs[Plan], session_factory: sessionmaker[Session]
) -> None:
    idents = [approved_plan(session_factory) for _ in range(5)]
    for ident in idents[:4]:
        plans.claim(ident)
        let_lapse(session_factory, ident)
    plans.claim(idents[4])
    assert answered("reap", target, "--limit", 1) == "1 run reaped\n"
    assert lines("reap", target, "--limit", 1) == [{"reaped": 1}]
    assert answered("reap", target) == "2 runs reaped\n"
    assert answered("reap", target) == "0 runs reaped\n"
    assert statuses(engine, *idents) == [PlanStatus.APPROVED] * 4 + [PlanStatus.EXECUTING]
    assert call("reap", target, "--limit", 0).exit_code == 2


# models


class Strict(DeclarativeBase):
    pass


class Final(RunMixin, Strict):
    """Is neither requeued nor cancelled."""

    __tablename__ = "final"
    __lifecycle__ = Lifecycle(
        jobs,
        ready=JobStatus.READY,
        running=JobStatus.RUNNING,
        done=JobStatus.DONE,
        failed=JobStatus.FAILED,
        lease=timedelta(seconds=30),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[JobStatus] = jobs.column()


class FinalStep(ReceiptMixin[Final], Strict):
    __tablename__ = "final_step"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("requeue", "Final names no status to requeue from; add Lifecycle(requeue={...})."),
        ("cancel", "Final cannot be cancelled; name Lifecycle(cancelled=...)."),
    ],
)
def test_a_lifecycle_without_the_way_is_one_line(
    empty_url: str, monkeypatch: pytest.MonkeyPatch, form: str, command: str, said: str
) -> None:
    engine = create_engine(empty_url)
    target = f"{importable(monkeypatch, runs=made(form, engine, Final, FinalStep))}:runs"
    assert refused(command, target, 1) == (1, f"sqla-durable {command}: {said}")
    engine.dispose()


@pytest.mark.parametrize("form", FORMS)
def test_composite_keys_are_given_one_by_one(empty_url: str, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    engine = create_engine(empty_url)
    Keys.metadata.create_all(engine)
    tenant = uuid4()
    names = ["a b", 'c, "d"', "東京"]
    with Session(engine) as session, session.begin():
        session.add_all(Pair(tenant=tenant, name=name, status=JobStatus.READY) for name in names)
    target = f"{importable(monkeypatch, runs=made(form, engine, Pair, PairStep))}:runs"
    idents = [each["ident"] for each in lines("runs", target)]
    assert [each["ident"] for each in lines("cancel", target, *idents)] == idents
    assert {each["status"] for each in lines("runs", target)} == {JobStatus.CANCELLED.value}
    engine.dispose()


# real processes


def test_what_is_listed_can_be_handed_to_another_command(
    tmp_path: Path, empty_url: str, engine: Engine, plans: Runs[Plan], session_factory: sessionmaker[Session]
) -> None:
    idents = {approved_plan(session_factory) for _ in range(3)}
    for ident in idents:
        plans.execute(ident, fails)
    listed = real("runs", "tests.support:Plan", "--json", "--url", empty_url, cwd=tmp_path)
    filtered = subprocess.run(
        [sys.executable, "-c", "import json, sys\nfor line in sys.stdin: print(json.loads(line)['ident'])"],
        input=listed.stdout,
        capture_output=True,
        text=True,
        check=True,
    )
    done = real("requeue", "tests.support:Plan", "--url", empty_url, *filtered.stdout.split(), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert set(statuses(engine, *idents)) == {PlanStatus.APPROVED}
    refused = real("requeue", "tests.support:Plan", "--url", empty_url, *idents, cwd=tmp_path)
    assert refused.returncode == 1
