"""Sleeping: a run that is handed back until an instant, which its first attempt fixes on the database clock."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Effect, Ending, Run, Runs, StepOutcome, UsageError
from sqla_durable.testing import let_pass, make_due
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, column, entries, write_entry
from tests.support_signals import Order, make_tables, new_order, of_order, orders_on, send

HOUR = timedelta(hours=1)


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep)


def naps(run: Run[Plan]) -> None:
    run.step("before", write_entry, "before")
    run.sleep("nap", HOUR)
    run.step("after", write_entry, "after")


def wake(plans: Runs[Any], ident: Any, key: str | int = "nap") -> None:
    with plans.session_factory.begin() as session:
        let_pass(session, PlanStep, ident, key)


def test_a_run_sleeps_in_its_row_and_goes_on_afterwards(
    plans: Runs[Plan], session_factory: sessionmaker[Session], engine: Engine
) -> None:
    ident = approved_plan(session_factory)
    outcome = plans.execute(ident, naps)
    assert (outcome.ending, outcome.status) == (Ending.SUSPENDED, PlanStatus.APPROVED)
    assert column(engine, ident, "attempts") == 0
    left = column(engine, ident, "available_at") - datetime.now(UTC)
    assert timedelta(minutes=59) < left < timedelta(minutes=61)
    assert plans.claim(ident) is None
    before, nap = plans.receipts(ident)
    assert (nap.outcome, nap.effect, before.step) == (StepOutcome.PENDING, Effect.SLEEP, "before")
    wake(plans, ident)
    outcome = plans.execute(ident, naps)
    assert outcome.status is PlanStatus.EXECUTED
    assert entries(engine) == ["before", "after"]
    assert [receipt.outcome for receipt in outcome.receipts] == [StepOutcome.SUCCEEDED] * 3
    assert outcome.receipts[1].result is None


def test_a_run_that_is_claimed_early_sleeps_for_the_rest(
    plans: Runs[Plan], session_factory: sessionmaker[Session], engine: Engine
) -> None:
    ident = approved_plan(session_factory)
    plans.execute(ident, naps)
    due = column(engine, ident, "available_at")
    assert plans.execute(ident, naps, run_now=True).ending is Ending.SUSPENDED
    assert column(engine, ident, "available_at") == due
    with session_factory.begin() as session:
        make_due(session, Plan, ident)
    assert plans.execute(ident, naps).ending is Ending.SUSPENDED
    assert column(engine, ident, "available_at") == due


def test_a_requeued_run_sleeps_for_the_rest(orders: Runs[Order], engine: Engine) -> None:
    def handler(run: Run[Order]) -> None:
        run.sleep("nap", HOUR)

    ident = new_order(orders.session_factory)
    orders.execute(ident, handler)
    due = of_order(engine, ident).available_at
    with orders.session_factory.begin() as session:
        assert orders.request_cancel(session, ident)
    assert orders.requeue(ident)
    assert orders.execute(ident, handler).ending is Ending.SUSPENDED
    assert of_order(engine, ident).available_at == due


@pytest.mark.parametrize("duration", [timedelta(0), timedelta(days=-1), datetime(2020, 1, 1, tzinfo=UTC)])
def test_an_instant_that_has_passed_parks_nothing(
    plans: Runs[Plan], session_factory: sessionmaker[Session], duration: Any
) -> None:
    ident = approved_plan(session_factory)
    outcome = plans.execute(ident, lambda run: run.sleep("nap", duration))
    assert (outcome.status, outcome.receipts[0].outcome) == (PlanStatus.EXECUTED, StepOutcome.SUCCEEDED)


def test_a_run_sleeps_until_an_instant_that_the_caller_names(
    plans: Runs[Plan], session_factory: sessionmaker[Session], engine: Engine
) -> None:
    ident = approved_plan(session_factory)
    morning = datetime(2500, 1, 1, 8, 0, 0, 123456, tzinfo=UTC)
    plans.execute(ident, lambda run: run.sleep("nap", morning))
    assert column(engine, ident, "available_at") == morning


@pytest.mark.parametrize("duration", [datetime.max.replace(tzinfo=UTC), timedelta.max])
def test_no_instant_is_later_than_what_can_be_read_back(
    plans: Runs[Plan], session_factory: sessionmaker[Session], engine: Engine, duration: Any
) -> None:
    ident = approved_plan(session_factory)
    assert plans.execute(ident, lambda run: run.sleep("nap", duration)).ending is Ending.SUSPENDED
    assert column(engine, ident, "available_at") > datetime(2100, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize("duration", [5, None, datetime(2500, 1, 1)])
def test_a_sleep_is_a_duration_or_an_instant_with_a_time_zone(
    plans: Runs[Plan], session_factory: sessionmaker[Session], duration: Any
) -> None:
    run = plans.claim(approved_plan(session_factory))
    assert run is not None
    with pytest.raises(UsageError):
        run.sleep("nap", duration)


def test_a_run_that_was_asked_to_be_cancelled_does_not_sleep(
    plans: Runs[Plan], session_factory: sessionmaker[Session]
) -> None:
    def handler(run: Run[Plan]) -> None:
        with session_factory.begin() as session:
            assert plans.request_cancel(session, run.row.id)
        run.sleep("nap", HOUR)

    outcome = plans.execute(approved_plan(session_factory), handler)
    assert (outcome.status, outcome.receipts) == (PlanStatus.CANCELLED, ())


@pytest.fixture
def orders(engine: Engine, session_factory: sessionmaker[Session]) -> Runs[Order]:
    make_tables(engine)
    return orders_on(session_factory)


def test_a_signal_that_is_named_like_a_sleep_does_not_end_it(orders: Runs[Order], engine: Engine) -> None:
    ident = new_order(orders.session_factory)
    orders.execute(ident, lambda run: run.sleep("nap", HOUR))
    assert of_order(engine, ident).waits_for is None
    send(orders, ident, "nap", 1)
    assert not of_order(engine, ident).due


def test_two_naps_in_a_row_each_take_their_time(plans: Runs[Plan], session_factory: sessionmaker[Session]) -> None:
    ident = approved_plan(session_factory)

    def handler(run: Run[Plan]) -> None:
        run.sleep(1, HOUR)
        run.sleep(2, HOUR)

    assert plans.execute(ident, handler).ending is Ending.SUSPENDED
    wake(plans, ident, 1)
    assert plans.execute(ident, handler).ending is Ending.SUSPENDED
    wake(plans, ident, 2)
    assert plans.execute(ident, handler).status is PlanStatus.EXECUTED
