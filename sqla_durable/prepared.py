"""A statement that is compiled once and then executed at the cheapest level there is.

For the step's statements a Core execution spends more client time on the cache key than the server does on the work.
They go to the driver's cursor directly, unless somebody listens to the engine or logs its statements: then through
:meth:`~sqlalchemy.engine.Connection.exec_driver_sql`, which tells them.
"""

from __future__ import annotations

import logging
from collections import namedtuple
from contextlib import suppress
from typing import Any, cast

from sqlalchemy import Connection, Engine, Executable
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import ClauseElement

from sqla_durable.rows import AnyRow


class Prepared:
    """An executable that returns at most one row, compiled for one engine with its schema translation.

    :param statement: the statement; its bound parameters must need no conversion by their types.
    :param engine: whose dialect and ``schema_translate_map`` apply.
    :param columns: the names of what it returns.
    """

    __slots__ = ("_dialect", "_fixed", "_row", "_sql")

    def __init__(self, statement: Executable, engine: Engine, *columns: str) -> None:
        translate = engine.get_execution_options().get("schema_translate_map")
        compiled: Any = cast(ClauseElement, statement).compile(
            dialect=engine.dialect, schema_translate_map=translate, render_schema_translate=bool(translate)
        )
        self._dialect: Any = engine.dialect
        self._sql = str(compiled)
        escaped: dict[str, str] = compiled.escaped_bind_names or {}
        self._fixed: dict[str, Any] = {}
        for bind, name in compiled.bind_names.items():
            if not bind.required:
                self._fixed[escaped.get(str(name), str(name))] = bind.value
        self._row = cast(Any, _row_class(columns))

    def first(self, connection: Connection, parameters: dict[str, Any]) -> AnyRow | None:
        """Execute with ``parameters`` beside the values the statement already holds; return the row, if any."""
        values = {**self._fixed, **parameters}
        row: Any
        if _observed(connection):
            row = connection.exec_driver_sql(self._sql, values).one_or_none()
        else:
            row = self._execute(connection, values)
        return None if row is None else self._row(*row)

    def _execute(self, connection: Connection, values: dict[str, Any]) -> tuple[Any, ...] | None:
        cursor = connection.connection.cursor()
        try:
            cursor.execute(self._sql, values)
            return cast("tuple[Any, ...] | None", cursor.fetchone())
        except self._dialect.loaded_dbapi.Error as error:
            raise self._wrapped(connection, error, values, cursor) from error
        finally:
            cursor.close()

    def _wrapped(self, connection: Connection, error: Any, values: dict[str, Any], cursor: Any) -> Any:
        """Return what SQLAlchemy raises for a driver's error."""
        lost = self._dialect.is_disconnect(error, connection.connection.dbapi_connection, cursor)
        if lost:
            # On a connection that is lost nothing is executed again, but SQLAlchemy hears of it and has the pool
            # replace all its connections; connection.invalidate() would drop this one only.
            with suppress(DBAPIError):
                connection.exec_driver_sql(self._sql, values)
        base = self._dialect.loaded_dbapi.Error
        instance: Any = DBAPIError.instance
        return instance(self._sql, values, error, base, connection_invalidated=lost, dialect=self._dialect)


def _row_class(columns: tuple[str, ...]) -> type[tuple[Any, ...]]:
    make: Any = namedtuple  # noqa: PYI024 - the names are known at run time only
    row: type[tuple[Any, ...]] = make("Row", columns)
    return row


def _observed(connection: Connection) -> bool:
    dispatch: Any = connection.dispatch
    errors: Any = connection.dialect.dispatch
    logger: logging.Logger = cast(Any, connection.engine).logger
    listened_to = dispatch.before_cursor_execute or dispatch.after_cursor_execute or errors.handle_error
    return bool(listened_to) or logger.isEnabledFor(logging.INFO)
