"""An object of a mapped class that goes into the session by statements of ours, and comes out as from a flush.

A flush cannot be told what to do about a conflict, and rolls the caller's transaction back where it meets one. So the
statements are made here, of the values that SQLAlchemy's own unit of work would send.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from sqlalchemy import Column, ColumnElement, Connection, Table, inspect
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import InstanceState, MapperProperty, RelationshipDirection, RelationshipProperty, Session
from sqlalchemy.orm import persistence as unit_of_work
from sqlalchemy.orm.attributes import get_history, set_attribute, set_committed_value
from sqlalchemy.schema import DefaultClause
from sqlalchemy.sql import ClauseElement
from sqlalchemy.sql.elements import literal_column

from sqla_durable.exc import UsageError
from sqla_durable.rows import AnyRow, Rows

_work: Any = unit_of_work


class Insertion:
    """One new object, from a caller's hands to a persistent one.

    :param session: the caller's; nothing in it is flushed here.
    :param connection: the session's.
    :param instance: an object that is in no session.
    """

    def __init__(self, session: Session, connection: Connection, instance: Any) -> None:
        self.instance = instance
        self._session = session
        self._connection = connection
        self._state: InstanceState[Any] = cast("InstanceState[Any]", inspect(instance))
        self._mapper: Any = self._state.mapper
        self._root = Rows(self._mapper.class_)

    def link(self) -> None:
        """Copy the foreign keys of the objects that this one refers to, as a flush would.

        :raises UsageError: where it refers to an object that is not in the session, or is referred to itself.
        """
        for relationship in self._mapper.relationships:
            referred = relationship.direction is not RelationshipDirection.MANYTOONE and not relationship.viewonly
            if referred and self._state.dict.get(relationship.key):
                raise UsageError(
                    f"{self._mapper.class_.__name__}.{relationship.key} cannot be given to a run that is being "
                    "started, as what refers to it is inserted after it; set it on the run that start() returns."
                )
        for relationship, value in self._related():
            state: InstanceState[Any] = cast("InstanceState[Any]", inspect(value))
            if state.session is not self._session or state.identity is None:
                raise UsageError(
                    f"{self._mapper.class_.__name__}.{relationship.key} is {value!r}, which is not in this session; "
                    "add it to the session first."
                )
            for local, remote in relationship.local_remote_pairs or ():
                of_remote: MapperProperty[Any] = state.mapper.get_property_by_column(remote)
                own = self._mapper.get_property_by_column(local).key
                set_attribute(self.instance, own, getattr(value, of_remote.key))

    def foreign_keys(self, attribute: str) -> dict[str, Any]:
        """Return the foreign keys, by attribute, that stand for a relationship."""
        pairs = self._mapper.relationships[attribute].local_remote_pairs
        names = (self._mapper.get_property_by_column(local).key for local, _ in pairs)
        return {name: getattr(self.instance, name) for name in names}

    def begin(self, settled: Sequence[Column[Any]]) -> dict[Column[Any], Any]:
        """Put the object into the session, tell the mapper's listeners, and return the values of ``settled``.

        :param settled: columns of the root table whose values must be known beforehand, defaults and all.
        """
        self._session.add(self.instance)
        self._mapper.dispatch.before_insert(self._mapper, self._connection, self._state)
        self._values = self._collect(self._root)
        for column in settled:
            if column not in self._values and column.default is not None:
                self._values[column] = self._default(column)
        return {column: self._values.get(column, _server_default(column)) for column in settled}

    def insert(self, returning: Sequence[ColumnElement[Any]], *, on_conflict: bool) -> bool:
        """Insert the row of the root table; return whether there is one.

        :param returning: what else the statement returns, for its effect.
        :param on_conflict: whether a conflict with any unique index is no error, but inserts nothing.
        """
        return self._insert(self._root, self._values, returning, on_conflict=on_conflict)

    def finish(self) -> None:
        """Insert the rows of the tables of subclasses, and make the object persistent, as the end of a flush does.

        It is then one that was added in this transaction, and leaves the session if that rolls back.
        """
        for table in self._tables()[1:]:
            rows = Rows(self._mapper.class_, table)
            self._insert(rows, self._collect(rows), (), on_conflict=False)
        self._mapper.dispatch.after_insert(self._mapper, self._connection, self._state)
        cast("Any", self._session)._register_persistent({self._state})

    def discard(self) -> None:
        """Take the object out of the session, and back what its construction did to objects that are in it."""
        if self.instance in self._session:
            self._session.expunge(self.instance)
        for relationship in self._mapper.relationships:
            back = cast("str | None", relationship.back_populates)
            if back is None or relationship.key not in self._state.dict:
                continue
            for value in get_history(self.instance, relationship.key).added:
                if value is not None and cast("InstanceState[Any]", inspect(value)).persistent:
                    self._session.expire(value, [back])

    # the parts

    def _related(self) -> list[tuple[RelationshipProperty[Any], Any]]:
        """The objects that this one refers to, many to one."""
        referring = [
            relationship
            for relationship in self._mapper.relationships
            if relationship.direction is RelationshipDirection.MANYTOONE and not relationship.viewonly
        ]
        held = [(relationship, self._state.dict.get(relationship.key)) for relationship in referring]
        return [(relationship, value) for relationship, value in held if value is not None]

    def _tables(self) -> list[Table]:
        """The tables of the class, the root first."""
        every: Mapping[Table, Any] = self._mapper.base_mapper._sorted_tables
        return [table for table in every if table in self._mapper.tables]

    def _collect(self, rows: Rows[Any]) -> dict[Column[Any], Any]:
        """What a flush would insert into one of the tables, by column: plain values and SQL expressions."""
        states = [(self._state, self._state.dict, self._mapper, self._connection)]
        columns = rows.table.columns
        values: dict[Column[Any], Any] = {}
        for command in _work._collect_insert_commands(rows.table, states):
            values |= {columns[key]: value for key, value in command[2].items()} | command[5]
        return values

    def _default(self, column: Column[Any]) -> Any:
        default: Any = column.default
        if default.is_clause_element or default.is_sequence:
            return default.arg if default.is_clause_element else default.next_value()
        return self._connection.scalar(default)  # of Python; no statement is sent

    def _insert(
        self,
        rows: Rows[Any],
        values: Mapping[Column[Any], Any],
        returning: Sequence[ColumnElement[Any]],
        *,
        on_conflict: bool,
    ) -> bool:
        statement = insert(rows.table).values(dict(values))
        if on_conflict:
            statement = statement.on_conflict_do_nothing()
        plain = {column for column, value in values.items() if not isinstance(value, ClauseElement)}
        unknown = [column for column in rows.attributes() if column.primary_key or column not in plain]
        row: AnyRow = self._connection.execute(statement.returning(*unknown, *returning)).one_or_none()
        if row is not None:
            known = {column: values[column] for column in plain}
            self._show(rows, known | {column: row._mapping[column] for column in unknown})
        return row is not None

    def _show(self, rows: Rows[Any], values: Mapping[Column[Any], Any]) -> None:
        """Have the object hold what was inserted, and a subclass's tables the key they share with this one."""
        loaded: list[str] = []
        for column, attribute in rows.attributes().items():
            held, value = self._state.dict.get(attribute, _ABSENT), values[column]
            if held is not value:
                set_committed_value(self.instance, attribute, value)
            if held is not value and not (held is _ABSENT and value is None):
                loaded.append(attribute)
        if loaded:
            self._mapper.class_manager.dispatch.refresh_flush(self._state, None, loaded)
        for mapper, pairs in self._mapper._table_to_equated[rows.table]:
            for column, equal in pairs:
                value = getattr(self.instance, mapper.get_property_by_column(column).key)
                set_committed_value(self.instance, mapper.get_property_by_column(equal).key, value)


_ABSENT = object()


def _server_default(column: Column[Any]) -> Any:
    """Return the default that the server gives a column, as an SQL expression."""
    default = column.server_default
    if not isinstance(default, DefaultClause):
        return None
    if isinstance(default.arg, str):
        quoted = default.arg.replace("'", "''")
        return literal_column(f"'{quoted}'", column.type)
    return default.arg
