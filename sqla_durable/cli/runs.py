"""``sqla-durable runs``: lists runs, or counts them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any

import typer

from sqla_durable.cli.conditions import ListConditions
from sqla_durable.cli.durations import rounded
from sqla_durable.cli.errors import CommandError
from sqla_durable.cli.form import OpenFunctions, OpenRuns, opened
from sqla_durable.cli.groups import grouped
from sqla_durable.cli.idents import Idents
from sqla_durable.cli.options import AsJson, Target, Url
from sqla_durable.cli.output import abbreviated, printable, say, write_json, write_table
from sqla_durable.cli.record import holder_of, message_of, record_of, status_of
from sqla_durable.functions import FunctionSummary
from sqla_durable.listing import RunSummary
from sqla_durable.run import RunRows


@grouped
def runs(
    target: Target,
    *,
    url: Url = None,
    which: ListConditions,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="How many at the most.")] = 100,
    after: Annotated[str | None, typer.Option(metavar="CURSOR", help="Go on after an earlier page.")] = None,
    counts: Annotated[bool, typer.Option("--counts", help="Count the runs of each status instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """List runs, the newest first. Nothing is healed."""
    with opened(target, url) as runs:
        conditions = which.given(runs)
        if counts:
            _count(runs, conditions, after, as_json=as_json)
            return
        found = runs.find(limit=limit + 1, after=after, **conditions)
        _write(found[:limit], runs.rows, as_json=as_json)
    if as_json:
        return
    if not found:
        say("no such runs" if conditions or after is not None else "no runs")
    elif len(found) > limit:
        say(f"There are more: --after {found[limit - 1].cursor}")


def _count(runs: OpenRuns, conditions: dict[str, Any], after: str | None, *, as_json: bool) -> None:
    if after is not None or (conditions and not isinstance(runs, OpenFunctions)):
        raise CommandError("--counts counts every run; leave the other conditions out.")
    counted = runs.counts(**conditions)
    if not isinstance(runs, OpenFunctions):
        _write_counts(counted, as_json=as_json)
    elif as_json:
        write_json({name: {status.value: each for status, each in of.items()} for name, of in counted.items()})
    else:
        rows = [
            (printable(name), status.value, str(each))
            for name, of in counted.items()
            for status, each in of.items()
            if each
        ]
        write_table(["function", "status", "runs"], rows)


def _write(found: Sequence[RunSummary], rows: RunRows[Any], *, as_json: bool) -> None:
    idents = Idents(rows)
    if as_json:
        for summary in found:
            write_json(record_of(summary, idents, rows))
    elif found:
        lines = [_cells(summary, idents, rows) for summary in found]
        write_table([title for title, _ in lines[0]], [[cell for _, cell in line] for line in lines])


def _cells(summary: RunSummary, idents: Idents, rows: RunRows[Any]) -> list[tuple[str, str]]:
    """Return what the table has of a run: the title of each column, and what is in it."""
    key = [("key", summary.key)] if rows.idempotency_key is not None else []
    waits_for = [("waits for", summary.waits_for)] if rows.waits_for is not None else []
    return [
        (idents.title, printable(idents.write(summary.identity))),
        *([("function", printable(summary.function))] if isinstance(summary, FunctionSummary) else []),
        *((title, printable(value or "")) for title, value in key),
        ("status", status_of(summary)),
        ("attempts", str(summary.attempts)),
        ("age", _since(summary.age)),
        *((title, printable(value or "")) for title, value in waits_for),
        ("holder", abbreviated(holder_of(summary))),
        ("error", abbreviated(message_of(summary.failure))),
    ]


def _write_counts(counts: dict[StrEnum, int], *, as_json: bool) -> None:
    if as_json:
        write_json({status.value: count for status, count in counts.items()})
    else:
        write_table(["status", "runs"], [(status.value, str(count)) for status, count in counts.items()])


def _since(created: timedelta | None) -> str:
    return "" if created is None else rounded(timedelta(seconds=int(created.total_seconds())))
