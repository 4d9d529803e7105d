"""Expiry: until when a run that waits, for consent or for its turn, may leave its status for another than expired."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from sqlalchemy import Column, ColumnElement, DateTime, case, event
from sqlalchemy.orm import Mapped, Mapper, mapped_column

from sqla_durable import clock
from sqla_durable.exc import ConfigurationError, UsageError
from sqla_durable.lifecycle import Lifecycle
from sqla_durable.mapping import add_index, when_mapped
from sqla_durable.rows import Rows, constant

_SORT_ORDER = 1020


class ExpiryMixin:
    """An expiry beside :class:`.RunMixin`, on a class whose lifecycle names an ``expired`` status.

    ``expires_at`` is yours to set, with an aware datetime or, better, an SQL expression such as
    ``func.now() + timedelta(hours=1)``; NULL is never. Once it has passed on the database clock, a run that can expire
    leaves its status for the expired one only.
    """

    if TYPE_CHECKING:
        expires_at: Mapped[datetime | None]
    else:
        expires_at = mapped_column(DateTime(timezone=True), sort_order=_SORT_ORDER)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        when_mapped(cls, _refuse_elsewhere)


def configure(rows: Rows[Any], status: Column[Any], lifecycle: Lifecycle[Any]) -> None:
    """Configure a run class for expiry, if its lifecycle has any.

    :raises ConfigurationError: where the lifecycle and the class do not agree on that.
    """
    name, mixed_in = rows.entity.__name__, issubclass(rows.entity, ExpiryMixin)
    if lifecycle.expired is None:
        if mixed_in:
            raise ConfigurationError(f"{name} has ExpiryMixin, and nothing to become; add Lifecycle(expired=...).")
        return
    if not mixed_in:
        raise ConfigurationError(f"{name} names Lifecycle(expired=...), and has no expiry; add ExpiryMixin to it.")
    event.listen(rows.entity.expires_at, "set", _checked, propagate=True, retval=True)
    add_index([rows.column("expires_at")], can_expire(status, lifecycle))


def can_expire(status: Column[Any], lifecycle: Lifecycle[Any]) -> ColumnElement[bool]:
    """The condition that a run is in a status from which it can expire."""
    return status.in_([constant(status, each) for each in sorted(lifecycle.expirable)])


def until(
    rows: Rows[Any], status: Column[Any], lifecycle: Lifecycle[Any], sources: Collection[StrEnum]
) -> ColumnElement[Any] | None:
    """Return until when a run may leave one of ``sources`` for another status than expired.

    :return: an expression, NULL for a run that always may; or None where each of them may.
    """
    expirable = lifecycle.expirable.intersection(sources)
    if not expirable:
        return None
    expires_at = rows.column("expires_at")
    return expires_at if expirable.issuperset(sources) else case((can_expire(status, lifecycle), expires_at))


def refuse_naive(value: object) -> None:
    """Refuse a datetime without a time zone, which would be taken for one in the time zone of the database session."""
    if isinstance(value, datetime) and value.tzinfo is None:
        raise UsageError(
            f"expires_at={value!r} has no time zone; pass an aware datetime, or better an SQL expression such as "
            "func.now() + timedelta(hours=1)."
        )


def _checked(_: object, value: object, *__: object) -> object:
    refuse_naive(value)
    return clock.within(value)


def _refuse_elsewhere(mapper: Mapper[Any]) -> None:
    cls, parent = mapper.class_, mapper.inherits
    if not hasattr(cls, "__lifecycle__"):
        raise ConfigurationError(f"{cls.__name__}: ExpiryMixin goes beside RunMixin, on a class with a __lifecycle__.")
    if parent is not None and not mapper.concrete and not issubclass(parent.class_, ExpiryMixin):
        raise ConfigurationError(
            f"{cls.__name__}: ExpiryMixin goes on the class that owns the root table, here "
            f"{mapper.base_mapper.class_.__name__}, not on one that inherits from it."
        )
