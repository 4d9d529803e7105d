"""Indexes and storage: missing ones, other definitions, and indexes that PostgreSQL does not use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from sqlalchemy import Connection, Index, Table, text
from sqlalchemy.schema import CreateIndex

from sqla_durable.catalogue import Catalogue
from sqla_durable.checkup.finding import Finding, error, warning
from sqla_durable.mapping import owned_indexes
from sqla_durable.monthly import partitioned
from sqla_durable.plain_sql import plain_dialect

_USABLE: Final = text(
    "SELECT c.relname AS name, CAST(indexrelid AS regclass) AS shown, indisvalid AND indisready AND indislive AS usable"
    " FROM pg_index JOIN pg_class c ON c.oid = indexrelid WHERE indrelid = to_regclass(:table)"
)


def indexes(connection: Connection, table: Table, name: str, found: Catalogue, wanted: Catalogue) -> Iterator[Finding]:
    """Compare the indexes that mixins have added to a table.

    :param name: its quoted name, with its schema.
    :param found: what it has.
    :param wanted: what PostgreSQL makes of the model's.
    """
    there = {row.name: row for row in connection.execute(_USABLE, {"table": name})}
    for index, item in owned_indexes(table).items():
        create = _create(connection, item)
        told = error if item.unique else warning
        meaning = "what it keeps unique is so no longer" if item.unique else "the library reads the whole table instead"
        if index not in there:
            yield told("missing-index", f"{name} {index}", f"This index is missing: {meaning}.", create)
            continue
        drop = f"DROP INDEX {'' if partitioned(table) else 'CONCURRENTLY '}{there[index].shown}"
        if wanted.indexes[index] and wanted.indexes[index] != found.indexes.get(index):
            yield told(
                "other-index",
                f"{name} {index}",
                f"This index has another definition than in the model: {meaning}.",
                f"{drop}; {create}",
            )
        if not there[index].usable:
            # One that is unique may be so since rows break it.
            yield told(
                "invalid-index",
                f"{name} {index}",
                f"This index is INVALID, as its building was broken off: {meaning}.",
                f"{drop}; {create}",
            )


def storage(name: str, found: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[Finding]:
    """Compare storage parameters; those that the model does not name are left alone.

    :param name: the quoted name of a table, with its schema.
    """
    changed = {key: value for key, value in wanted.items() if found.get(key) != value}
    if changed:
        listed = ", ".join(f"{key} = {value}" for key, value in changed.items())
        yield warning(
            "storage-parameter",
            name,
            f"It is stored without {listed}: renewing a lease then touches the indexes, and leaves more to vacuum.",
            f"ALTER TABLE {name} SET ({listed})",
        )


def _create(connection: Connection, index: Index) -> str:
    options: Any = connection.get_execution_options().get("schema_translate_map")
    compile_: Any = CreateIndex(index).compile
    sql = str(compile_(dialect=plain_dialect(), schema_translate_map=options, render_schema_translate=bool(options)))
    table = index.table
    if table is None or partitioned(table) is not None:
        return sql  # PostgreSQL creates none CONCURRENTLY on a partitioned table
    return sql.replace(" INDEX ", " INDEX CONCURRENTLY ", 1)
