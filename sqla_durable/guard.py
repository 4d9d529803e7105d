"""Guards: triggers that keep a table's rows to the rules of this library, whoever writes them.

A guard is plain SQL: one function in PL/pgSQL, and the triggers that call it. What it refuses has an SQLSTATE of the
class ``SD``; see :func:`.guard_violation`. With ``SET LOCAL sqla_durable.override = 'reason'`` a transaction passes it,
and what would have been refused is recorded in the table ``durable_override`` of the same schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Final, cast

from sqlalchemy import (
    BLANK_SCHEMA,
    DDL,
    BigInteger,
    Column,
    Connection,
    DateTime,
    Executable,
    Identity,
    String,
    Table,
    Text,
    event,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from sqla_durable.exc import ConfigurationError
from sqla_durable.mapping import notes, plain_dialect, shortened

PREFIX: Final = "durable_guard_"
"""How the names of a guard's function and triggers begin."""
OVERRIDES: Final = "durable_override"
_INFO: Final = "sqla_durable.guard"
_OVERRIDES_INFO: Final = "sqla_durable.overrides"
_DIGEST: Final = 8

SchemaOf = Callable[[Table], str | None]
"""Says in which schema a table is, where a ``schema_translate_map`` has it elsewhere than declared."""


def declared_schema(table: Table) -> str | None:
    """Return the schema that a table was declared in."""
    return table.schema


@dataclass(frozen=True)
class Trigger:
    """When a guard's function is called.

    :param when: such as ``AFTER UPDATE``.
    :param condition: its ``WHEN``; None for always.
    :param each: ``ROW`` or ``STATEMENT``.
    """

    when: str
    condition: str | None = None
    each: str = "ROW"

    def create(self, name: str, table: str, function: str) -> str:
        """Return the statement that creates it."""
        condition = "" if self.condition is None else f" WHEN ({self.condition})"
        return (
            f"CREATE OR REPLACE TRIGGER {quoted(name)} {self.when} ON {table} FOR EACH {self.each}{condition} "
            f"EXECUTE FUNCTION {function}()"
        )


@dataclass(frozen=True)
class Guard:
    """The guard of one table, as complete SQL statements that need nothing of this library.

    :param table: the table.
    :param function: the function's name, in the table's schema.
    :param triggers: the triggers, by name.
    :param body: returns the function's source, given what names a table in it.
    """

    table: Table
    function: str
    triggers: Mapping[str, Trigger]
    body: Callable[[Callable[[Table], str]], str] = field(repr=False)

    def source(self, schema_of: SchemaOf = declared_schema) -> str:
        """Return the function's source, exactly as ``pg_proc.prosrc`` has it.

        It begins with a digest of the triggers, so that a guard with other triggers has another source.

        :param schema_of: says in which schema a table is.
        """
        triggers = _digest("\n".join(t.create(name, "", "") for name, t in self.triggers.items()))
        said = f"-- A guard of sqla_durable, with the triggers {triggers}. It is made from the model: change that."
        return f"\n{said}\n{self.body(lambda table: qualified(table, table.name, schema_of))}"

    def create(self, schema_of: SchemaOf = declared_schema) -> tuple[str, ...]:
        """Return the statements that create it, or replace one of an earlier model.

        :param schema_of: says in which schema a table is.
        """
        source = self.source(schema_of)
        quote = "$guard$"
        while quote in source:
            quote = f"{quote[:-1]}_$"
        # A name without a schema is looked up in the search path: of who creates the table, not of who writes to it.
        path = " SET search_path FROM CURRENT" if schema_of(self.table) is None else ""
        function, table = self._function(schema_of), qualified(self.table, self.table.name, schema_of)
        return (
            f"CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql{path} AS {quote}{source}{quote}",
            *(trigger.create(name, table, function) for name, trigger in self.triggers.items()),
        )

    def drop(self, schema_of: SchemaOf = declared_schema, *, table_is_gone: bool = False) -> tuple[str, ...]:
        """Return the statements that drop it.

        :param schema_of: says in which schema a table is.
        :param table_is_gone: whether the triggers went with the table.
        """
        table = qualified(self.table, self.table.name, schema_of)
        triggers = () if table_is_gone else self.triggers
        return (
            *(f"DROP TRIGGER IF EXISTS {quoted(name)} ON {table}" for name in triggers),
            f"DROP FUNCTION IF EXISTS {self._function(schema_of)}()",
        )

    def _function(self, schema_of: SchemaOf) -> str:
        return qualified(self.table, self.function, schema_of)


def guard_of(table: Table) -> Guard | None:
    """Return the guard of a table; None where it has none."""
    guard: Guard | None = notes(table).get(_INFO)
    return guard


def deletion_triggers(table: Table) -> list[str]:
    """Return the names of the triggers by which the guard of a table, if it has one, is told of deleted rows."""
    guard = guard_of(table)
    triggers: Mapping[str, Trigger] = {} if guard is None else guard.triggers
    return [name for name, each in triggers.items() if each.each == "ROW" and "DELETE" in each.when]


def is_guarded(run: type[Any]) -> bool:
    """Whether a run class asks for guards, of its own table and of what belongs to its runs."""
    return bool(run.__guard__ or run.__lifecycle__.guard)


