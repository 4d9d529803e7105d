"""A listener is told, on commit, which table has a run that has become ready, and nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, event, make_url, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import ReceiptMixin, RetryableError, RunMixin, Runs
from sqla_durable.asyncio import AsyncRuns
from sqla_durable.wake import CHANNEL
from tests.support import DEADLINE
from tests.support_models import JobStatus, jobs, lifecycle
from tests.support_start import Order, OrderStep, Shop, shop
from tests.support_statements import statements


class Listener:
    """A connection of psycopg's own that listens."""

    def __init__(self, url: str) -> None:
        dsn = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.connection.execute(f"LISTEN {CHANNEL}")

    def heard(self) -> list[str]:
        """What was sent since by transactions that have committed: the queue has an order, so a mark ends it."""
        self.connection.execute(f"NOTIFY {CHANNEL}, 'mark'")
        heard: list[str] = []
        for notification in self.connection.notifies(timeout=DEADLINE):
            if notification.payload == "mark":
                return heard
            heard.append(notification.payload)
        raise AssertionError("the mark did not come back")


@pytest.fixture
def store(empty_url: str) -> Iterator[Shop]:
    with shop(empty_url) as made:
        yield made


@pytest.fixture
def listener(empty_url: str) -> Iterator[Listener]:
    made = Listener(empty_url)
    yield made
    made.connection.close()


READY: dict[str, Any] = {"status": JobStatus.READY}


def test_a_start_notifies_when_it_commits(store: Shop, listener: Listener) -> None:
    with store.factory() as session:
        store.orders.start(session, **READY)
        store.orders.start(session, **READY)
        assert listener.heard() == []
        session.commit()
    assert listener.heard() == ["orders"]
    assert listener.heard() == []


def test_a_start_that_is_rolled_back_notifies_nobody(store: Shop, listener: Listener) -> None:
    with store.factory() as session:
        store.orders.start(session, **READY)
        session.rollback()
    assert listener.heard() == []


@pytest.mark.parametrize(
    "values", [{}, {**READY, "available_at": timedelta(hours=1)}, {"available_at": timedelta(hours=-1)}]
)
def test_a_run_that_is_not_ready_or_not_due_notifies_nobody(
    store: Shop, listener: Listener, values: dict[str, Any]
) -> None:
    store.start(**values)
    assert listener.heard() == []


@pytest.mark.parametrize("due", [timedelta(0), timedelta(hours=-1), text("clock_timestamp()")])
def test_a_run_that_is_due_by_the_time_given_notifies(store: Shop, listener: Listener, due: Any) -> None:
    store.start(available_at=due, **READY)
    assert listener.heard() == ["orders"]


def test_a_replay_notifies_nobody(store: Shop, listener: Listener) -> None:
    store.start(key="a", **READY)
    assert listener.heard() == ["orders"]
    store.start(key="a", **READY)
    assert listener.heard() == []


def test_a_payload_of_a_megabyte_is_no_part_of_the_notification(store: Shop, listener: Listener) -> None:
    order = store.start(key="a", details={"text": "x" * 2**20}, **READY)
    assert listener.heard() == ["orders"]
    assert store.start(key="a", details={"text": "x" * 2**20}).id == order.id


def transitioned(store: Shop, order: Order) -> None:
    with store.factory.begin() as session:
        assert jobs.transition(session, (Order, order.id), JobStatus.READY)


def lost(store: Shop, order: Order) -> None:
    transitioned(store, order)
    with store.factory.begin() as session:
        assert not jobs.transition(session, (Order, order.id), JobStatus.READY)


def test_a_transition_into_ready_notifies_once(store: Shop, listener: Listener) -> None:
    transitioned(store, store.start())
    assert listener.heard() == ["orders"]


def test_a_transition_elsewhere_or_lost_notifies_nobody(store: Shop, listener: Listener) -> None:
    order = store.start()
    lost(store, order)
    assert listener.heard() == ["orders"]
    with store.factory.begin() as session:
        assert jobs.transition(session, (Order, order.id), JobStatus.CANCELLED)
    assert listener.heard() == []


