"""The database clock as SQL. No Python clock value ever reaches a lease, backoff, expiry or schedule column.

PostgreSQL has three clocks (`Current Date/Time
<https://www.postgresql.org/docs/current/functions-datetime.html#FUNCTIONS-DATETIME-CURRENT>`_). ``now()`` is the
transaction's start, which a step that waited for its lock has long left behind. A *stamp* is therefore taken from
``clock_timestamp()``, in a statement that runs after the lock; a *comparison* uses ``statement_timestamp()``, which
is stable within a statement and can use an index, as the volatile ``clock_timestamp()`` cannot.

Tests move a run's times rather than the clock: see :mod:`sqla_durable.testing`.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from sqlalchemy import ColumnElement, DateTime, Float, Interval, cast, func, literal

from sqla_durable.retry import LONGEST, Retry

ValueT = TypeVar("ValueT")
# A year from the ends of what Python's datetime can hold, so that no time zone makes an instant one that it cannot.
_FIRST: Final = datetime(2, 1, 1, tzinfo=UTC)
_LAST: Final = datetime(9999, 1, 1, tzinfo=UTC)


def stamp() -> ColumnElement[datetime]:
    """The instant to write into a row."""
    return func.clock_timestamp(type_=DateTime(timezone=True))


def now() -> ColumnElement[datetime]:
    """The instant to compare a row with."""
    return func.statement_timestamp(type_=DateTime(timezone=True))


def within(value: ValueT) -> ValueT | datetime:
    """Return an aware datetime as one that can be read back in the time zone of any session; anything else as it is.

    One at the end of what Python can hold is stored, but the driver cannot load it any more, nor whatever stands beside
    it in its row.
    """
    if isinstance(value, datetime) and value.utcoffset() is not None:
        instant: datetime = value
        return min(max(instant, _FIRST), _LAST)
    return value


def ahead(duration: timedelta) -> ColumnElement[datetime]:
    """The instant to write that is so far ahead, or behind; no further than PostgreSQL can add to the present."""
    return stamp() + interval(min(max(duration, -LONGEST), LONGEST))


def interval(duration: timedelta) -> ColumnElement[timedelta]:
    """A duration as an SQL constant, exact to the microsecond."""
    return cast(f"{duration.days} days {duration.seconds} seconds {duration.microseconds} microseconds", Interval)


def backoff(retry: Retry, attempts: ColumnElement[int]) -> ColumnElement[timedelta]:
    """The delay before the next start of a run that has been started ``attempts`` times."""
    exponent = func.least(func.greatest(attempts - 1, 0), retry.doublings)
    delay: ColumnElement[Any] = func.least(
        literal(retry.backoff.total_seconds(), Float) * func.power(literal(retry.factor, Float), exponent),
        literal(retry.cap.total_seconds(), Float),
        type_=Float,
    )
    chance: Any = func.random(type_=Float)
    spread = 1 + literal(retry.jitter, Float) * (2 * chance - 1)
    return func.make_interval(0, 0, 0, 0, 0, 0, delay * spread, type_=Interval)
