"""Whether a change of a table has PostgreSQL write the whole table anew, as PostgreSQL itself says.

Which defaults are volatile and which types are alike enough differs between its releases, so it is asked: the change is
made to an empty temporary table, which is rolled back, and has other storage after it where the table was rewritten.
"""

from __future__ import annotations

from typing import Any, Final

from alembic.operations import ops
from sqlalchemy import Column, Connection, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateColumn

from sqla_durable.plain_sql import plain_dialect, quoted

_TABLE: Final = "sqla_durable_rewritten"
_STORAGE: Final = text("SELECT pg_relation_filenode(to_regclass(:table))")


def adding_rewrites(connection: Connection, column: Column[Any]) -> bool:
    """Whether a table is rewritten when a column is added to it."""
    added = str(CreateColumn(column).compile(dialect=plain_dialect()))
    return _rewrites(connection, "", f"ADD COLUMN {added}")


def altering_rewrites(connection: Connection, altered: ops.AlterColumnOp) -> bool:
    """Whether a table is rewritten when the type of one of its columns changes."""
    if altered.modify_type is None or altered.existing_type is None:
        return False
    name = quoted(altered.column_name)
    old, new = (each.compile(dialect=plain_dialect()) for each in (altered.existing_type, altered.modify_type))
    return _rewrites(connection, f"{name} {old}", f"ALTER COLUMN {name} TYPE {new}")


def _rewrites(connection: Connection, columns: str, change: str) -> bool:
    """Whether it does; also where PostgreSQL refuses the change by itself, as it does a type of another kind."""
    with connection.begin_nested() as savepoint:
        try:
            _run(connection, f"CREATE TEMPORARY TABLE {_TABLE} ({columns})")
            before = connection.scalar(_STORAGE, {"table": _TABLE})
            _run(connection, f"ALTER TABLE {_TABLE} {change}")
            after = connection.scalar(_STORAGE, {"table": _TABLE})
        except DBAPIError as error:
            if error.connection_invalidated:
                raise
            return True
        finally:
            savepoint.rollback()
    return bool(before != after)


def _run(connection: Connection, statement: str) -> None:
    connection.exec_driver_sql(statement, execution_options={"no_parameters": True})
