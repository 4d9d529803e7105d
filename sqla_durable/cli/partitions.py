"""``sqla-durable partitions``: lists the monthly partitions of runs and receipts, creates and drops them."""

from __future__ import annotations

from datetime import date, timedelta
from typing import Annotated, Any

import typer

from sqla_durable.cli.errors import CommandError
from sqla_durable.cli.form import OpenRuns, opened
from sqla_durable.cli.options import AsJson, Target, Url, age
from sqla_durable.cli.output import jsonable, printable, write_json, write_table
from sqla_durable.mapping import root_table
from sqla_durable.monthly import partitioned
from sqla_durable.partitions import (
    Partition,
    PartitionKept,
    create_partitions,
    drop_partitions,
    partition_sql,
    partitions_of,
)


def partitions(
    target: Target,
    *,
    url: Url = None,
    ahead: Annotated[
        int | None,
        typer.Option("--ahead", min=0, metavar="N", help="Create those of this month and of so many to come."),
    ] = None,
    drop_older_than: Annotated[
        timedelta | None,
        typer.Option(parser=age, metavar="DURATION", help="Drop those whose month ended longer ago: 90d, 365d."),
    ] = None,
    sql: Annotated[
        str | None, typer.Option("--sql", metavar="YYYY-MM", help="Write the SQL that creates that of a month instead.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the monthly partitions of runs and receipts, having created and dropped what was asked for.

    Exit status 1 where one that is old enough was kept, or a month could have none.
    """
    with opened(target, url) as runs:
        entities = [each for each in runs.entities() if partitioned(root_table(each.__mapper__)) is not None]
        if not entities:
            raise CommandError(f"neither {runs.name} nor its receipts are partitioned; see __partition__ = Monthly().")
        if sql is not None:
            _write_sql(entities, sql)
            return
        occupied = [] if ahead is None else _create(runs, entities, ahead)
        kept: list[PartitionKept] = []
        if drop_older_than is not None:
            # Those of the receipts go first, and take those of the runs along.
            kept = list(runs.transact(drop_partitions, entities[-1], drop_older_than).kept)
        listed = [each for entity in entities for each in runs.transact(partitions_of, entity)]
    _write(listed, {each.partition.name: each for each in kept}, as_json=as_json)
    for month in occupied:
        typer.echo(f"runs of {month:%Y-%m} are in the default partition, so it can have none of its own.", err=True)
    if kept or occupied:
        raise typer.Exit(1)


def _create(runs: OpenRuns, entities: list[type[Any]], months: int) -> list[date]:
    return [month for entity in entities for month in runs.transact(create_partitions, entity, months).occupied]


def _write_sql(entities: list[type[Any]], month: str) -> None:
    try:
        first = date.fromisoformat(f"{month}-01")
    except ValueError:
        raise CommandError(f"{month!r} is not a month; write it as 2026-03.") from None
    for statement in (each for entity in entities for each in partition_sql(entity, first)):
        typer.echo(f"{statement};")


def _write(listed: list[Partition], kept: dict[str, PartitionKept], *, as_json: bool) -> None:
    if as_json:
        for each in listed:
            why = kept.get(each.name)
            reason = None if why is None else {name: getattr(why, name) for name in _REASONS}
            ends = {"since": jsonable(each.since), "until": jsonable(each.until)}
            write_json({"name": each.name, **ends, "is_default": each.is_default, "kept": reason})
        return
    rows = [[printable(each.name), _since(each), _reason(kept.get(each.name))] for each in listed]
    write_table(["partition", "since", "kept"], rows)


_REASONS = "live", "requeueable", "referenced_by"


def _since(each: Partition) -> str:
    return "default" if each.is_default else "" if each.since is None else f"{each.since:%Y-%m-%d}"


def _reason(why: PartitionKept | None) -> str:
    if why is None:
        return ""
    if why.referenced_by is not None:
        return f"rows of {printable(why.referenced_by)} refer to its runs"
    return f"{why.live} live, {why.requeueable} could be requeued"
