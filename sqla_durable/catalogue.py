"""What PostgreSQL has of a table's checks, indexes and storage parameters, and what it would make of the model's.

An expression comes back from PostgreSQL in words of its own. To compare it, PostgreSQL itself is asked what it makes of
the model's, on a temporary table that is rolled back; parsing both instead would take every new release for a change.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, cast

from sqlalchemy import Connection, Row, Table, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.elements import ClauseElement

from sqla_durable.guard import CLOSED_PATH, PREFIX, Guard, SchemaOf, function_sql
from sqla_durable.mapping import owned_checks, owned_indexes, storage_parameters
from sqla_durable.plain_sql import qualified, quoted, written

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

_IS_THERE: Final = text("SELECT CAST(to_regclass(:table) AS oid)")

_CAST: Final = "::character varying"
_WORDS: Final = {"= ANY": "IN", "<> ALL": "NOT IN"}
_LIST: Final = re.compile(
    r"""\((\w+|"(?:[^"]|"")+")\)::text (= ANY|<> ALL) """
    r"""\(\(ARRAY\[((?:'(?:[^']|'')*'::character varying(?:, )?)+)\]\)::text\[\]\)"""
)
_ITEM: Final = r"'(?:[^']|'')*'::character varying"
_RESTORED: Final = re.compile(rf"ARRAY\[((?:\({_ITEM}\)::text(?:, )?)+)\]")
_RESTORED_ITEM: Final = re.compile(rf"\(({_ITEM})\)::text")
_GUARD: Final = text(
    "SELECT relname, proname, relnamespace = pronamespace AS beside, quote_ident(nspname) AS schema, prosrc AS source,"
    " proconfig AS settings, prosecdef AS as_owner, tgname AS name,"
    " tgenabled = 'O' AND NOT EXISTS (SELECT FROM pg_trigger c WHERE c.tgparentid = t.oid AND c.tgenabled <> 'O')"
    " AS enabled,"
    # Only the short form leaves out the schema of a table that is in the search path.
    " pg_get_triggerdef(t.oid) AS qualified, pg_get_triggerdef(t.oid, true) AS short"
    " FROM pg_trigger t JOIN pg_class r ON r.oid = tgrelid JOIN pg_proc p ON p.oid = tgfoid"
    " JOIN pg_namespace n ON n.oid = pronamespace"
    " WHERE tgrelid = to_regclass(:table) AND NOT tgisinternal AND starts_with(tgname, :prefix) ORDER BY tgname"
)
_BY_PATH: Final = re.compile(r"search_path=pg_catalog, (.*, )?pg_temp")
_ON: Final = re.compile(r" ON .*? (?=FOR EACH)", re.DOTALL)
_CALLED: Final = re.compile(r"(?<=EXECUTE FUNCTION ).*$")


@dataclass(frozen=True)
class GuardThere:
    """The guard that a table has.

    :param table: the table's quoted name, with its schema.
    :param function: the quoted name of its function, with its schema.
    :param source: the function's source.
    :param settings: the settings that the function runs with.
    :param shapes: when its triggers fire, by their names.
    :param statements: those that create all of it.
    :param enabled: whether all of the triggers fire, on all partitions.
    """

    table: str
    function: str
    source: str
    settings: str
    shapes: Mapping[str, str]
    statements: tuple[str, ...]
    enabled: bool

    def is_of(self, connection: Connection, guard: Guard, schema_of: SchemaOf) -> bool:
        """Whether it is what a guard wants, be it enabled or not.

        :param schema_of: says in which schema a table is.
        """
        closed = self.settings == f"search_path={CLOSED_PATH}"
        by_path = _BY_PATH.fullmatch(self.settings) is not None and not closed
        return (
            self.source == guard.source(schema_of)
            and self.function.endswith(quoted(guard.function))
            and (closed or (by_path and guard.goes_by_path(schema_of)))
            and self.shapes == _wanted_shapes(connection, guard, self)
        )


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


def is_there(connection: Connection, table: str) -> bool:
    """Return whether a table exists.

    :param table: its quoted name, with its schema.
    """
    return connection.execute(_IS_THERE, {"table": table}).scalar_one() is not None


def existing(connection: Connection, table: Table) -> Catalogue:
    """Return what PostgreSQL has of a table."""
    return _read(connection, table_name(connection, table))


