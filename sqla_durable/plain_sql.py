"""SQL that goes to PostgreSQL as it is written, without parameters: names, texts, expressions, statements."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from hashlib import sha256
from typing import Any, Final

from sqlalchemy import DDL, ClauseElement, Dialect
from sqlalchemy.dialects.postgresql.base import PGDialect

_LONGEST: Final = 63
_DIGEST: Final = 8


@cache
def plain_dialect() -> Dialect:
    """Return a dialect that writes names and SQL as PostgreSQL reads them.

    That of an engine has every percent sign doubled, for a driver that is given parameters.
    """
    make: Any = PGDialect
    dialect: Dialect = make(paramstyle="named")
    return dialect


def quoted(name: str) -> str:
    """Return a name, in quotes where it needs them."""
    return plain_dialect().identifier_preparer.quote(name)


def qualified(schema: str | None, name: str) -> str:
    """Return a name in a schema, if there is one."""
    return quoted(name) if schema is None else f"{quoted(schema)}.{quoted(name)}"


def shortened(name: str, suffix: str = "") -> str:
    """Return a name that PostgreSQL does not cut off, in bytes, and that differs where the whole name does.

    :param suffix: which stays as it is.
    """
    encoded, room = name.encode(), _LONGEST - len(suffix.encode())
    if len(encoded) > room:
        name = f"{encoded[: room - _DIGEST - 1].decode(errors='ignore')}_{digest(name)}"
    return name + suffix


def digest(value: str) -> str:
    """Return a few characters that differ where a text does."""
    return sha256(value.encode()).hexdigest()[:_DIGEST]


def literal(value: str) -> str:
    """Return a text in quotes, whatever ``standard_conforming_strings`` is."""
    escape = "E" if "\\" in value else ""
    return escape + "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


def literals(values: Iterable[str]) -> str:
    """Return texts in quotes, as ``IN`` takes them."""
    return ", ".join(literal(value) for value in values)


def written(element: ClauseElement) -> str:
    """Return an expression of one table, its values written out."""
    return str(element.compile(dialect=plain_dialect(), compile_kwargs={"literal_binds": True, "include_table": False}))


def ddl(statement: str) -> DDL:
    """Return a statement that is sent as it is."""
    make: Any = DDL
    sent: DDL = make(statement.replace("%", "%%"))  # it formats its text
    return sent
