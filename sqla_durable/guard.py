"""Guards: triggers that keep a table's rows to the rules of this library, whoever writes them.

A guard is plain SQL: one function in PL/pgSQL, and the triggers that call it. What it refuses has an SQLSTATE of the
class ``SD``; see :func:`.guard_violation`. With ``SET LOCAL sqla_durable.override = 'reason'`` a transaction passes it,
and what would have been refused is recorded in the table ``durable_override`` of the same schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from sqlalchemy import (
    BLANK_SCHEMA,
    DDL,
    BigInteger,
    Column,
    Connection,
    DateTime,
    Executable,
    FromClause,
    Identity,
    String,
    Table,
    Text,
    event,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from sqla_durable.exc import ConfigurationError
from sqla_durable.mapping import notes
from sqla_durable.plain_sql import digest, literal, qualified, quoted, shortened

OVERRIDES: Final = "durable_override"
"""The name of the table that records overrides, and where a metadata's ``info`` has another name for it."""
PREFIX: Final = "durable_guard_"
"""What the names of a guard's function and of its triggers begin with."""
CLOSED_PATH: Final = "pg_catalog, pg_temp"
_INFO: Final = "sqla_durable.guard"
_OVERRIDES_INFO: Final = "sqla_durable.overrides"

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
    :param named: the tables that it names.
    """

    table: Table
    function: str
    triggers: Mapping[str, Trigger]
    body: Callable[[Callable[[Table], str]], str] = field(repr=False)
    named: tuple[Table, ...] = field(repr=False)

    def source(self, schema_of: SchemaOf = declared_schema) -> str:
        """Return the function's source, exactly as ``pg_proc.prosrc`` has it.

        It begins with a digest of the triggers, so that a guard with other triggers has another source.

        :param schema_of: says in which schema a table is.
        """
        triggers = digest("\n".join(t.create(name, "", "") for name, t in self.triggers.items()))
        said = f"-- A guard of sqla_durable, with the triggers {triggers}. It is made from the model: change that."
        return f"\n{said}\n{self.body(lambda table: table_name(table, schema_of))}"

    def create(self, schema_of: SchemaOf = declared_schema) -> tuple[str, ...]:
        """Return the statements that create it, or replace one of an earlier model.

        :param schema_of: says in which schema a table is.
        """
        function, table = self._function(schema_of), table_name(self.table, schema_of)
        return (
            *function_sql(function, self.source(schema_of), by_path=self.goes_by_path(schema_of)),
            *(trigger.create(name, table, function) for name, trigger in self.triggers.items()),
        )

    def goes_by_path(self, schema_of: SchemaOf = declared_schema) -> bool:
        """Whether it names a table without a schema, and so depends on the search path.

        :param schema_of: says in which schema a table is.
        """
        return any(schema_of(table) is None for table in self.named)

    def drop(self, schema_of: SchemaOf = declared_schema, *, table_is_gone: bool = False) -> tuple[str, ...]:
        """Return the statements that drop it.

        :param schema_of: says in which schema a table is.
        :param table_is_gone: whether the triggers went with the table.
        """
        table = table_name(self.table, schema_of)
        triggers = () if table_is_gone else self.triggers
        return (
            *(f"DROP TRIGGER IF EXISTS {quoted(name)} ON {table}" for name in triggers),
            f"DROP FUNCTION IF EXISTS {self._function(schema_of)}()",
        )

    def _function(self, schema_of: SchemaOf) -> str:
        return qualified(schema_of(self.table), self.function)


def function_sql(name: str, source: str, *, by_path: bool) -> tuple[str, ...]:
    """Return the statements that create the function of a guard.

    It has a search path of its own, in which nothing comes before PostgreSQL's own operators, and temporary tables of
    whoever writes come last. What it looks up is found by the search path of who creates it.

    :param name: its quoted name.
    :param source: its source.
    :param by_path: whether it names tables without their schema.
    """
    quote = "$guard$"
    while quote in source:
        quote = f"{quote[:-1]}_$"
    made = f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql SET search_path TO {CLOSED_PATH}"
    created = f"{made} AS {quote}{source}{quote}"
    if not by_path:
        return (created,)
    path = "concat_ws(', ', 'pg_catalog', nullif(current_setting('search_path'), ''), 'pg_temp')"
    set_path = f"EXECUTE concat('ALTER FUNCTION ', {literal(name)}, '() SET search_path TO ', {path});"
    return created, f"DO $path$\nBEGIN\n  {set_path}\nEND\n$path$"


def guard_of(table: FromClause) -> Guard | None:
    """Return the guard of a table; None where it has none.

    :param table: the table, as in ``Plan.__table__``.
    """
    guard: Guard | None = notes(table).get(_INFO)
    return guard


def deletion_triggers(table: Table) -> list[str]:
    """Return the names of the triggers by which the guard of a table, if it has one, is told of deleted rows."""
    guard = guard_of(table)
    if guard is None:
        return []
    return [name for name, each in guard.triggers.items() if each.each == "ROW" and "DELETE" in each.when]


def is_guarded(run: type[Any]) -> bool:
    """Whether a run class asks for guards, of its own table and of what belongs to its runs.

    :raises ConfigurationError: where it says neither yes nor no.
    """
    for where, asked in (("__guard__", run.__guard__), ("__lifecycle__.guard", run.__lifecycle__.guard)):
        if not isinstance(asked, bool):
            raise ConfigurationError(f"{run.__name__}.{where} is {asked!r}; write True or False.")
    return bool(run.__guard__ or run.__lifecycle__.guard)


def function_name(table: str) -> str:
    """Return the name of the function of a table's guard."""
    return shortened(f"{PREFIX}{table}")


def attach(
    table: Table, triggers: Mapping[str, Trigger], body: Callable[[Callable[[Table], str]], str], *named: Table
) -> None:
    """Give a table a guard, which is created and dropped with it.

    :param triggers: its triggers, by what follows the prefix in their names.
    :param body: as for :class:`Guard`.
    :param named: likewise.
    """
    own = {f"{PREFIX}{name}": trigger for name, trigger in triggers.items()}
    guard = Guard(table, function_name(table.name), own, body, named)
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
    name = str(table.metadata.info.get(OVERRIDES, OVERRIDES))
    known = table.metadata.tables.get(name if table.schema is None else f"{table.schema}.{name}")
    if known is None:
        return _overrides(table, name)
    if not is_overrides(known):
        raise ConfigurationError(
            f"the table {known.fullname!r} is one of your own, but guards record there what was written in spite of "
            f"them; give it another name, or have them use another one: MetaData(info={{{OVERRIDES!r}: ...}})."
        )
    return known


def is_overrides(table: Table) -> bool:
    """Whether a table is one that guards record overrides in."""
    return bool(notes(table).get(_OVERRIDES_INFO))


def _overrides(table: Table, name: str) -> Table:
    return Table(
        name,
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
    which = f"CASE WHEN TG_LEVEL = 'ROW' THEN concat(' (', {row}, ')') END"
    said = f"concat({literal(what)}, {which}, {literal(f' in {table.name}: ')}, problem)"
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


def table_name(table: Table, schema_of: SchemaOf) -> str:
    """Return a table's quoted name."""
    return qualified(schema_of(table), table.name)


def _execute(connection: Connection, statements: Iterable[str]) -> None:
    for statement in statements:
        ddl: Executable = cast(Any, DDL)(statement.replace("%", "%%"))  # it formats its text
        connection.execute(ddl)
