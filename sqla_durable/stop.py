"""What a holder's statements tell it about its run: whether it has to stop, and as what it can only land then."""

from __future__ import annotations

from enum import Enum
from typing import Any

from sqlalchemy import CTE, ColumnElement

from sqla_durable.deadline import OUT_OF_TIME, judged
from sqla_durable.rows import AnyRow, AnySelect
from sqla_durable.run import RunRows


class Stop(Enum):
    """As what a run can only land now."""

    CANCELLED = "cancelled"
    """Someone asked for it to be cancelled, which outweighs a deadline."""
    TIMED_OUT = "timed out"
    """It ran past its deadline."""


def reasons(runs: RunRows[Any], *, requested: bool, late: bool) -> Stop | None:
    """Return what a run can only land as, if it has to stop.

    :param requested: whether someone asked for it to be cancelled; of no account where the lifecycle has no such end.
    :param late: whether its deadline has passed.
    """
    if requested and runs.lifecycle.cancelled is not None:
        return Stop.CANCELLED
    return Stop.TIMED_OUT if late else None


def judged_once(runs: RunRows[Any], locking: AnySelect) -> CTE:
    """Return what ``locking`` locks as ``held``; in a class with deadlines, together with whether its has passed."""
    if runs.deadline is None:
        held: CTE = locking.cte("held")
        return held
    held = judged(locking, runs.deadline).cte("held")
    return held.prefix_with("MATERIALIZED")


def late(held: CTE) -> list[ColumnElement[bool]]:
    """Whether the deadline of a ``held`` run has passed, in a class that has deadlines."""
    return [held.c[OUT_OF_TIME]] if OUT_OF_TIME in held.c else []


def told(held: CTE) -> list[ColumnElement[Any]]:
    """The columns by which a statement tells about a ``held`` run that has its ``cancel_requested_at``."""
    return [held.c.cancel_requested_at.is_not(None).label("cancel_requested"), *late(held)]


def names(runs: RunRows[Any]) -> tuple[str, ...]:
    """The names of these columns."""
    return ("cancel_requested",) if runs.deadline is None else ("cancel_requested", OUT_OF_TIME)


def stop_of(runs: RunRows[Any], row: AnyRow) -> Stop | None:
    """Return what a row with these columns tells."""
    return reasons(runs, requested=row.cancel_requested, late=runs.deadline is not None and row.out_of_time)
