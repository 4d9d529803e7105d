"""A run is started in the caller's transaction: one statement, there if and only if the caller commits."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from sqlalchemy import create_engine, event, func, inspect, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, make_transient, scoped_session, sessionmaker, with_loader_criteria

from sqla_durable import ConfigurationError, KeyConflict, Runs, UndeclaredTransition, UsageError
from tests.support import Plan, PlanStatus, PlanStep
from tests.support_models import JobStatus
from tests.support_start import Base, Customer, Order, OrderStep, Shop, shop
from tests.support_statements import statements


@pytest.fixture
def store(empty_url: str) -> Iterator[Shop]:
    with shop(empty_url) as made:
        yield made


# --- one statement


@pytest.mark.parametrize("values", [{}, {"key": "a"}, {"kind": "a"}, {"key": "a", "kind": "a", "priority": 3}])
def test_a_start_is_one_statement_and_everything_is_loaded_afterwards(store: Shop, values: dict[str, Any]) -> None:
    with store.factory.begin() as session:
        session.connection()
        with statements(store.engine) as sent:
            order = store.orders.start(session, amount=Decimal("1.50"), **values)
            state = inspect(order)
            assert state.persistent
            assert not state.modified
            assert {attribute.key for attribute in state.mapper.column_attrs} <= set(state.dict)
            assert session.get(Order, order.id) is order
            session.flush()
        assert len(sent) == 1
        assert "ON CONFLICT" in sent[0] or not values
        assert order.status is JobStatus.WAITING
        assert (order.fence, order.attempts, order.failures) == (0, 0, [])
        assert order.priority == values.get("priority", 0)
        assert order.created_at == order.available_at
        assert (order.idempotency_key, order.key_fingerprint is None) == (values.get("key"), "key" not in values)
    assert store.count() == 1


def test_what_is_pending_is_flushed_first(store: Shop) -> None:
    with store.factory.begin() as session:
        customer = Customer(name="ada")
        session.add(customer)
        order = store.orders.start(session, customer=customer)
        assert order.customer_id == customer.id
        assert order.customer is customer
        assert order in customer.orders
        with statements(store.engine) as sent:
            session.flush()
        assert sent == []


def test_a_run_that_was_started_is_an_ordinary_object_of_the_session(store: Shop) -> None:
    with store.factory.begin() as session:
        order = store.orders.start(session, key="a")
        order.kind = "changed"
    with store.factory.begin() as session:
        assert session.get_one(Order, order.id).kind == "changed"
        session.delete(session.get_one(Order, order.id))
    assert store.count() == 0


def test_a_scoped_session_will_do(store: Shop) -> None:
    registry = scoped_session(store.factory)
    order = store.orders.start(registry, key="a")
    registry.commit()
    assert store.orders.get(order.id) is not None
    registry.remove()


def test_a_run_that_was_started_ready_can_be_claimed(store: Shop) -> None:
    order = store.start(status=JobStatus.READY)
    assert store.orders.execute(order.id, lambda run: None).status is JobStatus.DONE


# --- the caller's transaction


def test_a_run_and_what_it_is_for_appear_together_and_only_on_commit(store: Shop) -> None:
    with store.factory() as session:
        session.add(Customer(name="ada"))
        store.orders.start(session, key="a")
        assert session.in_transaction()
        assert not session.in_nested_transaction()
        assert store.count() == 0
        with store.engine.connect() as other:
            assert other.scalar(select(func.count()).select_from(Customer)) == 0
        session.commit()
    assert store.count() == 1


def test_a_rollback_takes_both_away_and_the_object_out_of_the_session(store: Shop) -> None:
    with store.factory() as session:
        customer = Customer(name="ada")
        session.add(customer)
        order = store.orders.start(session, key="a", id=7, customer=customer)
        session.rollback()
        assert order not in session
        assert inspect(order).transient
        assert store.count() == 0
        again = store.orders.start(session, key="a", id=7)
        assert again is not order
        session.commit()
    assert store.count() == 1


def test_a_savepoint_of_the_callers_is_the_callers(store: Shop) -> None:
    with store.factory.begin() as session:
        with statements(store.engine) as sent:
            kept = store.orders.start(session, key="a")
            nested = session.begin_nested()
            undone = store.orders.start(session, key="b")
            nested.rollback()
        assert not any("SAVEPOINT" in statement for statement in sent if "sa_savepoint_1" not in statement)
        assert kept in session
        assert undone not in session
        assert store.orders.start(session, key="b") is not undone
    assert store.count() == 2


def test_a_step_starts_another_run_exactly_once(store: Shop) -> None:
    def follow_up(session: Session, label: str) -> int:
        return store.orders.start(session, code=label).id

    def fail_after(session: Session, label: str) -> None:
        follow_up(session, label)
        raise ValueError(label)

    def carry_out(run: Any) -> None:
        run.step("first", follow_up, "first")
        with pytest.raises(ValueError, match="second"):
            run.step("second", fail_after, "second")

    order = store.start(status=JobStatus.READY)
    store.orders.execute(order.id, carry_out)
    store.orders.execute(order.id, carry_out)
    assert store.count() == 2


# --- replays


@pytest.mark.past_guards
@pytest.mark.parametrize("status", list(JobStatus))
def test_the_same_key_and_values_return_the_same_run_from_any_status(store: Shop, status: JobStatus) -> None:
    order = store.start(key="a", amount=Decimal(3), status=JobStatus.READY)
    if status is JobStatus.RUNNING:
        store.orders.claim(order.id)
    else:
        with store.engine.begin() as connection:
            connection.execute(text("UPDATE orders SET status = :status"), {"status": status.value})
    with store.factory.begin() as session:
        before = session.get_one(Order, order.id)
        with statements(store.engine) as sent:
            again = store.orders.start(session, key="a", amount=Decimal(3))
        assert again is before
        assert again.status is status
        assert not session.new
        assert not session.dirty
        assert [statement.split()[0] for statement in sent] == ["INSERT", "SELECT", "SELECT"]
    assert store.count() == 1


def test_a_replay_shows_the_row_as_it_is_now(store: Shop) -> None:
    order = store.start(key="a")
    with store.factory.begin() as session:
        loaded = session.get_one(Order, order.id)
        with store.engine.begin() as connection:
            connection.execute(text("UPDATE orders SET kind = 'since'"))
        assert store.orders.start(session, key="a") is loaded
        assert loaded.kind == "since"


def test_when_a_run_is_due_is_no_part_of_what_its_key_stands_for(store: Shop) -> None:
    order = store.start(key="a", amount=Decimal(1))
    later = store.start(
        key="a", amount=Decimal("1.0"), available_at=timedelta(hours=1), priority=9, status=JobStatus.READY
    )
    assert later.id == order.id
    assert later.available_at == order.available_at
    assert (later.priority, later.status) == (0, JobStatus.WAITING)


def test_another_payload_under_the_same_key_is_a_conflict_that_names_key_and_run(store: Shop) -> None:
    order = store.start(key="a", amount=Decimal(1))
    for values in ({"amount": Decimal(2)}, {}, {"amount": Decimal(1), "details": {}}):
        with pytest.raises(KeyConflict, match=rf"'a' belongs to Order \({order.id},\)") as caught:
            store.start(key="a", **values)
        assert (caught.value.key, caught.value.identity) == ("a", (order.id,))
    assert store.count() == 1


def test_a_session_goes_on_after_a_conflict(store: Shop) -> None:
    store.start(key="a", amount=Decimal(1))
    with store.factory.begin() as session:
        with pytest.raises(KeyConflict):
            store.orders.start(session, key="a")
        assert not session.new
        store.orders.start(session, key="b")
    assert store.count() == 2


def test_a_key_that_was_written_by_hand_is_a_conflict(store: Shop) -> None:
    with store.factory.begin() as session:
        session.add(Order(idempotency_key="a"))
    with pytest.raises(KeyConflict, match="no fingerprint"):
        store.start(key="a")


def test_a_key_is_unique_within_its_scope_where_null_is_a_scope_too(store: Shop) -> None:
    started = [store.start(key="a", tenant=tenant).id for tenant in ("north", "south", None)]
    assert len(set(started)) == 3
    assert [store.start(key="a", tenant=tenant).id for tenant in ("north", "south", None)] == started


def test_runs_without_a_key_do_not_conflict(store: Shop) -> None:
    assert store.start().id != store.start().id


def test_a_customer_who_is_referred_to_is_as_before_after_a_replay(store: Shop) -> None:
    with store.factory.begin() as session:
        customer = Customer(name="ada")
        session.add(customer)
        order = store.orders.start(session, key="a", customer=customer)
    with store.factory.begin() as session:
        customer = session.get_one(Customer, customer.id)
        assert [each.id for each in customer.orders] == [order.id]
        again = store.orders.start(session, key="a", customer=customer)
        assert customer.orders == [again]
        assert store.orders.start(session, key="a", customer_id=customer.id) is again
        with pytest.raises(KeyConflict):
            store.orders.start(session, key="a", customer=customer, kind="other")
        assert customer.orders == [again]
        assert not session.dirty


def test_a_run_hidden_by_loader_criteria_is_an_error_that_says_so(store: Shop) -> None:
    order = store.start(key="a", kind="secret")

    def hide(state: Any) -> None:
        state.statement = state.statement.options(with_loader_criteria(Order, Order.kind != "secret"))

    event.listen(store.factory, "do_orm_execute", hide)
    with pytest.raises(UsageError, match=rf"Order \({order.id},\).*hidden"):
        store.start(key="a", kind="secret")


# --- what is in the way and is neither key nor group


def test_another_unique_constraint_raises_its_own_error(store: Shop) -> None:
    order = store.start(key="a", code="c")
    for values in ({"key": "b"}, {}, {"kind": "k"}):
        with pytest.raises(IntegrityError, match="orders_code_key"):
            store.start(code="c", **values)
        with pytest.raises(IntegrityError, match="orders_pkey"):
            store.start(id=order.id, **values)
    assert store.count() == 1


def test_a_key_that_wins_over_another_constraint_is_a_replay(store: Shop) -> None:
    assert store.start(key="a", code="c").id == store.start(key="a", code="c").id


# --- what may be given


def test_due_times_are_the_databases(store: Shop) -> None:
    instant = datetime(2031, 2, 3, 4, 5, 6, 7, tzinfo=UTC)
    assert store.start(available_at=instant).available_at == instant
    assert store.start(available_at=func.date_trunc("hour", func.now())).available_at.minute == 0
    assert store.start(available_at=None).available_at is not None
    with store.factory.begin() as session:
        order = store.orders.start(session, available_at=timedelta(hours=1, microseconds=3))
        passed = order.available_at - session.scalar(select(func.clock_timestamp()))
        assert timedelta(minutes=59) < passed < timedelta(hours=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"available_at": datetime(2031, 2, 3)}, "naive"),
        ({"available_at": 60}, "timedelta"),
        ({"available_at": "tomorrow"}, "timedelta"),
        ({"fence": 3}, "Order.fence is written by the library only"),
        ({"lease_owner": "me"}, "written by the library only"),
        ({"created_at": None}, "written by the library only"),
        ({"idempotency_key": "a"}, "Give the key as key="),
        ({"key_fingerprint": "a"}, "written by the library only"),
        ({"status": JobStatus.DONE}, "begins as not yet or may start"),
        ({"status": JobStatus.RUNNING}, "begins as not yet or may start"),
        ({"priority": 10}, "from 0 to 9"),
        ({"priority": -1}, "from 0 to 9"),
        ({"key": ""}, "from 1 to 255 printable"),
        ({"key": "x" * 256}, "from 1 to 255 printable"),
        ({"key": "a\0b"}, "from 1 to 255 printable"),
        ({"key": "a\nb"}, "from 1 to 255 printable"),
        ({"key": "\ud800"}, "from 1 to 255 printable"),
        ({"key": 3}, "a key is a str"),
        ({"customer": Customer(name="new")}, "add it to the session first"),
    ],
)
def test_what_cannot_be_right_is_refused_before_anything_is_sent(
    store: Shop, values: dict[str, Any], message: str
) -> None:
    with statements(store.engine) as sent, pytest.raises(UsageError, match=message):
        store.start(**values)
    assert sent == []


def test_a_status_of_another_enumeration_is_refused(store: Shop) -> None:
    with pytest.raises(UndeclaredTransition):
        store.start(status="may start")


def test_an_unknown_attribute_is_refused_by_the_constructor(store: Shop) -> None:
    with pytest.raises(TypeError, match="nothing"):
        store.start(nothing=1)


def test_a_key_of_the_longest_and_oddest_kind(store: Shop) -> None:
    key = "ключ 鍵 🗝" + "x" * 246
    assert store.start(key=key).id == store.start(key=key).id


def test_a_customer_of_another_session_is_refused(store: Shop) -> None:
    with store.factory.begin() as session:
        session.add(customer := Customer(name="ada"))
    with store.factory.begin() as session, pytest.raises(UsageError, match="add it to the session first"):
        store.orders.start(session, customer=customer)
    make_transient(customer)


def test_a_key_on_a_class_without_keys_is_refused_with_the_remedy(session_factory: sessionmaker[Session]) -> None:
    plans = Runs(session_factory, Plan, PlanStep)
    with session_factory.begin() as session:
        with pytest.raises(UsageError, match=r"class Plan\(KeyMixin, RunMixin, \.\.\.\)"):
            plans.start(session, key="a")
        plan = plans.start(session, status=PlanStatus.APPROVED, actions=[1])
        assert plan.actions == [1]
        assert plan.id is not None


def test_a_session_of_autocommit_is_refused(empty_url: str) -> None:
    engine = create_engine(empty_url, isolation_level="AUTOCOMMIT")
    Base.metadata.create_all(engine)
    factory = sessionmaker(engine)
    with factory.begin() as session, pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        Runs(factory, Order, OrderStep).start(session)
    engine.dispose()
