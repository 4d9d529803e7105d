"""What a step's key may be, and what using it again means."""

from __future__ import annotations

from enum import Enum, IntEnum, StrEnum
from typing import Any

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Run, Runs, StepFailed, StepReused, UsageError
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, entries, write_entry


class Word(StrEnum):
    SHIP = "ship it"


class Mixed(str, Enum):  # noqa: UP042 - the older way
    SHIP = "ship by hand"


class Place(IntEnum):
    FIRST = 1


class OddStr(str):
    def __str__(self) -> str:
        return "something else"


class OddInt(int):
    def __repr__(self) -> str:
        return "something else"


class NotAKey(Enum):
    A = "a"


KEYS: list[tuple[Any, str]] = [
    ("charge", "charge"),
    (0, "0"),
    (-7, "-7"),
    (10**50, "1" + "0" * 50),
    (Word.SHIP, "ship it"),
    (Mixed.SHIP, "ship by hand"),
    (Place.FIRST, "1"),
    (OddStr("plain"), "plain"),
    (OddInt(5), "5"),
    ("x" * 200, "x" * 200),
    ("1a", "1a"),
    ("1.5", "1.5"),
    ("--1", "--1"),
    (" padded ", " padded "),
    ('it\'s a %s :key \\ "quoted"', 'it\'s a %s :key \\ "quoted"'),
    ("ключ 鍵 🔑", "ключ 鍵 🔑"),
    ("NULL", "NULL"),
]


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


def use(plans: Runs[Plan], run: Run[Plan], verb: str, key: Any) -> None:
    """Do a step with that key, in one of the three ways."""
    match verb:
        case "step":
            run.step(key, write_entry, verb)
        case "external":
            run.external(key, lambda: verb)
        case _:
            with sessions_of(plans).begin() as session:
                plans.record(session, run.lease, key, verb)


def sessions_of(plans: Runs[Plan]) -> sessionmaker[Session]:
    return plans._verbs.store.sessions._factory  # type: ignore[attr-defined, no-any-return]


def test_keys_are_stored_as_they_are_given_and_ints_as_their_decimals(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    for verb in ("step", "external", "record"):
        run = plans.claim(approved_plan(session_factory))
        assert run is not None
        for key, _ in KEYS:
            use(plans, run, verb, key)
        assert {receipt.step for receipt in plans.receipts(run.row.id)} == {stored for _, stored in KEYS}
        following = again(plans, run)
        for key, _ in KEYS:
            if verb == "external":
                following.external(key, lambda: pytest.fail("called again"))
            else:
                following.step(key, lambda session: pytest.fail("ran again"))
        following.finish()
    assert entries(engine) == ["step"] * len(KEYS)


REFUSED: list[Any] = [
    True,
    False,
    None,
    1.5,
    b"bytes",
    ("a", 1),
    NotAKey.A,
    "",
    "x" * 201,
    10**200,
    "1",
    "007",
    "-3",
    "٣",
    "line\nbreak",
    "nul\0",
    "\ud800",
    "\x85",
    frozenset({1}),
]


@pytest.mark.parametrize("key", REFUSED, ids=ascii)
@pytest.mark.parametrize("verb", ["step", "external", "record"])
def test_other_keys_are_refused_before_the_body_is_called(
    engine: Engine, plans: Runs[Plan], run: Run[Plan], key: Any, verb: str
) -> None:
    with pytest.raises(UsageError, match="step key"):
        use(plans, run, verb, key)
    assert plans.receipts(run.row.id) == ()
    assert entries(engine) == []


def test_the_refusal_of_digits_says_to_use_the_int(run: Run[Plan]) -> None:
    with pytest.raises(UsageError, match=r"use the int 12"):
        run.step("12", write_entry, "a")


@pytest.mark.parametrize(("first", "second"), [("a", "a"), (1, 1), (Word.SHIP, "ship it"), (1, Place.FIRST)])
def test_a_key_used_twice_in_one_execution_is_an_error(engine: Engine, run: Run[Plan], first: Any, second: Any) -> None:
    run.step(first, write_entry, "a")
    for verb in (lambda: run.step(second, write_entry, "b"), lambda: run.external(second, lambda: "b")):
        with pytest.raises(StepReused, match="used twice"):
            verb()
    assert entries(engine) == ["a"]


def test_a_replayed_key_is_used_up_too(engine: Engine, plans: Runs[Plan], run: Run[Plan]) -> None:
    run.step("a", write_entry, "a")
    following = again(plans, run)
    assert following.step("a", write_entry, "b") == "a"
    with pytest.raises(StepReused):
        following.step("a", write_entry, "c")
    assert entries(engine) == ["a"]


def test_the_same_key_in_the_next_execution_and_in_another_run_is_fine(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], run: Run[Plan]
) -> None:
    run.step("a", write_entry, "a")
    again(plans, run).step("a", write_entry, "b")
    other = plans.claim(approved_plan(session_factory))
    assert other is not None
    assert other.step("a", write_entry, "c") == "c"
    assert entries(engine) == ["a", "c"]


