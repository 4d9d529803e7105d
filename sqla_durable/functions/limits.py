"""How many runs of a function may be live at a time, and how many may be started in a time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Final, cast

from sqla_durable.exc import ConfigurationError
from sqla_durable.retry import LONGEST, require_durations

MOST: Final = 2**31 - 1
_MICROSECOND: Final = timedelta(microseconds=1)


@dataclass(frozen=True, slots=True)
class Rate:
    """How many runs of a function may be started in a time, by all workers together.

    It is a bucket of ``burst`` tokens. A start takes one, and one comes back every ``per / limit``. A run that is
    started again, after a failure or a wait, takes another one.

    :param limit: how many.
    :param per: in what time; at least a microsecond for each.
    :param burst: how many may be started at once after a quiet time; by default ``limit``. With 1 they are evenly
     spaced.
    :raises ConfigurationError: for a value out of its range.
    """

    limit: int
    per: timedelta
    burst: int | None = None

    def __post_init__(self) -> None:
        _require_count(f"Rate(limit={self.limit!r})", self.limit)
        if self.burst is not None:
            _require_count(f"Rate(burst={self.burst!r})", self.burst)
        require_durations(self, per=self.per)
        if self.per < self.limit * _MICROSECOND:
            raise ConfigurationError(f"Rate(per={self.per}): at least a microsecond for each of {self.limit}.")
        if self.per > LONGEST or self.pace * self.tokens > LONGEST // _MICROSECOND:
            raise ConfigurationError(f"Rate(per={self.per}): so slow that a burst takes over {LONGEST.days} days.")

    @property
    def pace(self) -> int:
        """After how many microseconds a token comes back; rounded up, so that the rate is never exceeded."""
        return -(-(self.per // _MICROSECOND) // self.limit)

    @property
    def tokens(self) -> int:
        """How many tokens there are in all."""
        return self.limit if self.burst is None else self.burst


@dataclass(frozen=True, slots=True)
class Limits:
    """What one function is limited to; see :func:`limits_of`."""

    concurrency: int | None = None
    concurrency_per_tenant: int | None = None
    rate: Rate | None = None


UNLIMITED: Final = Limits()


def limits_of(function: str, concurrency: int | None, concurrency_per_tenant: int | None, rate: Rate | None) -> Limits:
    """Return the limits that a function was declared with.

    :param concurrency: how many of its runs may be live.
    :param concurrency_per_tenant: how many of one tenant.
    :param rate: how many may be started in a time.
    :raises ConfigurationError: for a value out of its range.
    """
    require_concurrency(f"function {function!r}: concurrency", concurrency)
    require_concurrency(f"function {function!r}: concurrency_per_tenant", concurrency_per_tenant)
    if rate is not None and not isinstance(cast(object, rate), Rate):
        raise ConfigurationError(f"function {function!r}: rate={rate!r} is no Rate(100, per=timedelta(minutes=1)).")
    return Limits(concurrency, concurrency_per_tenant, rate)


def require_concurrency(name: str, value: int | None) -> None:
    """Refuse what cannot be a number of live runs.

    :raises ConfigurationError: naming the parameter and the remedy.
    """
    if value is not None:
        _require_count(f"{name}={value!r}", value, ", or None for any number")


def _require_count(said: str, value: object, otherwise: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST:
        raise ConfigurationError(f"{said}: a whole number from 1 to {MOST}{otherwise}.")
