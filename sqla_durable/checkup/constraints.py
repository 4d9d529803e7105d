"""Constraints: missing ones, ones with another definition or name, and ones that PostgreSQL does not enforce."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, ForeignKeyConstraint, Table, text

from sqla_durable import catalogue
from sqla_durable.catalogue import Catalogue
from sqla_durable.checkup.finding import Finding, error, warning
from sqla_durable.mapping import owned_checks, owned_foreign_keys
from sqla_durable.plain_sql import quoted, written

_READ: Final = text(
    "SELECT conname AS name, contype AS kind, convalidated AS valid,"
    # PostgreSQL 18 has constraints that are not enforced.
    " coalesce(CAST(to_jsonb(c) ->> 'conenforced' AS boolean), true) AS enforced,"
    " condeferrable AS deferrable, condeferred AS deferred, confdeltype AS on_delete,"
    " CAST(confrelid AS bigint) AS referred,"
    " ARRAY(SELECT CAST(attname AS text) FROM unnest(conkey) WITH ORDINALITY k (number, at)"
    "  JOIN pg_attribute ON attrelid = conrelid AND attnum = number ORDER BY at) AS columns,"
    " ARRAY(SELECT CAST(attname AS text) FROM unnest(confkey) WITH ORDINALITY k (number, at)"
    "  JOIN pg_attribute ON attrelid = confrelid AND attnum = number ORDER BY at) AS referred_columns"
    " FROM pg_constraint c WHERE conrelid = to_regclass(:table) ORDER BY conname"
)
_OID: Final = text("SELECT CAST(CAST(to_regclass(:table) AS oid) AS bigint)")
_SILENCED: Final = text(
    "SELECT count(*) FROM pg_trigger WHERE tgrelid = to_regclass(:table) AND tgisinternal AND tgenabled IN ('D', 'R')"
)
_ON_DELETE: Final[Mapping[str | None, str]] = {None: "a", "CASCADE": "c"}


def constraints(
    connection: Connection, table: Table, name: str, found: Catalogue, wanted: Catalogue
) -> Iterator[Finding]:
    """Compare the constraints that mixins have added to a table, and its primary key.

    :param name: its quoted name, with its schema.
    :param found: what it has.
    :param wanted: what PostgreSQL makes of the model's.
    """
    there = {row.name: row for row in connection.execute(_READ, {"table": name})}
    yield from _primary_key(table, name, there)
    yield from _checks(table, name, there, found, wanted)
    for key in owned_foreign_keys(table).values():
        referred = catalogue.table_name(connection, key.referred_table)
        yield from foreign_key(connection, name, Wanted.of(key, referred), there)
    if connection.execute(_SILENCED, {"table": name}).scalar_one():
        yield error(
            "disabled-constraint",
            name,
            "Triggers that enforce its foreign keys are disabled: a receipt could be committed that was never sealed.",
            f"ALTER TABLE {name} ENABLE TRIGGER ALL",
        )


def constraints_there(connection: Connection, table: str) -> dict[str, Any]:
    """Return the constraints that a table has, by name.

    :param table: its quoted name, with its schema.
    """
    return {row.name: row for row in connection.execute(_READ, {"table": table})}


class Wanted:
    """A foreign key that a table should have.

    :param name: its name.
    :param columns: the names of its columns.
    :param referred: the quoted name of the table that it refers to, with its schema.
    :param referred_columns: the names of the columns there.
    :param on_delete: as PostgreSQL's catalogue has it.
    :param deferred: whether it is checked at the end of the transaction.
    """

    def __init__(
        self,
        name: str,
        columns: Sequence[str],
        referred: str,
        referred_columns: Sequence[str],
        on_delete: str = "a",
        *,
        deferred: bool = False,
    ) -> None:
        self.name = name
        self.columns = list(columns)
        self.referred = referred
        self.referred_columns = list(referred_columns)
        self.on_delete = on_delete
        self.deferred = deferred

    @classmethod
    def of(cls, key: ForeignKeyConstraint, referred: str) -> Wanted:
        """Return what a foreign key of a model asks for."""
        there = [element.column.name for element in key.elements]
        deferred = (key.initially or "").upper() == "DEFERRED"
        on_delete = _ON_DELETE[key.ondelete]
        return cls(str(key.name), key.columns.keys(), referred, there, on_delete, deferred=deferred)

    def matches(self, row: Any, referred: int | None) -> bool:
        """Whether a constraint is one like this, but for its name."""
        shape = self.columns, self.referred_columns, self.on_delete, self.deferred, self.deferred
        is_key = row.kind == "f" and row.referred == referred
        return is_key and shape == (row.columns, row.referred_columns, row.on_delete, row.deferrable, row.deferred)

    def add(self, table: str) -> str:
        """Return the statement that adds it to a table."""
        here, there = (", ".join(map(quoted, names)) for names in (self.columns, self.referred_columns))
        more = (" ON DELETE CASCADE" if self.on_delete == "c" else "") + (
            " DEFERRABLE INITIALLY DEFERRED" if self.deferred else ""
        )
        key = f"FOREIGN KEY ({here}) REFERENCES {self.referred} ({there}){more}"
        return f"ALTER TABLE {table} ADD CONSTRAINT {quoted(self.name)} {key}"


def foreign_key(connection: Connection, table: str, wanted: Wanted, there: Mapping[str, Any]) -> Iterator[Finding]:
    """Compare one foreign key of a table.

    :param table: its quoted name, with its schema.
    :param there: what :func:`constraints_there` returned.
    """
    referred = connection.execute(_OID, {"table": wanted.referred}).scalar_one()
    drop = f"ALTER TABLE {table} DROP CONSTRAINT {quoted(wanted.name)}"
    row = there.get(wanted.name)
    meaning = (
        "it refuses to commit a receipt that was not sealed"
        if wanted.deferred
        else "it removes what belongs to a run together with the run, and lets nothing refer to one that is gone"
    )
    if row is not None:
        if not wanted.matches(row, referred):
            yield _other(table, wanted.name, f"{drop}; {wanted.add(table)}", meaning)
        yield from _unenforced(table, row)
        return
    if other := next((each for each in there.values() if wanted.matches(each, referred)), None):
        yield _misnamed(table, other.name, wanted.name, decides=wanted.deferred)
        return
    yield _missing(table, wanted.name, wanted.add(table), meaning)


def _primary_key(table: Table, name: str, there: Mapping[str, Any]) -> Iterator[Finding]:
    wanted = [column.name for column in table.primary_key.columns]
    if not any(row.kind == "p" and sorted(row.columns) == sorted(wanted) for row in there.values()):
        key = ", ".join(map(quoted, wanted))
        yield error(
            "missing-constraint",
            f"{name} primary key",
            f"It is not ({key}), as in the model: rows are no longer told apart by it.",
            f"ALTER TABLE {name} ADD PRIMARY KEY ({key})",
        )


def _checks(
    table: Table, name: str, there: Mapping[str, Any], found: Catalogue, wanted: Catalogue
) -> Iterator[Finding]:
    for check, item in owned_checks(table).items():
        add = f"ALTER TABLE {name} ADD CONSTRAINT {quoted(check)} CHECK ({written(item.sqltext)})"
        meaning = "it keeps rows to what the library relies on, whoever writes them"
        if check not in there:
            yield _missing(name, check, add, meaning)
            continue
        if wanted.checks[check] and wanted.checks[check] != found.checks.get(check):
            yield _other(name, check, f"ALTER TABLE {name} DROP CONSTRAINT {quoted(check)}; {add}", meaning)
        yield from _unenforced(name, there[check])


def _missing(table: str, name: str, add: str, meaning: str) -> Finding:
    return error("missing-constraint", f"{table} {name}", f"This constraint is missing: {meaning}.", add)


def _other(table: str, name: str, replace: str, meaning: str) -> Finding:
    return error(
        "other-constraint",
        f"{table} {name}",
        f"This constraint has another definition than in the model: {meaning}, and refuses what the library writes, or "
        "lets pass what it should not.",
        replace,
    )


def _misnamed(table: str, name: str, wanted: str, *, decides: bool) -> Finding:
    told = error if decides else warning
    known = "an error is known by that name" if decides else "migrations know it by that name"
    return told(
        "constraint-name",
        f"{table} {name}",
        f"This constraint is named {wanted} in the model; {known}.",
        f"ALTER TABLE {table} RENAME CONSTRAINT {quoted(name)} TO {quoted(wanted)}",
    )


def _unenforced(table: str, row: Any) -> Iterator[Finding]:
    alter = f"ALTER TABLE {table}"
    if not row.enforced:
        yield error(
            "constraint-not-enforced",
            f"{table} {row.name}",
            "This constraint is NOT ENFORCED: it refuses nothing.",
            f"{alter} ALTER CONSTRAINT {quoted(row.name)} ENFORCED"
            if row.kind == "f"
            else f"{alter} DROP CONSTRAINT {quoted(row.name)}, and add it anew: a CHECK cannot be altered",
        )
    elif not row.valid:
        yield warning(
            "constraint-not-valid",
            f"{table} {row.name}",
            "This constraint is NOT VALID: rows from before it was added may break it.",
            f"{alter} VALIDATE CONSTRAINT {quoted(row.name)}",
        )
