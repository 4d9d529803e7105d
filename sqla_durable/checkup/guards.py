"""Guards: a missing, an other or a disabled one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from sqlalchemy import Connection, Table

from sqla_durable import catalogue
from sqla_durable.checkup.finding import Finding, error, warning
from sqla_durable.guard import guard_of
from sqla_durable.plain_sql import quoted

_MIGRATE: Final = 'alembic revision --autogenerate -m "guards" && alembic upgrade head'


def guards(connection: Connection, table: Table, name: str) -> Iterator[Finding]:
    """Compare the guard of a table.

    :param name: its quoted name, with its schema.
    """
    wanted, found = guard_of(table), catalogue.guard_there(connection, name)
    if wanted is None:
        if found is not None:
            yield warning(
                "left-over-guard",
                f"{name} {found.function}",
                "The model asks for no guard any more, and the table has one: it may refuse what the library writes.",
                _MIGRATE,
            )
        return
    if found is None:
        yield error(
            "missing-guard",
            name,
            "The model asks for a guard, and the table has none: SQL of any kind may break the rules.",
            _MIGRATE,
        )
        return
    if not found.is_of(connection, wanted, connection.schema_for_object):
        yield error(
            "other-guard",
            f"{name} {found.function}",
            "The guard was made for another model: it refuses what it should let pass, or the other way round.",
            _MIGRATE,
        )
    if not found.enabled:
        enable = ", ".join(f"ENABLE TRIGGER {quoted(trigger)}" for trigger in found.shapes)
        yield error(
            "disabled-guard",
            f"{name} {found.function}",
            "Triggers of the guard are disabled: SQL of any kind may break the rules.",
            f"ALTER TABLE {name} {enable}",
        )
