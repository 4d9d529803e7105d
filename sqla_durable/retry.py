"""How often a run may be started, and how long it waits in between; the waiting is done by the database clock."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

from sqla_durable.exc import ConfigurationError

LONGEST: Final = timedelta(days=36500)
"""Beyond any use, and well within what PostgreSQL can add to the present."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retry:
    """A bounded, spaced number of starts.

    The delay before start *n + 1* is ``backoff * factor ** (n - 1)``, no longer than ``cap``, and then lengthened
    or shortened by up to the share ``jitter`` of itself (`Exponential Backoff and Jitter
    <https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/>`_).

    :param max_attempts: how many times a run may be started. An attempt counts when it is claimed, so a run that
     kills its process each time is bounded too. ``None`` removes the bound.
    :param backoff: the delay after the first attempt; ``timedelta(0)`` for none.
    :param factor: what each further delay is multiplied by; at least 1.
    :param cap: the longest delay before jitter.
    :param jitter: the largest share by which a delay is moved, from 0 to 1.
    :raises ConfigurationError: for a value out of its range.
    """

    max_attempts: int | None = 5
    backoff: timedelta = timedelta(seconds=1)
    factor: float = 2.0
    cap: timedelta = timedelta(minutes=5)
    jitter: float = 0.1

    def __post_init__(self) -> None:
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
    def doublings(self) -> int:
        """After how many multiplications by ``factor`` the cap is reached, so that SQL never overflows."""
        if not self.backoff or self.factor == 1:
            return 0
        return math.ceil(math.log(self.cap / self.backoff, self.factor))


def require_durations(owner: object, **durations: object) -> None:
    """Refuse a number where a :class:`~datetime.timedelta` is wanted.

    :raises ConfigurationError: naming the parameter and the remedy.
    """
    for name, value in durations.items():
        if not isinstance(value, timedelta):
            raise ConfigurationError(
                f"{type(owner).__name__}({name}={value!r}): a duration is a timedelta, as in timedelta(seconds=30)."
            )
