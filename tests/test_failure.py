"""A failure is written into a real JSONB value, whatever the exception holds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from typing import Any

import psycopg
import pytest

from sqla_durable.failure import Failure


class Broken(Exception):
    def __str__(self) -> str:
        raise self.args[0]


class Hostile(Exception):
    @property
    def __cause__(self) -> BaseException:  # type: ignore[override]
        raise LookupError


class Outer:
    class Inner(Exception):
        pass


def raised(make: Callable[[], BaseException]) -> BaseException:
    try:
        raise make()
    except BaseException as error:  # noqa: BLE001  the failure of any kind
        return error


def chained() -> BaseException:
    try:
        try:
            raise KeyError("the cause")
        except KeyError as cause:
            raise ValueError("the effect") from cause
    except ValueError as error:
        return error


def endless() -> BaseException:
    def recurse() -> None:
        recurse()

    try:
        recurse()
    except RecursionError as error:
        return error
    raise AssertionError


def circular() -> BaseException:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    return one


def deep_group() -> BaseException:
    error: Exception = ValueError("innermost")
    for _ in range(2_000):
        error = ExceptionGroup("group", [error])
    return error


EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "plain": lambda: ValueError("no"),
    "raised": lambda: raised(lambda: ValueError("no")),
    "empty": ValueError,
    "NUL": lambda: raised(lambda: ValueError("a\0b")),
    "surrogate": lambda: raised(lambda: ValueError("a\ud800b\udcff")),
    "note": lambda: raised(lambda: _noted("\0\udc80")),
    "str raises": lambda: raised(lambda: Broken(ValueError())),
    "str recurses": lambda: raised(lambda: Broken(RecursionError())),
    "huge": lambda: raised(lambda: ValueError("head" + "\0" * 200_000 + "tail")),
    "group": lambda: raised(lambda: ExceptionGroup("g", [ValueError("in\0side")])),
    "deep group": deep_group,
    "deep group that is broken": lambda: raised(lambda: ExceptionGroup("g", [Broken(ValueError())])),
    "hostile": lambda: raised(Hostile),
    "chained": chained,
    "circular": circular,
    "recursion": endless,
    "interrupt": lambda: raised(KeyboardInterrupt),
    "surrogate in the module's name": lambda: type("Bad", (Exception,), {"__module__": "m\udc80"})("no"),
}


def _noted(note: str) -> BaseException:
    error = ValueError("no")
    error.add_note(note)
    return error


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_every_failure_is_stored_and_read_back(name: str, database_url: str) -> None:
    failure = Failure.of(EXCEPTIONS[name]())
    with psycopg.connect(database_url.replace("+psycopg", "")) as connection:
        row = connection.execute("SELECT %s::jsonb", [json.dumps(failure.to_json())]).fetchone()
    assert row is not None
    assert Failure.from_json(row[0]) == failure
    assert len(failure.message) < 10_100
    assert len(failure.traceback or "") < 50_100


def test_it_holds_type_message_and_traceback() -> None:
    failure = Failure.of(raised(lambda: ValueError("no")))
    assert (failure.type, failure.message) == ("ValueError", "no")
    assert failure.traceback is not None
    assert failure.traceback.startswith("Traceback (most recent call last):")
    assert "in raised" in failure.traceback
    assert failure.traceback.endswith("ValueError: no\n")


def test_a_type_that_is_no_builtin_is_named_with_its_module_and_class() -> None:
    assert Failure.of(Outer.Inner()).type == f"{__name__}.Outer.Inner"


def test_what_jsonb_cannot_hold_is_escaped() -> None:
    assert Failure.of(ValueError("a\0b\ud800\udcffc\\x00")).message == r"a\x00b\ud800\udcffc\x00"


def test_a_message_that_cannot_be_had_says_so() -> None:
    assert Failure.of(Broken(KeyError())).message == "<str() of it raised KeyError>"


def test_a_long_message_keeps_head_and_tail_and_says_what_was_cut() -> None:
    message = Failure.of(ValueError("head" + "x" * 20_000 + "tail")).message
    assert message.startswith("headx")
    assert message.endswith("xtail")
    assert "[... 10,008 characters cut ...]" in message


def test_a_message_at_the_limit_is_kept_whole() -> None:
    assert Failure.of(ValueError("x" * 10_000)).message == "x" * 10_000


def test_a_long_traceback_keeps_head_and_tail() -> None:
    traceback = Failure.of(raised(lambda: ValueError("x" * 100_000 + "tail"))).traceback or ""
    assert traceback.startswith("Traceback (most recent call last):")
    assert traceback.endswith("xtail\n")
    assert " characters cut ...]" in traceback


def test_causes_and_groups_are_in_the_traceback() -> None:
    chain = Failure.of(chained()).traceback or ""
    assert "KeyError: 'the cause'" in chain
    assert "ValueError: the effect" in chain
    group = Failure.of(ExceptionGroup("g", [ValueError("first"), KeyError("second")])).traceback or ""
    assert "ValueError: first" in group
    assert "KeyError: 'second'" in group


def test_an_exception_that_cannot_be_formatted_keeps_its_frames() -> None:
    traceback = Failure.of(raised(Hostile)).traceback or ""
    assert "in raised" in traceback
    assert traceback.endswith("raised LookupError>\n")


def test_keys_of_a_later_version_are_passed_over() -> None:
    stored: dict[str, Any] = {"type": "ValueError", "message": "no", "later": 1}
    assert Failure.from_json(stored) == Failure("ValueError", "no", None)


def test_it_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Failure("a", "b", None).type = "c"  # type: ignore[misc]
