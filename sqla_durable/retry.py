"""How often a run may be started, and how long it waits in between; the waiting is done by the database clock."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeAlias, cast

from sqla_durable.exc import ConfigurationError, RetryableError

RetryPolicy: TypeAlias = Callable[[Exception], bool | timedelta]
RetryOn: TypeAlias = type[Exception] | tuple[type[Exception], ...] | RetryPolicy

LONGEST: Final = timedelta(days=36500)
"""Beyond any use, and well within what PostgreSQL can add to the present."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """Which failures are tried again: a bounded, spaced number of starts.

    The delay before start *n + 1* is ``backoff * factor ** (n - 1)``, no longer than ``cap``, and then lengthened
    or shortened by up to the share ``jitter`` of itself (`Exponential Backoff and Jitter
    <https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/>`_).

    :param on: the failures that are retryable: a type of exception, a tuple of types, or a callable that is asked about
     each one. It answers with a bool, or with the delay to wait for, as an HTTP ``Retry-After`` names it. A
     :class:`.RetryableError` always is, and no other error of this library ever. An exception group is retryable where
     all that is in it is.
    :param max_attempts: how many times a run may be started. An attempt counts when it is claimed, so a run that
     kills its process each time is bounded too. ``None`` removes the bound.
    :param backoff: the delay after the first attempt; ``timedelta(0)`` for none.
    :param factor: what each further delay is multiplied by; at least 1.
    :param cap: the longest delay before jitter.
    :param jitter: the largest share by which a delay is moved, from 0 to 1.
    :raises ConfigurationError: for a value out of its range.
    """

    on: RetryOn = RetryableError
    max_attempts: int | None = 5
    backoff: timedelta = timedelta(seconds=1)
    factor: float = 2.0
    cap: timedelta = timedelta(minutes=5)
    jitter: float = 0.1

    def __post_init__(self) -> None:
        _check_policy(self.on, self.kinds)
        require_durations(self, backoff=self.backoff, cap=self.cap)
        if self.max_attempts is not None and self.max_attempts < 1:
            raise ConfigurationError(f"Retry(max_attempts={self.max_attempts}): at least 1, or None for no bound.")
        if self.backoff < timedelta(0):
            raise ConfigurationError(f"Retry(backoff={self.backoff}): a delay cannot be negative.")
        if not self.backoff <= self.cap <= LONGEST:
            raise ConfigurationError(
                f"Retry(cap={self.cap}): must not be shorter than backoff={self.backoff}, nor longer than "
                f"{LONGEST.days} days."
            )
        if not (math.isfinite(self.factor) and self.factor >= 1):
            raise ConfigurationError(f"Retry(factor={self.factor}): a finite number of at least 1.")
        if not 0 <= self.jitter <= 1:
            raise ConfigurationError(f"Retry(jitter={self.jitter}): a share from 0 to 1.")

    @property
    def kinds(self) -> tuple[type[Exception], ...] | None:
        """The types of exception that ``on`` names; None where it is asked instead."""
        on: object = self.on
        if isinstance(on, tuple):
            return cast("tuple[type[Exception], ...]", on)
        return (cast("type[Exception]", on),) if isinstance(on, type) else None

    @property
    def doublings(self) -> int:
        """After how many multiplications by ``factor`` the cap is reached, so that SQL never overflows."""
        if not self.backoff or self.factor == 1:
            return 0
        return math.ceil(math.log(self.cap / self.backoff, self.factor))


def _check_policy(on: object, kinds: tuple[object, ...] | None) -> None:
    """Refuse what could not decide, or would keep a :class:`Retry` from being a value."""
    for kind in kinds or ():
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise ConfigurationError(f"Retry(on={on!r}): {kind!r} is not a subclass of Exception.")
    if kinds is None and (not callable(on) or inspect.iscoroutinefunction(on)):
        raise ConfigurationError(
            f"Retry(on={on!r}): a type of exception, a tuple of them, or a plain function of the exception that "
            "returns a bool or a timedelta."
        )
    try:
        hash(on)
    except TypeError as error:
        raise ConfigurationError(f"Retry(on={on!r}): must be hashable; pass a function.") from error


def require_durations(owner: object, **durations: object) -> None:
    """Refuse a number where a :class:`~datetime.timedelta` is wanted.

    :raises ConfigurationError: naming the parameter and the remedy.
    """
    for name, value in durations.items():
        if not isinstance(value, timedelta):
            raise ConfigurationError(
                f"{type(owner).__name__}({name}={value!r}): a duration is a timedelta, as in timedelta(seconds=30)."
            )
