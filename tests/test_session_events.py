"""Session events around a step, objects that outlive their session, and sessions of several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, inspect, select, text
from sqlalchemy.orm import Session, object_session, sessionmaker

from sqla_durable import Run, Runs, StepReused, TransactionEnded, UsageError
from tests.support import (
    Background,
    Entry,
    Plan,
    PlanStatus,
    PlanStep,
    approved_plan,
    column,
    entries,
    plan_statuses,
    wait_until_blocked,
    write_entry,
)


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep)


@pytest.fixture
def run(session_factory: sessionmaker[Session], plans: Runs[Plan]) -> Run[Plan]:
    claimed = plans.claim(approved_plan(session_factory))
    assert claimed is not None
    return claimed


def succeeded(plans: Runs[Plan], run: Run[Plan]) -> list[str]:
    return [receipt.step for receipt in plans.receipts(run.row.id) if receipt.outcome == "succeeded"]


# --- events around the commit


def test_after_commit_fires_once_after_the_real_commit_with_the_bodys_values(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], run: Run[Plan]
) -> None:
    seen: list[tuple[str, list[str], list[str]]] = []

    def note(session: Session) -> None:
        if "label" in session.info:
            seen.append((session.info["label"], entries(engine), succeeded(plans, run)))

    event.listen(session_factory, "after_commit", note)

    def body(session: Session) -> str:
        session.info["label"] = "a"
        return write_entry(session, "a")

    run.step("only", body)
    assert seen == [("a", ["a"], ["only"])]


def test_after_commit_of_one_session_registered_in_the_body_fires_too(
    engine: Engine, plans: Runs[Plan], run: Run[Plan]
) -> None:
    seen: list[list[str]] = []

    def body(session: Session) -> None:
        write_entry(session, "a")
        event.listen(session, "after_commit", lambda _: seen.append(entries(engine)), once=True)

    run.step("only", body)
    run.step("next", write_entry, "b")
    assert seen == [["a"]]


def test_after_commit_does_not_fire_for_a_step_that_fails_or_loses_its_lease(
    session_factory: sessionmaker[Session], plans: Runs[Plan], run: Run[Plan]
) -> None:
    seen: list[Session] = []

    def body(session: Session) -> None:
        event.listen(session, "after_commit", seen.append)
        raise ValueError("no stock")

    def refused(session: Session) -> object:
        event.listen(session, "after_commit", seen.append)
        return object()

    with pytest.raises(ValueError, match="no stock"):
        run.step("fails", body)
    with pytest.raises(UsageError):
        run.step("refused", refused)
    assert seen == []


def raise_(session: Session) -> None:
    raise RuntimeError("mail server is down")


def write(session: Session) -> None:
    session.execute(text("INSERT INTO entry (label) VALUES ('late')"))


def write_by_orm(session: Session) -> None:
    write_entry(session, "late")
    session.flush()


def commit(session: Session) -> None:
    session.commit()


@pytest.mark.parametrize("work", [raise_, write, write_by_orm, commit])
@pytest.mark.parametrize("on", ["factory", "class", "session"])
def test_an_error_in_after_commit_neither_undoes_nor_repeats_the_step(
    engine: Engine, work: Any, on: str, caplog: pytest.LogCaptureFixture
) -> None:
    class OwnSession(Session):
        pass

    factory = sessionmaker(engine, class_=OwnSession)
    plans = Runs(factory, Plan, PlanStep)
    claimed = plans.claim(approved_plan(factory))
    assert claimed is not None
    calls = 0

    def after_commit(session: Session) -> None:
        if session.info.get("in step"):
            work(session)

    def body(session: Session) -> str:
        nonlocal calls
        calls += 1
        session.info["in step"] = True
        if on == "session":
            event.listen(session, "after_commit", after_commit)
        return write_entry(session, "a")

    if on != "session":
        event.listen(factory if on == "factory" else OwnSession, "after_commit", after_commit)
    assert claimed.step("only", body) == "a"
    assert calls == 1
    assert entries(engine) == ["a"]
    assert succeeded(plans, claimed) == ["only"]
    assert "after_commit" in caplog.text
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    assert claimed.step("next", write_entry, "b") == "b"


def test_what_before_commit_writes_is_atomic_with_the_receipt(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], run: Run[Plan]
) -> None:
    fail = True

    def audit(session: Session) -> None:
        if session.info.get("in step"):
            session.add(Entry(label="audit"))
            if fail:
                raise RuntimeError("audit refused")

    event.listen(session_factory, "before_commit", audit)

    def body(session: Session) -> None:
        session.info["in step"] = True
        write_entry(session, "a")

    with pytest.raises(RuntimeError, match="audit refused"):
        run.step("only", body)
    assert entries(engine) == []
    assert succeeded(plans, run) == []
    fail = False
    run.step("only", body)
    assert entries(engine) == ["a", "audit"]
    assert succeeded(plans, run) == ["only"]


@pytest.mark.parametrize("moment", ["before_commit", "before_flush", "after_flush"])
def test_a_database_error_that_an_event_swallows_is_told_instead_of_a_silent_rollback(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], run: Run[Plan], moment: str
) -> None:
    def swallow(session: Session, *_: object) -> None:
        if session.info.pop("in step", False):
            with suppress(Exception):
                session.connection().exec_driver_sql("SELECT 1 / 0")

    event.listen(session_factory, moment, swallow)

    def body(session: Session) -> None:
        write_entry(session, "a")
        session.info["in step"] = True

    with pytest.raises(Exception, match=r"swallowed a database error|current transaction is aborted"):
        run.step("only", body)
    assert entries(engine) == []
    assert succeeded(plans, run) == []
    assert run.step("only", write_entry, "a") == "a"
    assert entries(engine) == ["a"]


def test_a_before_commit_that_ends_the_transaction_is_told_so(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], run: Run[Plan]
) -> None:
    def meddle(session: Session) -> None:
        if session.info.pop("in step", False):
            with suppress(Exception):
                session.connection().exec_driver_sql("ROLLBACK")

    event.listen(session_factory, "before_commit", meddle)

    def body(session: Session) -> None:
        write_entry(session, "a")
        session.info["in step"] = True

    with pytest.raises(TransactionEnded):
        run.step("only", body)
    assert entries(engine) == []
    assert succeeded(plans, run) == []


# --- objects that outlive their session


@pytest.mark.parametrize("expire", [True, False])
def test_a_handle_holds_plain_values_and_works_in_another_thread(engine: Engine, expire: bool) -> None:
    factory = sessionmaker(engine, expire_on_commit=expire)
    plans = Runs(factory, Plan, PlanStep)
    run = plans.claim(approved_plan(factory, actions=["a"], note="mine"))
    assert run is not None
    assert object_session(run.row) is None
    assert not inspect(run.row).expired

    def elsewhere() -> list[Any]:
        done = run.step("only", write_entry, run.row.actions[0])
        return [done, run.row.note, run.row.status, run.receipts[0].step]

    assert Background(elsewhere).result() == ["a", "mine", PlanStatus.EXECUTING, "only"]
    run.finish()
    assert run.row.status is PlanStatus.EXECUTED
    assert run.row.finished_at is not None


@pytest.mark.parametrize("state", ["detached", "expired", "attached elsewhere", "persistent here"])
def test_an_object_in_any_state_identifies_its_run(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], state: str
) -> None:
    ident = approved_plan(session_factory)
    with session_factory() as session:
        row = session.get_one(Plan, ident)
        if state == "detached":
            session.expunge(row)
        elif state == "expired":
            session.expire(row)
        session.commit()
        if state in {"detached", "expired"}:
            session.close()
        run = plans.claim(row)
        assert run is not None
        assert run.row is not row
        assert plans.get(row) is not None
        assert run.step("only", write_entry, "a") == "a"
        run.finish()
    assert entries(engine) == ["a"]
    assert plans.execute(row, lambda run: pytest.fail("ran again")).status is PlanStatus.EXECUTED


def test_an_object_of_another_session_is_refused_by_a_transition_with_a_reason(
    session_factory: sessionmaker[Session],
) -> None:
    ident = approved_plan(session_factory)
    with session_factory() as theirs, session_factory.begin() as ours:
        row = theirs.get_one(Plan, ident)
        with pytest.raises(UsageError, match="another session"):
            plan_statuses.transition(ours, row, PlanStatus.CANCELLED)
        theirs.expunge(row)
        assert plan_statuses.transition(ours, row, PlanStatus.CANCELLED)
        assert row.status is PlanStatus.CANCELLED


def test_the_row_can_be_merged_into_a_step_and_changed_there(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], run: Run[Plan]
) -> None:
    def body(session: Session) -> None:
        session.merge(run.row).note = "merged"

    run.step("only", body)
    run.row.note = "changed on the detached object"
    run.finish()
    assert column(engine, run.row.id, "note") == "merged"
    assert column(engine, run.row.id, "status") is PlanStatus.EXECUTED


# --- several threads


def test_two_threads_of_one_handle_do_not_both_run_a_step(engine: Engine, run: Run[Plan]) -> None:
    inside, leave = threading.Event(), threading.Event()

    def body(session: Session) -> str:
        inside.set()
        assert leave.wait(20)
        return write_entry(session, "a")

    first = Background(lambda: run.step("only", body))
    assert inside.wait(20)
    second = Background(lambda: run.step("only", write_entry, "b"))
    leave.set()
    assert first.result() == "a"
    with pytest.raises(StepReused):
        second.result()
    assert entries(engine) == ["a"]


def test_two_holders_of_one_lease_one_executes_and_the_other_replays(
    engine: Engine, plans: Runs[Plan], run: Run[Plan]
) -> None:
    other = plans.hold(run.lease)
    inside, leave = threading.Event(), threading.Event()

    def body(session: Session) -> str:
        inside.set()
        assert leave.wait(20)
        return write_entry(session, "a")

    first = Background(lambda: run.step("only", body))
    assert inside.wait(20)
    second = Background(lambda: other.step("only", write_entry, "b"))
    wait_until_blocked(engine)
    leave.set()
    assert first.result() == "a"
    assert second.result() == "a"
    assert entries(engine) == ["a"]


def test_if_the_first_of_two_holders_fails_the_other_does_the_step(
    engine: Engine, plans: Runs[Plan], run: Run[Plan]
) -> None:
    other = plans.hold(run.lease)
    inside, leave = threading.Event(), threading.Event()

    def body(session: Session) -> None:
        write_entry(session, "never")
        session.flush()
        inside.set()
        assert leave.wait(20)
        raise KeyboardInterrupt

    first = Background(lambda: run.step("only", body))
    assert inside.wait(20)
    second = Background(lambda: other.step("only", write_entry, "b"))
    wait_until_blocked(engine)
    leave.set()
    with pytest.raises(KeyboardInterrupt):
        first.result()
    assert second.result() == "b"
    assert entries(engine) == ["b"]


@pytest.fixture
def sessions_by_thread() -> Iterator[list[str]]:
    used: list[str] = []

    def note(session: Session, transaction: Any, connection: Any) -> None:
        used.append(threading.current_thread().name)

    event.listen(Session, "after_begin", note)
    yield used
    event.remove(Session, "after_begin", note)


def test_a_heartbeat_of_listening_sessions_has_one_of_its_own_and_leaves_the_users_pool_alone(
    engine: Engine, session_factory: sessionmaker[Session], sessions_by_thread: list[str], monkeypatch: Any
) -> None:
    from dataclasses import replace

    from tests.support import eventually

    monkeypatch.setattr(Plan, "__lifecycle__", replace(Plan.__lifecycle__, lease=timedelta(seconds=0.3)))
    narrow = create_engine(engine.url, pool_size=1, max_overflow=0, pool_timeout=1)
    factory = sessionmaker(narrow)
    plans = Runs(factory, Plan, PlanStep)
    ident = approved_plan(session_factory)

    def renewed(run: Run[Plan]) -> None:
        with factory() as session:  # the only connection of the user's pool
            before = session.scalar(select(Plan.lease_expires_at).where(Plan.id == ident))
            session.commit()
            session.execute(text("SELECT 1"))
            eventually(lambda: column(engine, ident, "lease_expires_at") > before, "a heartbeat")

    assert plans.execute(ident, renewed).status is PlanStatus.EXECUTED
    assert set(sessions_by_thread) == {threading.current_thread().name, "sqla_durable heartbeat"}
    narrow.dispose()
