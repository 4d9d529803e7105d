"""What a step's body may do to its session and transaction, and what it may not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from sqlalchemy import Engine, event, insert, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, RetryableError, Run, Runs, TransactionEnded
from tests.support import Entry, Plan, PlanStatus, PlanStep, approved_plan, column, entries, write_entry

Way = Callable[[Session], object]


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep)


@pytest.fixture
def run(session_factory: sessionmaker[Session], plans: Runs[Plan]) -> Run[Plan]:
    claimed = plans.claim(approved_plan(session_factory))
    assert claimed is not None
    return claimed


def committed_receipts(plans: Runs[Plan], run: Run[Plan]) -> list[str]:
    return [receipt.step for receipt in plans.receipts(run.row.id)]


def goes_on(engine: Engine, plans: Runs[Plan], run: Run[Plan], key: str) -> None:
    """Nothing of the step with that key was committed; it and others can still be done, and the run lands."""
    assert entries(engine) == []
    assert committed_receipts(plans, run) == []
    assert run.step(key, write_entry, "again") == "again"
    assert run.step("next", write_entry, "next") == "next"
    run.finish()
    assert entries(engine) == ["again", "next"]
    assert column(engine, run.row.id, "status") is PlanStatus.EXECUTED


# --- ending the transaction


def in_with(session: Session) -> None:
    with session:
        session.execute(text("SELECT 1"))


def in_with_begin(session: Session) -> None:
    with session.begin():
        session.execute(text("SELECT 1"))


def in_transaction_of_session(session: Session) -> None:
    transaction = session.get_transaction()
    assert transaction is not None
    with transaction:
        session.execute(text("SELECT 1"))


def of_transaction(verb: str) -> Way:
    return lambda session: getattr(session.get_transaction(), verb)()


def literal_commit_after_savepoint(session: Session) -> None:
    with session.begin_nested():
        session.execute(text("COMMIT"))


def driver_connection(session: Session) -> Any:
    return session.connection().connection.driver_connection


def literal_by_driver(statement: str) -> Way:
    return lambda session: driver_connection(session).execute(statement)


WAYS: dict[str, Way] = {
    "session.commit()": lambda session: session.commit(),
    "session.rollback()": lambda session: session.rollback(),
    "session.close()": lambda session: session.close(),
    "session.reset()": lambda session: session.reset(),
    "session.invalidate()": lambda session: session.invalidate(),
    "session.prepare()": lambda session: session.prepare(),
    "session.begin()": lambda session: session.begin(),
    "with session": in_with,
    "with session.begin()": in_with_begin,
    "with session.get_transaction()": in_transaction_of_session,
    "session.get_transaction().commit()": of_transaction("commit"),
    "session.get_transaction().rollback()": of_transaction("rollback"),
    "session.get_transaction().close()": of_transaction("close"),
    "session.connection().commit()": lambda session: session.connection().commit(),
    "session.connection().rollback()": lambda session: session.connection().rollback(),
    "session.connection().close()": lambda session: session.connection().close(),
    "text('COMMIT')": lambda session: session.execute(text("COMMIT")),
    "text('END')": lambda session: session.execute(text("END")),
    "text('COMMIT AND CHAIN')": lambda session: session.execute(text("COMMIT AND CHAIN")),
    "text('ROLLBACK')": lambda session: session.execute(text("ROLLBACK")),
    "text('ROLLBACK AND CHAIN')": lambda session: session.execute(text("ROLLBACK AND CHAIN")),
    "text('ABORT')": lambda session: session.execute(text("ABORT")),
    "text('COMMIT') in a savepoint": literal_commit_after_savepoint,
    "exec_driver_sql('COMMIT')": lambda session: session.connection().exec_driver_sql("COMMIT"),
    "pool connection commit()": lambda session: session.connection().connection.commit(),
    "pool connection rollback()": lambda session: session.connection().connection.rollback(),
    "driver commit()": lambda session: driver_connection(session).commit(),
    "driver rollback()": lambda session: driver_connection(session).rollback(),
    "driver COMMIT": literal_by_driver("COMMIT"),
    "driver ROLLBACK": literal_by_driver("ROLLBACK"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_body_that_ends_its_transaction_is_told_so_and_nothing_of_it_is_committed(
    engine: Engine, plans: Runs[Plan], run: Run[Plan], way: str
) -> None:
    def body(session: Session) -> None:
        write_entry(session, "before")
        session.flush()
        WAYS[way](session)

    with pytest.raises(TransactionEnded):
        run.step("only", body)
    goes_on(engine, plans, run, "only")


@pytest.mark.parametrize("way", WAYS)
def test_swallowing_that_error_and_writing_on_commits_nothing_either(
    engine: Engine, plans: Runs[Plan], run: Run[Plan], way: str
) -> None:
    def body(session: Session) -> None:
        write_entry(session, "before")
        session.flush()
        with suppress(Exception):
            WAYS[way](session)
        with suppress(Exception):
            write_entry(session, "after")
            session.flush()

    with pytest.raises(TransactionEnded):
        run.step("only", body)
    goes_on(engine, plans, run, "only")


@pytest.mark.parametrize("broken", ["connection().invalidate()", "driver close()", "server"])
@pytest.mark.parametrize("swallowed", [True, False])
def test_a_body_that_breaks_its_connection_commits_nothing_and_is_not_recorded_as_failed(
    engine: Engine, plans: Runs[Plan], run: Run[Plan], broken: str, swallowed: bool
) -> None:
    def break_it(session: Session) -> None:
        match broken:
            case "connection().invalidate()":
                session.connection().invalidate()
            case "driver close()":
                driver_connection(session).close()
            case _:
                session.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    def body(session: Session) -> None:
        write_entry(session, "before")
        session.flush()
        with suppress(Exception) if swallowed else nullcontext():
            break_it(session)
        with suppress(Exception) if swallowed else nullcontext():
            write_entry(session, "after")
            session.flush()

    with pytest.raises((TransactionEnded, RetryableError)):
        run.step("only", body)
    goes_on(engine, plans, run, "only")


@pytest.mark.parametrize("way", ["session.commit()", "text('COMMIT')", "driver commit()", "text('ROLLBACK')"])
def test_execute_lands_a_run_whose_body_ends_its_transaction_as_failed(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], way: str
) -> None:
    def body(session: Session) -> None:
        write_entry(session, "never")
        session.flush()
        WAYS[way](session)

    ident = approved_plan(session_factory)
    outcome = plans.execute(ident, lambda run: run.step("only", body))
    assert outcome.ending is Ending.LANDED
    assert outcome.status is PlanStatus.FAILED
    assert outcome.failure is not None
    assert outcome.failure.type.endswith("TransactionEnded")
    assert entries(engine) == []
    assert plans.receipts(ident) == ()


@pytest.mark.parametrize("way", ["session.commit()", "session.begin()", "with session"])
def test_the_error_names_what_the_body_did_and_what_to_do_instead(run: Run[Plan], way: str) -> None:
    with pytest.raises(TransactionEnded, match=r"begin_nested"):
        run.step("only", WAYS[way])


def test_a_body_may_check_its_own_deferred_constraints_before_it_returns(
    engine: Engine, plans: Runs[Plan], run: Run[Plan]
) -> None:
    with engine.begin() as connection:
        connection.execute(
            text("CREATE TABLE seat (place int CONSTRAINT seat_taken UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        )

    def body(session: Session) -> None:
        write_entry(session, "a")
        session.execute(text("INSERT INTO seat VALUES (1)"))
        session.execute(text("SET CONSTRAINTS seat_taken IMMEDIATE"))

    run.step("only", body)
    assert entries(engine) == ["a"]


# --- savepoints


def test_a_savepoint_that_succeeds_commits_with_the_step(engine: Engine, run: Run[Plan]) -> None:
    def body(session: Session) -> None:
        with session.begin_nested():
            write_entry(session, "inner")
        write_entry(session, "outer")

    run.step("only", body)
    assert entries(engine) == ["inner", "outer"]


def test_a_savepoint_that_is_rolled_back_leaves_the_rest_of_the_step(
    engine: Engine, plans: Runs[Plan], run: Run[Plan]
) -> None:
    def body(session: Session) -> str:
        write_entry(session, "before")
        savepoint = session.begin_nested()
        write_entry(session, "undone")
        session.flush()
        savepoint.rollback()
        write_entry(session, "after")
        return "kept"

    assert run.step("only", body) == "kept"
    assert entries(engine) == ["before", "after"]
    assert committed_receipts(plans, run) == ["only"]


def test_a_savepoint_that_is_left_open_commits_with_the_step(engine: Engine, plans: Runs[Plan], run: Run[Plan]) -> None:
    def body(session: Session) -> None:
        session.begin_nested()
        write_entry(session, "a")
        session.begin_nested()
        write_entry(session, "b")

    run.step("only", body)
    assert entries(engine) == ["a", "b"]
    assert committed_receipts(plans, run) == ["only"]


def test_a_savepoint_left_open_does_not_disturb_a_before_commit_of_the_users(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], run: Run[Plan]
) -> None:
    event.listen(session_factory, "before_commit", lambda session: write_entry(session, "audit"))

    def body(session: Session) -> None:
        session.begin_nested()
        write_entry(session, "a")

    run.step("only", body)
    assert entries(engine)[0] == "a"
    assert "audit" in entries(engine)
    assert committed_receipts(plans, run) == ["only"]


def test_a_body_that_fails_inside_an_open_savepoint_leaves_nothing(
    engine: Engine, plans: Runs[Plan], run: Run[Plan]
) -> None:
    def body(session: Session) -> None:
        write_entry(session, "outer")
        session.begin_nested()
        write_entry(session, "inner")
        session.flush()
        raise ValueError("no stock")

    with pytest.raises(ValueError, match="no stock"):
        run.step("only", body)
    assert entries(engine) == []
    assert [receipt.outcome for receipt in plans.receipts(run.row.id)] == ["failed"]


# --- swallowed database errors


def by_flush(session: Session) -> None:
    session.add_all([Entry(id=1, label="a"), Entry(id=1, label="b")])
    session.flush()


def by_core(session: Session) -> None:
    session.execute(insert(Entry), [{"id": 1, "label": "a"}])
    session.connection().execute(insert(Entry.__table__), [{"id": 1, "label": "b"}])


def by_text(session: Session) -> None:
    session.execute(text("SELECT 1 / 0"))


def by_driver(session: Session) -> None:
    driver_connection(session).execute("SELECT 1 / 0")


ERRORS: dict[str, Way] = {"a flush": by_flush, "Core": by_core, "text": by_text, "the driver": by_driver}


@pytest.mark.filterwarnings("ignore:New instance .* with identity key:sqlalchemy.exc.SAWarning")  # by_flush means to
@pytest.mark.parametrize("error", ERRORS)
def test_a_swallowed_database_error_is_told_instead_of_a_silent_rollback(
    engine: Engine, plans: Runs[Plan], run: Run[Plan], error: str
) -> None:
    def body(session: Session) -> None:
        write_entry(session, "before")
        session.flush()
        with suppress(Exception):
            ERRORS[error](session)

    with pytest.raises(TransactionEnded, match="swallowed a database error"):
        run.step("only", body)
    goes_on(engine, plans, run, "only")


@pytest.mark.filterwarnings("ignore:New instance .* with identity key:sqlalchemy.exc.SAWarning")  # by_flush means to
@pytest.mark.parametrize("error", ERRORS)
def test_inside_a_savepoint_a_swallowed_database_error_is_fine(
    engine: Engine, plans: Runs[Plan], run: Run[Plan], error: str
) -> None:
    def body(session: Session) -> None:
        write_entry(session, "before")
        session.flush()
        with suppress(Exception), session.begin_nested():
            ERRORS[error](session)
        write_entry(session, "after")

    run.step("only", body)
    assert entries(engine) == ["before", "after"]
    assert committed_receipts(plans, run) == ["only"]


@pytest.mark.filterwarnings("ignore:New instance .* with identity key:sqlalchemy.exc.SAWarning")  # by_flush means to
@pytest.mark.parametrize("error", ERRORS)
def test_a_database_error_that_passes_is_the_steps_failure(
    engine: Engine, plans: Runs[Plan], run: Run[Plan], error: str
) -> None:
    with pytest.raises(Exception, match=r"duplicate key|division by zero"):
        run.step("only", ERRORS[error])
    assert entries(engine) == []
    (receipt,) = plans.receipts(run.row.id)
    assert receipt.outcome == "failed"


def test_a_deferred_constraint_of_the_users_that_fails_at_commit_is_the_steps_failure(
    engine: Engine, plans: Runs[Plan], run: Run[Plan]
) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE seat (place int UNIQUE DEFERRABLE INITIALLY DEFERRED)"))

    def body(session: Session) -> None:
        write_entry(session, "a")
        session.execute(text("INSERT INTO seat VALUES (1), (1)"))

    with pytest.raises(IntegrityError, match="seat_place_key"):
        run.step("only", body)
    assert entries(engine) == []
    (receipt,) = plans.receipts(run.row.id)
    assert receipt.failure is not None
    assert "seat_place_key" in receipt.failure.message


def test_a_pending_object_that_cannot_be_written_is_the_steps_failure_not_a_lost_write(
    engine: Engine, plans: Runs[Plan], run: Run[Plan]
) -> None:
    def body(session: Session) -> None:
        session.add(Entry(id=1, label=None))  # type: ignore[arg-type]

    with pytest.raises(DBAPIError, match="null value"):
        run.step("only", body)
    assert entries(engine) == []
    assert [receipt.outcome for receipt in plans.receipts(run.row.id)] == ["failed"]