def wanted(connection: Connection, table: Table, there: Catalogue) -> Catalogue:
    """Return what PostgreSQL would have of what the mixins added to a table, as far as it is ``there`` by its name.

    What PostgreSQL refuses to create, since a column has another type there for one, is an empty definition.

    :param connection: whose transaction gets a savepoint, which is rolled back.
    """
    with connection.begin_nested() as savepoint:
        # Columns as they are: one that changes as well is for those who compare columns.
        _run(connection, f"CREATE TEMPORARY TABLE {_SHADOW} (LIKE {there.table})")
        for statement in _statements(table, there):
            _try(connection, statement)
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
    first = rows[0]
    # In the schema that the models name for the table, or in none: another database may have it in another one.
    place = table.removesuffix(quoted(first.relname)) if first.beside else f"{first.schema}."
    function = f"{place}{quoted(first.proname)}"
    created = {row.name: row.short if table == quoted(first.relname) else row.qualified for row in rows}
    triggers = [_CALLED.sub(lambda _: f"{function}()", each) for each in created.values()]
    # Of one that calls another function, or runs as its owner, nothing is as it should be.
    strange = first.as_owner or len({(row.schema, row.proname) for row in rows}) > 1
    settings = "" if strange else ", ".join(first.settings or ())
    by_path = settings != f"search_path={CLOSED_PATH}"
    statements = (*function_sql(function, first.source, by_path=by_path), *triggers)
    return GuardThere(table, function, first.source, settings, _shapes(rows), statements, all(r.enabled for r in rows))


def _wanted_shapes(connection: Connection, guard: Guard, there: GuardThere) -> dict[str, str]:
    """Return what PostgreSQL makes of the triggers that a guard wants."""
    with connection.begin_nested() as savepoint:
        _run(connection, f"CREATE TEMPORARY TABLE {_SHADOW} (LIKE {there.table})")
        for name, trigger in guard.triggers.items():
            _try(connection, trigger.create(name, f"pg_temp.{_SHADOW}", there.function))
        rows = connection.execute(_GUARD, {"table": f"pg_temp.{_SHADOW}", "prefix": PREFIX}).all()
        savepoint.rollback()
    return _shapes(rows)


def _shapes(rows: Sequence[Row[Any]]) -> dict[str, str]:
    """Return when each trigger fires, by its name."""
    return {row.name: _CALLED.sub("", _ON.sub("", row.qualified)) for row in rows}


def as_written(definition: str) -> str:
    """Return a definition in words from which PostgreSQL makes the very same definition again.

    Of a list of texts it makes an array that it casts, and of a cast array one whose members are cast.
    """
    return _LIST.sub(lambda found: f"{found[1]} {_WORDS[found[2]]} ({found[3].replace(_CAST, '')})", definition)


def table_name(connection: Connection, table: Table) -> str:
    """Return a table's quoted name, in the schema that it is in for this connection."""
    return qualified(connection.schema_for_object(table), table.name)


def _statements(table: Table, there: Catalogue) -> Iterator[str]:
    for name, check in owned_checks(table).items():
        if name in there.checks:
            yield f"ALTER TABLE {_SHADOW} ADD CONSTRAINT {quoted(name)} CHECK ({written(check.sqltext)})"
    for name, index in owned_indexes(table).items():
        if name in there.indexes:
            where = index.dialect_options["postgresql"]["where"]
            columns = ", ".join(written(cast("ClauseElement", each)) for each in index.expressions)
            predicate = "" if where is None else f" WHERE {written(where)}"
            kind = "UNIQUE INDEX" if index.unique else "INDEX"
            yield f"CREATE {kind} {quoted(name)} ON {_SHADOW} ({columns}){predicate}"


def _run(connection: Connection, statement: str) -> None:
    connection.exec_driver_sql(statement, execution_options={"no_parameters": True})


def _try(connection: Connection, statement: str) -> None:
    """Execute what PostgreSQL may refuse, where a column is missing or has another type for one."""
    try:
        with connection.begin_nested():
            _run(connection, statement)
    except DBAPIError as error:
        if error.connection_invalidated:
            raise


def _read(connection: Connection, table: str) -> Catalogue:
    given = {"table": table}
    definitions = (connection.execute(query, given).all() for query in (_CHECKS, _INDEXES, _STORAGE))
    checks, indexes, storage = ({row[0]: _as_created(row[1]) for row in rows} for rows in definitions)
    columns = {row[0]: row[1] for row in connection.execute(_COLUMNS, given).all()}
    return Catalogue(table, checks, indexes, storage, columns)


def _as_created(definition: str) -> str:
    """Return a definition as PostgreSQL prints it where it was not dumped and restored; see :func:`as_written`."""
    return _RESTORED.sub(_created, definition)


def _created(found: re.Match[str]) -> str:
    items = _RESTORED_ITEM.sub(r"\1", found[1])
    return f"(ARRAY[{items}])::text[]"
