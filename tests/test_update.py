"""Updates: a signal that is answered, exactly once, in one transaction with the answer's effect."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import (
    Ending,
    NotAnswered,
    RetryableError,
    Run,
    RunNotFound,
    Runs,
    SignalMismatch,
    SignalTimeout,
    StepFailed,
    TransactionConflict,
    UpdateFailed,
    UpdateTimeout,
    UsageError,
)
from sqla_durable.testing import let_pass
from tests.support import Background, PlanStatus, eventually
from tests.support_signals import (
    Order,
    OrderSignal,
    OrderStep,
    add_line,
    blocked,
    lines,
    make_tables,
    new_order,
    of_order,
    orders_on,
    send,
    sent_later,
    taken,
)

SOON = timedelta(seconds=15)


@dataclass
class Discount:
    percent: int


@dataclass
class Price:
    cents: int


@pytest.fixture
def orders(engine: Engine, session_factory: sessionmaker[Session]) -> Runs[Order]:
    make_tables(engine)
    return orders_on(session_factory)


@pytest.fixture
def ident(orders: Runs[Order], session_factory: sessionmaker[Session]) -> Any:
    return new_order(session_factory)


def reduce(session: Session, discount: Discount) -> Price:
    add_line(session, f"{discount.percent} %")
    return Price(1000 - 10 * discount.percent)


def answer_one(run: Run[Order]) -> None:
    assert run.answer("discount", reduce) == Price(750)


def asking(orders: Runs[Order], ident: Any, timeout: timedelta = SOON) -> Background:
    return Background(
        lambda: orders.update(ident, "discount", Discount(25), type_=Discount, returns=Price, timeout=timeout)
    )


def serve(orders: Runs[Order], ident: Any, handler: Callable[[Run[Order]], object]) -> Any:
    """Execute the run as soon as it has something to do."""
    return eventually(
        lambda: outcome if (outcome := orders.execute(ident, handler)).ending is Ending.LANDED else None, "a landing"
    )


def test_an_update_returns_what_the_run_replied(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    orders.execute(ident, answer_one)
    assert of_order(engine, ident).waits_for == "discount"
    update = asking(orders, ident)
    serve(orders, ident, answer_one)
    assert update.result() == Price(750)
    assert lines(engine) == ["25 %"]
    assert taken(engine, ident) == [("discount", {"percent": 25}, "discount")]


def test_a_replayed_answer_has_no_second_effect(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    def interrupted(run: Run[Order]) -> None:
        answer_one(run)
        raise KeyboardInterrupt

    send(orders, ident, "discount", {"percent": 25})
    with pytest.raises(KeyboardInterrupt):
        orders.execute(ident, interrupted)
    assert orders.execute(ident, answer_one).status is PlanStatus.EXECUTED
    assert lines(engine) == ["25 %"]


def test_an_answer_that_fails_for_good_is_the_reply_and_the_steps_failure(
    orders: Runs[Order], ident: Any, engine: Engine
) -> None:
    def refuse(session: Session, discount: Discount) -> Price:
        add_line(session, "undone")
        raise ValueError("too much")

    def handler(run: Run[Order]) -> None:
        try:
            run.answer("discount", refuse)
        except (ValueError, StepFailed):
            run.answer("discount", reduce, key="second")

    update = asking(orders, ident)
    eventually(lambda: taken(engine, ident), "the signal")
    assert orders.execute(ident, handler).ending is Ending.SUSPENDED
    with pytest.raises(UpdateFailed, match="ValueError: too much"):
        update.result()
    assert lines(engine) == []
    send(orders, ident, "discount", {"percent": 25})
    outcome = orders.execute(ident, handler)
    assert outcome.status is PlanStatus.EXECUTED
    assert [receipt.failure is None for receipt in outcome.receipts] == [False, True]
    assert lines(engine) == ["25 %"]


def test_an_answer_that_fails_retryably_takes_nothing(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    calls: list[int] = []

    def flaky(session: Session, discount: Discount) -> Price:
        add_line(session, "line")
        calls.append(1)
        if len(calls) == 1:
            raise TransactionConflict("not now")
        if len(calls) == 2:
            raise RetryableError("not now")
        return Price(1)

    send(orders, ident, "discount", {"percent": 25})
    outcome = orders.execute(ident, lambda run: run.answer("discount", flaky))
    assert (outcome.ending, len(calls)) == (Ending.INTERRUPTED, 2)
    assert taken(engine, ident) == [("discount", {"percent": 25}, None)]
    assert orders.execute(ident, lambda run: run.answer("discount", flaky)).status is PlanStatus.EXECUTED
    assert lines(engine) == ["line"]


def test_an_update_that_is_not_answered_in_time_stays_sent(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    with pytest.raises(UpdateTimeout):
        asking(orders, ident, timedelta(seconds=0.1)).result()
    assert issubclass(UpdateTimeout, TimeoutError)
    assert orders.execute(ident, answer_one).status is PlanStatus.EXECUTED


def test_an_update_of_a_run_that_has_landed_or_is_missing_is_refused(
    orders: Runs[Order], ident: Any, engine: Engine
) -> None:
    orders.execute(ident, lambda run: None)
    with pytest.raises(NotAnswered, match="nothing was sent"):
        asking(orders, ident).result()
    with pytest.raises(RunNotFound):
        asking(orders, "00000000-0000-0000-0000-000000000000").result()
    assert taken(engine, ident) == []


def test_a_run_that_lands_without_answering_leaves_nobody_waiting(
    orders: Runs[Order], ident: Any, engine: Engine
) -> None:
    update = asking(orders, ident)
    eventually(lambda: taken(engine, ident), "the signal")
    orders.execute(ident, lambda run: None)
    with pytest.raises(NotAnswered, match="executed"):
        update.result()


def test_an_update_that_is_taken_by_a_mere_wait_is_told_so(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    update = asking(orders, ident)
    eventually(lambda: taken(engine, ident), "the signal")

    def handler(run: Run[Order]) -> None:
        run.wait("discount", Discount)
        run.wait("never")

    orders.execute(ident, handler)
    with pytest.raises(NotAnswered, match="wait"):
        update.result()


def test_a_payload_that_does_not_decode_is_not_consumed(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    send(orders, ident, "discount", "all of it")
    outcome = orders.execute(ident, answer_one)
    assert outcome.status is PlanStatus.FAILED
    assert isinstance(outcome.exception, SignalMismatch)
    assert "payload cannot be rebuilt" in str(outcome.exception)
    assert re.search(r"DELETE FROM \w+ WHERE id = \d+\. Then requeue the run", str(outcome.exception))
    assert taken(engine, ident) == [("discount", "all of it", None)]
    assert lines(engine) == []


def test_an_answer_times_out_like_a_wait(orders: Runs[Order], ident: Any) -> None:
    def handler(run: Run[Order]) -> None:
        run.answer("discount", reduce, timeout=timedelta(hours=1))

    orders.execute(ident, handler)
    with orders.session_factory.begin() as session:
        let_pass(session, OrderStep, ident, "discount")
    assert isinstance(orders.execute(ident, handler).exception, SignalTimeout)


def test_an_answer_waits_for_a_sender_that_has_not_committed(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    with sent_later(orders, ident, "discount", {"percent": 25}):
        executing = blocked(engine, lambda: orders.execute(ident, answer_one))
    assert executing.result().status is PlanStatus.EXECUTED


def test_an_answer_takes_over_the_receipt_of_a_wait_that_was_parked(
    orders: Runs[Order], ident: Any, engine: Engine
) -> None:
    orders.execute(ident, answer_one)
    send(orders, ident, "discount", {"percent": 25})
    outcome = orders.execute(ident, answer_one)
    assert outcome.status is PlanStatus.EXECUTED
    assert outcome.receipts[0].result == {"cents": 750}


class Desk:
    def reduce(self, session: Session, discount: Discount) -> Price:
        return reduce(session, discount)


def reduce_by(factor: int, session: Session, discount: Discount) -> Price:
    return Price(1000 - factor * discount.percent)


def anything(session: Session, payload: Any) -> Any:
    return payload


def test_the_payload_is_decoded_as_the_second_parameter_says(orders: Runs[Order], ident: Any) -> None:
    def local(session: Session, discount: Discount) -> Price:
        return reduce(session, discount)

    send(orders, ident, "discount", *[{"percent": 25}] * 5)

    def handler(run: Run[Order]) -> None:
        assert run.answer("discount", Desk().reduce, key=1) == Price(750)
        assert run.answer("discount", partial(reduce_by, 10), key=2) == Price(750)
        assert run.answer("discount", local, key=3) == Price(750)
        assert run.answer("discount", anything, key=4) == {"percent": 25}
        assert run.answer("discount", lambda session, payload: payload, key=5) == {"percent": 25}

    outcome = orders.execute(ident, handler)
    assert (outcome.status, outcome.exception) == (PlanStatus.EXECUTED, None)


def test_the_body_of_an_answer_is_that_of_a_step(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    def commits(session: Session, payload: Any) -> None:
        add_line(session, "half")
        session.commit()

    send(orders, ident, "discount", 1)
    outcome = orders.execute(ident, lambda run: run.answer("discount", commits))
    assert outcome.status is PlanStatus.FAILED
    assert lines(engine) == []
    assert taken(engine, ident) == [("discount", 1, None)]


def test_a_timeout_is_a_duration(orders: Runs[Order], ident: Any) -> None:
    with pytest.raises(UsageError):
        orders.update(ident, "discount", 1, timeout=5)  # type: ignore[call-overload]


def test_the_reply_stands_beside_the_signal(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    send(orders, ident, "discount", {"percent": 25})
    orders.execute(ident, answer_one)
    with Session(engine) as session:
        signal = session.query(OrderSignal).one()
        assert (signal.reply, signal.error) == ({"cents": 750}, None)
        assert signal.answered_at is not None
        assert signal.created_at < signal.answered_at
