"""Guards on the two tables of functions: forks, limits and signals pass, and nobody else's receipts do."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Session, sessionmaker

from sqla_durable import (
    FunctionMixin,
    FunctionRun,
    Functions,
    FunctionStatus,
    ReceiptMixin,
    SignalMixin,
    Worker,
    function_lifecycle,
    guard_violation,
)
from sqla_durable.guard import overrides_of


class Base(DeclarativeBase):
    pass


class GuardedRun(FunctionMixin, Base):
    __tablename__ = "guarded_run"
    __lifecycle__ = function_lifecycle(guard=True)


class GuardedStep(ReceiptMixin[GuardedRun], Base):
    __tablename__ = "guarded_step"


class GuardedSignal(SignalMixin[GuardedRun], Base):
    __tablename__ = "guarded_signal"


def write(session: Session, value: str) -> str:
    return value


@pytest.fixture
def guarded(empty_url: str) -> Iterator[Engine]:
    engine = create_engine(empty_url)
    Base.metadata.create_all(engine)
    yield engine
    with engine.connect() as connection:
        assert connection.execute(select(overrides_of(GuardedRun.__table__))).all() == []  # type: ignore[arg-type]
    engine.dispose()


@pytest.fixture
def functions(guarded: Engine) -> Functions[GuardedRun]:
    made = Functions(sessionmaker(guarded), GuardedRun, GuardedStep, signals=GuardedSignal)

    @made.function("job", concurrency=2)
    def job(run: FunctionRun) -> str:
        return "".join(run.step(key, write, key) for key in ("a", "b", "c"))

    return made


def started(functions: Functions[GuardedRun]) -> Any:
    with functions.session_factory.begin() as session:
        return functions.start(session, "job")


def test_a_fork_begins_with_receipts_of_another_run_in_a_savepoint_as_well(functions: Functions[GuardedRun]) -> None:
    handle = started(functions)
    functions.execute(handle)
    with functions.session_factory.begin() as session, session.begin_nested():
        fork = functions.fork(session, handle, from_step="b")
    assert [receipt.step for receipt in functions.steps(fork)] == ["a"]
    assert functions.execute(fork).status is FunctionStatus.DONE


def test_a_run_under_limits_is_claimed_and_carried_out(functions: Functions[GuardedRun]) -> None:
    for _ in range(3):
        started(functions)
    Worker(functions).run_due(timedelta(seconds=20))
    assert functions.counts()["job"][FunctionStatus.DONE] == 3


@pytest.mark.parametrize("state", ["a fork of an earlier transaction", "a run that was requeued"])
def test_nobody_adds_a_receipt_to_a_run_that_was_not_made_just_now(
    functions: Functions[GuardedRun], guarded: Engine, state: str
) -> None:
    handle = started(functions)
    functions.execute(handle)
    if state == "a fork of an earlier transaction":
        with functions.session_factory.begin() as session:
            handle = functions.fork(session, handle, from_step="b")
    else:
        with functions.session_factory.begin() as session:
            handle = functions.start(session, "job")
            assert functions.request_cancel(session, handle)
        assert functions.requeue(handle)
    receipt = """INSERT INTO guarded_step (guarded_run_id, step, outcome, result, effect, fence)
        SELECT id, 'b', 'succeeded', '1', 'transactional', fence FROM guarded_run WHERE id = :id"""
    with pytest.raises(DBAPIError) as caught, guarded.begin() as connection:
        connection.execute(text(receipt), {"id": handle.id})
    refused = guard_violation(caught.value)
    assert refused is not None
    assert refused.sqlstate == "SD011"
