"""Statements that are compiled once and then executed at the cheapest level there is.

For the step's statements a Core execution spends more client time on the cache key than the server does on the work.
They go to the driver's cursor directly, unless somebody listens to the engine or logs its statements: then through
:meth:`~sqlalchemy.engine.Connection.exec_driver_sql`, which tells them.
"""

from __future__ import annotations

import logging
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

from psycopg.sql import Literal
from sqlalchemy import Column, Connection, Dialect, Engine, Executable
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql import ClauseElement

from sqla_durable.rows import AnyRow


class Prepared:
    """An executable compiled for one engine with its schema translation.

    :param statement: the statement; its bound parameters must need no conversion by their types.
    :param engine: whose dialect and ``schema_translate_map`` apply.
    :param columns: the names of what it returns.
    """

    __slots__ = ("_dialect", "_fixed", "_row", "_sql", "types")

    types: Sequence[Any]
    """What the driver called the types of what was returned, once something was."""

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
            if bind.required:
                continue
            placeholder = escaped.get(str(name), str(name))
            if type(bind.value) in {int, str}:
                # A constant: each parameter costs the driver as much as a column of the result.
                self._sql = self._sql.replace(f"%({placeholder})s", _constant(bind.value))
            else:
                self._fixed[placeholder] = bind.value
        self._row = cast(Any, _row_class(columns))
        self.types = ()

    def first(self, connection: Connection, parameters: dict[str, Any]) -> AnyRow | None:
        """Execute with ``parameters`` beside the values the statement already holds; return the row, if any."""
        rows = self.rows(connection, parameters)
        return self._row(*rows[0]) if rows else None

    def rows(self, connection: Connection, parameters: dict[str, Any]) -> Sequence[Sequence[Any]]:
        """Execute with ``parameters`` likewise; return all rows as the driver gives them."""
        values = {**self._fixed, **parameters}
        if _observed(connection):
            result: Any = connection.exec_driver_sql(self._sql, values)
            self._note_types(result.cursor)
            return cast("Sequence[Sequence[Any]]", result.all())
        return self._execute(connection, values)

    def _execute(self, connection: Connection, values: dict[str, Any]) -> Sequence[Sequence[Any]]:
        cursor = connection.connection.cursor()
        try:
            cursor.execute(self._sql, values)
            self._note_types(cursor)
            return cursor.fetchall()
        except self._dialect.loaded_dbapi.Error as error:
            raise self._wrapped(connection, error, values, cursor) from error
        finally:
            cursor.close()

    def _note_types(self, cursor: Any) -> None:
        if not self.types:
            # Once only: the driver makes the description anew each time, at the cost of a small statement.
            self.types = [column[1] for column in cursor.description]

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


def _constant(value: int | str) -> str:
    return Literal(value).as_string(None).strip().replace("%", "%%")


class Loader:
    """Turns what a driver returned for some columns into the values that their types make of it.

    :param columns: the columns, in the order in which the statement returns them.
    :param dialect: the engine's.
    """

    def __init__(self, columns: Sequence[Column[Any]], dialect: Dialect) -> None:
        self._columns = columns
        self._dialect = dialect
        self._processors: list[tuple[int, Callable[[Any], Any]]] | None = None

    def load(self, row: Sequence[Any], types: Sequence[Any]) -> dict[Column[Any], Any]:
        """Return the values of ``row`` by column.

        :param types: the :attr:`.Prepared.types` of the statement that returned it.
        """
        if self._processors is None:
            self._processors = list(self._needed(types))
        values = list(row)
        for position, process in self._processors:
            values[position] = process(values[position])
        return dict(zip(self._columns, values, strict=False))

    def _needed(self, types: Sequence[Any]) -> Iterator[tuple[int, Callable[[Any], Any]]]:
        for position, column in enumerate(self._columns):
            type_ = column.type.dialect_impl(self._dialect)
            process = type_.result_processor(self._dialect, types[position])
            if process is not None:
                yield position, process


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
