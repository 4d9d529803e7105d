"""Receipts: one outcome each, gone with their run, and equal in value and type on the first run and on replay."""

from __future__ import annotations

import asyncio
import enum
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from pydantic import BaseModel
from sqlalchemy import Engine, delete, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, ReceiptMismatch, ResultError, Run, Runs, StepOutcome
from sqla_durable.asyncio import AsyncRuns
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


def test_a_recorded_receipt_cannot_be_opened_again_and_committed(engine: Engine, plans: Runs[Plan], run: Run[Plan]) -> None:
    run.step("only", write_entry, "a")
    with pytest.raises(IntegrityError), engine.begin() as connection:
        connection.execute(text("UPDATE plan_step SET outcome = NULL, result = NULL, unsealed = ''"))
    assert plans.receipts(run.row.id)[0].outcome is StepOutcome.SUCCEEDED


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
        raise ERRORS[error]()

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


# --- first run and replay are equal in value and type (H22)


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Point(NamedTuple):
    x: int
    y: float


@dataclass(frozen=True)
class Parcel:
    number: int
    weight: Decimal
    at: datetime


class Shipment(BaseModel):
    parcels: list[Parcel]
    colour: Colour
    when: date | None = None


BERLIN = timezone(timedelta(hours=2))
PARCEL = Parcel(2**63, Decimal("1.50"), datetime(2026, 3, 1, 12, 30, 0, 123456, BERLIN))
VALUES: list[tuple[Any, Any]] = [
    (None, None),
    (bool, True),
    (int, 2**63),
    (int, -(10**40)),
    (float, 0.1),
    (float, 1e300),
    (str, "ключ \" \\ % 🔑"),
    (bytes, b"\x00\xff"),
    (Decimal, Decimal("12.500")),
    (UUID, UUID(int=7)),
    (datetime, datetime(2026, 1, 1, 1, 2, 3, 4, UTC)),
    (datetime, datetime(2026, 1, 1, 1, 2, 3, 4)),
    (date, date(2026, 2, 28)),
    (time, time(1, 2, 3)),
    (timedelta, timedelta(days=-1, microseconds=1)),
    (tuple[int, str], (1, "a")),
    (tuple[int, ...], (1, 2)),
    (set[int], {1, 2}),
    (frozenset[str], frozenset({"a"})),
    (deque[int], deque([1, 2])),
    (dict[int, str], {1: "a"}),
    (dict[UUID, Decimal], {UUID(int=1): Decimal("0.10")}),
    (Colour, Colour.RED),
    (Level, Level.HIGH),
    (Point, Point(1, 2.0)),
    (Parcel, PARCEL),
    (Shipment, Shipment(parcels=[PARCEL], colour=Colour.RED, when=date(2026, 1, 1))),
    (list[Shipment] | None, [Shipment(parcels=[], colour=Colour.RED)]),
    (Any, {"a": [1, 2.5, None, {"b": "c"}], "": {}}),
    (Any, []),
]


def returning(annotation: Any, value: Any) -> tuple[Callable[[Session], Any], Callable[[], Any]]:
    def body(session: Session) -> Any:
        return value

    def call() -> Any:
        return value

    body.__annotations__["return"] = call.__annotations__["return"] = annotation
    return body, call


def types(value: Any) -> Any:
    """The types of a value and of all it holds."""
    if isinstance(value, dict):
        return dict, {key: (types(key), types(part)) for key, part in value.items()}
    if isinstance(value, list | tuple | deque):
        return type(value), [types(part) for part in value]
    if isinstance(value, set | frozenset):
        return type(value), {part: types(part) for part in value}
    if isinstance(value, Parcel | Shipment):
        return type(value), types(vars(value))
    return type(value)


def same(a: Any, b: Any) -> None:
    assert a == b
    assert types(a) == types(b)


def test_the_first_run_equals_each_replay_in_value_and_type(plans: Runs[Plan], run: Run[Plan]) -> None:
    first: list[Any] = []
    for position, (annotation, value) in enumerate(VALUES):
        body, call = returning(annotation, value)
        for result in (run.step(position, body), run.external(f"e{position}", call)):
            same(result, value)
            first.append(result)
    in_another_process = Runs(plans._verbs.store.sessions._factory, Plan, PlanStep)  # type: ignore[attr-defined]
    run.release()
    following = in_another_process.claim(run.row.id)
    assert following is not None
    replayed: list[Any] = []
    for position, (annotation, _) in enumerate(VALUES):
        body, call = returning(annotation, "not returned")
        replayed += [following.step(position, body), following.external(f"e{position}", call)]
    for one, other in zip(first, replayed, strict=True):
        same(one, other)
    assert plans.receipts(run.row.id) == run.receipts


def test_the_same_over_asyncio(engine: Engine, session_factory: sessionmaker[Session]) -> None:
    ident = approved_plan(session_factory)

    async def carry_out() -> None:
        async_engine = create_async_engine(engine.url)
        plans = AsyncRuns(async_sessionmaker(async_engine), Plan, PlanStep)
        try:
            await first_and_replay(plans)
        finally:
            await async_engine.dispose()

    async def first_and_replay(plans: AsyncRuns[Plan]) -> None:
        for attempt in ("first", "replay"):
            run = await plans.claim(ident)
            assert run is not None
            for position, (annotation, value) in enumerate(VALUES):
                returned = value if attempt == "first" else "not returned"

                async def body(session: Any, returned: Any = returned) -> Any:
                    return returned

                async def call(returned: Any = returned) -> Any:
                    return returned

                body.__annotations__["return"] = call.__annotations__["return"] = annotation
                same(await run.step(position, body), value)
                same(await run.external(f"e{position}", call), value)
            await run.release()

    asyncio.run(carry_out())


REFUSED: list[tuple[Any, Any]] = [
    (Any, (1, 2)),
    (Any, {1: "a"}),
    (Any, {1, 2}),
    (Any, Decimal(1)),
    (Any, UUID(int=1)),
    (Any, datetime(2026, 1, 1, tzinfo=UTC)),
    (Any, Colour.RED),
    (Any, PARCEL),
    (list[int], (1, 2)),
    (float, math.nan),
    (float, math.inf),
    (int, True),
    (int, 1.5),
    (Decimal, Decimal("NaN")),
    (str, "a\0"),
    (str, Colour.RED),
    (datetime, date(2026, 1, 1)),
]


@pytest.mark.parametrize(("annotation", "value"), REFUSED, ids=lambda value: ascii(value)[:30])
def test_what_would_not_come_back_equal_is_refused_on_the_first_run(
    engine: Engine, plans: Runs[Plan], run: Run[Plan], annotation: Any, value: Any
) -> None:
    body, call = returning(annotation, value)

    def with_effect(session: Session) -> Any:
        write_entry(session, "never")
        return body(session)

    with_effect.__annotations__["return"] = annotation
    with pytest.raises(ResultError, match="step 'only'"):
        run.step("only", with_effect)
    with pytest.raises(ResultError, match="step 'only'"):
        run.external("only", call)
    assert entries(engine) == []
    assert plans.receipts(run.row.id) == ()