@pytest.mark.parametrize("verb", ["step", "external"])
def test_a_failed_step_may_be_tried_again_in_place_as_often_as_wanted(
    plans: Runs[Plan], run: Run[Plan], verb: str
) -> None:
    attempts = 0

    def flaky(*_: Any) -> int:
        nonlocal attempts
        attempts += 1
        if attempts < 4:
            raise ValueError(f"attempt {attempts}")
        return attempts

    for attempt in (1, 2, 3):
        with pytest.raises(ValueError, match=f"attempt {attempt}"):
            getattr(run, verb)("flaky", flaky)
        (receipt,) = plans.receipts(run.row.id)
        assert receipt.failure is not None
        assert receipt.failure.message == f"attempt {attempt}"
        assert receipt.result is None
    assert getattr(run, verb)("flaky", flaky) == 4
    (receipt,) = plans.receipts(run.row.id)
    assert (receipt.outcome, receipt.result, receipt.failure) == ("succeeded", 4, None)
    with pytest.raises(StepReused):
        getattr(run, verb)("flaky", flaky)


def test_the_next_execution_replays_the_failure_once_and_may_then_try_again(plans: Runs[Plan], run: Run[Plan]) -> None:
    attempts = 0

    def flaky(session: Session) -> int:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise ValueError("first")
        return attempts

    with pytest.raises(ValueError, match="first"):
        run.step("flaky", flaky)
    following = again(plans, run)
    with pytest.raises(StepFailed) as caught:
        following.step("flaky", flaky)
    assert attempts == 1
    assert caught.value.step == "flaky"
    assert (caught.value.failure.type, caught.value.failure.message) == ("ValueError", "first")
    assert following.step("flaky", flaky) == 2
    assert again(plans, following).step("flaky", flaky) == 2
    assert attempts == 2


def test_a_failure_of_the_effect_that_was_fixed_by_the_retry_leaves_one_effect(
    engine: Engine, plans: Runs[Plan], run: Run[Plan]
) -> None:
    fail = True

    def body(session: Session) -> str:
        write_entry(session, "effect")
        session.flush()
        if fail:
            session.execute(text("SELECT 1 / 0"))
        return "done"

    with pytest.raises(Exception, match="division by zero"):
        run.step("only", body)
    fail = False
    assert run.step("only", body) == "done"
    run.finish()
    assert entries(engine) == ["effect"]


def test_replaying_sends_no_statement(engine: Engine, plans: Runs[Plan], run: Run[Plan]) -> None:
    from tests.support_models import statements

    for position in range(3):
        run.step(position, write_entry, "a")
    run.external("call", lambda: 1)
    following = again(plans, run)
    with statements(engine) as sent:
        assert [following.step(position, write_entry, "b") for position in range(3)] == ["a"] * 3
        assert following.external("call", lambda: 2) == 1
    assert sent == []
    following.finish()
    assert following.row.status is PlanStatus.EXECUTED
