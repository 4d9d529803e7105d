"""Two or many start the same run at once, on connections of their own, at every isolation level."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

from sqla_durable import KeyConflict, RunInFlight, TransactionConflict
from sqla_durable.start import Start
from tests.support import DEADLINE, Background, wait_until_blocked
from tests.support_processes import Program
from tests.support_start import Order, Shop, shop

READ_COMMITTED = "READ COMMITTED"
SNAPSHOTS = ["REPEATABLE READ", "SERIALIZABLE"]
LEVELS = [READ_COMMITTED, *SNAPSHOTS]


@pytest.fixture
def store(empty_url: str) -> Iterator[Shop]:
    with shop(empty_url) as made:
        yield made


@pytest.fixture
def watcher(empty_url: str) -> Iterator[Engine]:
    engine = create_engine(empty_url)
    yield engine
    engine.dispose()


@pytest.fixture(params=LEVELS)
def rival(request: pytest.FixtureRequest, empty_url: str, store: Shop) -> Iterator[Shop]:
    """Another process's sessions, at each isolation level."""
    with shop(empty_url, request.param) as made:
        yield made


def retried(work: Callable[[], Any]) -> tuple[Any, int]:
    """Do what the error of a conflict says: the whole transaction again."""
    for conflicts in range(10):
        try:
            return work(), conflicts
        except TransactionConflict:
            continue
    raise AssertionError("conflicts without end")


def race(store: Shop, watcher: Engine, end: Callable[[Session], None], second: Callable[[], Any]) -> tuple[Order, Any]:
    """Start an order, and let ``second`` wait for it before its transaction ends."""
    with store.factory() as session:
        first = store.orders.start(session, key="a", kind="k")
        behind = Background(second)
        wait_until_blocked(watcher)
        end(session)
        return first, behind.result()


def test_the_second_waits_and_gets_the_run_of_the_first(store: Shop, rival: Shop, watcher: Engine) -> None:
    def second() -> tuple[Order, int]:
        return retried(lambda: rival.start(key="a", kind="k"))

    first, (found, conflicts) = race(store, watcher, Session.commit, second)
    assert found.id == first.id
    assert conflicts == (0 if rival.isolation == READ_COMMITTED else 1)
    assert store.count() == 1


def test_the_second_wins_where_the_first_rolls_back(store: Shop, rival: Shop, watcher: Engine) -> None:
    first, second = race(store, watcher, Session.rollback, lambda: rival.start(key="a", kind="k"))
    assert second is not first
    assert second.kind == "k"
    assert store.count() == 1


def test_the_second_with_other_values_is_told_of_the_conflict(store: Shop, rival: Shop, watcher: Engine) -> None:
    def second() -> Any:
        with pytest.raises(KeyConflict) as caught:
            retried(lambda: rival.start(key="a", kind="other"))
        return caught.value

    first, error = race(store, watcher, Session.commit, second)
    assert error.identity == (first.id,)
    assert store.count() == 1


def test_the_second_of_a_group_is_told_who_is_in_flight(store: Shop, rival: Shop, watcher: Engine) -> None:
    def second() -> Any:
        with pytest.raises(RunInFlight) as caught:
            retried(lambda: rival.start(key="b", tenant="t", kind="k"))
        return caught.value

    with store.factory() as session:
        first = store.orders.start(session, key="a", tenant="t", kind="k")
        behind = Background(second)
        wait_until_blocked(watcher)
        session.commit()
        assert behind.result().identity == (first.id,)
    assert store.count() == 1


@pytest.mark.parametrize("rival", SNAPSHOTS, indirect=True)
def test_a_snapshot_taken_before_the_first_committed_is_a_conflict_to_retry(store: Shop, rival: Shop) -> None:
    with rival.factory() as session:
        session.execute(text("SELECT 1 FROM orders"))
        first = store.start(key="a")
        with pytest.raises(TransactionConflict, match=r"40001.*retry the whole transaction"):
            rival.orders.start(session, key="a")
        session.rollback()
        assert rival.orders.start(session, key="a").id == first.id


def test_an_existing_run_is_found_at_every_level_without_a_conflict(store: Shop, rival: Shop) -> None:
    first = store.start(key="a")
    assert rival.start(key="a").id == first.id


@pytest.mark.parametrize("and_started_again", [False, True])
def test_a_run_that_is_deleted_between_the_conflict_and_the_look_is_looked_for_anew(
    store: Shop, monkeypatch: pytest.MonkeyPatch, and_started_again: bool
) -> None:
    first = store.start(key="a")
    find = Start._find
    between: list[Order] = []

    def delete_first(self: Any, scope: Any) -> Any:
        monkeypatch.setattr(Start, "_find", find)
        with store.factory.begin() as session:
            session.delete(session.get_one(Order, first.id))
        found = find(self, scope)
        if and_started_again:
            between.append(store.start(key="a"))
        return found

    monkeypatch.setattr(Start, "_find", delete_first)
    second = store.start(key="a")
    assert second.id != first.id
    assert [order.id for order in between] == [second.id] * and_started_again
    assert store.count() == 1


def test_two_that_start_the_same_keys_in_another_order_end_with_one_run_each(
    store: Shop, rival: Shop, watcher: Engine
) -> None:
    started, go_on = threading.Event(), threading.Event()

    def second() -> None:
        with rival.factory.begin() as session:
            rival.orders.start(session, key="b")
            started.set()
            assert go_on.wait(DEADLINE)
            rival.orders.start(session, key="a")

    with store.factory() as session:
        store.orders.start(session, key="a")
        behind = Background(lambda: retried(second))
        assert started.wait(DEADLINE)
        go_on.set()
        wait_until_blocked(watcher)
        try:
            store.orders.start(session, key="b")
            session.commit()
        except TransactionConflict:  # the deadlock was found here
            session.rollback()
            retried(lambda: (store.start(key="a"), store.start(key="b")))
    behind.result()
    assert store.count() == 2


@pytest.mark.parametrize("level", LEVELS)
def test_many_processes_start_each_key_once(empty_url: str, level: str) -> None:
    processes, keys = 4, 30
    with shop(empty_url) as store:
        programs = [Program("starter", empty_url, level, str(keys)) for _ in range(processes)]
        try:
            for program in programs:
                assert program.receive() == "ready"
            for program in programs:
                program.send("go")
            told = [program.receive() for program in programs]
        finally:
            for program in programs:
                program.__exit__()
        assert store.count() == keys
        assert all(each == told[0] for each in told)
        assert len(set(told[0].values())) == keys
