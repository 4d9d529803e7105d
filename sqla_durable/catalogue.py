"""What PostgreSQL has of a table's checks, indexes and storage parameters, and what it would make of the model's.

An expression comes back from PostgreSQL in words of its own. To compare it, PostgreSQL itself is asked what it makes of
the model's, on a temporary table that is rolled back; parsing both instead would take every new release for a change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from sqlalchemy import Connection, Table, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.elements import ClauseElement

from sqla_durable.guard import PREFIX
from sqla_durable.mapping import owned_checks, owned_indexes, plain_dialect, storage_parameters

_SHADOW: Final = "sqla_durable_shadow"
_CHECKS: Final = text("SELECT conname, pg_get_expr(conbin, conrelid) FROM pg_constraint"
    " WHERE contype = 'c' AND conrelid = to_regclass(:table)")  # fmt: skip
_COLUMNS: Final = text(
    "SELECT conname, ARRAY(SELECT attname::text FROM pg_attribute WHERE attrelid = conrelid AND attnum = ANY (conkey))"
    " FROM pg_constraint WHERE contype = 'c' AND conrelid = to_regclass(:table)"
)
_INDEXES: Final = text(
    "SELECT c.relname, concat_ws(' ', CASE WHEN indisunique THEN 'unique' END,"
    " (SELECT string_agg(pg_get_indexdef(indexrelid, k, true), ', ' ORDER BY k) FROM generate_series(1, indnatts) k),"
    " array_to_string(indoption, ' '), 'where ' || pg_get_expr(indpred, indrelid))"
    " FROM pg_index JOIN pg_class c ON c.oid = indexrelid WHERE indrelid = to_regclass(:table)"
)
_STORAGE: Final = text(
    "SELECT split_part(o, '=', 1), split_part(o, '=', 2) FROM pg_class, unnest(reloptions) o"
    " WHERE oid = to_regclass(:table)"
)

_CAST: Final = "::character varying"
_WORDS: Final = {"= ANY": "IN", "<> ALL": "NOT IN"}
_LIST: Final = re.compile(
    r"""\((\w+|"(?:[^"]|"")+")\)::text (= ANY|<> ALL) """
    r"""\(\(ARRAY\[((?:'(?:[^']|'')*'::character varying(?:, )?)+)\]\)::text\[\]\)"""
)
_GUARD: Final = text(
    "SELECT format('%I.%I', n.nspname, proname) AS function, prosrc AS source,"
    " pg_get_functiondef(p.oid) AS definition, tgname AS name, pg_get_triggerdef(t.oid) AS trigger,"
    " tgenabled = 'O' AS enabled"
    " FROM pg_trigger t JOIN pg_proc p ON p.oid = tgfoid JOIN pg_namespace n ON n.oid = pronamespace"
    " WHERE tgrelid = to_regclass(:table) AND NOT tgisinternal AND starts_with(tgname, :prefix) ORDER BY tgname"
)


@dataclass(frozen=True)
class GuardThere:
    """The guard that a table has.

    :param function: the quoted name of its function, with its schema.
    :param source: the function's source.
    :param definition: the statement that creates the function.
    :param triggers: the statements that create the triggers, by name.
    :param enabled: whether all of the triggers fire.
    """

    function: str
    source: str
    definition: str
    triggers: Mapping[str, str]
    enabled: bool


@dataclass(frozen=True)
class Catalogue:
    """The definitions of one table's checks, indexes and storage parameters, each by its name.

    :param table: the table's quoted name, with its schema.
    :param checks: the expressions of its checks.
    :param indexes: what its indexes are made of.
    :param storage: its storage parameters.
    :param columns: the columns that its checks are about.
    """

    table: str
    checks: Mapping[str, str]
    indexes: Mapping[str, str]
    storage: Mapping[str, str]
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])


def existing(connection: Connection, table: Table) -> Catalogue:
    """Return what PostgreSQL has of a table."""
    return _read(connection, qualified(connection, table))


