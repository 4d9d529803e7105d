"""The user's objects for claimed runs: made of what the claim itself returned, where that is all there is to load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Generic, cast

from sqlalchemy import Column
from sqlalchemy.orm import ColumnProperty, Session, make_transient_to_detached

from sqla_durable.run import RunRows, RunT

_LAZY = {"select", "raise", "raise_on_sql", "noload", "dynamic", "write_only", True, None}


class Loading(Generic[RunT]):
    """How the rows of one run class become objects.

    :param runs: the rows of the run class.
    :param session: a session as the user's sessionmaker makes it; what listens to it may have a say in each load.
    """

    def __init__(self, runs: RunRows[RunT], session: Session) -> None:
        self._runs = runs
        self._session = session

    @cached_property
    def plain(self) -> bool:
        """Whether a row of the table is all there is to an object: an ORM query would load no more and hide nothing."""
        mapper = self._runs.mapper
        events: Any = self._session.dispatch
        instances: Any = mapper.class_manager.dispatch
        kind = type(self._session)
        return not (
            kind.execute is not Session.execute
            or kind.scalars is not Session.scalars
            or events.do_orm_execute
            or events.loaded_as_persistent
            or instances.load
            or mapper.inherits is not None
            or mapper.polymorphic_on is not None
            or len(mapper.tables) > 1
            or any(relation.lazy not in _LAZY for relation in mapper.relationships)
            or not all(self._is_plain(column) for column in mapper.column_attrs)
        )

    def _is_plain(self, column: ColumnProperty[Any]) -> bool:
        return not column.deferred and len(column.columns) == 1 and column.columns[0] in self._runs.table.c.values()

    def instance(self, load: Callable[[], Mapping[Column[Any], Any]]) -> RunT:
        """Return the detached object of a row.

        :param load: returns the row's values, or raises what the type of one of them has against it.
        """
        values = load()
        manager: Any = self._runs.mapper.class_manager
        made = cast(RunT, manager.new_instance())
        self._runs.show(made, values)  # a table may have columns that the class does not map
        make_transient_to_detached(made)
        return made
