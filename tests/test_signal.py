"""Signals: taken exactly once with a receipt, in the order they were sent, by a run that waits in its row."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, delete, select
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import (
    Cancelled,
    ConfigurationError,
    Effect,
    Ending,
    ReceiptMismatch,
    ResultError,
    Run,
    RunNotFound,
    Runs,
    SignalMismatch,
    SignalTimeout,
    StepOutcome,
    StepReused,
    Suspended,
    TransactionConflict,
    UsageError,
)
from sqla_durable.testing import let_pass
from tests.support import Background, Plan, PlanStatus, PlanStep, approved_plan
from tests.support_signals import (
    Order,
    OrderSignal,
    OrderStep,
    add_line,
    blocked,
    collecting,
    lines,
    make_tables,
    new_order,
    of_order,
    orders_on,
    send,
    sent_later,
    taken,
)

HOUR = timedelta(hours=1)


@pytest.fixture
def orders(engine: Engine, session_factory: sessionmaker[Session]) -> Runs[Order]:
    make_tables(engine)
    return orders_on(session_factory)


@pytest.fixture
def ident(orders: Runs[Order], session_factory: sessionmaker[Session]) -> Any:
    return new_order(session_factory)


def wait_for_paid(run: Run[Order]) -> None:
    assert run.wait("paid", int) == 7


# --- the order of things


def test_a_signal_sent_before_the_wait_is_taken_without_parking(
    orders: Runs[Order], ident: Any, engine: Engine
) -> None:
    send(orders, ident, "paid", 7)
    outcome = orders.execute(ident, wait_for_paid)
    assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.EXECUTED)
    (receipt,) = outcome.receipts
    assert (receipt.step, receipt.result, receipt.effect) == ("paid", 7, Effect.SIGNAL)
    assert (receipt.outcome, receipt.fence) == (StepOutcome.SUCCEEDED, 1)
    assert taken(engine, ident) == [("paid", 7, "paid")]


def test_a_run_without_a_signal_waits_in_its_row_until_one_comes(
    orders: Runs[Order], ident: Any, engine: Engine
) -> None:
    outcome = orders.execute(ident, wait_for_paid)
    assert (outcome.ending, outcome.status) == (Ending.SUSPENDED, PlanStatus.APPROVED)
    assert isinstance(outcome.exception, Suspended)
    row = of_order(engine, ident)
    assert (row.waits_for, row.attempts, row.lease_owner, row.lease_expires_at) == ("paid", 0, None, None)
    assert row.available_at.year == 9999
    assert orders.claim(ident) is None
    assert orders.claim_due(10) == []
    send(orders, ident, "paid", 7)
    assert of_order(engine, ident).due
    (run,) = orders.claim_due(10)
    assert of_order(engine, ident).waits_for is None
    assert orders.execute(run, wait_for_paid).status is PlanStatus.EXECUTED


def test_a_signal_of_another_name_neither_wakes_nor_is_taken(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    orders.execute(ident, wait_for_paid)
    send(orders, ident, "shipped", 1)
    assert not of_order(engine, ident).due
    send(orders, ident, "paid", 7)
    assert orders.execute(ident, wait_for_paid).status is PlanStatus.EXECUTED
    assert taken(engine, ident) == [("shipped", 1, None), ("paid", 7, "paid")]


def test_signals_are_taken_in_the_order_they_were_sent(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    into: list[Any] = []
    send(orders, ident, "n", 0, 1)
    assert orders.execute(ident, collecting("n", 5, into)).ending is Ending.SUSPENDED
    send(orders, ident, "n", 2, 3, 4, 5)
    assert orders.execute(ident, collecting("n", 5, into)).status is PlanStatus.EXECUTED
    assert into == [0, 1, 2, 3, 4]
    assert taken(engine, ident) == [*(("n", n, f"n-{n}") for n in range(5)), ("n", 5, None)]


def test_a_replayed_wait_returns_what_was_taken_and_sends_no_statement(orders: Runs[Order], ident: Any) -> None:
    def fails(run: Run[Order]) -> None:
        wait_for_paid(run)
        raise KeyboardInterrupt

    send(orders, ident, "paid", 7, 8)
    with pytest.raises(KeyboardInterrupt):
        orders.execute(ident, fails)
    assert orders.execute(ident, wait_for_paid).status is PlanStatus.EXECUTED


def test_a_signal_that_is_rolled_back_was_never_sent(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    orders.execute(ident, wait_for_paid)
    with orders.session_factory() as session:
        assert orders.signal(session, ident, "paid", 7)
        session.rollback()
    assert taken(engine, ident) == []
    assert of_order(engine, ident).waits_for == "paid"
    assert orders.claim(ident) is None


def test_a_signal_to_a_run_that_has_landed_is_a_lost_race(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    orders.execute(ident, lambda run: None)
    with orders.session_factory.begin() as session:
        assert not orders.signal(session, ident, "paid", 7)
    assert taken(engine, ident) == []


def test_a_signal_to_no_run_is_an_error(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(delete(Order.__table__))
    with orders.session_factory.begin() as session, pytest.raises(RunNotFound):
        orders.signal(session, ident, "paid", 7)


def test_a_signal_may_be_sent_in_the_transaction_that_starts_the_run(orders: Runs[Order], engine: Engine) -> None:
    with orders.session_factory.begin() as session:
        order = orders.start(session, status=PlanStatus.APPROVED)
        assert orders.signal(session, order, "paid", 7)
        ident = order.id
    assert orders.execute(ident, wait_for_paid).status is PlanStatus.EXECUTED


# --- between the first look and parking


def test_a_sender_that_has_not_committed_holds_the_parking_up_and_is_not_missed(
    orders: Runs[Order], ident: Any, engine: Engine
) -> None:
    with sent_later(orders, ident, "paid", 7):
        executing = blocked(engine, lambda: orders.execute(ident, wait_for_paid))
        assert taken(engine, ident) == []
    assert executing.result().status is PlanStatus.EXECUTED
    assert taken(engine, ident) == [("paid", 7, "paid")]


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_nor_is_it_missed_where_the_engine_keeps_one_snapshot_for_each_transaction(
    orders: Runs[Order], ident: Any, engine: Engine, level: Any
) -> None:
    strict = create_engine(engine.url, isolation_level=level)
    runs = orders_on(sessionmaker(strict))
    with sent_later(orders, ident, "paid", 7):
        executing = blocked(engine, lambda: runs.execute(ident, wait_for_paid))
    assert executing.result().status is PlanStatus.EXECUTED
    with strict.connect() as connection:
        assert connection.get_isolation_level() == level
    strict.dispose()


def test_a_sender_that_rolls_back_lets_the_run_park(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    with orders.session_factory() as session:
        orders.signal(session, ident, "paid", 7)
        executing = blocked(engine, lambda: orders.execute(ident, wait_for_paid))
        session.rollback()
    assert executing.result().ending is Ending.SUSPENDED
    assert of_order(engine, ident).waits_for == "paid"


def test_a_sender_that_comes_while_a_run_is_parked_waits_for_that_and_wakes_it(
    orders: Runs[Order], ident: Any, engine: Engine
) -> None:
    """The parking has the lock, and has looked; the signal must find the run parked."""
    run = orders.claim(ident)
    assert run is not None
    waits, lease = run.holder.steps.waits, run.lease
    with orders.session_factory.begin() as session:
        connection = session.connection()
        parameters = waits.store.parameters(
            lease, step="paid", name="paid", effect="signal", timeout=None, input_fingerprint=None
        )
        assert waits._locks.first(connection, parameters) is not None
        sending = blocked(engine, lambda: send(orders, ident, "paid", 7))
        assert waits._looks.first(connection, parameters).id is None
        connection.execute(waits._parks, {**parameters, **waits._key(lease)}).one()
    sending.result()
    assert of_order(engine, ident).due
    assert orders.execute(ident, wait_for_paid).status is PlanStatus.EXECUTED


def test_a_step_under_way_does_not_hold_a_sender_up(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    def body(session: Session) -> None:
        add_line(session, "step")
        session.flush()
        Background(lambda: send(orders, ident, "paid", 7)).result()

    def handler(run: Run[Order]) -> None:
        run.step("send", body)
        wait_for_paid(run)

    assert orders.execute(ident, handler).status is PlanStatus.EXECUTED


def test_a_sender_that_has_not_committed_holds_no_step_up(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    with sent_later(orders, ident, "paid", 7):
        run = orders.claim(ident)
        assert run is not None
        assert run.step("line", add_line, "a") == "a"
        run.renew()
    assert run.wait("paid", int) == 7


def test_a_second_signal_of_one_sender_does_not_wait_for_the_run_that_waits_for_it(
    orders: Runs[Order], ident: Any, engine: Engine
) -> None:
    with sent_later(orders, ident, "paid", 7) as session:
        executing = blocked(engine, lambda: orders.execute(ident, wait_for_paid))
        assert orders.signal(session, ident, "paid", 8)
        session.execute(select(Order).where(Order.id == ident).with_for_update(key_share=True))
    assert executing.result().status is PlanStatus.EXECUTED
    assert taken(engine, ident) == [("paid", 7, "paid"), ("paid", 8, None)]


def test_a_sender_in_repeatable_read_is_told_to_retry_where_the_run_was_parked_since(
    orders: Runs[Order], ident: Any, engine: Engine
) -> None:
    strict = engine.execution_options(isolation_level="REPEATABLE READ")
    with sessionmaker(strict)() as session:
        session.execute(select(Order.note))
        orders.execute(ident, wait_for_paid)
        with pytest.raises(TransactionConflict):
            orders.signal(session, ident, "paid", 7)
        session.rollback()
        assert orders.signal(session, ident, "paid", 7)
        session.commit()
    assert orders.execute(ident, wait_for_paid).status is PlanStatus.EXECUTED


# --- the timeout


def wait_an_hour(run: Run[Order]) -> None:
    run.wait("paid", int, timeout=HOUR)


def pass_time(orders: Runs[Order], ident: Any, key: str = "paid") -> None:
    with orders.session_factory.begin() as session:
        let_pass(session, OrderStep, ident, key)


def test_the_instant_of_the_first_attempt_stands(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    assert orders.execute(ident, wait_an_hour).ending is Ending.SUSPENDED
    due = of_order(engine, ident).available_at
    (receipt,) = orders.receipts(ident)
    assert (receipt.outcome, receipt.effect) == (StepOutcome.PENDING, Effect.SIGNAL)
    assert orders.execute(ident, wait_an_hour, run_now=True).ending is Ending.SUSPENDED
    assert of_order(engine, ident).available_at == due


def test_a_wait_that_is_over_fails_and_a_replay_raises_the_same(orders: Runs[Order], ident: Any) -> None:
    orders.execute(ident, wait_an_hour)
    pass_time(orders, ident)
    outcome = orders.execute(ident, wait_an_hour)
    assert outcome.status is PlanStatus.FAILED
    assert isinstance(outcome.exception, SignalTimeout)
    assert isinstance(outcome.exception, TimeoutError)
    assert outcome.exception.step == "paid"
    assert outcome.receipts[0].failure is not None


def test_a_handler_goes_on_after_a_timeout_and_does_so_again_in_the_next_execution(
    orders: Runs[Order], ident: Any
) -> None:
    seen: list[str] = []

    def handler(run: Run[Order]) -> None:
        try:
            run.wait("paid", int, timeout=HOUR)
        except SignalTimeout as late:
            seen.append(str(late))
        run.wait("shipped", int)

    orders.execute(ident, handler)
    pass_time(orders, ident)
    assert orders.execute(ident, handler).ending is Ending.SUSPENDED
    send(orders, ident, "shipped", 1)
    assert orders.execute(ident, handler).status is PlanStatus.EXECUTED
    assert len(seen) == 2
    assert seen[0] == seen[1]


def test_a_wait_that_timed_out_may_be_begun_again_in_place(orders: Runs[Order], ident: Any) -> None:
    def handler(run: Run[Order]) -> None:
        while True:
            try:
                run.wait("paid", int, timeout=HOUR)
            except SignalTimeout:
                continue
            return

    orders.execute(ident, handler)
    pass_time(orders, ident)
    assert orders.execute(ident, handler).ending is Ending.SUSPENDED
    pass_time(orders, ident)
    assert orders.execute(ident, handler).ending is Ending.SUSPENDED
    send(orders, ident, "paid", 7)
    assert orders.execute(ident, handler).status is PlanStatus.EXECUTED


def test_a_signal_that_committed_before_the_timeout_was_found_is_taken(orders: Runs[Order], ident: Any) -> None:
    orders.execute(ident, wait_an_hour)
    pass_time(orders, ident)
    send(orders, ident, "paid", 7)
    assert orders.execute(ident, wait_an_hour).status is PlanStatus.EXECUTED


def test_a_sender_that_has_not_committed_when_the_time_is_over_is_waited_for(
    orders: Runs[Order], ident: Any, engine: Engine
) -> None:
    orders.execute(ident, wait_an_hour)
    pass_time(orders, ident)
    run = orders.claim(ident)
    assert run is not None
    with sent_later(orders, ident, "paid", 7):
        executing = blocked(engine, lambda: orders.execute(run, wait_an_hour))
    assert executing.result().status is PlanStatus.EXECUTED


def test_a_signal_after_the_timeout_is_kept(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    def handler(run: Run[Order]) -> None:
        try:
            run.wait("paid", int, timeout=HOUR)
        except SignalTimeout:
            send(orders, ident, "paid", 7)
            assert run.wait("paid", int, key="late") == 7

    orders.execute(ident, handler)
    pass_time(orders, ident)
    assert orders.execute(ident, handler).status is PlanStatus.EXECUTED
    assert taken(engine, ident) == [("paid", 7, "late")]


def test_a_requeued_run_waits_anew(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    orders.execute(ident, wait_an_hour)
    pass_time(orders, ident)
    orders.execute(ident, wait_an_hour)
    assert orders.requeue(ident)
    assert orders.execute(ident, wait_an_hour).ending is Ending.SUSPENDED
    assert not of_order(engine, ident).due


@pytest.mark.parametrize("verb", ["requeue", "requeue_all"])
def test_a_run_that_is_requeued_while_its_time_runs_waits_anew(
    orders: Runs[Order], ident: Any, engine: Engine, verb: str
) -> None:
    """It was cancelled while it waited; the time that was left of that wait is over by then."""
    orders.execute(ident, wait_an_hour)
    pass_time(orders, ident)
    with orders.session_factory.begin() as session:
        assert orders.request_cancel(session, ident)
    assert of_order(engine, ident).status is PlanStatus.CANCELLED
    assert orders.requeue(ident) if verb == "requeue" else orders.requeue_all(everything=True) == 1
    assert orders.receipts(ident) == ()
    assert orders.execute(ident, wait_an_hour).ending is Ending.SUSPENDED
    assert not of_order(engine, ident).due


# --- cancelling


def test_a_run_that_waits_is_cancelled_at_once(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    orders.execute(ident, wait_for_paid)
    with orders.session_factory.begin() as session:
        assert orders.request_cancel(session, ident)
    row = of_order(engine, ident)
    assert (row.status, row.waits_for) == (PlanStatus.CANCELLED, None)
    with orders.session_factory.begin() as session:
        assert not orders.signal(session, ident, "paid", 7)


def test_a_cancelled_run_takes_no_signal(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    run = orders.claim(ident)
    assert run is not None
    send(orders, ident, "paid", 7)
    with orders.session_factory.begin() as session:
        assert orders.request_cancel(session, ident)
    with pytest.raises(Cancelled):
        run.wait("paid", int)
    assert taken(engine, ident) == [("paid", 7, None)]


def test_a_run_that_would_be_parked_is_cancelled_instead(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    def handler(run: Run[Order]) -> None:
        with orders.session_factory.begin() as session:
            assert orders.request_cancel(session, ident)
        run.wait("paid", int)

    outcome = orders.execute(ident, handler)
    assert outcome.status is PlanStatus.CANCELLED
    assert orders.receipts(ident) == ()


def test_a_cancel_that_commits_while_the_parking_waits_for_a_sender_is_seen(
    orders: Runs[Order], ident: Any, engine: Engine
) -> None:
    with sent_later(orders, ident, "shipped", 1):
        executing = blocked(engine, lambda: orders.execute(ident, wait_for_paid))
        with orders.session_factory.begin() as session:
            assert orders.request_cancel(session, ident)
    assert executing.result().status is PlanStatus.CANCELLED
    assert taken(engine, ident) == [("shipped", 1, None)]


# --- taking over


def test_a_holder_whose_run_was_taken_over_takes_nothing(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    from sqla_durable import LostLease
    from sqla_durable.testing import lapse

    first = orders.claim(ident)
    assert first is not None
    with orders.session_factory.begin() as session:
        lapse(session, Order, ident)
    second = orders.claim(ident)
    assert second is not None
    send(orders, ident, "paid", 7)
    with pytest.raises(LostLease):
        first.wait("paid", int)
    assert taken(engine, ident) == [("paid", 7, None)]
    with pytest.raises(LostLease):
        first.wait("shipped", int)
    assert second.wait("paid", int) == 7


def test_a_run_that_was_parked_by_its_next_holder_is_not_resumed(orders: Runs[Order], ident: Any) -> None:
    from sqla_durable import LostLease
    from sqla_durable.testing import lapse

    first = orders.claim(ident)
    assert first is not None
    with orders.session_factory.begin() as session:
        lapse(session, Order, ident)
    orders.execute(ident, wait_for_paid)
    with pytest.raises(LostLease):
        first.wait("paid", int)


def test_two_handles_of_one_lease_take_one_signal_once(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    run = orders.claim(ident)
    assert run is not None
    other = orders.hold(run.lease)
    send(orders, ident, "paid", 7, 8)
    assert run.wait("paid", int) == 7
    assert other.wait("paid", int) == 7
    assert taken(engine, ident) == [("paid", 7, "paid"), ("paid", 8, None)]


def test_a_holder_that_was_reaped_but_not_replaced_takes_its_run_back(orders: Runs[Order], ident: Any) -> None:
    from sqla_durable.testing import lapse

    run = orders.claim(ident)
    assert run is not None
    with orders.session_factory.begin() as session:
        lapse(session, Order, ident)
    assert orders.reap() == 1
    with pytest.raises(Suspended):
        run.wait("paid", int)


def test_a_run_that_was_claimed_early_and_released_waits_no_more(
    orders: Runs[Order], ident: Any, engine: Engine
) -> None:
    """No signal would wake it: it is not noted any more what it waits for."""
    orders.execute(ident, wait_for_paid)
    run = orders.claim(ident, run_now=True)
    assert run is not None
    run.release()
    assert of_order(engine, ident).due
    assert orders.execute(ident, wait_for_paid).ending is Ending.SUSPENDED


# --- payloads and declarations


def test_a_payload_that_does_not_decode_is_final_and_not_consumed(
    orders: Runs[Order], ident: Any, engine: Engine
) -> None:
    send(orders, ident, "paid", "seven")
    outcome = orders.execute(ident, wait_for_paid)
    assert outcome.status is PlanStatus.FAILED
    assert isinstance(outcome.exception, SignalMismatch)
    with engine.connect() as connection:
        (signal,) = connection.scalars(select(OrderSignal.id))
    assert str(outcome.exception) == (
        f"signal 'paid' of Order ({ident!r},): its payload does not decode as int: payload cannot be rebuilt: Input "
        "should be a valid integer, unable to parse string as an integer. The signal was not consumed: have the run "
        "wait for a type that can read it, or delete it: DELETE FROM order_signal WHERE id = "
        f"{signal}. Then requeue the run."
    )
    assert taken(engine, ident) == [("paid", "seven", None)]
    assert outcome.receipts == ()
    orders.requeue(ident)
    assert orders.execute(ident, lambda run: run.wait("paid", str)).status is PlanStatus.EXECUTED


def test_a_payload_that_would_not_come_back_equal_is_refused_before_it_is_sent(
    orders: Runs[Order], ident: Any, engine: Engine
) -> None:
    with orders.session_factory.begin() as session, pytest.raises(ResultError, match="signal 'paid'"):
        orders.signal(session, ident, "paid", (1, 2))
    assert taken(engine, ident) == []


def test_null_is_a_payload(orders: Runs[Order], ident: Any) -> None:
    with orders.session_factory.begin() as session:
        assert orders.signal(session, ident, "paid")
    assert orders.execute(ident, lambda run: run.wait("paid")).status is PlanStatus.EXECUTED


def test_one_key_waits_once(orders: Runs[Order], ident: Any) -> None:
    send(orders, ident, "paid", 7, 8)
    run = orders.claim(ident)
    assert run is not None
    run.wait("paid", int)
    with pytest.raises(StepReused):
        run.wait("paid", int)
    assert run.wait("paid", int, key="again") == 8


def test_a_key_of_another_kind_of_step_is_refused(orders: Runs[Order], ident: Any) -> None:
    orders.execute(ident, wait_an_hour)
    run = orders.claim(ident, run_now=True)
    assert run is not None
    with pytest.raises(ReceiptMismatch):
        run.step("paid", add_line, "a")
    with pytest.raises(ReceiptMismatch):
        run.sleep("paid", HOUR)


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", 7])
def test_a_name_is_a_short_printable_text(orders: Runs[Order], ident: Any, name: Any) -> None:
    with orders.session_factory.begin() as session, pytest.raises(UsageError):
        orders.signal(session, ident, name, 1)


@pytest.mark.parametrize("timeout", [timedelta(seconds=-1), 5, timedelta.max])
def test_a_timeout_is_a_duration(orders: Runs[Order], ident: Any, timeout: Any) -> None:
    run = orders.claim(ident)
    assert run is not None
    with pytest.raises(UsageError):
        run.wait("paid", int, timeout=timeout)


def test_without_a_table_for_signals_the_remedy_is_named(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    plans = Runs(session_factory, Plan, PlanStep)
    ident = approved_plan(session_factory)
    run = plans.claim(ident)
    assert run is not None
    with pytest.raises(ConfigurationError, match="signals=PlanSignal"):
        run.wait("paid")
    with session_factory.begin() as session, pytest.raises(ConfigurationError, match="WaitMixin"):
        plans.signal(session, ident, "paid")


def test_signals_of_another_class_are_refused(session_factory: sessionmaker[Session]) -> None:
    with pytest.raises(ConfigurationError, match="SignalMixin"):
        Runs(session_factory, Plan, PlanStep, signals=OrderSignal)
    with pytest.raises(ConfigurationError, match="receipts"):
        Runs(session_factory, Order, OrderSignal)  # type: ignore[arg-type]


def test_deleting_a_run_deletes_its_signals(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    send(orders, ident, "paid", 7)
    with engine.begin() as connection:
        connection.execute(delete(Order.__table__))
    assert taken(engine, ident) == []


def test_a_step_may_signal_another_run(orders: Runs[Order], ident: Any, engine: Engine) -> None:
    other = new_order(orders.session_factory)
    orders.execute(other, wait_for_paid)

    def tell(session: Session) -> bool:
        add_line(session, "told")
        return orders.signal(session, other, "paid", 7)

    assert orders.execute(ident, lambda run: run.step("tell", tell)).status is PlanStatus.EXECUTED
    assert orders.execute(other, wait_for_paid).status is PlanStatus.EXECUTED
    assert lines(engine) == ["told"]
