"""Refuses a migration that removes a status which rows are in, before it changes anything."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Final

from sqla_durable.alembic.operation import SqlOp
from sqla_durable.plain_sql import literal, literals, quoted

_TEXT: Final = re.compile(r"'((?:[^']|'')*)'")


def values_in(definition: str) -> list[str]:
    """Return the texts that the definition of a check names."""
    return [found.replace("''", "'") for found in _TEXT.findall(definition)]


def refusal(table: str, column: str, removed: Collection[str], added: Collection[str]) -> SqlOp:
    """Return the operation that refuses to go on while rows are in a status that is no longer declared.

    A downgrade refuses the statuses that the migration has added.

    :param table: the table's quoted name, with its schema.
    :param column: the name of its status column.
    :param removed: the statuses that are gone.
    :param added: the statuses that are new.
    """
    name = quoted(column)
    forth, back = _statement(table, name, removed), _statement(table, name, added)
    return SqlOp(forth, back, _comment(table, name, removed), _comment(table, name, added), reads_rows=True)


def _statement(table: str, column: str, removed: Collection[str]) -> list[str]:
    if not removed:
        return []
    rule = f"{table}.{column} IN ({literals(removed)})"
    told = literal(f" rows are in a status that this migration removes: {rule}")
    hint = literal(f"Give them another one above this statement of the migration: {_update(table, column, removed)}")
    quote = "$refuse$"
    while any(quote in value for value in removed):
        quote = f"{quote[:-1]}_$"
    statement = (
        f"DO {quote}\n"
        "DECLARE\n"
        "    remaining bigint;\n"
        "BEGIN\n"
        f"    SELECT count(*) INTO remaining FROM {table} WHERE {column} IN ({literals(removed)});\n"
        "    IF remaining > 0 THEN\n"
        f"        RAISE EXCEPTION USING ERRCODE = 'check_violation', MESSAGE = remaining || {told},\n"
        f"            HINT = {hint};\n"
        "    END IF;\n"
        "END\n"
        f"{quote}"
    )
    return [statement]


def _comment(table: str, column: str, removed: Collection[str]) -> list[str]:
    statement = json.dumps(_update(table, column, removed), ensure_ascii=False)
    return ["Rows in a status that is gone stop the migration. Give them another one here:", f"op.execute({statement})"]


def _update(table: str, column: str, removed: Collection[str]) -> str:
    return f"UPDATE {table} SET {column} = '...' WHERE {column} IN ({literals(removed)})"
