"""Changed code: what is done about a run whose receipts are not those of the code that carries it out."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from typing import Final

_PAUSE: Final = timedelta(minutes=1)
_SPREAD: Final = 0.25


class OnMismatch(StrEnum):
    """What happens where the code of a function and the receipts of a run are at odds."""

    FAIL = "fail"
    """The run fails with an error that names the difference; it can be requeued once the code is right."""
    KEEP = "keep"
    """Receipts answer though the input has changed, and those of steps that are not reached any more are let be."""
    PARK = "park"
    """The run is handed back, and due again after a minute, for a process with other code; no attempt is counted."""


@dataclass(frozen=True)
class Changes:
    """What a function says of its steps as they were before.

    :param on_mismatch: what happens where code and receipts are at odds.
    :param former: the former keys of renamed steps, the latest first.
    """

    on_mismatch: OnMismatch = OnMismatch.FAIL
    former: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    @property
    def keeps(self) -> bool:
        """Whether receipts answer though the code has changed."""
        return self.on_mismatch is OnMismatch.KEEP

    @property
    def parks(self) -> bool:
        """Whether the run is handed back for a process with other code."""
        return self.on_mismatch is OnMismatch.PARK

    def recorded_as(self, step: str, receipts: Collection[str]) -> str:
        """Return the key under which a step has its receipt: a former one if it has been renamed since."""
        if step in receipts:
            return step
        return next((former for former in self.former.get(step, ()) if former in receipts), step)

    def first_key(self, step: str) -> str:
        """Return the key that a step had at first."""
        return self.former.get(step, (step,))[-1]

    def renamed(self, step: str) -> str | None:
        """Return the present key of a step that was given by a former one."""
        return next((present for present, former in self.former.items() if step in former), None)


def pause() -> timedelta:
    """Return for how long a run is left to a process with other code."""
    return _PAUSE * random.uniform(1 - _SPREAD, 1 + _SPREAD)  # noqa: S311 - a spread, no secret
