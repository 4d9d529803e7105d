"""An operation that is SQL: rendered as ``op.execute()`` with the whole text, line by line, and reversible."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from alembic.autogenerate import renderers
from alembic.autogenerate.api import AutogenContext
from alembic.operations.ops import MigrateOperation

from sqla_durable.alembic.verbatim import escaped


class SqlOp(MigrateOperation):
    """Statements to execute, and those that undo them.

    :param statements: what is executed, one after the other.
    :param undoing: what a downgrade executes, one after the other.
    :param comment: what the migration says above the statements, if anything.
    :param undoing_comment: what it says above those of the downgrade.
    :param reads_rows: whether a statement reads all rows of the table, so that it is not to be locked meanwhile.
    """

    def __init__(
        self,
        statements: Sequence[str],
        undoing: Sequence[str] = (),
        comment: Sequence[str] = (),
        undoing_comment: Sequence[str] = (),
        *,
        reads_rows: bool = False,
    ) -> None:
        self.statements = tuple(statements)
        self.undoing = tuple(undoing)
        self.comment = tuple(comment)
        self.undoing_comment = tuple(undoing_comment)
        self.reads_rows = reads_rows

    def reverse(self) -> SqlOp:
        """Return the operation that undoes this one."""
        return SqlOp(self.undoing, self.statements, self.undoing_comment, self.comment, reads_rows=self.reads_rows)

    def to_diff_tuple(self) -> tuple[Any, ...]:
        """Return what ``alembic check`` reports."""
        if not self.statements:
            return ("execute in the downgrade", *self.undoing)
        return ("execute", *self.statements)


def render_with_whole_text() -> None:
    """Have Alembic render the operation."""
    renderers.dispatch_for(SqlOp, replace=True)(_render)


def _render(context: AutogenContext, operation: SqlOp) -> list[str]:
    prefix = context.opts["alembic_module_prefix"]
    comment = [f"# {line}" for line in operation.comment] if operation.statements else []
    return comment + [f"{prefix}execute({_literal(statement)})" for statement in operation.statements]


def _literal(statement: str) -> str:
    # In one string of several lines Alembic would indent the text itself, and a function would never compare equal.
    lines = escaped(statement).splitlines(keepends=True)
    quoted = [json.dumps(line, ensure_ascii=False) for line in lines]
    return quoted[0] if len(quoted) == 1 else "".join(f"\n    {line}" for line in quoted) + "\n"
