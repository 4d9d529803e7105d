"""The helpers for tests of users: a run of a function is named by its handle, too."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import (
    Ending,
    FunctionHandle,
    FunctionRun,
    Functions,
    FunctionStatus,
    RunNotFound,
    UsageError,
)
from sqla_durable.testing import lapse, let_pass, make_due, overrun
from tests.support import Plan
from tests.support_functions import DurableRun, DurableSignal, DurableStep, FunctionBase

DAY = timedelta(days=1)


@pytest.fixture
def functions(engine: Engine, session_factory: sessionmaker[Session]) -> Functions[DurableRun]:
    FunctionBase.metadata.drop_all(engine)
    FunctionBase.metadata.create_all(engine)
    return Functions(session_factory, DurableRun, DurableStep, signals=DurableSignal)


def started(functions: Functions[DurableRun], body: Callable[..., Any], **options: Any) -> FunctionHandle:
    with functions.session_factory.begin() as session:
        return functions.start(session, body, key="k", **options)


def without_id(handle: FunctionHandle) -> FunctionHandle:
    return FunctionHandle(handle.function, None, handle.key, handle.tenant)


def move(functions: Functions[DurableRun], change: Callable[..., None], *arguments: Any) -> None:
    with functions.session_factory.begin() as session:
        change(session, *arguments)


@pytest.mark.parametrize("tenant", [None, "north"])
@pytest.mark.parametrize("named", [lambda handle: handle, without_id, lambda handle: handle.id])
def test_a_sleep_passes_of_a_run_that_is_named_by_its_handle(
    functions: Functions[DurableRun], named: Callable[[FunctionHandle], Any], tenant: str | None
) -> None:
    @functions.function("nap")
    def nap(run: FunctionRun) -> int:
        run.sleep("nap", DAY)
        return 1

    other = started(functions, nap, tenant="south")
    handle = started(functions, nap, tenant=tenant)
    for each in (other, handle):
        assert functions.execute(each).ending is Ending.SUSPENDED
    move(functions, let_pass, DurableStep, named(handle), "nap")
    assert functions.execute(handle).status is FunctionStatus.DONE
    assert functions.execute(other).ending is Ending.NOT_CLAIMABLE


@pytest.mark.parametrize("named", [lambda handle: handle, without_id])
def test_a_deadline_passes_and_a_lease_lapses_of_a_run_that_is_named_by_its_handle(
    functions: Functions[DurableRun], named: Callable[[FunctionHandle], FunctionHandle]
) -> None:
    def hang(change: Any) -> None:
        move(functions, change, DurableRun, named(handle))
        lapsed.append(functions.describe(handle).lapsed)

    @functions.function("hang")
    def hangs(run: FunctionRun) -> None:
        run.external("lapse", hang, lapse)
        run.external("overrun", hang, overrun)

    lapsed: list[bool] = []
    handle = started(functions, hangs)
    assert functions.execute(handle).status is FunctionStatus.TIMED_OUT
    assert lapsed[0]


def test_a_run_that_was_started_for_later_is_due(functions: Functions[DurableRun]) -> None:
    @functions.function("later")
    def later(run: FunctionRun) -> None: ...

    handle = started(functions, later, run_at=DAY)
    assert functions.execute(handle).ending is Ending.NOT_CLAIMABLE
    move(functions, make_due, DurableRun, handle)
    assert functions.execute(handle).ending is Ending.LANDED


def test_a_handle_of_no_run_is_not_found_and_one_of_another_class_is_refused(functions: Functions[DurableRun]) -> None:
    for handle in (FunctionHandle("nap", None, "none"), FunctionHandle("nap", uuid4())):
        with pytest.raises(RunNotFound):
            move(functions, make_due, DurableRun, handle)
    with pytest.raises(UsageError, match="Plan is not the run class of functions"):
        move(functions, lapse, Plan, FunctionHandle("nap", uuid4()))
