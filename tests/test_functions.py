"""A function: declared, started, carried out and observed."""

from __future__ import annotations

import pickle
import threading
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest
from pydantic import BaseModel
from sqlalchemy import Engine, MetaData, select, text
from sqlalchemy.orm import DeclarativeBase, MappedAsDataclass, Session, scoped_session, sessionmaker

from sqla_durable import (
    ConfigurationError,
    Ending,
    FunctionHandle,
    FunctionMixin,
    FunctionRun,
    Functions,
    FunctionStatus,
    InputError,
    NestedStep,
    NotAnswered,
    ReceiptMismatch,
    ReceiptMixin,
    Retry,
    RetryableError,
    RunCancelled,
    RunFailed,
    RunNotFound,
    RunNotLanded,
    Runs,
    UpdateTimeout,
    UsageError,
)
from tests.support import DEADLINE, Background, Plan, PlanStep, wait_until_blocked
from tests.support_functions import DurableRun, DurableStep, Order, Shipment, labels, made, runs, ship, tables, work


@pytest.fixture
def factory(engine: Engine) -> sessionmaker[Session]:
    tables(engine)
    return sessionmaker(engine)


@pytest.fixture
def functions(factory: sessionmaker[Session]) -> Functions[DurableRun]:
    return made(factory)


def started(functions: Functions[Any], function: Any, /, *given: Any, **options: Any) -> FunctionHandle[Any]:
    with functions.session_factory.begin() as session:
        handle: FunctionHandle[Any] = functions.start(session, function, *given, **options)
        return handle


def test_a_worker_carries_it_out_and_the_result_comes_back_as_it_was_returned(
    functions: Functions[DurableRun], engine: Engine
) -> None:
    handle = started(functions, "fulfil", Order(id=1))
    work(functions)
    assert functions.result(handle) == Shipment(code="s-1")
    assert labels(engine) == ["ship 1"]


def test_the_result_is_there_too_where_the_landing_had_to_wait_for_the_row(
    functions: Functions[DurableRun], engine: Engine
) -> None:
    """Whoever has it locked is not passed by in the end: the run is landed by a statement that waits."""
    locked, go = threading.Event(), threading.Event()

    @functions.function("waits for its row")
    def count(run: FunctionRun) -> int:
        locked.set()
        assert go.wait(DEADLINE)
        return 7

    handle = started(functions, count)
    executing = Background(lambda: functions.execute(handle))
    assert locked.wait(DEADLINE)
    with engine.begin() as connection:
        connection.execute(select(DurableRun.id).where(DurableRun.id == handle.id).with_for_update())
        go.set()
        wait_until_blocked(engine)
    assert executing.result().status is FunctionStatus.DONE
    assert functions.result(handle) == 7


def test_the_decorated_function_stays_what_it_was(functions: Functions[DurableRun]) -> None:
    def body(run: FunctionRun, order: Order) -> None: ...

    assert functions.function("plain")(body) is body


@dataclass
class Given:
    amount: Decimal
    when: datetime
    parts: tuple[int, ...]


def test_input_and_result_come_back_equal_in_value_and_type(factory: sessionmaker[Session]) -> None:
    functions: Functions[DurableRun] = Functions(factory, DurableRun, DurableStep)
    seen: list[Given] = []

    @functions.function("keep")
    def keep(run: FunctionRun, given: Given) -> Given:
        seen.append(given)
        return given

    given = Given(Decimal("1.20"), datetime(2026, 1, 2, tzinfo=UTC), (1, 2))
    handle = started(functions, keep, given)
    work(functions)
    assert seen == [given]
    assert functions.result(handle) == given


def test_a_function_may_take_nothing_and_return_nothing(factory: sessionmaker[Session]) -> None:
    functions: Functions[DurableRun] = Functions(factory, DurableRun, DurableStep)

    @functions.function("nothing")
    def nothing(run: FunctionRun) -> None:
        run.step("only", lambda _: None)

    handle = started(functions, nothing)
    work(functions)
    assert functions.result(handle) is None


