"""Receipts: one outcome each, gone with their run, and always writable."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from sqlalchemy import Engine, delete, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, ReceiptMismatch, Run, Runs, StepOutcome
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, column, entries, write_entry


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep)


@pytest.fixture
def run(session_factory: sessionmaker[Session], plans: Runs[Plan]) -> Run[Plan]:
    claimed = plans.claim(approved_plan(session_factory))
    assert claimed is not None
    return claimed


def again(plans: Runs[Plan], run: Run[Plan]) -> Run[Plan]:
    """The next execution of the same run."""
    run.release()
    claimed = plans.claim(run.row.id)
    assert claimed is not None
    return claimed


# --- what PostgreSQL itself allows

ROWS = {
    "success with a result": ("'succeeded'", "'1'", "NULL", "NULL", True),
    "success with a JSON null": ("'succeeded'", "'null'", "NULL", "NULL", True),
    "failure with an error": ("'failed'", "NULL", """'{"type": "E", "message": "m"}'""", "NULL", True),
    "success without a result": ("'succeeded'", "NULL", "NULL", "NULL", False),
    "success with an error": ("'succeeded'", "'1'", "'{}'", "NULL", False),
    "failure without an error": ("'failed'", "NULL", "NULL", "NULL", False),
    "failure with a result": ("'failed'", "'1'", "'{}'", "NULL", False),
    "no outcome at all": ("NULL", "NULL", "NULL", "NULL", False),
    "no outcome but a result": ("NULL", "'1'", "NULL", "NULL", False),
    "another outcome": ("'skipped'", "'1'", "NULL", "NULL", False),
    "an empty outcome": ("''", "NULL", "NULL", "''", False),
    "success that is open": ("'succeeded'", "'1'", "NULL", "''", False),
    "failure that is open": ("'failed'", "NULL", "'{}'", "''", False),
    "open with a result": ("NULL", "'1'", "NULL", "''", False),
    "open and committed": ("NULL", "NULL", "NULL", "''", False),
    "open and referring to itself": ("NULL", "NULL", "NULL", "'raw'", False),
}


@pytest.mark.past_guards
@pytest.mark.parametrize("case", ROWS)
def test_a_committed_receipt_has_exactly_one_outcome_whoever_writes_it(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], case: str
) -> None:
    outcome, result, error, unsealed, allowed = ROWS[case]
    ident = approved_plan(session_factory)
    insert = text(
        "INSERT INTO plan_step (plan_id, step, outcome, result, error, effect, fence, unsealed)"
        f" VALUES (:ident, 'raw', {outcome}, {result}, {error}, 'transactional', 1, {unsealed})"
    )
    if allowed:
        with engine.begin() as connection:
            connection.execute(insert, {"ident": ident})
        assert len(plans.receipts(ident)) == 1
    else:
        with pytest.raises(IntegrityError), engine.begin() as connection:
            connection.execute(insert, {"ident": ident})
        assert plans.receipts(ident) == ()


@pytest.mark.past_guards
def test_a_recorded_receipt_cannot_be_opened_again_and_committed(
    engine: Engine, plans: Runs[Plan], run: Run[Plan]
) -> None:
    run.step("only", write_entry, "a")
    with pytest.raises(IntegrityError), engine.begin() as connection:
        connection.execute(text("UPDATE plan_step SET outcome = NULL, result = NULL, unsealed = ''"))
    assert plans.receipts(run.row.id)[0].outcome is StepOutcome.SUCCEEDED


@pytest.mark.past_guards
def test_a_receipt_needs_its_run_and_goes_with_it(engine: Engine, plans: Runs[Plan], run: Run[Plan]) -> None:
    run.step("a", write_entry, "a")
    run.external("b", lambda: 1)
    with engine.begin() as connection:
        connection.execute(delete(Plan).where(Plan.id == run.row.id))
    assert plans.receipts(run.row.id) == ()
    with engine.connect() as connection:
        assert connection.execute(select(PlanStep.step)).all() == []
    with pytest.raises(IntegrityError), engine.begin() as connection:
        connection.execute(
            text(
                "INSERT INTO plan_step (plan_id, step, outcome, result, effect, fence)"
                " VALUES (gen_random_uuid(), 'raw', 'succeeded', '1', 'transactional', 1)"
            )
        )


def test_receipts_come_in_the_order_they_were_recorded_with_what_was_known(plans: Runs[Plan], run: Run[Plan]) -> None:
    run.step("z", write_entry, "a")
    run.external("a", lambda: {"b": 1})
    following = again(plans, run)
    with pytest.raises(ValueError, match="no"):
        following.step("m", fails, "no")
    receipts = plans.receipts(run.row.id)
    assert [receipt.step for receipt in receipts] == ["z", "a", "m"]
    assert [receipt.fence for receipt in receipts] == [1, 1, 2]
    assert [receipt.effect for receipt in receipts] == ["transactional", "external", "transactional"]
    assert [receipt.outcome for receipt in receipts] == ["succeeded", "succeeded", "failed"]
    assert receipts == following.receipts
    assert all(receipt.recorded_at.tzinfo is not None for receipt in receipts)
    assert receipts[0].recorded_at < receipts[1].recorded_at < receipts[2].recorded_at


def fails(session: Session, message: str) -> None:
    raise ValueError(message)


# --- a receipt that does not fit its step


def test_a_receipt_of_another_kind_of_step_is_a_mismatch(engine: Engine, plans: Runs[Plan], run: Run[Plan]) -> None:
    run.step("a", write_entry, "a")
    run.external("b", lambda: 1)
    following = again(plans, run)
    with pytest.raises(ReceiptMismatch, match=r"'a'.*recorded as transactional.*now external"):
        following.external("a", lambda: pytest.fail("called"))
    with pytest.raises(ReceiptMismatch, match=r"'b'.*recorded as external.*now transactional"):
        following.step("b", lambda session: pytest.fail("ran"))
    assert following.step("a", write_entry, "b") == "a"
    assert entries(engine) == ["a"]


def test_a_failed_receipt_of_another_kind_of_step_is_a_mismatch_too(plans: Runs[Plan], run: Run[Plan]) -> None:
    with pytest.raises(ValueError, match="no"):
        run.step("a", fails, "no")
    with pytest.raises(ReceiptMismatch):
        again(plans, run).external("a", lambda: pytest.fail("called"))


def test_a_result_that_no_longer_decodes_is_a_mismatch_and_fails_the_run(
    engine: Engine, plans: Runs[Plan], run: Run[Plan]
) -> None:
    def before(session: Session) -> str:
        return "not a number"

    def after(session: Session) -> int:
        pytest.fail("ran again")

    run.step("a", before)
    run.release()
    outcome = plans.execute(run.row.id, lambda run: run.step("a", after))
    assert isinstance(outcome.exception, ReceiptMismatch)
    assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.FAILED)
    assert [receipt.outcome for receipt in plans.receipts(run.row.id)] == ["succeeded"]


# --- failures are always writable


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Nameless(type):
    def __str__(cls) -> str:
        raise RuntimeError


def caused() -> BaseException:
    error = ValueError("outer \0")
    error.__cause__ = Unspeakable()
    error.add_note("note \ud800")
    return error


ERRORS: dict[str, Callable[[], BaseException]] = {
    "NUL": lambda: ValueError("a\0b"),
    "surrogate": lambda: ValueError("a\udc80b"),
    "str() raises": Unspeakable,
    "cause, note": caused,
    "group": lambda: ExceptionGroup("g\0", [ValueError("\ud800"), Unspeakable()]),
    "long": lambda: ValueError("x" * 5_000_000),
    "no arguments": ValueError,
    "percent signs": lambda: ValueError("100%s %(a)s {b} :c"),
    "bytes": lambda: ValueError(b"\xff\x00"),
    "NaN": lambda: ValueError(math.nan),
}


@pytest.mark.parametrize("error", ERRORS)
def test_any_exception_can_be_recorded_as_the_failure_of_a_step_and_of_a_run(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], error: str
) -> None:
    def body(*_: object) -> None:
        raise ERRORS[error]()  # noqa: RSE102 - it makes the exception

    ident = approved_plan(session_factory)

    def carry_out(run: Run[Plan]) -> None:
        with pytest.raises(type(ERRORS[error]())):
            run.external("outside", body)
        run.step("only", body)

    outcome = plans.execute(ident, carry_out)
    assert outcome.status is PlanStatus.FAILED
    assert [receipt.outcome for receipt in plans.receipts(ident)] == ["failed", "failed"]
    assert column(engine, ident, "error")["type"].endswith(type(ERRORS[error]()).__name__)
    assert plans.execute(ident, carry_out) == outcome
