"""A deadline: for how long one execution of a run may last before it can only land as timed out."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import ColumnElement, DateTime, Float, Interval, and_, cast, false, func, literal_column, not_, select
from sqlalchemy.dialects.postgresql import INTERVAL
from sqlalchemy.orm import Mapped, Mapper, mapped_column

from sqla_durable import clock
from sqla_durable.beside import require_type, root_rows
from sqla_durable.exc import ConfigurationError
from sqla_durable.lifecycle import Lifecycle
from sqla_durable.mapping import add_check, when_mapped
from sqla_durable.retry import LONGEST
from sqla_durable.rows import AnySelect

OUT_OF_TIME: Final = "out_of_time"
_SORT_ORDER: Final = 1060


class DeadlineMixin:
    """Gives each run of a class a ``max_duration``; NULL is no limit. The lifecycle names a ``timed_out`` status.

    It is mixed in beside :class:`.RunMixin`, as in ``class Order(DeadlineMixin, RunMixin, Base)``. The time is counted
    for each execution, from the claim on, on the database clock: a run that waits for its turn, its backoff or its next
    poll uses none of it. Once it is over the run lands as timed out, whatever its handler does.
    """

    if TYPE_CHECKING:
        max_duration: Mapped[timedelta | None]
    else:
        max_duration = mapped_column(Interval, sort_order=_SORT_ORDER)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        when_mapped(cls, _configure)


def deadline(started_at: ColumnElement[Any], max_duration: ColumnElement[Any]) -> ColumnElement[datetime]:
    """The instant at which an execution's time is over; NULL for one without a limit.

    The duration is added as seconds: PostgreSQL adds the days of an interval by the calendar of the session's time
    zone, in which one of them may last 23 hours, or 25.
    """
    epoch: ColumnElement[Any] = func.extract("epoch", max_duration)
    seconds: ColumnElement[Any] = cast(epoch, Float)
    over: ColumnElement[Any] = started_at + func.make_interval(0, 0, 0, 0, 0, 0, seconds, type_=Interval)
    return cast(over, DateTime(timezone=True))


def judged(locking: AnySelect, over: ColumnElement[Any], *, late: bool | None = None) -> AnySelect:
    """Return what ``locking`` locks, having judged once it is locked whether its deadline has passed.

    A condition of the locking statement itself would be from before its wait, and two expressions that each read the
    clock may answer differently.

    :param over: the deadline of a row.
    :param late: only rows whose deadline has passed, or has not; by default all, with a column ``out_of_time``.
    """
    locked = locking.add_columns(over.label("deadline")).cte("locked")
    passed = func.coalesce(locked.c.deadline <= clock.stamp(), false())
    columns = [column for column in locked.c if column.key != "deadline"]
    if late is None:
        return select(*columns, passed.label(OUT_OF_TIME))
    return select(*columns).where(passed if late else not_(passed))


def _configure(mapper: Mapper[Any]) -> None:
    if (rows := root_rows(mapper, DeadlineMixin)) is None:
        return
    lifecycle: Lifecycle[Any] = rows.entity.__lifecycle__
    if lifecycle.timed_out is None:
        raise ConfigurationError(
            f"{rows.entity.__name__} has DeadlineMixin, and nothing to become; add Lifecycle(timed_out=...)."
        )
    limit = rows.column("max_duration")
    require_type(limit, rows, DeadlineMixin, "an Interval", Interval, INTERVAL)
    nothing, longest = (literal_column(f"interval '{days} days'", Interval()) for days in (0, LONGEST.days))
    add_check(rows.table, "max_duration", and_(limit > nothing, limit <= longest))
