"""Server defaults that PostgreSQL cannot compare, which Alembic asks it to all the same."""

from __future__ import annotations

from typing import Any

from alembic.autogenerate.api import AutogenContext
from alembic.operations import ops
from alembic.util import PriorityDispatchResult
from sqlalchemy import JSON, Column, Enum


def compare_defaults(
    _context: AutogenContext,
    altered: ops.AlterColumnOp,
    _schema: str | None,
    _table: str,
    _name: str,
    there: Column[Any],
    column: Column[Any],
) -> PriorityDispatchResult:
    """Answer for a column whose defaults have no equality: a JSON, or a native enum that becomes a text.

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
    return PriorityDispatchResult.CONTINUE


def _is_native_enum(column: Column[Any]) -> bool:
    return isinstance(column.type, Enum) and column.type.native_enum
