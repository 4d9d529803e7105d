"""What has changed in the guard of a table: replaced as a whole, with the text of both in the migration."""

from __future__ import annotations

import logging
from typing import Final

from alembic.operations import ops
from sqlalchemy import Connection, Table

from sqla_durable import catalogue
from sqla_durable.alembic.operation import SqlOp
from sqla_durable.catalogue import GuardThere
from sqla_durable.guard import Guard, declared_schema, guard_of
from sqla_durable.plain_sql import quoted

_log: Final = logging.getLogger(f"alembic.{__name__}")  # below that one, whose level Alembic's ini file sets


def compare_guards(
    connection: Connection,
    modified: ops.ModifyTableOps,
    there: Table | None,
    table: Table | None,
    *,
    is_replaced: bool,
) -> None:
    """Drop the guard that a table has, and create the one that it wants, where they differ.

    So too where the table is replaced, or a column gets another type: PostgreSQL lets none that a trigger looks at.

    It is dropped before all else, since it holds on to columns and would refuse rows another status; and created after
    all else.
    """
    name = None if there is None else catalogue.table_name(connection, there)
    found = None if name is None else catalogue.guard_there(connection, name)
    wanted = None if table is None else guard_of(table)
    is_same = _is_same(connection, found, wanted)
    is_renewed = is_replaced or any(_gets_another_type(op) for op in modified.ops)
    if is_same and (not is_renewed or wanted is None):
        return
    if not is_same:
        what = "added" if found is None else "removed" if wanted is None else "changed"
        _log.info("Detected %s guard of table %r", what, modified.table_name)
    if found is not None and name is not None:
        modified.ops.insert(0, _dropping(name, found))
    if wanted is not None:
        modified.ops.append(SqlOp(wanted.create(), wanted.drop()))


def _is_same(connection: Connection, found: GuardThere | None, wanted: Guard | None) -> bool:
    if found is None or wanted is None:
        return found is None and wanted is None
    return found.enabled and found.is_of(connection, wanted, declared_schema)


def _gets_another_type(operation: ops.MigrateOperation) -> bool:
    return isinstance(operation, ops.AlterColumnOp) and operation.modify_type is not None


def _dropping(table: str, found: GuardThere) -> SqlOp:
    triggers = [f"DROP TRIGGER {quoted(name)} ON {table}" for name in found.shapes]
    return SqlOp([*triggers, f"DROP FUNCTION {found.function}()"], found.statements)
