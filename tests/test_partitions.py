"""Monthly partitions: every verb works on them, they are created ahead under load, and dropped once all is over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Computed, Engine, create_engine, func, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import (
    FunctionMixin,
    FunctionRun,
    Functions,
    Monthly,
    PartitionsDropped,
    ReceiptMixin,
    TransactionConflict,
    TransactionEnded,
    UsageError,
    create_partitions,
    drop_partitions,
    partition_sql,
    partitions_of,
    uuid7,
)
from sqla_durable.sqlstate import translated
from tests.support import Background, wait_until_blocked
from tests.support_statements import statements
from tests.test_plans_of_statements import explained, nodes

NOW = timedelta(0)
DAY = timedelta(days=1)


class Base(DeclarativeBase):
    pass


class Parted(FunctionMixin, Base):
    __tablename__ = "parted"
    __guard__ = True  # which a receipt that moves to the partition of its month must pass


class PartedStep(ReceiptMixin[Parted], Base):
    __tablename__ = "parted_step"
    __partition__ = Monthly()
    letters: Mapped[int] = mapped_column(Computed("length(step)", persisted=True))  # which no INSERT may name


class Effect(Base):
    __tablename__ = "parted_effect"
    id: Mapped[int] = mapped_column(primary_key=True)
    label: Mapped[str]


def at(month: date) -> UUID:
    """The key of a run that was made in the middle of a month."""
    milliseconds = int(datetime(month.year, month.month, 15, tzinfo=UTC).timestamp() * 1000)
    return UUID(int=milliseconds << 80 | uuid7().int & ((1 << 80) - 1))


def months_ago(count: int) -> date:
    today = datetime.now(UTC).date()
    months = today.year * 12 + today.month - 1 - count
    return date(months // 12, months % 12 + 1, 1)


@pytest.fixture
def parted(empty_url: str) -> Iterator[Engine]:
    engine = create_engine(empty_url)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


def functions_on(engine: Engine) -> Functions[Parted]:
    functions = Functions(sessionmaker(engine), Parted, PartedStep)

    @functions.function("write")
    def write(run: FunctionRun, label: str) -> int:
        def put(session: Session) -> str:
            session.add(Effect(label=label))
            return label

        return len(run.step("one", put) + run.step("two", put))

    @functions.function("refuse")
    def refuse(run: FunctionRun) -> None:
        run.step("one", lambda session: 1)
        run.step("refused", lambda session: 1 / 0)

    @functions.function("slip")
    def slip(run: FunctionRun) -> None:
        def put(session: Session) -> None:
            session.add(Effect(label="slipped"))
            session.flush()
            session.execute(text("COMMIT"))

        run.step("slipped", put)

    return functions


def where(engine: Engine) -> dict[str, int]:
    """How many receipts there are in each partition."""
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT CAST(tableoid AS regclass), count(*) FROM parted_step GROUP BY 1"))
        return {str(name): count for name, count in rows}


def ahead(engine: Engine, months: int = 3) -> Any:
    with Session(engine) as session, session.begin():
        return create_partitions(session, PartedStep, months)


def dropped(engine: Engine, older_than: timedelta = NOW) -> Any:
    with Session(engine) as session, session.begin():
        return drop_partitions(session, PartedStep, older_than)


def test_steps_replay_requeue_fork_and_purge_work_on_partitions(parted: Engine) -> None:
    ahead(parted)
    functions = functions_on(parted)
    with functions.session_factory.begin() as session:
        handle = functions.start(session, "write", "a")
        failing = functions.start(session, "refuse")
    assert functions.execute(handle).status == "done"
    assert functions.execute(handle).status == "done"
    assert functions.execute(failing).status == "failed"
    assert list(where(parted)) == [f"parted_step_{months_ago(0):%Y_%m}"]
    assert functions.requeue(failing)
    assert [receipt.step for receipt in functions.steps(failing)] == ["one"]
    with functions.session_factory.begin() as session:
        fork = functions.fork(session, handle, from_step="two")
    assert functions.execute(fork).status == "done"
    with Session(parted) as session:
        assert session.scalar(select(func.count()).select_from(Effect)) == 3
    assert functions.purge(NOW) == 2
    assert sum(where(parted).values()) == 1  # of the run that was requeued


def test_a_literal_commit_is_refused_in_a_month_and_in_the_default_partition(parted: Engine) -> None:
    functions = functions_on(parted)
    for _ in range(2):
        with functions.session_factory.begin() as session:
            handle = functions.start(session, "slip")
        outcome = functions.execute(handle)
        assert outcome.status == "failed"
        assert outcome.failure is not None
        assert outcome.failure.type.endswith(TransactionEnded.__name__)
        ahead(parted)
    with Session(parted) as session:
        assert session.scalar(select(func.count()).select_from(Effect)) == 0


def test_partitions_are_created_once_for_this_month_and_those_ahead(parted: Engine) -> None:
    created = ahead(parted, 2)
    names = [f"parted_step_{months_ago(-month):%Y_%m}" for month in range(3)]
    assert [each.name for each in created.created] == names
    assert ahead(parted, 2).created == ()
    assert [each.name for each in ahead(parted, 3).created] == [f"parted_step_{months_ago(-3):%Y_%m}"]
    with Session(parted) as session:
        listed = partitions_of(session, PartedStep)
    assert [each.is_default for each in listed] == [True, False, False, False, False]
    assert listed[1].since == datetime(months_ago(0).year, months_ago(0).month, 1, tzinfo=UTC)
    assert [each.until for each in listed[1:4]] == [each.since for each in listed[2:]]


def test_receipts_in_the_default_partition_move_to_that_of_their_month(parted: Engine) -> None:
    functions = functions_on(parted)
    with functions.session_factory.begin() as session:
        handle = functions.start(session, "write", "a")
    functions.execute(handle)
    assert where(parted) == {"parted_step_default": 2}
    before = functions.steps(handle)
    ahead(parted)
    assert where(parted) == {f"parted_step_{months_ago(0):%Y_%m}": 2}
    assert functions.steps(handle) == before


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_partitions_are_neither_created_nor_dropped_by_what_a_snapshot_shows(parted: Engine, level: str) -> None:
    with Session(parted.execution_options(isolation_level=level)) as session:
        with pytest.raises(UsageError, match=f"the transaction is {level}"):
            drop_partitions(session, PartedStep, NOW)
        with pytest.raises(UsageError, match="isolation_level='READ COMMITTED'"):
            create_partitions(session, PartedStep)


def a_month(engine: Engine, month: date, *statements: str) -> str:
    """Create the partition of a month as a migration does, and return its name."""
    with engine.begin() as connection:
        for statement in partition_sql(PartedStep, month):
            connection.execute(text(statement))
    return f"parted_step_{month:%Y_%m}"


def made(functions: Functions[Parted], month: date, name: str = "write", *inputs: str) -> UUID:
    """A run that was made in a month, not carried out yet."""
    with functions.session_factory.begin() as session:
        run = Parted(id=at(month), function=name, input=inputs[0] if inputs else None)
        session.add(run)
        session.flush()
        return run.id


def test_a_month_whose_runs_are_all_done_is_dropped_and_the_runs_stay(parted: Engine) -> None:
    functions, month = functions_on(parted), months_ago(5)
    name = a_month(parted, month)
    done = made(functions, month, "write", "a")
    assert functions.execute(done).status == "done"
    assert where(parted) == {name: 2}
    assert dropped(parted, 3650 * DAY).dropped == ()
    result = dropped(parted)
    assert [each.name for each in result.dropped] == [name]
    assert result.kept == ()
    assert where(parted) == {}
    assert functions.result(done) == 2
    assert functions.steps(done) == ()
    assert functions.execute(done).status == "done"
    assert functions.purge(NOW) == 1


def test_a_month_with_a_run_that_has_not_ended_is_kept(parted: Engine) -> None:
    functions, month = functions_on(parted), months_ago(5)
    name = a_month(parted, month)
    for label in "a", "b":
        functions.execute(made(functions, month, "write", label))
    live = made(functions, month, "write", "c")
    result = dropped(parted)
    assert result.dropped == ()
    assert [(each.partition.name, each.live, each.requeueable) for each in result.kept] == [(name, 1, 0)]
    assert where(parted) == {name: 4}
    functions.execute(live)
    assert [each.name for each in dropped(parted).dropped] == [name]


def test_a_month_is_kept_while_a_requeue_would_do_its_steps_again(parted: Engine) -> None:
    functions, month = functions_on(parted), months_ago(5)
    name = a_month(parted, month)
    failed = made(functions, month, "refuse")
    assert functions.execute(failed).status == "failed"
    (kept,) = dropped(parted).kept
    assert (kept.live, kept.requeueable) == (0, 1)
    assert where(parted) == {name: 2}
    assert functions.purge(NOW) == 1
    assert [each.name for each in dropped(parted).dropped] == [name]


def test_neither_the_present_month_nor_the_default_partition_is_dropped(parted: Engine) -> None:
    ahead(parted)
    assert dropped(parted) == PartitionsDropped((), ())
    with Session(parted) as session:
        assert len(partitions_of(session, PartedStep)) == 5


def test_a_step_under_way_as_its_month_is_created_is_done_once_in_its_partition(parted: Engine) -> None:
    functions = functions_on(parted)
    release, inside = threading.Event(), threading.Event()

    @functions.function("slow")
    def slow(run: FunctionRun) -> None:
        def put(session: Session) -> None:
            session.add(Effect(label="slow"))
            inside.set()
            assert release.wait(20)

        run.step("one", put)

    with functions.session_factory.begin() as session:
        handle = functions.start(session, "slow")
    step = Background(lambda: functions.execute(handle))
    assert inside.wait(20)
    creating = Background(lambda: ahead(parted))
    wait_until_blocked(parted)
    release.set()
    assert step.result().status == "done"
    assert len(creating.result().created) == 4
    assert where(parted) == {f"parted_step_{months_ago(0):%Y_%m}": 1}
    with Session(parted) as session:
        assert session.scalar(select(func.count()).select_from(Effect)) == 1


def test_a_step_on_its_way_to_the_default_partition_is_done_once_in_that_of_its_month(parted: Engine) -> None:
    functions = functions_on(parted)
    release, inside = threading.Event(), threading.Event()

    @functions.function("slow")
    def slow(run: FunctionRun) -> None:
        inside.set()
        assert release.wait(20)
        run.step("one", lambda session: session.add(Effect(label="slow")))

    with functions.session_factory.begin() as session:
        handle = functions.start(session, "slow")
    step = Background(lambda: functions.execute(handle))
    assert inside.wait(20)
    with Session(parted) as session, session.begin():
        session.execute(text("LOCK TABLE parted_step_default IN ACCESS EXCLUSIVE MODE"))
        release.set()
        wait_until_blocked(parted)
        create_partitions(session, PartedStep)
    assert step.result().status == "done"
    assert where(parted) == {f"parted_step_{months_ago(0):%Y_%m}": 1}
    with Session(parted) as session:
        assert list(session.scalars(select(Effect.label))) == ["slow"]


def test_an_insert_that_was_on_its_way_to_the_default_partition_is_a_conflict_to_repeat(parted: Engine) -> None:
    functions = functions_on(parted)
    ident = made(functions, months_ago(0))
    insert = text(
        "INSERT INTO parted_step (parted_id, step, effect, fence, unsealed) VALUES (:id, 'x', 'external', 1, '')"
    )

    def write() -> None:
        with translated(), parted.begin() as connection:
            connection.execute(insert, {"id": ident})

    with Session(parted) as session, session.begin():
        session.execute(text("LOCK TABLE parted_step_default IN ACCESS EXCLUSIVE MODE"))
        late = Background(write)
        wait_until_blocked(parted)
        create_partitions(session, PartedStep)
    with pytest.raises(TransactionConflict, match="was created just now"):
        late.result()


def test_two_that_create_the_same_months_wait_for_each_other(parted: Engine) -> None:
    with Session(parted) as session, session.begin():
        assert len(create_partitions(session, PartedStep, 2).created) == 3
        other = Background(lambda: ahead(parted, 2))
        wait_until_blocked(parted)
    assert other.result().created == ()


def test_neither_waits_for_a_lock_for_longer_than_it_was_told(parted: Engine) -> None:
    with parted.begin() as reader:
        reader.execute(text("SELECT FROM parted_step_default"))
        with Session(parted) as session, pytest.raises(TransactionConflict, match="no lock on parted_step was"):
            create_partitions(session, PartedStep, lock_timeout=timedelta(milliseconds=50))
    a_month(parted, months_ago(5))
    with parted.begin() as reader:
        reader.execute(text("SELECT FROM parted_step"))
        with Session(parted) as session, pytest.raises(TransactionConflict, match="no lock on parted_step was"):
            drop_partitions(session, PartedStep, NOW, lock_timeout=timedelta(milliseconds=50))


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
def test_what_an_execution_sends_looks_into_the_partition_of_its_month_only(parted: Engine, mode: str) -> None:
    ahead(parted, 6)
    functions = functions_on(parted)
    with functions.session_factory.begin() as session:
        handle = functions.start(session, "write", "a")
    with statements(parted) as sent:
        functions.execute(handle)
        functions.steps(handle)
    on_receipts = [pair for pair in zip(sent, sent.parameters, strict=True) if "parted_step" in pair[0]]
    assert len(on_receipts) == 5
    for statement, parameters in on_receipts:
        read = {node.get("Relation Name", "") for node in nodes(explained(parted, statement, parameters, mode))}
        assert {name for name in read if name.startswith("parted_step_")} <= {f"parted_step_{months_ago(0):%Y_%m}"}


def test_names_near_the_longest_that_postgresql_keeps_stay_apart(empty_url: str) -> None:
    class Other(DeclarativeBase):
        pass

    class Long(FunctionMixin, Other):
        __tablename__ = "long"

    columns = {"__partition__": Monthly()}
    steps: list[type[Any]] = [
        type(f"Step{end}", (ReceiptMixin[Long], Other), {**columns, "__tablename__": "ü" * 30 + "%" + end})
        for end in ("a", "b")
    ]
    engine = create_engine(empty_url)
    Other.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        for step in steps:
            create_partitions(session, step, 1)
        names = [each.name for step in steps for each in partitions_of(session, step)]
        assert len({*names}) == len(names) == 6
        assert max(len(name.encode()) for name in names) <= 63
    engine.dispose()
