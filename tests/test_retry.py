"""How often a run may be started and how long it waits in between: what may be declared."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from sqla_durable import ConfigurationError, Retry


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_attempts": 0}, r"Retry\(max_attempts=0\): at least 1, or None"),
        ({"max_attempts": -1}, r"Retry\(max_attempts=-1\)"),
        ({"backoff": timedelta(seconds=-1)}, "a delay cannot be negative"),
        ({"backoff": timedelta(minutes=6)}, "must not be shorter than backoff=0:06:00"),
        ({"cap": timedelta(0)}, "must not be shorter than backoff"),
        ({"factor": 0.5}, r"Retry\(factor=0.5\): a finite number of at least 1"),
        ({"factor": float("inf")}, "a finite number"),
        ({"factor": float("nan")}, "a finite number"),
        ({"jitter": -0.1}, "a share from 0 to 1"),
        ({"jitter": 1.5}, "a share from 0 to 1"),
        ({"jitter": float("nan")}, "a share from 0 to 1"),
        ({"cap": timedelta.max}, r"Retry\(cap="),
    ],
    ids=str,
)
def test_a_value_out_of_its_range_is_refused_and_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Retry(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"max_attempts": 1},
        {"max_attempts": None},
        {"backoff": timedelta(0), "cap": timedelta(0)},
        {"factor": 1},
        {"jitter": 0},
        {"jitter": 1},
        {"backoff": timedelta(minutes=5)},
    ],
    ids=str,
)
def test_the_ends_of_a_range_are_within_it(options: dict[str, Any]) -> None:
    Retry(**options)


def test_the_growth_of_a_delay_is_bounded_by_when_it_reaches_its_cap() -> None:
    assert Retry(backoff=timedelta(seconds=1), cap=timedelta(seconds=8)).doublings == 3
    assert Retry(backoff=timedelta(seconds=1), cap=timedelta(seconds=9)).doublings == 4
    assert Retry(backoff=timedelta(seconds=1), cap=timedelta(seconds=1)).doublings == 0
    assert Retry(backoff=timedelta(0)).doublings == 0
    assert Retry(factor=1).doublings == 0
