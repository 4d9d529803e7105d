"""Functions that wait for signals, answer updates and sleep, through their handles."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from pydantic import BaseModel
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import (
    ConfigurationError,
    FunctionHandle,
    FunctionRun,
    Functions,
    FunctionStatus,
    NotAnswered,
    RunFailed,
    RunNotFound,
    SignalTimeout,
    UpdateTimeout,
)
from sqla_durable.testing import let_pass
from tests.support import Background, eventually
from tests.support_functions import DurableRun, DurableStep, Entry, Order, labels, made, tables, work


class Approval(BaseModel):
    by: str


@pytest.fixture
def functions(engine: Engine) -> Functions[DurableRun]:
    tables(engine)
    functions = made(sessionmaker(engine))

    @functions.function("approve", max_duration=timedelta(seconds=10))
    def approve(run: FunctionRun, order: Order) -> str:
        try:
            approval = run.wait("approved", Approval, timeout=timedelta(days=3))
        except SignalTimeout:
            return "nobody cared"
        run.step("note", note, f"approved by {approval.by}")
        run.sleep("cooling off", timedelta(days=14))
        return approval.by

    @functions.function("count")
    def count(run: FunctionRun, start: int) -> int:
        total = start
        for turn in range(2):
            total = run.answer("add", adding(total), key=f"turn {turn}")
        return total

    return functions


def note(session: Session, label: str) -> None:
    session.add(Entry(label=label))


def adding(total: int) -> Callable[[Session, int], int]:
    def add(session: Session, number: int) -> int:
        session.add(Entry(label=f"+{number}"))
        return total + number

    return add


def started(functions: Functions[Any], name: str, given: object, **options: Any) -> FunctionHandle[Any]:
    with functions.session_factory.begin() as session:
        return functions.start(session, name, given, **options)


def sent(functions: Functions[Any], handle: FunctionHandle[Any], name: str, payload: object = None) -> bool:
    with functions.session_factory.begin() as session:
        return functions.signal(session, handle, name, payload)


def passed(functions: Functions[Any], handle: FunctionHandle[Any], key: str) -> None:
    with functions.session_factory.begin() as session:
        let_pass(session, DurableStep, handle.id, key)


def test_a_function_waits_in_the_database_and_goes_on_with_the_signal(
    functions: Functions[DurableRun], engine: Engine
) -> None:
    handle = started(functions, "approve", Order(id=1), key="k")
    work(functions)
    described = functions.describe(handle)
    assert (described.status, described.waits_for, described.attempts) == (FunctionStatus.READY, "approved", 0)
    rebuilt = functions.handle(functions._registry.of("approve").body, key="k")
    assert sent(functions, rebuilt, "approved", Approval(by="ada"))
    work(functions)
    assert labels(engine) == ["approved by ada"]
    assert functions.describe(handle).status is FunctionStatus.READY
    passed(functions, handle, "cooling off")
    work(functions)
    assert functions.result(handle) == "ada"
    assert [receipt.step for receipt in functions.steps(handle)] == ["approved", "note", "cooling off"]
    assert not sent(functions, handle, "approved", Approval(by="late"))


def test_a_wait_that_nobody_answers_ends_with_its_timeout(functions: Functions[DurableRun]) -> None:
    handle = started(functions, "approve", Order(id=1))
    work(functions)
    passed(functions, handle, "approved")
    work(functions)
    assert functions.result(handle) == "nobody cared"


def test_a_signal_joins_the_callers_transaction(functions: Functions[DurableRun]) -> None:
    handle = started(functions, "approve", Order(id=1))
    with functions.session_factory() as session:
        assert functions.signal(session, handle, "approved", Approval(by="ada"))
        session.rollback()
    work(functions)
    assert functions.describe(handle).waits_for == "approved"


def test_a_signal_may_come_in_the_transaction_that_starts_the_run(functions: Functions[DurableRun]) -> None:
    with functions.session_factory.begin() as session:
        handle = functions.start(session, "approve", Order(id=1))
        assert functions.signal(session, handle, "approved", Approval(by="ada"))
    work(functions)
    passed(functions, handle, "cooling off")
    work(functions)
    assert functions.result(handle) == "ada"


def answered(functions: Functions[Any], handle: FunctionHandle[Any], number: int) -> Any:
    """Ask a run to add a number, while a worker works."""

    def ask() -> int:
        return functions.update(handle, "add", number, timeout=timedelta(seconds=20), returns=int)

    def carried_on() -> bool:
        work(functions)
        return not asked.is_alive()

    asked = Background(ask)
    eventually(carried_on, "the answer")
    return asked.result()


def test_updates_are_answered_by_what_the_run_returns(functions: Functions[DurableRun], engine: Engine) -> None:
    handle = started(functions, "count", 1)
    assert answered(functions, handle, 2) == 3
    assert answered(functions, handle, 4) == 7
    work(functions)
    assert functions.result(handle) == 7
    assert labels(engine) == ["+2", "+4"]


def test_an_update_that_nobody_answers_says_so(functions: Functions[DurableRun]) -> None:
    handle = started(functions, "count", 1)
    with pytest.raises(UpdateTimeout):
        functions.update(handle, "add", 1, timeout=timedelta(seconds=0.05))
    done = started(functions, "fulfil", Order(id=1))
    work(functions)
    with pytest.raises(NotAnswered):
        functions.update(done, "add", 1, timeout=timedelta(seconds=5))


def test_a_signal_for_a_run_that_does_not_exist_is_an_error(functions: Functions[DurableRun]) -> None:
    with pytest.raises(RunNotFound, match="nobody"):
        sent(functions, functions.handle(functions._registry.of("count").body, key="nobody"), "add", 1)


def test_functions_without_a_table_for_signals_say_what_to_declare(functions: Functions[DurableRun]) -> None:
    bare: Functions[DurableRun] = Functions(functions.session_factory, DurableRun, DurableStep)
    bare.function("waits")(lambda run: run.wait("x"))
    with bare.session_factory.begin() as session:
        handle = bare.start(session, "waits")
        with pytest.raises(ConfigurationError, match="SignalMixin") as refused:
            bare.signal(session, handle, "x")
    assert "WaitMixin" not in str(refused.value), "FunctionMixin has it"
    work(bare)
    with pytest.raises(RunFailed, match="SignalMixin"):
        bare.result(handle)
