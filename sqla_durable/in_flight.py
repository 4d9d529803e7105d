"""One run in flight for each group: who occupies a group, and what the violation of its index means."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, and_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.sql import ClauseElement

from sqla_durable.exc import RunInFlight
from sqla_durable.mapping import unique_index
from sqla_durable.rows import Ident
from sqla_durable.run import ONE_IN_FLIGHT, RunRows
from sqla_durable.sqlstate import violated


def occupant(runs: RunRows[Any], connection: Connection, group: Mapping[Column[Any], Any]) -> Ident | None:
    """Return the key of the run in flight in a group, if there is one that the connection sees.

    :param group: the value of each column of the group, plain or an SQL expression.
    """
    if not group or any(value is None for value in group.values()):
        return None
    same = (column == value for column, value in group.items())
    row = connection.execute(select(*runs.key).where(*same, runs.in_flight())).first()
    return None if row is None else tuple(row)


def rival(runs: RunRows[Any], connection: Connection, identity: Ident) -> Ident | None:
    """Return the key of the run in flight in the group of another run, if there is one."""
    parameters = runs.parameters(identity)
    row = connection.execute(select(*runs.group).where(runs.matches()), parameters).one_or_none()
    return None if row is None else occupant(runs, connection, dict(zip(runs.group, row, strict=True)))


def occupied(runs: RunRows[Any], identity: Ident | None) -> RunInFlight:
    """Return the error for a group in which another run is in flight."""
    name, group = runs.entity.__name__, ", ".join(runs.lifecycle.one_in_flight or ())
    which = f"another {name}" if identity is None else f"{name} {identity!r}"
    return RunInFlight(
        f"{which} with the same {group} is in flight, and Lifecycle(one_in_flight=...) allows one at a time; start "
        "this one when that has ended.",
        identity,
    )


@contextmanager
def refusing_occupied(runs: RunRows[Any]) -> Generator[None, None, None]:
    """Raise :class:`.RunInFlight` in place of the violation of the group's index."""
    try:
        yield
    except IntegrityError as error:
        if runs.group and violated(error) == unique_index(runs.table, ONE_IN_FLIGHT):
            raise occupied(runs, None) from error
        raise


def same(column: Column[Any], value: Any) -> ColumnElement[bool]:
    """The condition that a column has a value, where nulls are equal; by an index where the value is plain."""
    return column.is_not_distinct_from(value) if isinstance(value, ClauseElement) else and_(column == value)
