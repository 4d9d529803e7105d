"""The rows of one mapped class, below the ORM: their keys, their columns, and writes that touch nothing else.

The library's own statements are Core statements on the class's table. ORM statements would pass through the user's
loader criteria, eager joins, ``onupdate`` and ``version_id_col``, each of which can hide the row or change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, Generic, TypeAlias, TypeVar, cast

from sqlalchemy import (
    BindParameter,
    Column,
    ColumnElement,
    Dialect,
    Integer,
    Table,
    Update,
    and_,
    bindparam,
    inspect,
    literal_column,
    or_,
    select,
    tuple_,
    update,
)
from sqlalchemy.dialects.postgresql.base import PGDialect
from sqlalchemy.orm import InstanceState, Mapper, Session, class_mapper
from sqlalchemy.orm.attributes import set_committed_value
from sqlalchemy.orm.exc import UnmappedColumnError
from sqlalchemy.types import TypeEngine

from sqla_durable import clock
from sqla_durable.exc import ConfigurationError, UsageError

EntityT = TypeVar("EntityT")
Ident = tuple[Any, ...]
# Generic in one argument in SQLAlchemy 2.0 and in any number in 2.1, so that no spelling suits both.
AnyRow: TypeAlias = Any
AnySelect: TypeAlias = Any


def bound(name: str, type_: TypeEngine[Any]) -> BindParameter[Any]:
    """Return a parameter that :func:`arguments` gives a value.

    It has a prefix of ours: SQLAlchemy reserves the names of a table's columns in its ``UPDATE`` and ``INSERT``.
    """
    return bindparam(f"durable_{name}", type_=type_)


def at_most(rows: int) -> ColumnElement[int]:
    """Return a number of rows as a constant of the SQL text.

    With a limit that it does not know, a generic plan expects a tenth of the table and reads all of it.
    """
    return literal_column(str(int(rows)), Integer())


def arguments(**values: Any) -> dict[str, Any]:
    """Return values for the parameters that :func:`bound` made."""
    return {f"durable_{name}": value for name, value in values.items()}


def among(key: Sequence[Column[Any]], identities: Sequence[Ident]) -> ColumnElement[bool]:
    """The condition that the columns of a key have one of these values."""
    if len(key) == 1:
        return key[0].in_([identity[0] for identity in identities])
    return tuple_(*key).in_(identities)


def constant(column: ColumnElement[Any], value: object) -> ColumnElement[Any]:
    """Return ``value`` as a constant in the SQL text, where a partial index's predicate can match it.

    A bound parameter would not match it once PostgreSQL chooses a generic plan.
    """
    make: Any = PGDialect
    dialect = make(paramstyle="named")  # with the style of the driver a percent sign would be doubled twice
    process = column.type.dialect_impl(dialect).literal_processor(dialect)
    if process is None:
        raise ConfigurationError(f"{value!r} of column {column!r} cannot be written as a constant in SQL.")
    return literal_column(process(value), column.type)


def _unchanged(value: Any) -> Any:
    return value


class Rows(Generic[EntityT]):
    """The rows of a mapped class in one of its tables.

    :param entity: the mapped class; where it is a subclass, only its own rows are meant.
    :param table: the table; by default the one its inheritance hierarchy is rooted in.
    """

    def __init__(self, entity: type[EntityT], table: Table | None = None) -> None:
        self.entity = entity
        self.mapper: Mapper[EntityT] = class_mapper(entity, configure=False)
        root = cast(Table, self.mapper.base_mapper.local_table)
        self.table = root if table is None else table
        key: Any = self.mapper.base_mapper.primary_key if self.table is root else self.table.primary_key
        self.key: tuple[Column[Any], ...] = tuple(key)
        self.key_names = tuple(f"key_{position}" for position in range(len(self.key)))

    def column(self, attribute: str) -> Column[Any]:
        """Return the column that ``attribute`` is mapped to in this table."""
        for column in self.table.columns:
            if attribute == self._attributes.get(column):
                return column
        raise UsageError(
            f"{self.entity.__name__} maps no attribute {attribute!r} to a column of table {self.table.name!r}; "
            "only columns of that table can be set in the same statement."
        )

    def declared(self, names: Sequence[str], where: str) -> tuple[Column[Any], ...]:
        """Return the columns of attributes that a class names in its declaration.

        :param where: the place in which it names them, for the error.
        :raises ConfigurationError: where one is not mapped to a column of this table.
        """
        mapped = set(self._attributes.values())
        if unknown := [name for name in names if name not in mapped]:
            raise ConfigurationError(
                f"{self.entity.__name__}: {where} names {', '.join(map(repr, unknown))}, which is no attribute that is "
                f"mapped to a column of table {self.table.name!r}."
            )
        return tuple(self.column(name) for name in names)

    def attribute(self, column: Column[Any]) -> str:
        """Return the attribute that ``column`` is mapped to."""
        return self._attributes[column]

    def attributes(self) -> Mapping[Column[Any], str]:
        """Return the attribute of each column of this table that the class maps."""
        return self._attributes

    @cached_property
    def _attributes(self) -> dict[Column[Any], str]:
        # Not mapper.attrs, which would configure every mapper, while a class may refer to one that is defined later.
        attributes: dict[Column[Any], str] = {}
        for column in self.table.columns:
            with suppress(UnmappedColumnError):  # a sibling's in the same table
                attributes[column] = self.mapper.get_property_by_column(column).key
        return attributes

    # identity

    def identity(self, ident: object) -> Ident:
        """Return the primary key, as a tuple, that ``ident`` stands for.

        :param ident: a primary key as :meth:`~sqlalchemy.orm.Session.get` takes it (a value, a tuple, or a mapping
         by attribute), or an object of the mapped class.
        """
        if isinstance(ident, self.entity):
            state = cast(InstanceState[Any], inspect(ident, raiseerr=True))
            if state.identity is None:
                raise UsageError(f"{ident!r} is not in the database yet; add it to a session and flush it first.")
            return tuple(state.identity)
        if isinstance(ident, Mapping):
            by_attribute = cast(Mapping[str, Any], ident)
            values: Sequence[Any] = [by_attribute.get(self.attribute(column)) for column in self.key]
        else:
            values = cast(Sequence[Any], ident) if isinstance(ident, tuple | list) else (ident,)
        if len(values) != len(self.key) or any(value is None for value in values):
            wanted = ", ".join(self.attribute(column) for column in self.key)
            raise UsageError(f"{ident!r} does not identify a {self.entity.__name__}; its key is ({wanted}).")
        return tuple(values)

    def parameters(self, identity: Ident) -> dict[str, Any]:
        """Return what :meth:`matches` is executed with."""
        return arguments(**dict(zip(self.key_names, identity, strict=True)))

    def driver_parameters(self, dialect: Dialect) -> Callable[[Ident], dict[str, Any]]:
        """Return the function that gives what :class:`.Prepared` executes a statement made of :meth:`matches` with."""
        names = [f"durable_{name}" for name in self.key_names]
        processors = [column.type.dialect_impl(dialect).bind_processor(dialect) or _unchanged for column in self.key]

        def parameters(identity: Ident) -> dict[str, Any]:
            return {name: process(value) for name, process, value in zip(names, processors, identity, strict=True)}

        return parameters

    def binds(self) -> list[ColumnElement[Any]]:
        """Return a bound parameter for each key column."""
        return [bound(name, column.type) for name, column in zip(self.key_names, self.key, strict=True)]

    def matches(self) -> ColumnElement[bool]:
        """The condition that a row has the key given by :meth:`parameters`, and belongs to the class."""
        pairs = zip(self.key, self.binds(), strict=True)
        return and_(*(column == bind for column, bind in pairs), *self.of_class())

    def of_class(self) -> list[ColumnElement[bool]]:
        """The conditions, if any, that a row belongs to the class and not to a sibling in the same table."""
        if self.mapper.inherits is None:
            return []
        if self.mapper.polymorphic_on is None:
            raise ConfigurationError(
                f"{self.entity.__name__} inherits from a mapped class without polymorphic_on, so its rows cannot be "
                "told from those of its siblings; declare polymorphic_on, or use the base class."
            )
        kind = self.mapper.polymorphic_on
        return [
            or_(*(kind == constant(kind, mapper.polymorphic_identity) for mapper in self.mapper.self_and_descendants))
        ]

    # writing

    def lock(self, *conditions: ColumnElement[bool], skip_locked: bool = False) -> AnySelect:
        """Select and lock the rows that meet the conditions, as keys named ``key_0``, ``key_1``, ...

        The lock is ``FOR NO KEY UPDATE``: ``FOR UPDATE`` would make other sessions wait that insert rows which refer
        to this one by a foreign key (`Row-Level Locks
        <https://www.postgresql.org/docs/current/explicit-locking.html#LOCKING-ROWS>`_).
        """
        keys = [column.label(name) for column, name in zip(self.key, self.key_names, strict=True)]
        return (
            select(*keys)
            .where(*conditions, *self.of_class())
            .with_for_update(key_share=True, of=self.table, skip_locked=skip_locked)
        )

    def update(
        self,
        locking: AnySelect,
        values: Mapping[Column[Any], Any],
        name: str = "target",
        *,
        until: ColumnElement[Any] | None = None,
    ) -> Update:
        """Update the rows that ``locking``, made by :meth:`lock`, selected.

        The assignments stand in the outer statement, where they are evaluated after the lock: in a plain conditional
        ``UPDATE`` that waited for a row that was only locked, ``clock_timestamp()`` is from before the wait. The CTE
        is materialised because a plan may otherwise run a ``LIMIT ... FOR UPDATE`` more than once and update too
        many rows. Columns with an ``onupdate`` are set to themselves, as it would fire here too.

        :param name: the CTE's, where a statement has several.
        :param until: an instant of the row that must lie ahead, or be NULL, once the row is locked. The CTE returns
         what it has locked, and its output is filtered after the wait; its own conditions are from before it, and a
         condition on the table in the outer statement may be, too.
        """
        if until is not None:
            locking = locking.add_columns(until.label("until"))
        target = locking.cte(name).prefix_with("MATERIALIZED")
        pairs = zip(self.key, self.key_names, strict=True)
        return (
            update(self.table)
            .values({**self.untouched(), **values})
            .where(*(column == target.c[name] for column, name in pairs))
            .where(*([] if until is None else [or_(target.c.until.is_(None), target.c.until > clock.stamp())]))
        )

    def untouched(self) -> dict[Column[Any], Any]:
        """The assignments that keep each column's ``onupdate`` from firing: the column itself."""
        return {column: column for column in self.table.columns if column.onupdate is not None}

    # loaded objects

    def loaded(self, session: Session, row: AnyRow | None, identity: Ident) -> EntityT | None:
        """Return the object of a row if the session has it; without a statement.

        :param row: a row with the key columns, if there is one: the caller's key may be a value that the column's
         type converts.
        """
        key_of_row = identity if row is None else tuple(row._mapping[column] for column in self.key)
        key = self.mapper.identity_key_from_primary_key(key_of_row)
        return session.identity_map.get(key)

    def show(self, instance: EntityT, row: Mapping[Any, Any]) -> None:
        """Make a loaded object, in a session or detached, show what a row returned; without a statement."""
        for column in self.table.columns:
            if column in row and column in self._attributes:
                set_committed_value(instance, self._attributes[column], row[column])
