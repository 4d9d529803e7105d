"""A step whose body conflicts with another transaction, is interrupted, or is not a body at all."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, select, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import (
    Ending,
    NestedStep,
    ResultError,
    Run,
    Runs,
    TransactionConflict,
    UsageError,
)
from sqla_durable.sqlstate import CONFLICT_RETRIES
from tests.support import (
    Background,
    Entry,
    Plan,
    PlanStatus,
    PlanStep,
    approved_plan,
    column,
    entries,
    wait_until_blocked,
    write_entry,
)


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep)


@pytest.fixture
def run(session_factory: sessionmaker[Session], plans: Runs[Plan]) -> Run[Plan]:
    claimed = plans.claim(approved_plan(session_factory))
    assert claimed is not None
    return claimed


def change(session: Session, number: int, label: str) -> None:
    entry = session.get_one(Entry, number, with_for_update={"key_share": True})
    entry.label = label
    session.flush()


# --- 40001 and 40P01


def test_a_deadlock_in_a_body_does_the_whole_step_again_and_is_not_recorded(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], run: Run[Plan]
) -> None:
    with session_factory.begin() as session:
        session.add_all([Entry(id=101, label="one"), Entry(id=102, label="two")])
    attempts = 0

    def other() -> None:
        with session_factory.begin() as session:
            # The step is the one that looks for the deadlock, and so its victim.
            session.execute(text("SET LOCAL deadlock_timeout = '60s'"))
            change(session, 102, "other")
            change(session, 101, "other")

    background: Background | None = None

    def body(session: Session) -> int:
        nonlocal attempts, background
        attempts += 1
        session.execute(text("SET LOCAL deadlock_timeout = '10ms'"))
        write_entry(session, "effect")
        change(session, 101, "step")
        if background is None:
            background = Background(other)
            wait_until_blocked(engine)
        change(session, 102, "step")
        return attempts

    assert run.step("only", body) == 2
    assert background is not None
    background.result()
    assert entries(engine) == ["effect", "step", "step"]
    assert [receipt.outcome for receipt in plans.receipts(run.row.id)] == ["succeeded"]


def test_a_serialisation_failure_in_a_body_does_the_whole_step_again(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    with session_factory.begin() as session:
        session.add(Entry(id=1, label="one"))
    strict = create_engine(engine.url, isolation_level="REPEATABLE READ")
    plans = Runs(sessionmaker(strict), Plan, PlanStep)
    attempts = 0

    def body(session: Session) -> str:
        nonlocal attempts
        attempts += 1
        entry = session.get_one(Entry, 1)
        if attempts == 1:
            with session_factory.begin() as other:
                other.get_one(Entry, 1).label = "other"
        entry.label += "+step"
        return entry.label

    ident = approved_plan(session_factory)
    outcome = plans.execute(ident, lambda run: run.step("only", body))
    assert outcome.status is PlanStatus.EXECUTED
    assert attempts == 2
    assert entries(engine) == ["other+step"]
    strict.dispose()


@pytest.mark.parametrize("code", ["40001", "40P01"])
def test_a_conflict_that_never_ends_is_bounded_and_nothing_is_recorded(
    engine: Engine, plans: Runs[Plan], run: Run[Plan], code: str
) -> None:
    attempts = 0

    def body(session: Session) -> None:
        nonlocal attempts
        attempts += 1
        write_entry(session, "never")
        session.flush()
        session.execute(text(f"DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '{code}'; END $$"))

    with pytest.raises(TransactionConflict, match=code):
        run.step("only", body)
    assert attempts == CONFLICT_RETRIES + 1
    assert entries(engine) == []
    assert plans.receipts(run.row.id) == ()
    assert run.step("only", write_entry, "a") == "a"


def test_execute_puts_a_run_whose_conflicts_never_end_back_to_ready(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    def body(session: Session) -> None:
        session.execute(text("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$"))

    ident = approved_plan(session_factory)
    outcome = plans.execute(ident, lambda run: run.step("only", body))
    assert outcome.ending is Ending.INTERRUPTED
    assert outcome.status is PlanStatus.APPROVED
    assert column(engine, ident, "status") is PlanStatus.APPROVED


def test_a_conflict_within_a_savepoint_that_passes_does_the_whole_step_again(engine: Engine, run: Run[Plan]) -> None:
    attempts = 0

    def body(session: Session) -> None:
        nonlocal attempts
        attempts += 1
        write_entry(session, "effect")
        with session.begin_nested():
            if attempts == 1:
                session.execute(text("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$"))

    run.step("only", body)
    assert entries(engine) == ["effect"]
    assert attempts == 2


def test_a_conflict_that_a_body_wraps_in_an_error_of_its_own_is_retried_and_not_recorded(
    engine: Engine, plans: Runs[Plan], run: Run[Plan]
) -> None:
    attempts = 0

    def body(session: Session) -> None:
        nonlocal attempts
        attempts += 1
        try:
            write_entry(session, "effect")
            session.flush()
            if attempts == 1:
                session.execute(text("DO $$ BEGIN RAISE EXCEPTION 'again' USING ERRCODE = '40001'; END $$"))
        except DBAPIError as error:
            raise RuntimeError("could not write") from error

    run.step("only", body)
    assert attempts == 2
    assert entries(engine) == ["effect"]
    assert [receipt.outcome for receipt in plans.receipts(run.row.id)] == ["succeeded"]


# --- a step within a step


def test_a_step_inside_a_steps_body_is_refused_and_nothing_of_either_is_committed(
    engine: Engine, plans: Runs[Plan], run: Run[Plan]
) -> None:
    def body(session: Session) -> None:
        write_entry(session, "outer")
        session.flush()
        run.step("inner", write_entry, "inner")

    with pytest.raises(NestedStep, match="inner"):
        run.step("outer", body)
    assert entries(engine) == []
    assert plans.receipts(run.row.id) == ()
    assert run.step("outer", write_entry, "a") == "a"
    assert run.step("inner", write_entry, "b") == "b"


@pytest.mark.parametrize(("outer", "inner"), [("step", "external"), ("external", "step"), ("external", "external")])
def test_the_same_holds_for_external_steps(plans: Runs[Plan], run: Run[Plan], outer: str, inner: str) -> None:
    def body(*_: object) -> None:
        getattr(run, inner)("inner", lambda *_: None)

    with pytest.raises(NestedStep):
        getattr(run, outer)("outer", body)
    assert plans.receipts(run.row.id) == ()


def test_a_step_of_another_run_inside_a_body_is_its_own_transaction(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], run: Run[Plan]
) -> None:
    other = plans.claim(approved_plan(session_factory))
    assert other is not None

    def body(session: Session) -> None:
        write_entry(session, "undone")
        other.step("inner", write_entry, "kept")
        raise ValueError("no stock")

    with pytest.raises(ValueError, match="no stock"):
        run.step("outer", body)
    assert entries(engine) == ["kept"]


# --- results, coroutines, interruptions


@pytest.mark.parametrize(
    "result", [object(), {1, 2}, (1, 2), {1: "a"}, "\0", "\ud800", float("nan"), float("inf"), b"a", lambda: None]
)
def test_a_result_that_would_not_come_back_equal_undoes_the_effect_and_leaves_no_receipt(
    engine: Engine, plans: Runs[Plan], run: Run[Plan], result: Any
) -> None:
    def body(session: Session):  # type: ignore[no-untyped-def]
        write_entry(session, "never")
        return result

    with pytest.raises(ResultError, match="step 'only'"):
        run.step("only", body)
    assert entries(engine) == []
    assert plans.receipts(run.row.id) == ()
    assert run.step("only", write_entry, "a") == "a"


async def async_body(session: Session) -> None:
    write_entry(session, "never")


class AsyncCallable:
    async def __call__(self, session: Session) -> None:
        await async_body(session)


COROUTINES = {
    "a coroutine function": async_body,
    "a partial of one": functools.partial(async_body),
    "a callable object": AsyncCallable(),
    "a lambda that returns a coroutine": lambda session: async_body(session),  # noqa: PLW0108 - a lambda is the point
}


@pytest.mark.parametrize("fn", COROUTINES)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_coroutine_where_a_function_belongs_is_an_error_of_use(plans: Runs[Plan], run: Run[Plan], fn: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with pytest.raises(UsageError, match=r"(?i)coroutine"):
            run.step("only", COROUTINES[fn])
    assert plans.receipts(run.row.id) == ()


@pytest.mark.parametrize("handler", COROUTINES)
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_run_whose_handler_only_returned_a_coroutine_does_not_land_done(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], handler: str
) -> None:
    ident = approved_plan(session_factory)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            outcome = plans.execute(ident, COROUTINES[handler])
        except UsageError:
            assert column(engine, ident, "status") is PlanStatus.APPROVED
        else:
            assert outcome.status is PlanStatus.FAILED
            assert isinstance(outcome.exception, UsageError)


class Abort(BaseException):
    pass


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit, Abort, GeneratorExit])
def test_an_interruption_in_a_body_undoes_it_records_nothing_and_passes(
    engine: Engine, plans: Runs[Plan], run: Run[Plan], interruption: type[BaseException]
) -> None:
    def body(session: Session) -> None:
        write_entry(session, "never")
        session.flush()
        raise interruption

    with pytest.raises(interruption):
        run.step("only", body)
    assert entries(engine) == []
    assert plans.receipts(run.row.id) == ()
    assert engine.pool.checkedout() == 0  # type: ignore[attr-defined]
    assert run.step("only", write_entry, "a") == "a"


def test_an_interruption_in_execute_releases_the_run(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)

    def carry_out(run: Run[Plan]) -> None:
        run.step("first", write_entry, "a")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plans.execute(ident, carry_out)
    assert column(engine, ident, "status") is PlanStatus.APPROVED
    assert column(engine, ident, "error") is None
    assert plans.execute(ident, lambda run: run.step("first", write_entry, "b")).status is PlanStatus.EXECUTED
    assert entries(engine) == ["a"]


def test_a_body_works_in_an_ordinary_session_of_the_sessionmakers(engine: Engine) -> None:
    class OwnSession(Session):
        greeting = "hello"

    factory = sessionmaker(engine, class_=OwnSession, autoflush=False, info={"tenant": 7})
    run = Runs(factory, Plan, PlanStep).claim(approved_plan(factory))
    assert run is not None

    def body(session: Session) -> list[str]:
        assert isinstance(session, OwnSession)
        assert session.info["tenant"] == 7
        write_entry(session, "a")
        before = session.scalars(select(Entry.label)).all()
        session.flush()
        return [session.greeting, *before, *session.scalars(select(Entry.label))]

    assert run.step("only", body) == ["hello", "a"]
