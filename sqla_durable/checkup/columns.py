"""Columns: missing ones, and those that hold something else than the library writes to them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from sqlalchemy import Column, Connection, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.schema import CreateColumn

from sqla_durable.checkup.finding import Finding, error, warning
from sqla_durable.checkup.target import Expected
from sqla_durable.plain_sql import plain_dialect, quoted

_SHADOW: Final = "sqla_durable_shadow"
_READ: Final = text(
    "SELECT attname AS name, format_type(atttypid, atttypmod) AS type, attnotnull AS required,"
    " pg_get_expr(adbin, adrelid) AS given, attidentity <> '' OR attgenerated <> '' AS made"
    " FROM pg_attribute LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum"
    " WHERE attrelid = to_regclass(:table) AND attnum > 0 AND NOT attisdropped"
)
_TEXT: Final = re.compile(r"character varying(?:\((\d+)\))?|text")


@dataclass(frozen=True)
class _Found:
    """A column as PostgreSQL has it."""

    type: str
    required: bool
    given: str | None
    made: bool

    @property
    def room(self) -> float:
        """How many characters fit into it; none, where it holds something else than text."""
        found = _TEXT.fullmatch(self.type)
        return 0 if found is None else float(found[1] or "inf")


def columns(connection: Connection, expected: Expected, table: str) -> Iterator[Finding]:
    """Compare the columns of a table.

    :param table: its quoted name, with its schema.
    """
    there = _read(connection, table)
    missing = [column for column in expected.table.columns if column.name not in there]
    for column in missing:
        yield error(
            "missing-column",
            f"{table}.{column.name}",
            "The model has this column and the table does not: every statement that names it fails.",
            f"ALTER TABLE {table} ADD COLUMN {_ddl(column)}",
        )
    wanted = _wanted(
        connection, [each for each in expected.table.columns if each.name in expected.written and each not in missing]
    )
    for name, like in wanted.items():
        yield from _compared(f"{table}.{name}", there[name], like, f"ALTER TABLE {table} ALTER COLUMN {quoted(name)}")


def _compared(subject: str, there: _Found, wanted: _Found, alter: str) -> Iterator[Finding]:
    if there.type != wanted.type:
        told = warning if 0 < wanted.room < there.room else error
        yield told(
            "column-type",
            subject,
            f"It is {there.type} and not {wanted.type}, as which the library writes and compares it.",
            f"{alter} TYPE {wanted.type}",
        )
    if there.required and not wanted.required:
        yield error(
            "column-not-null",
            subject,
            "It may not be null, but the library sets it to NULL: that write fails.",
            f"{alter} DROP NOT NULL",
        )
    if wanted.required and not there.required:
        yield warning(
            "column-nullable",
            subject,
            "It may be null, which the library does not expect: a NULL that somebody writes there breaks a run.",
            f"{alter} SET NOT NULL",
        )
    if wanted.given is None or there.made or there.given == wanted.given:
        return
    told = error if there.given is None else warning
    yield told(
        "column-default",
        subject,
        f"Its default on the server is {there.given or 'missing'} and not {wanted.given}, which new rows rely on.",
        f"{alter} SET DEFAULT {wanted.given}",
    )


def _wanted(connection: Connection, columns: list[Column[object]]) -> Mapping[str, _Found]:
    """What PostgreSQL would make of columns; of none, where it does not know a type of theirs."""
    if not columns:
        return {}
    with connection.begin_nested() as savepoint:
        try:
            with connection.begin_nested():
                described = ", ".join(map(_ddl, columns))
                statement = f"CREATE TEMPORARY TABLE {_SHADOW} ({described})"
                connection.exec_driver_sql(statement, execution_options={"no_parameters": True})
            return _read(connection, f"pg_temp.{_SHADOW}")
        except DBAPIError as failed:
            if failed.connection_invalidated:
                raise
            return {}
        finally:
            savepoint.rollback()


def _ddl(column: Column[object]) -> str:
    return " ".join(str(CreateColumn(column).compile(dialect=plain_dialect())).split())


def _read(connection: Connection, table: str) -> dict[str, _Found]:
    rows = connection.execute(_READ, {"table": table})
    return {row.name: _Found(row.type, row.required, row.given, row.made) for row in rows}
