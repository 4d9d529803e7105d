"""How a mixin configures the class it is mixed into: after it was mapped, and whatever else the user declared.

A mixin's ``__table_args__`` is lost when the user writes their own. So a mixin of this library adds its indexes and
constraints to the finished table; there they follow the metadata's naming convention like the user's own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from sqlalchemy import (
    CheckConstraint,
    Column,
    ColumnElement,
    Constraint,
    ForeignKeyConstraint,
    FromClause,
    Index,
    Table,
    event,
    inspect,
)
from sqlalchemy.orm import Mapper
from sqlalchemy.schema import SchemaItem, conv

from sqla_durable.plain_sql import plain_dialect

_INFO = "sqla_durable.index"
_OWNED = "sqla_durable.owned"
_VALUES_OF = "sqla_durable.values_of"
_WRITTEN = re.compile(r"WITH \(([^)]*)\)", re.IGNORECASE)
_PREFIXES: Mapping[type[Any], str] = {CheckConstraint: "ck", ForeignKeyConstraint: "fk", Index: "ix"}


def when_mapped(cls: type[Any], configure: Callable[[Mapper[Any]], None]) -> None:
    """Call ``configure`` with the mapper of ``cls``: now if it is mapped, else as soon as its mapper is constructed.

    Declarative bases map a class within ``__init_subclass__``, metaclasses and decorators after it.
    """
    if "__mapper__" in vars(cls):
        configure(inspect(cls))
    elif not vars(cls).get("__abstract__", False):

        def constructed(mapper: Mapper[Any], _: type[Any]) -> None:
            configure(mapper)

        event.listen(cls, "after_mapper_constructed", constructed, once=True)


def add_check(table: Table, name: str, condition: ColumnElement[bool], values_of: Column[Any] | None = None) -> None:
    """Add a ``CHECK``, named by the metadata's convention if that goes by the names of constraints.

    :param values_of: the column whose values it lists, if it is such a check.
    """
    check = CheckConstraint(condition, name=_name(table, CheckConstraint, name, always=True))
    if values_of is not None:
        check.info[_VALUES_OF] = values_of.name
    _add(table, check)


def add_foreign_key(table: Table, columns: list[Column[Any]], referred: list[Column[Any]], **options: Any) -> None:
    """Add a foreign key, named by the metadata's convention if it has one for foreign keys.

    The columns referred to are given as objects: a name would be resolved in the wrong schema where the metadata, the
    table or a schema translation names another.
    """
    name = _name(table, ForeignKeyConstraint, *(column.name for column in columns))
    _add(table, ForeignKeyConstraint([column.key for column in columns], referred, name=name, **options))


def add_index(
    columns: Sequence[Column[Any]], where: ColumnElement[bool] | None = None, name: str | None = None
) -> None:
    """Add an index, a partial one if need be, named by the metadata's convention if it has one for indexes.

    :param name: what tells it from another index that begins with the same column.
    """
    table = columns[0].table
    named = _name(table, Index, columns[0].name) if name is None else _name(table, Index, name, always=True)
    Index(named, *columns, postgresql_where=where, info={_OWNED: True})


def add_unique_index(name: str, columns: Sequence[Column[Any]], where: ColumnElement[bool], **options: Any) -> None:
    """Add a unique partial index, named by the metadata's convention if that goes by the names of constraints.

    A convention that goes by columns is not asked: an index of the user's may well begin with the same one.
    """
    table = columns[0].table
    named = _name(table, Index, name, always=True)
    index = Index(named, *columns, unique=True, postgresql_where=where, info={_OWNED: True}, **options)
    index.name = _final_name(index)
    notes(table)[f"{_INFO}.{name}"] = index.name


def unique_index(table: Table, name: str) -> str | None:
    """Return by which name PostgreSQL reports the violation of an index that :func:`add_unique_index` added, if any."""
    found: str | None = notes(table).get(f"{_INFO}.{name}")
    return found


def set_fillfactor(table: Table, percent: int) -> None:
    """Leave room in the table's pages for updated rows, unless the user or the kind of table says otherwise."""
    options = table.dialect_options["postgresql"]
    if options.get("partition_by") is not None:
        return
    if "with" in options:
        table.dialect_kwargs["postgresql_with"] = {"fillfactor": percent, **(options["with"] or {})}
    elif options.get("using") is None:
        # SQLAlchemy 2.0 has no storage parameters, but what it writes after USING it writes as it is. A statement
        # sent after CREATE TABLE would not come out of Alembic's autogenerate.
        table.dialect_kwargs["postgresql_using"] = f"heap WITH (fillfactor = {percent})"


