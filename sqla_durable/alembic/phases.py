"""What of a migration comes first, what comes second, and what of each is outside of a transaction.

Whatever locks a table against its writers is in a transaction that reads no rows. Whatever reads rows can be repeated.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, field
from typing import Any, Final, cast

from alembic.operations import ops
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Column, Connection, DefaultClause, MetaData, Table, text
from sqlalchemy.schema import conv

from sqla_durable.alembic.block import AutocommitOp
from sqla_durable.alembic.operation import SqlOp
from sqla_durable.alembic.rewriting import adding_rewrites, altering_rewrites
from sqla_durable.alembic.verbatim import Verbatim
from sqla_durable.catalogue import qualified
from sqla_durable.mapping import plain_dialect, shortened

_log: Final = logging.getLogger(f"alembic.{__name__}")  # below that one, whose level Alembic's ini file sets
_VOLATILE: Final = "clock_timestamp()"
_STABLE: Final = "now()"

_Constraint = ops.CreateCheckConstraintOp | ops.CreateForeignKeyOp


@dataclass
class Part:
    """One direction of one migration.

    :param first: what is done in a transaction, to begin with.
    :param long: what is done after it, each statement in a transaction of its own; repeatable.
    :param last: what is done in a transaction at the end, which also notes the migration as done.
    :param locked: the tables that ``first`` and ``last`` change.
    """

    first: list[ops.MigrateOperation] = field(default_factory=list[ops.MigrateOperation])
    long: list[ops.MigrateOperation] = field(default_factory=list[ops.MigrateOperation])
    last: list[ops.MigrateOperation] = field(default_factory=list[ops.MigrateOperation])
    locked: dict[str, set[str]] = field(default_factory=lambda: {"first": set(), "last": set()})

    def operations(self) -> list[ops.MigrateOperation]:
        """Return all of it, in order."""
        first = [*self._lock("first"), *self.first]
        # What rows may fail comes before what has to be built again when the migration is repeated.
        long = sorted(self.long, key=lambda each: isinstance(each, ops.CreateIndexOp | ops.DropIndexOp))
        block = [AutocommitOp(long)] if long else []
        return [*first, *block, *self._lock("last"), *self.last]

    def is_empty(self) -> bool:
        """Whether there is nothing in it."""
        return not (self.first or self.long or self.last)

    def add(self, phase: str, operation: ops.MigrateOperation, table: str | None = None) -> None:
        """Add an operation to a phase.

        :param table: the table that is locked for it.
        """
        getattr(self, phase).append(operation)
        if table is not None:
            self.locked[phase].add(table)

    def _lock(self, phase: str) -> list[SqlOp]:
        # At once: with a weaker lock to begin with, a transaction that has read the table and is about to write to it
        # would be in a deadlock with us, and two waits in a row would keep a writer waiting for twice the lock_timeout.
        tables = ", ".join(sorted(self.locked[phase]))
        return [SqlOp([f"LOCK TABLE {tables} IN ACCESS EXCLUSIVE MODE"])] if tables else []


@dataclass
class Phases:
    """One direction of the two migrations: in the order in which they are carried out.

    :param context: of the migrations.
    :param connection: to the database as it is now.
    :param is_downgrade: which direction it is.
    :param earlier: the one that is carried out first.
    :param later: the one that is carried out then.
    """

    context: MigrationContext
    connection: Connection
    is_downgrade: bool
    earlier: Part = field(default_factory=Part)
    later: Part = field(default_factory=Part)

    @classmethod
    def split(
        cls, context: MigrationContext, connection: Connection, container: ops.OpContainer, *, is_downgrade: bool
    ) -> Phases:
        """Split all operations of one direction."""
        phases = cls(context, connection, is_downgrade)
        created = {(op.schema, op.table_name) for op in container.ops if isinstance(op, ops.CreateTableOp)}
        dropped = {(op.schema, op.table_name) for op in container.ops if isinstance(op, ops.DropTableOp)}
        for operation in container.ops:
            table = (getattr(operation, "schema", None), getattr(operation, "table_name", None))
            if table in created:
                phases.earlier.add("first", operation)
            elif table in dropped:
                phases.later.add("last", operation)
            elif isinstance(operation, ops.ModifyTableOps):
                _Modified(phases, operation).sort()
            else:
                phases.other(operation)
        return phases

    def are_repeatable_as_one(self) -> bool:
        """Whether one migration will do, since nothing that cannot be done twice comes before what can fail."""
        return not self.earlier.first or self.later.is_empty()

    def other(self, operation: ops.MigrateOperation, table: str | None = None) -> None:
        """Add what is neither an addition nor a removal: to the first migration, in both directions."""
        if self.is_downgrade:
            self.later.add("last", operation, table)
        else:
            self.earlier.add("first", operation, table)

    def swap(self, operation: ops.MigrateOperation, table: str) -> None:
        """Add what replaces a constraint: to the first migration as well, but there before it is validated."""
        (self.later if self.is_downgrade else self.earlier).add("first", operation, table)


class _Modified:
    """The changes of one table that is there."""

    def __init__(self, phases: Phases, modified: ops.ModifyTableOps) -> None:
        self._phases = phases
        self._operations = modified.ops
        schema = modified.schema
        self._table = qualified(phases.connection, Table(modified.table_name, MetaData(), schema=schema))
        self._prefix = self._table.removesuffix(_quoted(modified.table_name))
        dropped_checks = {str(op.constraint_name) for op in self._operations if isinstance(op, ops.DropConstraintOp)}
        added_checks = {str(op.constraint_name) for op in self._operations if isinstance(op, _Constraint)}
        self._swapped = dropped_checks & added_checks
        self._old = {str(op.index_name): op for op in self._operations if isinstance(op, ops.DropIndexOp)}
        self._new = {str(op.index_name) for op in self._operations if isinstance(op, ops.CreateIndexOp)}

        reading = (op for op in self._operations if isinstance(op, SqlOp) and op.reads_rows and op.statements)
        self._reading = next(reading, None)

    def sort(self) -> None:
        """Give each operation to its phase."""
        for operation in self._operations:
            match operation:
                case ops.AddColumnOp():
                    self._add_column(operation)
                case ops.CreateCheckConstraintOp() | ops.CreateForeignKeyOp():
                    self._add_constraint(operation)
                case ops.CreateIndexOp():
                    self._create_index(operation)
                case ops.DropColumnOp() | ops.DropConstraintOp() | ops.DropIndexOp():
                    self._drop(operation)
                case ops.AlterColumnOp():
                    self._alter_column(operation)
                case SqlOp():
                    self._execute(operation)
                case _:
                    self._phases.other(operation, self._table)

    def _drop(self, operation: ops.DropColumnOp | ops.DropConstraintOp | ops.DropIndexOp) -> None:
        if isinstance(operation, ops.DropIndexOp):
            self._drop_index(operation)
        elif isinstance(operation, ops.DropConstraintOp) and str(operation.constraint_name) in self._swapped:
            self._phases.swap(operation, self._table)
        else:
            self._phases.later.add("last", operation, self._table)

    def _execute(self, operation: SqlOp) -> None:
        if operation is self._reading:
            self._phases.later.add("long", operation)
        elif self._reading is None:
            if operation.statements:
                self._phases.other(operation, self._table)
        elif self._operations.index(operation) < self._operations.index(self._reading):
            # A guard goes before rows are given another status, which it would refuse, and comes after it.
            self._phases.swap(operation, self._table)
        else:
            self._phases.later.add("last", operation, self._table)

    def _add_column(self, operation: ops.AddColumnOp) -> None:
        column, connection = operation.column, self._phases.connection
        added: list[ops.MigrateOperation] = [operation]
        if adding_rewrites(connection, column):
            stable = _with_stable_default(column)
            if stable is None or adding_rewrites(connection, stable):
                _warn(self._table, f"adding the column {column.name!r} rewrites it")
            else:
                added = [
                    ops.AddColumnOp(operation.table_name, stable, schema=operation.schema, **operation.kw),
                    _default_of(operation, column),
                ]
        for each in added:
            self._phases.earlier.add("first", each, self._table)

    def _add_constraint(self, operation: _Constraint) -> None:
        name = plain_dialect().identifier_preparer.format_constraint(operation.to_constraint(self._phases.context))
        if name is None:
            _warn(self._table, "a constraint without a name is validated as it is added")
        else:
            operation.kw["postgresql_not_valid"] = True
            self._validate(name)
        if str(operation.constraint_name) in self._swapped:
            self._phases.swap(operation, self._table)
        else:
            self._phases.earlier.add("first", operation, self._table)

    def _create_index(self, operation: ops.CreateIndexOp) -> None:
        name, later = str(operation.index_name), self._phases.later
        old = self._old.get(name)
        built = operation.index_name = conv(name if old is None else shortened(f"{name}_new"))
        # What an attempt that failed has left behind is not valid, and IF NOT EXISTS would be content with it.
        stale = ops.DropIndexOp(built, operation.table_name, schema=operation.schema)
        later.add("long", _concurrently(stale))
        operation.kw["postgresql_concurrently"] = True
        later.add("long", operation)
        if old is not None:
            later.add("last", old, self._table)
            renamed = f"{self._prefix}{_quoted(built)}"
            later.add("last", SqlOp([f"ALTER INDEX {renamed} RENAME TO {_quoted(name)}"]))

    def _drop_index(self, operation: ops.DropIndexOp) -> None:
        if str(operation.index_name) not in self._new:
            (self._phases.earlier if self._phases.is_downgrade else self._phases.later).add(
                "long", _concurrently(operation)
            )

    def _alter_column(self, operation: ops.AlterColumnOp) -> None:
        if altering_rewrites(self._phases.connection, operation):
            _warn(self._table, f"the new type of the column {operation.column_name!r} rewrites it")
        if operation.modify_nullable is not False or operation.existing_nullable is False:
            self._phases.other(operation, self._table)
            return
        refusing = copy.copy(operation)
        refusing.modify_type, refusing.modify_server_default, refusing.modify_comment = None, False, False
        operation.modify_nullable = None
        if operation.has_changes():
            self._phases.other(operation, self._table)
            if not self._phases.is_downgrade and operation.modify_type is not None:
                refusing.existing_type = operation.modify_type
        self._refuse_nulls(refusing)

    def _refuse_nulls(self, operation: ops.AlterColumnOp) -> None:
        """Have PostgreSQL take a check's word for it that there are none, rather than look while nobody can read."""
        name, later = conv(shortened(f"{operation.table_name}_{operation.column_name}_not_null")), self._phases.later
        there = ops.DropConstraintOp(name, operation.table_name, "check", schema=operation.schema, if_exists=True)
        check = ops.CreateCheckConstraintOp(
            name,
            operation.table_name,
            cast(Any, Verbatim(f"{_quoted(operation.column_name)} IS NOT NULL")),
            schema=operation.schema,
            postgresql_not_valid=True,
        )
        later.add("first", there, self._table)
        later.add("first", check, self._table)
        self._validate(_quoted(str(name)))
        later.add("last", operation, self._table)
        later.add("last", there, self._table)

    def _validate(self, name: str) -> None:
        self._phases.later.add("long", SqlOp([f"ALTER TABLE {self._table} VALIDATE CONSTRAINT {name}"]))


def _concurrently(operation: ops.DropIndexOp) -> ops.DropIndexOp:
    operation.if_exists = True
    operation.kw["postgresql_concurrently"] = True
    return operation


def _with_stable_default(column: Column[Any]) -> Column[Any] | None:
    """Return the column with a default that is the same for all rows, if it has another one that is known."""
    if str(getattr(column.server_default, "arg", "")) != _VOLATILE:
        return None
    return Column(
        column.name, column.type, nullable=column.nullable, comment=column.comment, server_default=text(_STABLE)
    )


def _default_of(operation: ops.AddColumnOp, column: Column[Any]) -> ops.AlterColumnOp:
    return ops.AlterColumnOp(
        operation.table_name,
        column.name,
        schema=operation.schema,
        existing_type=column.type,
        existing_nullable=column.nullable,
        modify_server_default=DefaultClause(text(_VOLATILE)),  # a bare text() would be rendered as a name
    )


def _quoted(name: str) -> str:
    return plain_dialect().identifier_preparer.quote(name)


def _warn(table: str, what: str) -> None:
    _log.warning("Table %s stays locked for long: %s", table, what)
