"""What Alembic does not compare in a table of this library: checks, indexes, storage, partitioning, and the guard."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from alembic.autogenerate.api import AutogenContext
from alembic.operations import ops
from alembic.runtime.environment import NameFilterType
from alembic.util import PriorityDispatchResult
from sqlalchemy import CheckConstraint, Column, Index, Table
from sqlalchemy.schema import conv

from sqla_durable import catalogue
from sqla_durable.alembic.guards import compare_guards
from sqla_durable.alembic.operation import SqlOp
from sqla_durable.alembic.partitioning import compare_partitioning
from sqla_durable.alembic.removal import refusal, values_in
from sqla_durable.alembic.verbatim import Verbatim
from sqla_durable.catalogue import Catalogue, as_written
from sqla_durable.mapping import owned_checks, owned_indexes, values_of
from sqla_durable.monthly import partitioned
from sqla_durable.plain_sql import written

_log: Final = logging.getLogger(f"alembic.{__name__}")  # below that one, whose level Alembic's ini file sets


def compare(
    context: AutogenContext,
    modified: ops.ModifyTableOps,
    _schema: str | None,
    _name: str,
    there: Table | None,
    table: Table | None,
) -> PriorityDispatchResult:
    """Add the operations that Alembic's own comparison of a table leaves out."""
    connection = context.connection
    if connection is None or connection.dialect.name != "postgresql":
        return PriorityDispatchResult.CONTINUE
    if there is not None:
        found = catalogue.existing(connection, there)
        _reword(there, found)
        # SQLAlchemy 2.0 does not reflect them, and a downgrade would create the table without.
        if table is None and found.storage and not there.dialect_options["postgresql"].get("with"):
            modified.ops.append(SqlOp([], [f"ALTER TABLE {found.table} SET ({_written(found.storage)})"]))
        if table is not None:
            comparison = _Comparison(context, modified, there, table, found, catalogue.wanted(connection, table, found))
            modified.ops += [*comparison.checks_of_columns(), *comparison.checks()]
            modified.ops += [*comparison.indexes(), *comparison.storage()]
    if there is None and table is not None and (months := partitioned(table)) is not None:
        modified.ops.append(SqlOp(months.create_default(table.schema)))
    is_replaced = compare_partitioning(connection, modified, there, table)
    compare_guards(connection, modified, there, table, is_replaced=is_replaced)
    return PriorityDispatchResult.CONTINUE


def _reword(there: Table, found: Catalogue) -> None:
    """Have what a downgrade creates again come out as it was."""
    for check in there.constraints:
        if isinstance(check, CheckConstraint) and (definition := found.checks.get(str(check.name))) is not None:
            check.sqltext = Verbatim(as_written(definition))
    for index in there.indexes:
        options = index.dialect_options["postgresql"]
        if options["where"] is not None:
            options["where"] = Verbatim(as_written(str(options["where"])))


@dataclass(frozen=True)
class _Comparison:
    """One table as it is there and as the models have it."""

    context: AutogenContext
    modified: ops.ModifyTableOps
    there: Table
    table: Table
    found: Catalogue
    wanted: Catalogue

    def checks_of_columns(self) -> Iterator[ops.MigrateOperation]:
        """Drop the checks that would go with a column, so that a downgrade brings them back."""
        kept = {column.name for column in self.table.columns}
        gone = {each.name for each in self.there.columns if each.name not in kept and self._is_dropped(each)}
        for name, columns in self.found.columns.items():
            if gone.isdisjoint(columns) or name in owned_checks(self.table) or self._is_said(name):
                continue
            if (check := self._there(name)) is not None:
                yield ops.DropConstraintOp.from_constraint(check)

    def checks(self) -> Iterator[ops.MigrateOperation]:
        """Drop and add the checks that are other ones now, and add those that are missing.

        All are dropped before one is added, so that rows can be given another status in between.
        """
        changed = {name: check for name, check in sorted(owned_checks(self.table).items()) if self._is_changed(name)}
        there = {name: self._there(name) for name in changed}
        included = {name: check for name, check in changed.items() if self._is_included(check, name, there[name])}
        for name in included:
            old = there[name]
            what = "added" if old is None else "changed"
            _log.info("Detected %s check constraint %r on table %r", what, name, self.table.name)
            if old is not None:
                yield ops.DropConstraintOp.from_constraint(old)
        for name, check in included.items():
            yield from self._refusal(check, self.found.checks.get(name))
        for check in included.values():
            yield ops.AddConstraintOp.from_constraint(check)

    def indexes(self) -> Iterator[ops.MigrateOperation]:
        """Drop and create each index that covers other rows or columns now."""
        there = {str(index.name): index for index in self.there.indexes}
        for name, index in sorted(owned_indexes(self.table).items()):
            before = self.found.indexes.get(name)
            if before is None or before == self.wanted.indexes[name] or name not in there:
                continue
            if self._is_said(name) or not self._is_included(index, name, there[name]):
                continue
            _log.info("Detected changed index %r on table %r", name, self.table.name)
            yield ops.DropIndexOp.from_index(there[name])
            yield ops.CreateIndexOp.from_index(index)

    def storage(self) -> Iterator[SqlOp]:
        """Set the storage parameters that are other ones now; those that the models do not name are left alone."""
        before, after = self.found.storage, self.wanted.storage
        changed = {name: value for name, value in after.items() if before.get(name) != value}
        if not changed:
            return
        _log.info("Detected changed storage parameters of table %r: %s", self.table.name, ", ".join(changed))
        table = self.found.table
        kept = {name: before[name] for name in changed if name in before}
        new = [name for name in changed if name not in before]
        undone = [f"ALTER TABLE {table} SET ({_written(kept)})"] if kept else []
        undone += [f"ALTER TABLE {table} RESET ({', '.join(new)})"] if new else []
        yield SqlOp([f"ALTER TABLE {table} SET ({_written(changed)})"], undone)

    def _refusal(self, check: CheckConstraint, before: str | None) -> Iterator[SqlOp]:
        column = values_of(check)
        if column is None or before is None:
            return
        old, new = values_in(before), values_in(written(check.sqltext))
        removed = [value for value in old if value not in new]
        added = [value for value in new if value not in old]
        if removed or added:
            yield refusal(self.found.table, column, removed, added)

    def _there(self, name: str) -> CheckConstraint | None:
        before = self.found.checks.get(name)
        return (
            None if before is None else CheckConstraint(Verbatim(as_written(before)), name=conv(name), table=self.there)
        )

    def _is_changed(self, name: str) -> bool:
        before = self.found.checks.get(name)
        return not self._is_said(name) and (before is None or before != self.wanted.checks[name])

    def _is_dropped(self, column: Column[Any]) -> bool:
        """Whether Alembic, which drops columns last, is going to drop this one."""
        return self.context.run_object_filters(column, column.name, "column", reflected=True, compare_to=None)

    def _is_said(self, name: str) -> bool:
        """Whether Alembic has seen by itself that something of this name is another one."""
        said = (getattr(op, "constraint_name", None) or getattr(op, "index_name", None) for op in self.modified.ops)
        return name in {str(each) for each in said}

    def _is_included(self, item: CheckConstraint | Index, name: str, there: CheckConstraint | Index | None) -> bool:
        kind: NameFilterType = "index" if isinstance(item, Index) else "check_constraint"
        return self.context.run_object_filters(item, name, kind, reflected=False, compare_to=there)


def _written(parameters: Mapping[str, str]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in parameters.items())