def notes(table: FromClause) -> dict[str, Any]:
    """Return where this library notes what it knows of a table; a copy of the table has a copy of the notes.

    They are those of the key's first column: Alembic writes the ``info`` of a table into the migration.
    """
    first: Any = next(iter(table.primary_key))
    notes: dict[str, Any] = first.info
    return notes


def storage_parameters(table: Table) -> dict[str, str]:
    """Return the storage parameters that a table is created with, by name."""
    options = table.dialect_options["postgresql"]
    given = _WRITTEN.search(str(options.get("using") or ""))
    pairs = [pair.split("=") for pair in given[1].split(",")] if given else []
    written = {name.strip(): value.strip() for name, value in pairs}
    with_: Mapping[str, object] = options.get("with") or {}
    return written | {name: str(value) for name, value in with_.items()}


def owned_checks(table: Table) -> dict[str, CheckConstraint]:
    """Return the checks that the mixins added to a table, by the names that PostgreSQL knows them by."""
    checks = (item for item in table.constraints if isinstance(item, CheckConstraint))
    return {str(item.name): item for item in checks if item.info.get(_OWNED)}


def owned_foreign_keys(table: Table) -> dict[str, ForeignKeyConstraint]:
    """Return the foreign keys that the mixins added to a table, by the names that PostgreSQL knows them by."""
    return {str(item.name): item for item in table.foreign_key_constraints if item.info.get(_OWNED)}


def values_of(check: CheckConstraint) -> str | None:
    """Return the name of the column whose values a check lists, if it is such a check."""
    name: str | None = check.info.get(_VALUES_OF)
    return name


def owned_indexes(table: Table) -> dict[str, Index]:
    """Return the indexes that the mixins added to a table, by the names that PostgreSQL knows them by."""
    return {str(_final_name(item)): item for item in table.indexes if item.info.get(_OWNED)}


def root_table(mapper: Mapper[Any]) -> Table:
    """Return the table that a mapper's inheritance hierarchy is rooted in."""
    return cast("Table", mapper.base_mapper.local_table)


def _add(table: Table, constraint: Constraint) -> None:
    table.append_constraint(constraint)
    constraint.info[_OWNED] = True
    constraint.name = _final_name(constraint)


def _final_name(item: Constraint | Index) -> conv:
    """Return the name as PostgreSQL will report it: an error is known by it, and Alembic compares checks by it."""
    name = plain_dialect().identifier_preparer.format_constraint(item)
    return conv(str(name).removeprefix('"').removesuffix('"').replace('""', '"'))


def _name(table: Table, kind: type[SchemaItem], *words: str, always: bool = False) -> str | None:
    """Return the name to give to a constraint or index, so that it ends up deterministic and with one prefix.

    A convention that goes by ``%(constraint_name)s`` needs a bare name, and any other one takes none. A name that no
    convention makes is marked as final, which also has SQLAlchemy shorten it to what PostgreSQL allows.

    :param always: whether even a convention that makes a name without one is given one; two checks of one table may
     well begin with the same column.
    """
    keys = [key for cls in kind.__mro__ for key in (_PREFIXES.get(cls), cls)]
    conventions = cast("Mapping[Any, str]", table.metadata.naming_convention)
    convention = next((conventions[key] for key in keys if key in conventions), None)
    if convention is not None and "constraint_name" in convention:
        return "_".join(words)
    if convention is not None and not always:
        return None
    return conv("_".join([_PREFIXES[kind], table.name, *words]))
