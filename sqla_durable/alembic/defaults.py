"""Server defaults that PostgreSQL cannot compare, or Alembic cannot ask it about, and does all the same."""

from __future__ import annotations

from typing import Any

from alembic.autogenerate.api import AutogenContext
from alembic.operations import ops
from alembic.util import PriorityDispatchResult
from sqlalchemy import JSON, Column, Enum, String, literal_column, select


def compare_defaults(
    context: AutogenContext,
    altered: ops.AlterColumnOp,
    _schema: str | None,
    _table: str,
    _name: str,
    there: Column[Any],
    column: Column[Any],
) -> PriorityDispatchResult:
    """Answer for a JSON or a native enum that becomes a text, which have no equality, and for texts with apostrophes.

    A function given as ``compare_server_default`` would not do: Alembic fails where a column has an identity.
    """
    if there.server_default is None or column.server_default is None:
        return PriorityDispatchResult.CONTINUE
    if type(column.type) is JSON:
        return PriorityDispatchResult.STOP
    if _is_native_enum(there) and not _is_native_enum(column):
        altered.existing_server_default = there.server_default
        altered.modify_server_default = column.server_default
        return PriorityDispatchResult.STOP
    return _compare_apostrophes(context, altered, there, column)


def _compare_apostrophes(
    context: AutogenContext, altered: ops.AlterColumnOp, there: Column[Any], column: Column[Any]
) -> PriorityDispatchResult:
    before, after = getattr(there.server_default, "arg", None), getattr(column.server_default, "arg", None)
    if not isinstance(after, str) or "'" not in after[1:-1] or not isinstance(there.type, String):
        return PriorityDispatchResult.CONTINUE
    # Alembic would put it between two more, and fail.
    if context.connection is not None and not context.connection.scalar(select(literal_column(str(before)) == after)):
        altered.existing_server_default = there.server_default
        altered.modify_server_default = column.server_default
    return PriorityDispatchResult.STOP


def _is_native_enum(column: Column[Any]) -> bool:
    return isinstance(column.type, Enum) and column.type.native_enum
