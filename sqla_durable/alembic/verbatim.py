"""SQL that a migration has word for word, whatever stands in it.

Alembic renders an expression for the driver, with percent signs doubled, and executes what it has rendered as text, in
which they are doubled again and a colon begins a parameter: the check on a status ``a :b`` would not be the one meant.
"""

from __future__ import annotations

import re
from typing import Any, Final

from alembic.autogenerate.api import AutogenContext
from alembic.operations import ops
from alembic.util import PriorityDispatchResult
from sqlalchemy import CheckConstraint, ClauseElement, ColumnElement
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler

from sqla_durable.plain_sql import written

# What text() takes for a parameter, and a backslash that it would take away.
_SPECIAL: Final = re.compile(r"(?<![:\w\\]):(?=\w+(?![:\w]))|\\(?=:\w*(?![:\w]))")


class Verbatim(ColumnElement[Any]):
    """SQL that a migration is to have as it is.

    :param sql: as PostgreSQL reads it.
    """

    inherit_cache = False

    def __init__(self, sql: str) -> None:
        self.sql = sql

    def __repr__(self) -> str:
        # What ``alembic check`` shows of it.
        return f"{type(self).__name__}({self.sql!r})"


def escaped(sql: str) -> str:
    """Return SQL as ``text()`` takes it, so that it comes out as it is."""
    return _SPECIAL.sub(lambda found: "\\" + found[0], sql)


def keep_words(_context: AutogenContext, upgrade: ops.UpgradeOps, _schemas: Any) -> PriorityDispatchResult:
    """Have the checks and partial indexes of all operations rendered as PostgreSQL is to read them."""
    _keep(upgrade)
    return PriorityDispatchResult.CONTINUE


def _keep(container: ops.OpContainer) -> None:
    for operation in container.ops:
        if isinstance(operation, ops.OpContainer):
            _keep(operation)
        elif isinstance(operation, ops.CreateTableOp):
            operation.columns = [_kept_check(item) for item in operation.columns]
        elif isinstance(operation, ops.CreateCheckConstraintOp):
            operation.condition = _kept(operation.condition)
        elif isinstance(operation, ops.CreateIndexOp) and "postgresql_where" in operation.kw:
            operation.kw["postgresql_where"] = _kept(operation.kw["postgresql_where"])


def _kept_check(item: Any) -> Any:
    if not isinstance(item, CheckConstraint) or (kept := _kept(item.sqltext)) is item.sqltext:
        return item
    return CheckConstraint(kept, name=item.name, **item.dialect_kwargs)


def _kept(condition: Any) -> Any:
    if not isinstance(condition, ClauseElement) or isinstance(condition, Verbatim):
        return condition
    sql = written(condition)
    return Verbatim(sql) if "%" in sql or escaped(sql) != sql else condition


@compiles(Verbatim)
def _compile(element: Verbatim, _compiler: SQLCompiler, **_: Any) -> str:
    return escaped(element.sql)
