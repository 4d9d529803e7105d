"""A statement that is compiled once and then executed at the cheapest level that still has SQLAlchemy's events.

A Core execution computes the cache key of its statement each time, which for the step's statements costs more client
time than the rest of the call; :meth:`~sqlalchemy.engine.Connection.exec_driver_sql` does not.
"""

from __future__ import annotations

from typing import Any, cast

from sqlalchemy import Connection, CursorResult, Engine, Executable
from sqlalchemy.sql import ClauseElement


class Prepared:
    """An executable, compiled for one engine with its schema translation.

    :param statement: the statement; its bound parameters must need no conversion by their types.
    :param engine: whose dialect and ``schema_translate_map`` apply.
    """

    __slots__ = ("_fixed", "_sql")

    def __init__(self, statement: Executable, engine: Engine) -> None:
        translate = engine.get_execution_options().get("schema_translate_map")
        compiled: Any = cast(ClauseElement, statement).compile(
            dialect=engine.dialect,
            schema_translate_map=translate,
            render_schema_translate=bool(translate),
        )
        self._sql = str(compiled)
        self._fixed = {name: bind.value for name, bind in compiled.binds.items() if not bind.required}

    def execute(self, connection: Connection, parameters: dict[str, Any]) -> CursorResult[Any]:
        """Execute with ``parameters`` beside the values the statement already holds."""
        return connection.exec_driver_sql(self._sql, {**self._fixed, **parameters})
