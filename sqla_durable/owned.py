"""A table whose rows each belong to a run: the run's key columns in it, and the foreign key made of them."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from sqlalchemy import Column, ColumnElement, Table, inspect
from sqlalchemy.orm import mapped_column

from sqla_durable.exc import ConfigurationError
from sqla_durable.lease import LeaseMixin
from sqla_durable.mapping import add_foreign_key, root_table
from sqla_durable.plain_sql import shortened
from sqla_durable.rows import Rows

_SORT_ORDER = -2


def of_run_class(mixin: type[Any], run: Any, what: str) -> type[Any]:
    """Return a mixin with the key columns of ``run``, as ``ReceiptMixin[Plan]`` makes one.

    :param mixin: what is subscribed.
    :param what: what its rows are, for the error.
    """
    if isinstance(run, TypeVar):
        return mixin
    mapper = cast(Any, inspect(run, raiseerr=False)) if isinstance(run, type) else None
    if mapper is None or not issubclass(run, LeaseMixin):
        raise ConfigurationError(
            f"{mixin.__name__}[{run!r}]: not a mapped class with RunMixin. Define the run class above its {what}, and "
            "give the class itself rather than its name."
        )
    table = root_table(mapper)
    key = {
        name: mapped_column(name, column.type, primary_key=True, autoincrement=False, sort_order=_SORT_ORDER)
        for column in mapper.base_mapper.primary_key
        if (name := _key_name(table, column))
    }
    return type(
        f"{mixin.__name__}[{getattr(run, '__name__', run)}]", (mixin,), {"__abstract__": True, "__run__": run, **key}
    )


class OwnedRows(Rows[Any]):
    """The rows of such a table.

    :param entity: the mapped class.
    """

    def __init__(self, entity: type[Any]) -> None:
        super().__init__(entity)
        self.runs: Rows[Any] = Rows(entity.__run__)
        self.run_key: tuple[Column[Any], ...] = tuple(
            self.table.c[_key_name(self.runs.table, column)] for column in self.runs.key
        )

    def of_run(self) -> list[ColumnElement[bool]]:
        """The conditions that a row belongs to the run with the given key."""
        return [column == bind for column, bind in zip(self.run_key, self.runs.binds(), strict=True)]

    def of_locked(self, held: Any) -> list[ColumnElement[bool]]:
        """The conditions that a row belongs to the run that a CTE made by :meth:`.Rows.lock` has locked."""
        return [column == held.c[name] for column, name in zip(self.run_key, self.runs.key_names, strict=True)]

    def add_run_key(self) -> None:
        """Add the foreign key to the run, which cascades deletes."""
        add_foreign_key(self.table, list(self.run_key), list(self.runs.key), ondelete="CASCADE")

    def refuse_unfilled(self, *ours: Column[Any]) -> None:
        """Refuse a column that the library's ``INSERT`` would leave empty and that may not be.

        :param ours: the columns that it fills, besides the run's key.
        """
        for column in self.table.columns:
            filled = column in {*self.run_key, *ours} or column.server_default is not None or column.nullable
            if not filled and column.identity is None:
                raise ConfigurationError(
                    f"{self.entity.__name__}.{self.attribute(column)} may not be null and has no server_default; its "
                    "rows are written in SQL, where a Python default= does not apply. Give it a server_default."
                )


def _key_name(table: Table, column: Column[Any]) -> str:
    """Return the name of the column that holds a run's key; one that PostgreSQL cuts off is not found again by it."""
    return shortened(f"{table.name}_{column.name}")
