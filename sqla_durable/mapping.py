"""How a mixin configures the class it is mixed into: after it was mapped, and whatever else the user declared.

A mixin's ``__table_args__`` is lost when the user writes their own. So a mixin of this library adds its indexes and
constraints to the finished table; there they follow the metadata's naming convention like the user's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from sqlalchemy import CheckConstraint, Column, ColumnElement, ForeignKeyConstraint, Table, event, inspect
from sqlalchemy.orm import Mapper


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


def add_check(table: Table, name: str, condition: ColumnElement[bool]) -> None:
    """Add a ``CHECK``, named by the metadata's convention if it has one for checks."""
    conventional = "ck" in table.metadata.naming_convention or CheckConstraint in table.metadata.naming_convention
    table.append_constraint(CheckConstraint(condition, name=name if conventional else f"ck_{table.name}_{name}"))


def add_foreign_key(table: Table, columns: list[Column[Any]], referred: list[Column[Any]], **options: Any) -> None:
    """Add a foreign key, named by the metadata's convention if it has one for foreign keys.

    The columns referred to are given as objects: a name would be resolved in the wrong schema where the metadata, the
    table or a schema translation names another.
    """
    convention = table.metadata.naming_convention
    conventional = "fk" in convention or ForeignKeyConstraint in convention
    name = None if conventional else "_".join(["fk", table.name, *(column.name for column in columns)])
    table.append_constraint(ForeignKeyConstraint([column.name for column in columns], referred, name=name, **options))


def root_table(mapper: Mapper[Any]) -> Table:
    """Return the table that a mapper's inheritance hierarchy is rooted in."""
    return cast("Table", mapper.base_mapper.local_table)