def wanted(connection: Connection, table: Table, there: Catalogue) -> Catalogue:
    """Return what PostgreSQL would have of what the mixins added to a table, as far as it is ``there`` by its name.

    What PostgreSQL refuses to create, since a column has another type there for one, is an empty definition.

    :param connection: whose transaction gets a savepoint, which is rolled back.
    """
    with connection.begin_nested() as savepoint:
        # Columns as they are: one that changes as well is for those who compare columns.
        _run(connection, f"CREATE TEMPORARY TABLE {_SHADOW} (LIKE {there.table})")
        for statement in _statements(table, there):
            try:
                with connection.begin_nested():
                    _run(connection, statement)
            except DBAPIError as error:
                if error.connection_invalidated:
                    raise
        found = _read(connection, f"pg_temp.{_SHADOW}")
        savepoint.rollback()
    return Catalogue(
        there.table,
        checks={name: found.checks.get(name, "") for name in owned_checks(table) if name in there.checks},
        indexes={name: found.indexes.get(name, "") for name in owned_indexes(table) if name in there.indexes},
        storage=storage_parameters(table),
    )


def guard_there(connection: Connection, table: str) -> GuardThere | None:
    """Return the guard that a table has, if it has one.

    :param table: its quoted name, with its schema.
    """
    rows = connection.execute(_GUARD, {"table": table, "prefix": PREFIX}).all()
    if not rows:
        return None
    first, triggers = rows[0], {row.name: row.trigger for row in rows}
    enabled = all(row.enabled for row in rows)
    return GuardThere(first.function, first.source, first.definition, triggers, enabled)


def as_written(definition: str) -> str:
    """Return a definition in words from which PostgreSQL makes the very same definition again.

    Of a list of texts it makes an array that it casts, and of a cast array one whose members are cast.
    """
    return _LIST.sub(lambda found: f"{found[1]} {_WORDS[found[2]]} ({found[3].replace(_CAST, '')})", definition)


def qualified(connection: Connection, table: Table) -> str:
    """Return a table's quoted name, in the schema that it is in for this connection."""
    translation = connection.get_execution_options().get("schema_translate_map") or {}
    schema = translation.get(table.schema, table.schema)
    prefix = "" if schema is None else f"{_quoted(schema)}."
    return prefix + _quoted(table.name)


def _statements(table: Table, there: Catalogue) -> Iterator[str]:
    for name, check in owned_checks(table).items():
        if name in there.checks:
            yield f"ALTER TABLE {_SHADOW} ADD CONSTRAINT {_quoted(name)} CHECK ({written(check.sqltext)})"
    for name, index in owned_indexes(table).items():
        if name in there.indexes:
            where = index.dialect_options["postgresql"]["where"]
            columns = ", ".join(written(cast("ClauseElement", each)) for each in index.expressions)
            predicate = "" if where is None else f" WHERE {written(where)}"
            kind = "UNIQUE INDEX" if index.unique else "INDEX"
            yield f"CREATE {kind} {_quoted(name)} ON {_SHADOW} ({columns}){predicate}"


def written(element: ClauseElement) -> str:
    """Return an expression of one table as SQL, its values written out."""
    return str(element.compile(dialect=plain_dialect(), compile_kwargs={"literal_binds": True, "include_table": False}))


def _quoted(name: str) -> str:
    return plain_dialect().identifier_preparer.quote(name)


def _run(connection: Connection, statement: str) -> None:
    connection.exec_driver_sql(statement, execution_options={"no_parameters": True})


def _read(connection: Connection, table: str) -> Catalogue:
    given = {"table": table}
    definitions = (connection.execute(query, given).all() for query in (_CHECKS, _INDEXES, _STORAGE, _COLUMNS))
    return Catalogue(table, *({row[0]: row[1] for row in rows} for rows in definitions))
