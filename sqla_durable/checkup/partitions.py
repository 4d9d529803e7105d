"""Partitions: months without one, and partitions that lack what each must have."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime
from typing import Final

from sqlalchemy import Connection, select, text
from sqlalchemy.orm import Session

from sqla_durable import clock
from sqla_durable.checkup.constraints import Wanted, constraints_there, foreign_key
from sqla_durable.checkup.finding import Finding, error, warning
from sqla_durable.checkup.indexes import storage
from sqla_durable.checkup.target import Expected
from sqla_durable.monthly import Partitioned, following, partitioned
from sqla_durable.partitions import Partition, partitions_of

_KIND: Final = text("SELECT relkind = 'p' FROM pg_class WHERE oid = to_regclass(:table)")
_PARTITIONS: Final = text(
    "SELECT child.relname AS name, format('%I.%I', nspname, child.relname) AS qualified,"
    " (SELECT coalesce(jsonb_object_agg(split_part(o, '=', 1), split_part(o, '=', 2)), '{}')"
    "  FROM unnest(child.reloptions) o) AS storage"
    " FROM pg_inherits JOIN pg_class child ON child.oid = inhrelid JOIN pg_namespace n ON n.oid = child.relnamespace"
    " WHERE inhparent = to_regclass(:table) ORDER BY child.relname"
)


def partitions(connection: Connection, expected: Expected, name: str) -> Iterator[Finding]:
    """Compare how a table is partitioned.

    :param name: its quoted name, with its schema.
    """
    wanted = partitioned(expected.table)
    is_partitioned = bool(connection.execute(_KIND, {"table": name}).scalar_one())
    if is_partitioned is not (wanted is not None):
        yield error(
            "not-partitioned" if wanted else "partitioned",
            name,
            "The model is partitioned, and the table is not: no partition can be created or dropped."
            if wanted
            else "The table is partitioned, and the model is not: it relies on a foreign key that it cannot have.",
            "Remove __partition__ from the model, or move the rows to a table that is made from it"
            if wanted
            else "Add __partition__ = Monthly() to the model, or move the rows to a table that is made from it",
        )
    elif wanted is not None:
        yield from _each(connection, wanted, name)
        yield from _months(connection, expected, wanted, name)


def _each(connection: Connection, wanted: Partitioned, name: str) -> Iterator[Finding]:
    for row in connection.execute(_PARTITIONS, {"table": name}).all():
        if wanted.guard is not None:
            key, here, there = wanted.guard
            names = [column.name for column in here], [column.name for column in there]
            of = Wanted(key, names[0], row.qualified, names[1], deferred=True)
            yield from foreign_key(connection, row.qualified, of, constraints_there(connection, row.qualified))
        if wanted.fillfactor is not None:
            yield from storage(row.qualified, row.storage, {"fillfactor": str(wanted.fillfactor)})


def _months(connection: Connection, expected: Expected, wanted: Partitioned, name: str) -> Iterator[Finding]:
    now: datetime = connection.execute(select(clock.now())).scalar_one()
    this = now.astimezone(UTC).date().replace(day=1)
    with Session(connection) as session:
        listed = partitions_of(session, expected.entities[0])
    has_default = any(each.is_default for each in listed)
    schema = connection.schema_for_object(expected.table)
    for month in (this, following(this)):
        if any(_has(each, month) for each in listed):
            continue
        told = warning if has_default else error
        so = "its rows go to the default partition" if has_default else "its rows are refused"
        yield told(
            "missing-partition",
            f"{name} {month:%Y-%m}",
            f"This month has no partition: {so}.",
            "sqla-durable partitions TARGET --ahead 3",
        )
    if not has_default:
        yield error(
            "missing-partition",
            f"{name} default",
            "There is no default partition: a row whose month has none is refused.",
            "; ".join(wanted.create_default(schema)),
        )


def _has(each: Partition, month: date) -> bool:
    since, until = (datetime(day.year, day.month, 1, tzinfo=UTC) for day in (month, following(month)))
    begins, ends = each.since is None or each.since <= since, each.until is None or each.until >= until
    return not each.is_default and begins and ends