class Strict(BaseModel):
    id: int


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((), "takes an input, and was given none"),
        (({"id": 1},), "it takes Order"),
        ((Strict(id=1),), "it takes Order"),
        ((Order.model_construct(id="no number", article="x"),), "input"),
        ((Order(id=1, article="nul \x00"),), "NUL"),
        ((Order(id=1, article="half \ud800"),), "surrogate"),
    ],
)
def test_a_bad_input_never_becomes_a_run(
    functions: Functions[DurableRun], engine: Engine, given: tuple[Any, ...], says: str
) -> None:
    with functions.session_factory.begin() as session, pytest.raises(InputError, match=says) as caught:
        functions.start(session, "fulfil", *given)
    assert "'fulfil'" in str(caught.value)
    assert runs(engine) == 0


def test_an_input_for_a_function_that_takes_none_is_refused(factory: sessionmaker[Session]) -> None:
    functions: Functions[DurableRun] = Functions(factory, DurableRun, DurableStep)
    functions.function("nothing")(lambda run: None)
    with pytest.raises(InputError, match="takes no input"):
        started(functions, "nothing", 1)


def test_a_bad_result_fails_the_run_before_it_lands_done(factory: sessionmaker[Session]) -> None:
    functions: Functions[DurableRun] = Functions(factory, DurableRun, DurableStep)

    @functions.function("wrong")
    def wrong(run: FunctionRun) -> Shipment:
        return {"code": "x"}

    handle = started(functions, wrong)
    work(functions)
    with pytest.raises(RunFailed, match="ResultError") as caught:
        functions.result(handle)
    assert caught.value.status is FunctionStatus.FAILED
    assert caught.value.failure is not None
    assert "Shipment" in caught.value.failure.message


def test_a_failure_comes_back_with_its_type_and_message(factory: sessionmaker[Session]) -> None:
    functions: Functions[DurableRun] = Functions(factory, DurableRun, DurableStep)

    @functions.function("boom")
    def boom(run: FunctionRun) -> None:
        raise ValueError("no stock")

    handle = started(functions, boom)
    work(functions)
    with pytest.raises(RunFailed, match="ValueError: no stock") as caught:
        functions.result(handle)
    assert caught.value.failure is not None
    assert caught.value.failure.type == "ValueError"
    assert functions.describe(handle).failure == caught.value.failure


def test_each_function_has_its_own_number_of_attempts(factory: sessionmaker[Session]) -> None:
    functions: Functions[DurableRun] = Functions(factory, DurableRun, DurableStep)
    calls: list[str] = []

    def flaky(name: str) -> Any:
        def body(run: FunctionRun) -> None:
            calls.append(name)
            raise RetryableError("again")

        return body

    functions.function("twice", retry=Retry(max_attempts=2, backoff=timedelta(0)))(flaky("twice"))
    functions.function("four", retry=Retry(max_attempts=4, backoff=timedelta(0)))(flaky("four"))
    handles = [started(functions, "twice"), started(functions, "four")]
    work(functions)
    assert calls.count("twice") == 2
    assert calls.count("four") == 4
    assert [functions.describe(handle).attempts for handle in handles] == [2, 4]
    for handle in handles:
        with pytest.raises(RunFailed, match="again"):
            functions.result(handle)


def test_which_errors_are_retried_is_a_matter_of_the_function(factory: sessionmaker[Session]) -> None:
    functions: Functions[DurableRun] = Functions(factory, DurableRun, DurableStep)

    @functions.function("waits", retry=Retry(max_attempts=3, backoff=timedelta(0), on=ConnectionError))
    def waits(run: FunctionRun) -> str:
        if run.lease.attempt < 3:
            raise ConnectionError("down")
        return "up"

    handle = started(functions, waits)
    work(functions)
    assert functions.result(handle) == "up"


