"""A fork: a new run that begins with what another one had done before a step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Computed, Engine, ForeignKey, Identity, create_engine, func, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import (
    PENDING,
    Ending,
    FunctionHandle,
    FunctionMixin,
    FunctionRun,
    Functions,
    FunctionStatus,
    KeyConflict,
    ReceiptMixin,
    Retry,
    RunNotFound,
    UsageError,
    call,
)
from sqla_durable.wake import CHANNEL
from tests.support import Background, wait_until_blocked
from tests.support_functions import DurableRun, DurableStep, Entry, Order, labels, tables, work
from tests.support_statements import statements
from tests.support_versions import FORMS, Version, versions


@pytest.fixture(params=FORMS)
def version(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Version]:
    tables(engine)
    with versions(request.param, engine.url.render_as_string(hide_password=False), 1) as (made,):
        yield made


def write(session: Session, label: str) -> str:
    session.add(Entry(label=label))
    return label


def three(run: Any, order: Order) -> str:
    return "".join(run.step(key, write, f"{key}{order.id}") for key in ("a", "b", "c"))


def done(version: Version, body: Any = three, **options: Any) -> FunctionHandle[Any]:
    """A run that has been carried out."""
    version.function("job", body)
    given = [Order(id=1)] if body is three else []
    handle = version.start("job", *given, **options)
    version.execute(handle)
    return handle


def test_a_fork_begins_with_the_receipts_before_the_step_and_does_the_rest(version: Version, engine: Engine) -> None:
    handle = done(version, three, tenant="t", priority=3, note="mine")
    before = version.functions.steps(handle)
    fork = version.fork(handle, from_step="b")
    assert (fork.function, fork.key, fork.tenant) == ("job", None, "t")
    assert fork.id not in {None, handle.id}
    assert version.steps(fork) == {"a": "a1"}
    (copied,) = version.functions.steps(fork)
    assert copied.recorded_at == before[0].recorded_at
    assert copied.input_fingerprint == before[0].input_fingerprint is not None
    row, origin = version.row(fork), version.row(handle)
    assert (row.input, row.tenant, row.priority, row.note) == ({"id": 1, "article": "book"}, "t", 3, "mine")
    assert (row.status, row.attempts, row.fence, row.started_at) == (FunctionStatus.READY, 0, 1, None)
    assert row.output is None
    assert row.created_at > origin.created_at
    assert version.execute(fork).status is FunctionStatus.DONE
    assert version.functions.result(fork) == "a1b1c1"
    assert labels(engine) == ["a1", "b1", "c1", "b1", "c1"]
    assert version.functions.steps(handle) == before, "the original is untouched"
    assert version.row(handle).finished_at == origin.finished_at


def test_a_fork_from_the_first_step_begins_with_nothing(version: Version) -> None:
    fork = version.fork(done(version), from_step="a")
    assert version.steps(fork) == {}
    assert version.execute(fork).status is FunctionStatus.DONE


def test_a_worker_carries_a_fork_out(engine: Engine) -> None:
    tables(engine)
    with versions("sync", engine.url.render_as_string(hide_password=False), 1) as (version,):
        fork = version.fork(done(version), from_step="c")
        work(version.functions)
        assert version.functions.result(fork) == "a1b1c1"
    assert labels(engine) == ["a1", "b1", "c1", "c1"]


def test_a_fork_can_be_forked(version: Version) -> None:
    handle = done(version)
    first = version.fork(handle, from_step="b")
    version.execute(first)
    second = version.fork(first, from_step="c")
    assert version.steps(second) == {"a": "a1", "b": "b1"}
    assert version.execute(second).status is FunctionStatus.DONE


def test_it_joins_the_callers_transaction_with_one_statement(engine: Engine) -> None:
    tables(engine)
    with versions("sync", engine.url.render_as_string(hide_password=False), 1) as (version,):
        handle = done(version)
        with version.factory() as session, statements(version.engine) as sent:
            fork = version.functions.fork(session, handle, from_step="b")
            assert len(sent) == 1
            with pytest.raises(RunNotFound):
                version.functions.describe(fork)
            assert version.functions.describe(fork, session=session).steps == 1
            session.rollback()
        with pytest.raises(RunNotFound):
            version.functions.describe(fork)


def test_what_is_given_differs_from_the_run_that_is_forked(version: Version) -> None:
    handle = done(version)
    fork = version.fork(handle, from_step="b", run_at=timedelta(hours=1), priority=9, note="other")
    row = version.row(fork)
    assert (row.priority, row.note) == (9, "other")
    assert version.execute(fork).ending is Ending.NOT_CLAIMABLE
    assert version.execute(fork, run_now=True).status is FunctionStatus.DONE


@pytest.mark.parametrize("name", ["input", "function", "tenant", "output", "fence", "max_attempts"])
def test_what_makes_it_a_fork_cannot_be_given(version: Version, name: str) -> None:
    handle = done(version)
    with pytest.raises(UsageError, match=name):
        version.fork(handle, from_step="b", **{name: "x"})


def test_a_step_that_is_not_there_is_named_with_those_that_are(version: Version) -> None:
    handle = done(version)
    with pytest.raises(UsageError, match=r"from_step='d'.*no receipt of that step. Known: 'a', 'b', 'c'\."):
        version.fork(handle, from_step="d")
    with pytest.raises(RunNotFound):
        version.fork(FunctionHandle("job", uuid4()), from_step="a")
    with pytest.raises(UsageError, match="digits only"):
        version.fork(handle, from_step="7")
    with Session(version.engine) as session:
        assert session.scalar(select(func.count()).select_from(DurableRun)) == 1, "nothing is left of what is refused"


def test_a_run_is_forked_in_whatever_status_it_is(version: Version, engine: Engine) -> None:
    def fails(run: Any) -> None:
        run.step("a", write, "a")
        run.step("b", lambda session: 1 / 0)

    handle = done(version, fails)
    assert version.row(handle).status is FunctionStatus.FAILED
    fork = version.fork(handle, from_step="b")
    assert version.steps(fork) == {"a": "a"}
    assert version.row(handle).status is FunctionStatus.FAILED


def test_a_failed_receipt_before_the_step_is_not_copied(version: Version) -> None:
    def body(run: Any) -> None:
        try:
            run.external("a", lambda: 1 / 0)
        except ZeroDivisionError:
            run.external("b", lambda: "b")
        run.external("c", lambda: "c")

    handle = done(version, body)
    assert version.row(handle).status is FunctionStatus.DONE
    assert version.steps(version.fork(handle, from_step="c")) == {"b": "b"}


def waits(run: Any) -> None:
    run.external("a", lambda: "a")
    run.operation("b", start=lambda: 7, poll=lambda ids: PENDING)


@pytest.mark.past_guards
def test_a_run_with_an_open_operation_before_the_step_is_not_forked(version: Version) -> None:
    version.function("job", waits)
    handle = version.start("job")
    assert version.execute(handle).ending is Ending.SUSPENDED
    with Session(version.engine) as session, session.begin():
        session.add(
            DurableStep(durable_run_id=handle.id, step="c", outcome="succeeded", result=1, effect="external", fence=1)
        )
    with pytest.raises(UsageError, match="step 'b' before it has not ended"):
        version.fork(handle, from_step="c")
    assert version.steps(version.fork(handle, from_step="b")) == {"a": "a"}


def test_keyed_steps_of_a_fork_have_other_idempotency_keys(version: Version) -> None:
    keys: list[str] = []

    def pay(key: str) -> None:
        keys.append(key)

    handle = done(version, lambda run: run.keyed("pay", pay))
    version.execute(version.fork(handle, from_step="pay"))
    assert len(set(keys)) == 2


def test_a_step_is_found_by_its_present_key_where_it_was_renamed(version: Version) -> None:
    handle = done(version)
    with versions(version.form, version.engine.url.render_as_string(hide_password=False), 1) as (new,):
        new.function("job", three, aliases={"b-new": ("b-mid", "b")})
        assert new.steps(new.fork(handle, from_step="b-new")) == {"a": "a1"}


# keys


def test_a_key_makes_it_idempotent(version: Version) -> None:
    handle = done(version)
    first = version.fork(handle, from_step="b", key="k")
    version.execute(first)
    assert version.fork(handle, from_step="b", key="k") == first
    assert version.functions.handle(version._bodies[0][1], key="k") == FunctionHandle("job", None, "k")
    for other in ({"from_step": "c"}, {"from_step": "b", "note": "other"}):
        with pytest.raises(KeyConflict, match="'k' belongs to DurableRun"):
            version.fork(handle, key="k", **other)
    assert len(version.steps(first)) == 3


def test_the_key_of_a_run_that_was_started_is_no_key_of_a_fork(version: Version) -> None:
    handle = done(version, three, key="k")
    with pytest.raises(KeyConflict):
        version.fork(handle, from_step="b", key="k")


def test_two_forks_with_one_key_at_a_time_are_one_run(engine: Engine) -> None:
    tables(engine)
    with versions("sync", engine.url.render_as_string(hide_password=False), 1) as (version,):
        handle = done(version)
        with version.factory() as session:
            first = version.functions.fork(session, handle, from_step="b", key="k")
            other = Background(lambda: version.fork(handle, from_step="b", key="k"))
            wait_until_blocked(engine)
            session.commit()
            assert other.result() == first
        assert version.steps(first) == {"a": "a1"}


# races with the run that is forked


def test_a_fork_neither_waits_for_the_run_nor_sees_what_it_has_not_committed(version: Version, engine: Engine) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def held(session: Session) -> str:
        inside.set()
        assert go_on.wait(20)
        return "b"

    def body(run: Any, order: Order) -> str:
        first = run.step("a", write, f"a{order.id}")
        return str(first + run.step("b", held))

    version.function("job", body)
    handle = version.start("job", Order(id=1))
    holder = Background(lambda: version.execute(handle))
    assert inside.wait(20)
    fork = version.fork(handle, from_step="a")
    with pytest.raises(UsageError, match="Known: 'a'"):
        version.fork(handle, from_step="b")
    go_on.set()
    assert holder.result().status is FunctionStatus.DONE, "the original goes on"
    assert version.steps(fork) == {}
    assert version.execute(fork).status is FunctionStatus.DONE
    assert version.steps(version.fork(handle, from_step="b")) == {"a": "a1"}


@pytest.mark.slow
def test_forks_raced_by_the_original_have_a_whole_beginning_each(engine: Engine) -> None:
    tables(engine)
    url = engine.url.render_as_string(hide_password=False)
    names = [f"s{number:02}" for number in range(30)]

    def body(run: Any) -> int:
        for name in names:
            run.external(name, lambda name=name: name)
        return len(names)

    with versions("sync", url, 1) as (version,):
        version.function("job", body)
        handle = version.start("job")
        holder = Background(lambda: version.execute(handle))
        forks: list[FunctionHandle[Any]] = []
        while holder.is_alive():
            known = list(version.steps(handle))
            if known:
                forks.append(version.fork(handle, from_step=known[-1]))
                assert list(version.steps(forks[-1])) == known[:-1]
        assert holder.result().status is FunctionStatus.DONE
        assert forks
        for fork in forks[-3:]:
            assert version.execute(fork).status is FunctionStatus.DONE
            assert list(version.steps(fork)) == names


# the user's own tables


class OwnBase(DeclarativeBase):
    pass


class Customer(OwnBase):
    __tablename__ = "customer"
    id: Mapped[int] = mapped_column(primary_key=True)


class OwnRun(FunctionMixin, OwnBase):
    __tablename__ = "own_run"
    __table_args__ = {"schema": "own"}  # noqa: RUF012
    customer_id: Mapped[int | None] = mapped_column("customer", ForeignKey("customer.id"))
    number: Mapped[int] = mapped_column(Identity())
    twice: Mapped[int] = mapped_column(Computed("priority * 2"))
    touched: Mapped[int] = mapped_column(default=5, onupdate=6)


class OwnStep(ReceiptMixin[OwnRun], OwnBase):
    __tablename__ = "own_step"
    __table_args__ = {"schema": "own"}  # noqa: RUF012
    noted: Mapped[str] = mapped_column(server_default="x")


def test_columns_of_the_users_own_are_copied_but_for_those_that_the_database_makes(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA own"))
    OwnBase.metadata.create_all(engine)
    factory = sessionmaker(engine)
    functions = Functions(factory, OwnRun, OwnStep)

    @functions.function("job", retry=Retry(max_attempts=7))
    def job(run: FunctionRun) -> int:
        return run.gather(call("a", lambda: 1), call("b", lambda: 2))[0] + run.external("c", lambda: 3)

    with factory.begin() as session:
        session.add(Customer(id=1))
        session.flush()
        handle = functions.start(session, job, customer_id=1, touched=9, priority=2)
    functions.execute(handle)
    with factory.begin() as session:
        fork = functions.fork(session, handle, from_step="c")
    with factory() as session:
        row = session.get_one(OwnRun, fork.id)
        assert (row.customer_id, row.touched, row.twice, row.max_attempts) == (1, 9, 4, 7)
        assert row.number == 2
    functions.execute(fork)
    assert functions.result(fork) == 4


def test_a_fork_works_by_its_key_and_in_a_schema_that_is_translated(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA tenant_1"))
    translated = create_engine(engine.url, execution_options={"schema_translate_map": {"own": "tenant_1"}})
    OwnBase.metadata.create_all(translated)
    factory = sessionmaker(translated)
    functions = Functions(factory, OwnRun, OwnStep)

    @functions.function("job")
    def job(run: FunctionRun) -> int:
        return run.external("a", lambda: 1) + run.external("b", lambda: 2)

    with factory.begin() as session:
        handle = functions.start(session, job, key="k", touched=1)
    functions.execute(handle)
    with factory.begin() as session:
        fork = functions.fork(session, functions.handle(job, key="k"), from_step="b")
    assert isinstance(fork.id, UUID)
    assert functions.execute(fork).status is FunctionStatus.DONE
    translated.dispose()


def test_a_listening_worker_is_told_of_a_fork_that_is_due(engine: Engine) -> None:
    tables(engine)
    with versions("sync", engine.url.render_as_string(hide_password=False), 1) as (version,):
        handle = done(version)
        heard: list[Any] = []
        driver: Any = engine.raw_connection()
        try:
            driver.driver_connection.autocommit = True
            driver.driver_connection.execute(f"LISTEN {CHANNEL}")
            version.fork(handle, from_step="b", run_at=timedelta(hours=1))
            version.fork(handle, from_step="b")
            heard += [each.payload for each in driver.driver_connection.notifies(timeout=5, stop_after=1)]
            heard += [each.payload for each in driver.driver_connection.notifies(timeout=0.1)]
        finally:
            driver.invalidate()
        assert len(heard) == 1


@pytest.mark.parametrize("verb", ["start", "start_many", "fork"])
def test_a_key_does_not_hide_that_another_unique_index_is_violated(version: Version, engine: Engine, verb: str) -> None:
    """One of the user's own: the run that is in the way there is not the one that the key stands for."""
    with engine.begin() as connection:
        connection.execute(text("CREATE UNIQUE INDEX only_once ON durable_run (note)"))
    handle = done(version, three, note="mine")

    def start_many() -> None:
        with version.factory.begin() as session:
            version.functions.start_many(session, "job", [Order(id=1)], key=lambda order: "k", note="mine")

    calls = {
        "start": lambda: version.start("job", Order(id=1), key="k", note="mine"),
        "start_many": start_many,
        "fork": lambda: version.fork(handle, from_step="b", key="k"),
    }
    with pytest.raises(IntegrityError, match="only_once"):
        calls[verb]()