def attach(table: Table, triggers: Mapping[str, Trigger], body: Callable[[Callable[[Table], str]], str]) -> None:
    """Give a table a guard, which is created and dropped with it."""
    guard = Guard(table, shortened(f"{PREFIX}{table.name}"), triggers, body)
    notes(table)[_INFO] = guard

    def schema_of(target: Table, connection: Connection) -> SchemaOf:
        """Where tables are as ``target`` is created: itself, or a copy of it in another schema."""
        here = connection.schema_for_object(target)
        return lambda other: here if other.schema == table.schema else connection.schema_for_object(other)

    def created(target: Table, connection: Connection, **_: Any) -> None:
        _execute(connection, guard.create(schema_of(target, connection)))

    def dropped(target: Table, connection: Connection, **_: Any) -> None:
        _execute(connection, guard.drop(schema_of(target, connection), table_is_gone=True))

    # Passed on to the copies that to_metadata() makes.
    event.listen(table, "after_create", created, propagate=True)
    event.listen(table, "after_drop", dropped, propagate=True)


def overrides_of(table: Table) -> Table:
    """Return the table that records what was done to a guarded one all the same, one for each schema.

    :raises ConfigurationError: where the metadata has another table of that name.
    """
    name = OVERRIDES if table.schema is None else f"{table.schema}.{OVERRIDES}"
    known = table.metadata.tables.get(name)
    if known is None:
        return _overrides(table)
    if not notes(known).get(_OVERRIDES_INFO):
        raise ConfigurationError(
            f"the table {known.fullname!r} is one of your own, but guards record there what was written in spite of "
            "them; give it another name."
        )
    return known


def _overrides(table: Table) -> Table:
    return Table(
        OVERRIDES,
        table.metadata,
        Column("id", BigInteger, Identity(), primary_key=True, info={_OVERRIDES_INFO: True}),
        Column("table_name", Text, nullable=False),
        Column("row_key", JSONB),
        Column("operation", String(10), nullable=False),
        Column("problem", Text, nullable=False),
        Column("old_row", JSONB),
        Column("new_row", JSONB),
        Column("reason", Text, nullable=False),
        Column("written_by", Text, nullable=False, server_default=text("session_user")),
        Column("written_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
        schema=BLANK_SCHEMA if table.schema is None else table.schema,
    )


# the parts of a function's source


def verdict(table: Table, overrides: str, what: str, key: Sequence[Column[Any]]) -> str:
    """Return the end of a function: it refuses the write if there is a ``problem``, unless that is overridden.

    :param overrides: the table that records the latter.
    :param what: what a row is, for the message.
    :param key: the primary key.
    """
    values = [f"coalesce(OLD.{quoted(c.name)}, NEW.{quoted(c.name)})" for c in key]
    pairs = ", ".join(f"{literal(c.name)}, {value}" for c, value in zip(key, values, strict=True))
    row = f"concat_ws(', ', {', '.join(values)})"
    said = f"concat({literal(f'{what} (')}, {row}, {literal(f') in {table.name}: ')}, problem)"
    return f"""\
  IF problem IS NULL THEN
    RETURN NEW;
  END IF;
  reason := btrim(coalesce(current_setting('sqla_durable.override', true), ''), E' \\t\\r\\n');
  IF reason = '' THEN
    RAISE EXCEPTION USING
      ERRCODE = code,
      MESSAGE = {said},
      HINT = concat(remedy, ' An operator who must: SET LOCAL sqla_durable.override = ''<reason>''; it is recorded.'),
      SCHEMA = TG_TABLE_SCHEMA, TABLE = TG_TABLE_NAME, CONSTRAINT = TG_NAME;
  END IF;
  INSERT INTO {overrides} (table_name, row_key, operation, problem, old_row, new_row, reason)
  VALUES (
    {literal(table.name)},
    CASE WHEN TG_LEVEL = 'ROW' THEN jsonb_build_object({pairs}) END,
    TG_OP, concat(code, ': ', problem), to_jsonb(OLD), to_jsonb(NEW), reason
  );
  RETURN NEW;
END
"""  # noqa: S608 - identifiers and literals are quoted


def quoted(name: str) -> str:
    """Return an identifier as SQLAlchemy writes it."""
    result: str = plain_dialect().identifier_preparer.quote(name)
    return result


def qualified(table: Table, name: str, schema_of: SchemaOf) -> str:
    """Return a name in the schema of a table."""
    schema = schema_of(table)
    return (
        quoted(name) if schema is None else f"{plain_dialect().identifier_preparer.quote_schema(schema)}.{quoted(name)}"
    )


def literal(value: str) -> str:
    """Return a string literal, whatever ``standard_conforming_strings`` is."""
    escape = "E" if "\\" in value else ""
    return escape + "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"


def literals(values: Iterable[str]) -> str:
    """Return string literals as ``IN`` takes them."""
    return ", ".join(literal(value) for value in values)


def _digest(value: str) -> str:
    return sha256(value.encode()).hexdigest()[:_DIGEST]


def _execute(connection: Connection, statements: Iterable[str]) -> None:
    for statement in statements:
        ddl: Executable = cast(Any, DDL)(statement.replace("%", "%%"))  # it formats its text
        connection.execute(ddl)
