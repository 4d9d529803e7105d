"""Starting functions: in the caller's transaction, many at once, and by a key that starts the same work once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, func, text
from sqlalchemy.orm import sessionmaker

from sqla_durable import Functions, FunctionStatus, InputError, KeyConflict, TransactionConflict, UsageError, Worker
from tests.support import Background, wait_until_blocked
from tests.support_functions import DurableRun, Entry, Order, Shipment, functions_on, labels, made, runs, tables, work
from tests.support_processes import Program
from tests.support_wire import Wire

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


@pytest.fixture
def functions(engine: Engine) -> Functions[DurableRun]:
    tables(engine)
    return made(sessionmaker(engine))


@pytest.fixture(params=LEVELS)
def rival(
    request: pytest.FixtureRequest, functions: Functions[DurableRun], empty_url: str
) -> Iterator[Functions[DurableRun]]:
    with functions_on(empty_url, request.param) as made:
        yield made


def test_it_is_not_seen_before_the_caller_commits_and_gone_if_the_caller_rolls_back(
    functions: Functions[DurableRun], engine: Engine
) -> None:
    with functions.session_factory() as session:
        session.add(Entry(label="order"))
        functions.start(session, "fulfil", Order(id=1))
        work(functions)
        assert runs(engine) == 0
        session.rollback()
    assert runs(engine) == 0
    assert labels(engine) == []
    with functions.session_factory.begin() as session:
        session.add(Entry(label="order"))
        functions.start(session, "fulfil", Order(id=1))
    work(functions)
    assert labels(engine) == ["order", "ship 1"]


def test_a_savepoint_of_the_callers_takes_it_along(functions: Functions[DurableRun], engine: Engine) -> None:
    with functions.session_factory.begin() as session:
        with session.begin_nested() as savepoint:
            functions.start(session, "fulfil", Order(id=1))
            savepoint.rollback()
        functions.start(session, "fulfil", Order(id=2))
    assert runs(engine) == 1


def test_the_same_key_and_input_start_one_run_for_each_function_and_tenant(
    functions: Functions[DurableRun], engine: Engine
) -> None:
    functions.function("other")(lambda run, order: None)
    with functions.session_factory.begin() as session:
        one = functions.start(session, "fulfil", Order(id=1), key="k")
        assert functions.start(session, "fulfil", Order(id=1), key="k", priority=9, run_at=timedelta(hours=1)) == one
        assert functions.start(session, "fulfil", Order(id=1), key="k", tenant="north") != one
        functions.start(session, "other", {"id": 1}, key="k")
    assert runs(engine) == 3


def test_the_same_key_with_another_input_is_refused(functions: Functions[DurableRun], engine: Engine) -> None:
    with functions.session_factory.begin() as session:
        functions.start(session, "fulfil", Order(id=1), key="k")
        with pytest.raises(KeyConflict, match="'k'"):
            functions.start(session, "fulfil", Order(id=2), key="k")
        with pytest.raises(KeyConflict, match="'k'"):
            functions.start_many(session, "fulfil", [Order(id=2)], key=lambda _: "k")
    assert runs(engine) == 1


def test_a_key_conflict_says_of_which_run_and_function(functions: Functions[DurableRun]) -> None:
    with functions.session_factory.begin() as session:
        first = functions.start(session, "fulfil", Order(id=1), key="k")
        for start in (
            lambda: functions.start(session, "fulfil", Order(id=2), key="k"),
            lambda: functions.start_many(session, "fulfil", [Order(id=2)], key=lambda _: "k"),
        ):
            with pytest.raises(KeyConflict) as caught:
                start()
            said = (
                f"the key 'k' belongs to the run {first.id} of function 'fulfil', which was started with other values"
            )
            assert str(caught.value) == f"{said}; use a key for one payload only."
            assert caught.value.identity == (first.id,)


def test_a_run_that_has_ended_still_answers_to_its_key(functions: Functions[DurableRun]) -> None:
    with functions.session_factory.begin() as session:
        handle = functions.start(session, "fulfil", Order(id=1), key="k")
    work(functions)
    with functions.session_factory.begin() as session:
        again = functions.start(session, "fulfil", Order(id=1), key="k")
    assert again == handle
    assert functions.result(again) == Shipment(code="s-1")


def test_two_that_start_the_same_at_once_get_one_run(
    functions: Functions[DurableRun], rival: Functions[DurableRun], engine: Engine
) -> None:
    def second() -> object:
        while True:
            try:
                with rival.session_factory.begin() as session:
                    return rival.start(session, "fulfil", Order(id=1), key="k")
            except TransactionConflict:
                continue

    with functions.session_factory() as session:
        first = functions.start(session, "fulfil", Order(id=1), key="k")
        behind = Background(second)
        wait_until_blocked(engine)
        session.commit()
    assert behind.result() == first
    assert runs(engine) == 1


def test_start_many_that_races_for_the_same_keys_gets_the_same_runs(
    functions: Functions[DurableRun], rival: Functions[DurableRun], engine: Engine
) -> None:
    orders = [Order(id=number) for number in range(5)]

    def second() -> object:
        while True:
            try:
                with rival.session_factory.begin() as session:
                    return rival.start_many(session, "fulfil", orders[2:], key=lambda order: f"k{order.id}")
            except TransactionConflict:
                continue

    with functions.session_factory() as session:
        first = functions.start_many(session, "fulfil", orders[:4], key=lambda order: f"k{order.id}")
        behind = Background(second)
        wait_until_blocked(engine)
        session.commit()
    found = behind.result()
    assert isinstance(found, list)
    assert found[:2] == first[2:]
    assert runs(engine) == 5


def test_a_rolled_back_rival_leaves_the_key_to_the_one_that_waited(
    functions: Functions[DurableRun], engine: Engine
) -> None:
    def second() -> object:
        with functions.session_factory.begin() as session:
            return functions.start(session, "fulfil", Order(id=2), key="k")

    with functions.session_factory() as session:
        functions.start(session, "fulfil", Order(id=1), key="k")
        behind = Background(second)
        wait_until_blocked(engine)
        session.rollback()
    behind.result()
    assert runs(engine) == 1


@pytest.mark.slow
def test_a_thousand_starts_of_ten_keys_in_eight_processes_make_ten_runs(
    functions: Functions[DurableRun], engine: Engine, empty_url: str
) -> None:
    with ExitStack() as stack:
        programs = [stack.enter_context(Program("start_functions", empty_url)) for _ in range(8)]
        for program in programs:
            assert program.receive() == "ready"
        for program in programs:
            program.send(125)
        handles = {tuple(handle) for program in programs for handle in program.receive()}
    assert len(handles) == 10
    assert runs(engine) == 10


def test_start_many_keeps_the_order_and_starts_each(functions: Functions[DurableRun], engine: Engine) -> None:
    orders = [Order(id=number) for number in range(2500)]
    with functions.session_factory.begin() as session:
        handles = functions.start_many(session, "fulfil", orders, priority=2, tenant="north", run_at=timedelta(0))
    assert runs(engine) == 2500
    described = functions.describe(handles[1234])
    assert (described.priority, described.tenant) == (2, "north")
    assert functions.execute(handles[1234]).status is FunctionStatus.DONE
    assert functions.result(handles[1234]) == Shipment(code="s-1234")


def test_start_many_starts_none_where_one_input_is_bad(functions: Functions[DurableRun], engine: Engine) -> None:
    with functions.session_factory.begin() as session, pytest.raises(InputError):
        functions.start_many(session, "fulfil", [Order(id=1), 2])
    assert runs(engine) == 0


def test_start_many_of_nothing_is_nothing(functions: Functions[DurableRun]) -> None:
    with functions.session_factory.begin() as session:
        assert functions.start_many(session, "fulfil", []) == []


def test_equal_keys_within_start_many_start_one_run(functions: Functions[DurableRun], engine: Engine) -> None:
    with functions.session_factory.begin() as session:
        one, two = functions.start_many(session, "fulfil", [Order(id=1), Order(id=1)], key=lambda _: "k")
    assert one == two
    assert runs(engine) == 1


@pytest.mark.parametrize(
    "when", [timedelta(hours=1), datetime(2999, 1, 1, tzinfo=UTC), func.now() + timedelta(hours=1)]
)
def test_a_run_that_is_not_due_is_left_alone(functions: Functions[DurableRun], engine: Engine, when: Any) -> None:
    with functions.session_factory.begin() as session:
        functions.start(session, "fulfil", Order(id=1), run_at=when)
        functions.start_many(session, "fulfil", [Order(id=2)], run_at=when)
    work(functions)
    assert labels(engine) == []


def test_a_time_without_a_time_zone_is_refused(functions: Functions[DurableRun]) -> None:
    with functions.session_factory.begin() as session:
        with pytest.raises(UsageError, match="naive"):
            functions.start(session, "fulfil", Order(id=1), run_at=datetime(2026, 1, 1))
        with pytest.raises(UsageError, match="naive"):
            functions.start_many(session, "fulfil", [Order(id=1)], run_at=datetime(2026, 1, 1))


@pytest.mark.parametrize("verb", ["start", "start_many", "fork"])
@pytest.mark.parametrize(
    ("when", "said"), [(datetime(2026, 1, 1), "is naive"), ("noon", "give an aware datetime")], ids=["naive", "text"]
)
def test_a_time_that_is_refused_is_called_what_the_caller_has_called_it(
    functions: Functions[DurableRun], verb: str, when: Any, said: str
) -> None:
    with functions.session_factory() as session:
        handle = functions.start(session, "fulfil", Order(id=1))
        calls: dict[str, Callable[[], Any]] = {
            "start": lambda: functions.start(session, "fulfil", Order(id=1), run_at=when),
            "start_many": lambda: functions.start_many(session, "fulfil", [Order(id=1)], run_at=when),
            "fork": lambda: functions.fork(session, handle, from_step="ship", run_at=when),
        }
        with pytest.raises(UsageError, match=rf"^run_at=.*{said}"):
            calls[verb]()


@pytest.mark.parametrize("verb", ["start", "start_many", "fork"])
def test_when_it_is_due_is_said_in_one_way(functions: Functions[DurableRun], verb: str) -> None:
    """It was left unheeded, and the run was due at once."""
    values: Any = {"available_at": timedelta(hours=1)}
    with functions.session_factory() as session:
        handle = functions.start(session, "fulfil", Order(id=1))
        calls: dict[str, Callable[[], Any]] = {
            "start": lambda: functions.start(session, "fulfil", Order(id=1), **values),
            "start_many": lambda: functions.start_many(session, "fulfil", [Order(id=1)], **values),
            "fork": lambda: functions.fork(session, handle, from_step="ship", **values),
        }
        with pytest.raises(UsageError, match=r"available_at=.*run_at="):
            calls[verb]()


def test_a_higher_priority_is_carried_out_first(functions: Functions[DurableRun], engine: Engine) -> None:
    with functions.session_factory.begin() as session:
        for number in (1, 5, 9):
            functions.start(session, "fulfil", Order(id=number), priority=number)
    Worker(*functions.works(), concurrency=1).run_due(timedelta(seconds=10))
    assert labels(engine) == ["ship 9", "ship 5", "ship 1"]


def test_a_start_is_one_round_trip_and_so_are_a_thousand(functions: Functions[DurableRun], engine: Engine) -> None:
    wire = Wire(engine.url)
    through = create_engine(wire.url)
    try:
        others = made(sessionmaker(through))
        with others.session_factory() as session:
            session.execute(text("SELECT 1"))
            others.start(session, "fulfil", Order(id=0))  # compiles what is compiled once
            with wire.counting() as plain:
                others.start(session, "fulfil", Order(id=1))
            with wire.counting() as keyed:
                others.start(session, "fulfil", Order(id=2), key="k")
            with wire.counting() as many:
                others.start_many(session, "fulfil", [Order(id=number) for number in range(1000)])
    finally:
        through.dispose()
        wire.close()
    assert (plain.round_trips, keyed.round_trips, many.round_trips) == (1, 1, 1)