def test_a_retry_answers_from_receipts(factory: sessionmaker[Session], engine: Engine) -> None:
    functions: Functions[DurableRun] = Functions(factory, DurableRun, DurableStep)

    @functions.function("fulfil", retry=Retry(backoff=timedelta(0)))
    def fulfil(run: FunctionRun, order: Order) -> Shipment:
        shipment = run.step("ship", ship, order)
        if run.lease.attempt == 1:
            raise RetryableError("crash")
        return shipment

    handle = started(functions, fulfil, Order(id=1))
    work(functions)
    assert functions.result(handle) == Shipment(code="s-1")
    assert labels(engine) == ["ship 1"]
    assert [receipt.step for receipt in functions.steps(handle)] == ["ship"]


def test_a_worker_leaves_functions_that_it_does_not_know_to_others(functions: Functions[DurableRun]) -> None:
    other: Functions[DurableRun] = Functions(functions.session_factory, DurableRun, DurableStep)
    other.function("unknown here")(lambda run: "done there")
    handle = started(other, "unknown here")
    work(functions)
    assert functions.describe(handle).status is FunctionStatus.READY
    assert functions.execute(handle).ending is Ending.NOT_CLAIMABLE
    work(other)
    assert other.result(handle) == "done there"


def test_a_run_may_be_carried_out_in_this_process(functions: Functions[DurableRun]) -> None:
    handle = started(functions, "fulfil", Order(id=1), run_at=timedelta(hours=1))
    assert functions.execute(handle).ending is Ending.NOT_CLAIMABLE
    outcome = functions.execute(handle, run_now=True)
    assert outcome.status is FunctionStatus.DONE
    again = functions.execute(handle)
    assert again.replayed
    assert again == outcome


def test_a_handle_is_a_value_that_can_be_rebuilt_from_the_key(functions: Functions[DurableRun]) -> None:
    handle = started(functions, "fulfil", Order(id=1), key="order-1", tenant="north")
    work(functions)
    assert pickle.loads(pickle.dumps(handle)) == handle
    fulfil = next(iter(functions._registry)).body
    rebuilt = functions.handle(fulfil, key="order-1", tenant="north")
    assert functions.result(rebuilt) == functions.result(handle) == Shipment(code="s-1")
    assert functions.describe(rebuilt).handle == handle
    with pytest.raises(RunNotFound, match="order-1"):
        functions.describe(functions.handle(fulfil, key="order-1"))
    assert handle.id is not None
    assert functions.describe(handle.id).key == "order-1"