def test_a_release_notifies_and_a_failed_attempt_does_not(store: Shop, listener: Listener) -> None:
    order = store.start(**READY)
    listener.heard()
    run = store.orders.claim(order.id)
    assert run is not None
    assert listener.heard() == []
    run.release()
    assert listener.heard() == ["orders"]
    assert run.row.status is JobStatus.READY

    def fail(run: Any) -> None:
        raise RetryableError("later")

    store.orders.execute(order.id, fail)
    assert listener.heard() == []
    store.orders.execute(order.id, lambda run: None)
    assert listener.heard() == []


def test_a_release_of_a_run_that_lands_as_cancelled_notifies_nobody(store: Shop, listener: Listener) -> None:
    order = store.start(**READY)
    listener.heard()
    run = store.orders.claim(order.id)
    assert run is not None
    with store.factory.begin() as session:
        store.orders.request_cancel(session, order.id)
    run.release()
    assert run.row.status is JobStatus.CANCELLED
    assert listener.heard() == []


def test_a_requeue_notifies(store: Shop, listener: Listener) -> None:
    order = store.start(**READY)
    store.orders.execute(order.id, lambda run: run.fail(ValueError("no")))
    listener.heard()
    assert store.orders.requeue(order.id)
    assert listener.heard() == ["orders"]


@pytest.mark.parametrize("notify", [True, False])
def test_no_statement_is_sent_for_it_and_nothing_where_it_is_not_wanted(empty_url: str, notify: bool) -> None:
    class Base(DeclarativeBase):
        pass

    class Job(RunMixin, Base):
        __tablename__ = "a job's %s table"
        __lifecycle__ = lifecycle(notify=notify)
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[JobStatus] = jobs.column()

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    engine = create_engine(empty_url)
    Base.metadata.create_all(engine)
    factory = sessionmaker(engine, expire_on_commit=False)
    runs = Runs(factory, Job, JobStep)
    listener = Listener(empty_url)
    with statements(engine) as sent:
        with factory.begin() as session:
            job = runs.start(session)
            jobs.transition(session, job, JobStatus.READY)
        run = runs.claim(job.id)
        assert run is not None
        run.release()
        runs.execute(job.id, lambda run: run.fail(ValueError("no")))
        assert runs.requeue(job.id)
    telling = [statement for statement in sent if "pg_notify" in statement]
    assert len(telling) == (4 if notify else 0)
    assert all(statement.startswith(("INSERT", "WITH target")) for statement in telling)
    assert listener.heard() == (["a job's %s table"] * 3 if notify else [])
    listener.connection.close()
    engine.dispose()


@pytest.mark.parametrize("act", ["start", "transition", "release", "requeue"])
def test_a_transaction_that_is_prepared_sends_none_as_postgresql_refuses_that(
    store: Shop, listener: Listener, act: str
) -> None:
    order = store.start(**({} if act == "transition" else READY))
    if act == "requeue":
        store.orders.execute(order.id, lambda run: run.fail(ValueError("no")))
    listener.heard()
    factory = sessionmaker(store.engine, twophase=True, expire_on_commit=False)

    def listened(session: Session, *_: Any) -> None:
        pass

    event.listen(factory, "after_begin", listened)  # so that a single statement takes a transaction, too
    orders = Runs(factory, Order, OrderStep)
    acts: dict[str, Callable[[], Any]] = {
        "start": lambda: started(orders, factory),
        "transition": lambda: transition(factory, order),
        "release": lambda: claimed(orders, order).release(),
        "requeue": lambda: orders.requeue(order.id),
    }
    acts[act]()
    assert listener.heard() == []


def started(orders: Runs[Order], factory: sessionmaker[Session]) -> None:
    with factory.begin() as session:
        orders.start(session, **READY)


def transition(factory: sessionmaker[Session], order: Order) -> None:
    with factory.begin() as session:
        assert jobs.transition(session, (Order, order.id), JobStatus.READY)


def claimed(orders: Runs[Order], order: Order) -> Any:
    return orders.claim(order.id)


def test_the_asyncio_form_notifies_alike(store: Shop, listener: Listener, empty_url: str) -> None:
    async def main() -> None:
        engine = create_async_engine(empty_url)
        factory = async_sessionmaker(engine, expire_on_commit=False)
        orders = AsyncRuns(factory, Order, OrderStep)
        async with factory.begin() as session:
            order = await orders.start(session, **READY)
            assert listener.heard() == []
        assert listener.heard() == ["orders"]
        run = await orders.claim(order.id)
        assert run is not None
        await run.release()
        assert listener.heard() == ["orders"]
        await engine.dispose()

    asyncio.run(main())
