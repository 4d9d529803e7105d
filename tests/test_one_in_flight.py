"""Of each group one run at most is in flight, whatever its status short of a terminal one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, String, create_engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from sqla_durable import ConfigurationError, ReceiptMixin, RunInFlight, RunMixin, Runs
from tests.support import Background, wait_until_blocked
from tests.support_models import JobStatus, definitions, jobs, lifecycle
from tests.support_start import Order, Shop, shop


@pytest.fixture
def store(empty_url: str) -> Iterator[Shop]:
    with shop(empty_url) as made:
        yield made


@pytest.fixture
def bare(empty_url: str) -> Iterator[Engine]:
    engine = create_engine(empty_url)
    yield engine
    engine.dispose()


GROUP = {"tenant": "t", "kind": "k"}


def test_a_second_run_of_a_group_is_refused_and_the_first_is_named(store: Shop) -> None:
    first = store.start(**GROUP)
    with pytest.raises(RunInFlight, match=rf"Order \({first.id},\) with the same tenant, kind is in flight") as caught:
        store.start(**GROUP)
    assert caught.value.identity == (first.id,)
    assert store.start(tenant="t", kind="other").id != first.id
    assert store.count() == 2


@pytest.mark.parametrize("group", [{"tenant": "t"}, {"kind": "k"}, {}])
def test_a_run_with_a_null_in_its_group_is_in_no_group(store: Shop, group: dict[str, str]) -> None:
    assert store.start(**group).id != store.start(**group).id


def test_a_session_goes_on_after_it_was_refused(store: Shop) -> None:
    store.start(**GROUP)
    with store.factory.begin() as session:
        with pytest.raises(RunInFlight):
            store.orders.start(session, **GROUP)
        store.orders.start(session)
    assert store.count() == 2


@pytest.mark.past_guards
@pytest.mark.parametrize("status", list(JobStatus))
def test_a_group_is_free_again_once_its_run_is_terminal(store: Shop, status: JobStatus) -> None:
    first = store.start(status=JobStatus.READY, **GROUP)
    if status is JobStatus.RUNNING:
        store.orders.claim(first.id)
    else:
        with store.engine.begin() as connection:
            connection.execute(text("UPDATE orders SET status = :status"), {"status": status.value})
    if status in jobs.terminal:
        assert store.start(**GROUP).id != first.id
    else:
        with pytest.raises(RunInFlight):
            store.start(**GROUP)


def test_the_same_key_is_a_replay_and_not_refused(store: Shop) -> None:
    first = store.start(key="a", **GROUP)
    assert store.start(key="a", **GROUP).id == first.id
    with pytest.raises(RunInFlight):
        store.start(key="b", **GROUP)


def test_a_requeue_into_an_occupied_group_is_refused_and_the_occupant_named(store: Shop) -> None:
    first = store.start(status=JobStatus.READY, **GROUP)
    store.orders.execute(first.id, lambda run: run.fail(ValueError("no")))
    second = store.start(**GROUP)
    with pytest.raises(RunInFlight) as caught:
        store.orders.requeue(first.id)
    assert caught.value.identity == (second.id,)
    with store.factory.begin() as session:
        jobs.transition(session, (Order, second.id), JobStatus.CANCELLED)
    assert store.orders.requeue(first.id)


def test_a_requeue_that_races_a_start_is_refused(store: Shop) -> None:
    first = store.start(status=JobStatus.READY, **GROUP)
    store.orders.execute(first.id, lambda run: run.fail(ValueError("no")))
    with store.factory() as session:
        second = store.orders.start(session, **GROUP)
        behind = Background(lambda: store.orders.requeue(first.id))
        wait_until_blocked(store.engine)
        session.commit()
        with pytest.raises(RunInFlight) as caught:
            behind.result()
    assert caught.value.identity == (second.id,)


def test_a_run_goes_through_its_whole_life_in_its_group(store: Shop) -> None:
    order = store.start(status=JobStatus.READY, **GROUP)
    run = store.orders.claim(order.id)
    assert run is not None
    run.release()
    assert store.orders.execute(order.id, lambda run: None).status is JobStatus.DONE


def test_an_ordinary_flush_is_stopped_by_the_same_index(store: Shop) -> None:
    store.start(**GROUP)
    with store.factory() as session:
        session.add(Order(**GROUP))
        with pytest.raises(IntegrityError, match="ix_orders_one_in_flight"):
            session.flush()


# --- the declaration


def test_the_index_covers_the_runs_in_flight_of_a_group(store: Shop) -> None:
    definition = definitions(store.engine, Order.__table__)["ix_orders_one_in_flight"]
    assert definition.startswith("CREATE UNIQUE INDEX")
    assert "(tenant, kind)" in definition
    assert "NULLS NOT DISTINCT" not in definition
    for status in JobStatus:
        assert (f"'{status.value}'".replace("'off'", "''off''") in definition) is (status not in jobs.terminal)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "at least one attribute"),
        ("kind", "a tuple of attribute names"),
        (["kind"], "a tuple of attribute names"),
        ((1,), "a tuple of attribute names"),
        (("kind", "kind"), "only once"),
    ],
)
def test_a_group_that_cannot_be_is_refused_where_it_is_declared(given: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        lifecycle(one_in_flight=given)


def declare(**options: Any) -> tuple[type[Any], type[Any]]:
    class Base(DeclarativeBase):
        pass

    class Job(RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = lifecycle(**options)
        id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
        status: Mapped[JobStatus] = jobs.column()
        kind: Mapped[str] = mapped_column("the %s kind", String, default=lambda: "by default")
        place: Mapped[str] = mapped_column(server_default="it's here")
        day: Mapped[str] = mapped_column(server_default=text("to_char(now(), 'YYYY')"))

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    return Job, JobStep


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (("nothing",), "names 'nothing', which is no attribute"),
        (("kind", "the %s kind"), "names 'the %s kind', which is no attribute"),
        (("status",), "names status, which the library writes"),
        (("kind", "fence"), "names fence, which the library writes"),
    ],
)
def test_a_group_of_what_is_no_attribute_of_the_users_is_refused(group: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        declare(one_in_flight=group)


@pytest.mark.parametrize("group", [("kind",), ("place",), ("day",), ("day", "place", "kind")])
def test_the_occupant_is_found_by_values_that_are_defaults(bare: Engine, group: tuple[str, ...]) -> None:
    job, step = declare(one_in_flight=group)
    job.metadata.create_all(bare)
    factory = sessionmaker(bare)
    runs = Runs(factory, job, step)
    with factory.begin() as session:
        first = runs.start(session)
        with pytest.raises(RunInFlight) as caught:
            runs.start(session)
        assert caught.value.identity == (first.id,)