def test_a_handle_is_rebuilt_from_the_id(functions: Functions[DurableRun]) -> None:
    body = next(iter(functions._registry)).body
    functions.function("other")(lambda run: None)
    started_as = started(functions, body, Order(id=1), key="k")
    handle = functions.handle(body, id=started_as.id)
    work(functions)
    assert functions.result(handle) == Shipment(code="s-1")
    assert functions.describe(handle).handle == started_as
    for timeout in (None, timedelta(0)):
        with pytest.raises(UsageError, match=rf"the run {started_as.id} is one of function 'fulfil', not of 'other'"):
            functions.result(FunctionHandle("other", started_as.id), timeout=timeout)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "key= or as id="),
        ({"key": "k", "id": UUID(int=1)}, "key= or as id="),
        ({"id": UUID(int=1), "tenant": "north"}, "tenant= goes with key="),
        ({"id": str(UUID(int=1))}, "no UUID; pass UUID"),
        ({"key": 5}, "a key is a str"),
    ],
)
def test_a_handle_that_could_stand_for_no_run_is_refused(
    functions: Functions[DurableRun], arguments: Any, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        functions.handle(next(iter(functions._registry)).body, **arguments)


def test_what_a_handle_says_of_a_run_that_does_not_exist(functions: Functions[DurableRun]) -> None:
    for read in (functions.describe, functions.result, functions.wait):
        with pytest.raises(RunNotFound, match="fulfil"):
            read(FunctionHandle("fulfil", uuid4()))


def test_describe_tells_the_progress_that_a_run_has_made(factory: sessionmaker[Session]) -> None:
    functions: Functions[DurableRun] = Functions(factory, DurableRun, DurableStep)

    @functions.function("fulfil")
    def fulfil(run: FunctionRun, order: Order) -> Shipment:
        run.publish({"packed": 0})
        before = functions.describe(run.lease.identity[0])
        assert before.status is FunctionStatus.RUNNING
        assert (before.steps, before.last_step, before.state) == (0, None, {"packed": 0})
        shipment = run.step("ship", ship, order)
        run.publish(order)
        assert functions.describe(run.lease.identity[0]).cancellable
        return shipment

    handle = started(functions, fulfil, Order(id=1), key="k", priority=3)
    assert functions.describe(handle).attempts == 0
    work(functions)
    after = functions.describe(handle)
    assert (after.status, after.steps, after.last_step) == (FunctionStatus.DONE, 1, "ship")
    assert after.state == {"id": 1, "article": "book"}
    assert (after.function, after.key, after.priority, after.attempts) == ("fulfil", "k", 3, 1)
    assert after.started_at is not None
    assert after.finished_at is not None
    assert not after.cancellable


@pytest.mark.parametrize("all_at_once", [False, True])
def test_what_a_run_has_published_goes_with_its_former_life(factory: sessionmaker[Session], all_at_once: bool) -> None:
    functions: Functions[DurableRun] = Functions(factory, DurableRun, DurableStep)

    @functions.function("publishes")
    def publishes(run: FunctionRun) -> None:
        run.publish({"row": 7})
        raise ValueError

    handle = started(functions, publishes)
    work(functions)
    assert functions.describe(handle).state == {"row": 7}
    assert functions.requeue_all(everything=True) if all_at_once else functions.requeue(handle)
    assert functions.describe(handle).state is None


def test_state_is_not_published_from_within_a_step(factory: sessionmaker[Session]) -> None:
    functions: Functions[DurableRun] = Functions(factory, DurableRun, DurableStep)

    @functions.function("inside")
    def inside(run: FunctionRun) -> None:
        run.step("only", lambda _: run.publish(1))

    handle = started(functions, inside)
    work(functions)
    with pytest.raises(RunFailed, match=NestedStep.__name__):
        functions.result(handle)


def test_waiting_for_a_result_ends_with_the_timeout_and_the_run_goes_on(functions: Functions[DurableRun]) -> None:
    handle = started(functions, "fulfil", Order(id=1))
    with pytest.raises(RunNotLanded, match="ready") as caught:
        functions.result(handle, timeout=timedelta(seconds=0.05))
    assert isinstance(caught.value, TimeoutError)
    work(functions)
    assert functions.wait(handle) is FunctionStatus.DONE


def test_what_has_not_come_in_time_says_of_which_run_and_what_to_do(functions: Functions[DurableRun]) -> None:
    handle = started(functions, "fulfil", Order(id=1), key="k")
    run = "the run with the key 'k' of function 'fulfil'"
    with pytest.raises(
        UpdateTimeout, match=rf"^update 'add': {run} is ready, and has not answered within 0:00:00\.05.*answer"
    ):
        functions.update(handle, "add", 1, timeout=timedelta(seconds=0.05))
    with pytest.raises(RunNotLanded, match=rf"^{run} is ready still after 0:00:00\.050000; it goes on, and .*describe"):
        functions.result(handle, timeout=timedelta(seconds=0.05))
    with (
        functions.session_factory() as session,
        pytest.raises(RunNotLanded, match=rf"^{run} is ready still; .*without session="),
    ):
        functions.result(handle, session=session)
    work(functions)
    with pytest.raises(NotAnswered, match=rf"^update 'add': {run} has ended already"):
        functions.update(handle, "add", 1, timeout=timedelta(seconds=1))


def test_a_run_that_is_not_carried_out_is_cancelled_at_once(functions: Functions[DurableRun], engine: Engine) -> None:
    handle = started(functions, "fulfil", Order(id=1))
    with functions.session_factory.begin() as session:
        assert functions.request_cancel(session, handle)
        assert not functions.request_cancel(session, handle)
    work(functions)
    with pytest.raises(RunCancelled):
        functions.result(handle)
    assert labels(engine) == []
    assert functions.requeue(handle)
    work(functions)
    assert functions.result(handle) == Shipment(code="s-1")


def test_everything_may_be_read_in_the_callers_transaction(functions: Functions[DurableRun]) -> None:
    with functions.session_factory.begin() as session:
        handle = functions.start(session, "fulfil", Order(id=1))
        assert functions.describe(handle, session=session).status is FunctionStatus.READY
        assert functions.steps(handle, session=session) == ()
        with pytest.raises(RunNotLanded):
            functions.result(handle, session=session)
        with pytest.raises(RunNotFound):
            functions.describe(handle)
    work(functions)
    with functions.session_factory() as session:
        assert functions.result(handle, session=session) == Shipment(code="s-1")


def test_a_scoped_session_serves_as_the_callers_session(functions: Functions[DurableRun]) -> None:
    scoped = scoped_session(functions.session_factory)
    handle = functions.start(scoped, "fulfil", Order(id=1))
    many = functions.start_many(scoped, "fulfil", [Order(id=2), Order(id=3)])
    assert functions.describe(handle, session=scoped).status is FunctionStatus.READY
    assert functions.steps(handle, session=scoped) == ()
    with pytest.raises(RunNotLanded):
        functions.result(handle, session=scoped)
    assert functions.signal(scoped, handle, "packed")
    with pytest.raises(UsageError, match="no receipt"):
        functions.fork(scoped, handle, from_step="ship")
    assert functions.request_cancel(scoped, many[0])
    assert functions.cancel_all(scoped, everything=True) == 2
    scoped.commit()
    scoped.remove()
    assert functions.wait(handle) is FunctionStatus.CANCELLED


def test_a_result_that_no_longer_decodes_says_so(functions: Functions[DurableRun], engine: Engine) -> None:
    handle = started(functions, "fulfil", Order(id=1))
    work(functions)
    with engine.begin() as connection:
        connection.execute(text("UPDATE durable_run SET output = '{\"number\": 1}'"))
    with pytest.raises(ReceiptMismatch, match="fulfil"):
        functions.result(handle)


def test_columns_of_ones_own_are_given_by_name(functions: Functions[DurableRun], engine: Engine) -> None:
    started(functions, "fulfil", Order(id=1), note="gift")
    with Session(engine) as session:
        assert session.query(DurableRun).one().note == "gift"


def test_what_the_function_says_itself_is_not_said_again(functions: Functions[DurableRun]) -> None:
    for name in ("function", "max_attempts", "output"):
        with pytest.raises(UsageError, match=name):
            started(functions, "fulfil", Order(id=1), **{name: 1})


def test_listing_goes_by_function_key_and_tenant(functions: Functions[DurableRun]) -> None:
    functions.function("other")(lambda run: None)
    one = started(functions, "fulfil", Order(id=1), key="a", tenant="north")
    two = started(functions, "fulfil", Order(id=1), key="a", tenant="south")
    three = started(functions, "other")
    found = functions.find
    assert [each.handle for each in found()] == [three, two, one]
    assert [each.handle for each in found(function="fulfil")] == [two, one]
    assert [each.handle for each in found(tenant="north")] == [one]
    assert [each.handle for each in found(key="a", limit=1)] == [two]
    assert [each.handle for each in found(key="a", limit=1, after=found(key="a", limit=1)[0].cursor)] == [one]


@pytest.mark.parametrize("name", ["", "x" * 201, "new\nline", 7])
def test_a_name_that_cannot_be_one_is_refused(functions: Functions[DurableRun], name: Any) -> None:
    with pytest.raises(ConfigurationError, match="function name"):
        functions.function(name)(lambda run: None)


def test_two_functions_of_one_name_are_refused(functions: Functions[DurableRun]) -> None:
    with pytest.raises(ConfigurationError, match="already"):
        functions.function("fulfil")(lambda run: None)


@pytest.mark.parametrize("body", [lambda: None, lambda run, a, b: None, lambda *, run: None, 7])
def test_a_body_that_could_not_be_called_is_refused(functions: Functions[DurableRun], body: Any) -> None:
    with pytest.raises(ConfigurationError, match="odd"):
        functions.function("odd")(body)


def test_a_coroutine_function_is_refused_with_where_it_belongs(functions: Functions[DurableRun]) -> None:
    async def body(run: Any) -> None: ...

    with pytest.raises(ConfigurationError, match=r"'odd': .* declare it with AsyncFunctions"):
        functions.function("odd")(body)


def test_a_function_that_was_not_declared_is_refused_with_those_that_were(functions: Functions[DurableRun]) -> None:
    with pytest.raises(UsageError, match="'fulfil'"):
        started(functions, lambda run: None)
    with pytest.raises(UsageError, match="'fulfil'"):
        started(functions, "fulfill", Order(id=1))


def test_another_run_class_is_refused(factory: sessionmaker[Session]) -> None:
    with pytest.raises(ConfigurationError, match="FunctionMixin"):
        Functions(factory, Plan, PlanStep)


def test_its_runs_are_runs_like_any_other(functions: Functions[DurableRun]) -> None:
    """The core's verbs work on the table of functions, as scripts of an operator may want them."""
    handle = started(functions, "fulfil", Order(id=1))
    plain: Runs[DurableRun] = Runs(functions.session_factory, DurableRun, DurableStep)
    run = plain.get(handle.id)
    assert run is not None
    assert run.input == {"id": 1, "article": "book"}
    assert plain.counts()[FunctionStatus.READY] == 1


def test_it_stands_on_a_dataclass_base_in_a_schema_of_its_own(engine: Engine) -> None:
    class Base(MappedAsDataclass, DeclarativeBase):
        metadata = MetaData(schema="jobs")

    class Job(FunctionMixin, Base):
        __tablename__ = "job"

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA jobs"))
    Base.metadata.create_all(engine)
    functions: Functions[Job] = Functions(sessionmaker(engine), Job, JobStep)

    @functions.function("double")
    def double(run: FunctionRun, number: int) -> int:
        return number * 2

    one = started(functions, double, 2, key="k")
    assert started(functions, double, 2, key="k") == one
    with functions.session_factory.begin() as session:
        many = functions.start_many(session, double, [3, 4])
    work(functions)
    assert [functions.result(handle) for handle in (one, *many)] == [4, 6, 8]


def test_a_decorator_without_a_name_says_what_to_write(functions: Functions[DurableRun]) -> None:
    with pytest.raises(ConfigurationError, match=r'@functions.function\("fulfil-order"\)'):
        functions.function(lambda run: None)


def test_a_timeout_that_is_a_number_is_refused(functions: Functions[DurableRun]) -> None:
    handle = started(functions, "fulfil", Order(id=1))
    with pytest.raises(UsageError, match="timedelta"):
        functions.result(handle, timeout=10)


def test_a_text_in_place_of_a_handle_is_refused(functions: Functions[DurableRun]) -> None:
    for verb in (functions.describe, functions.result, functions.requeue, functions.execute):
        with pytest.raises(UsageError, match="UUID"):
            verb("c3f0")


def test_a_body_has_one_name(functions: Functions[DurableRun]) -> None:
    body = next(iter(functions._registry)).body
    with pytest.raises(ConfigurationError, match="'fulfil' already"):
        functions.function("other")(body)


@dataclass
class Unhashable:
    def __call__(self, run: FunctionRun) -> None: ...


def test_a_body_that_could_not_be_recognised_is_refused(functions: Functions[DurableRun]) -> None:
    with pytest.raises(ConfigurationError, match="hash"):
        functions.function("odd")(Unhashable())
