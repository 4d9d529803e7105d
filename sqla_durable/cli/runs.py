"""``sqla-durable runs``: lists runs, or counts them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Annotated

import typer

from sqla_durable.cli.durations import rounded
from sqla_durable.cli.errors import CommandError
from sqla_durable.cli.form import OpenRuns
from sqla_durable.cli.idents import Idents
from sqla_durable.cli.options import AsJson, Target, Url, age
from sqla_durable.cli.output import abbreviated, printable, say, write_json, write_table
from sqla_durable.cli.record import holder_of, message_of, record_of, status_of
from sqla_durable.listing import RunSummary


def runs(
    target: Target,
    *,
    url: Url = None,
    status: Annotated[
        list[str] | None, typer.Option("--status", metavar="STATUS", help="Only these; may be given several times.")
    ] = None,
    older_than: Annotated[
        timedelta | None,
        typer.Option(parser=age, metavar="DURATION", help="Only runs inserted longer ago: 90s, 15m, 2h, 7d."),
    ] = None,
    newer_than: Annotated[
        timedelta | None, typer.Option(parser=age, metavar="DURATION", help="Only runs inserted since.")
    ] = None,
    error: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only runs with this in the type or message of their error.")
    ] = None,
    owner: Annotated[str | None, typer.Option(metavar="NAME", help="Only runs whose lease carries this name.")] = None,
    cancel_requested: Annotated[
        bool | None,
        typer.Option("--cancel-requested/--no-cancel-requested", help="Only runs with, or without, a cancel request."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="How many at the most.")] = 100,
    after: Annotated[str | None, typer.Option(metavar="CURSOR", help="Go on after an earlier page.")] = None,
    counts: Annotated[bool, typer.Option("--counts", help="Count the runs of each status instead.")] = False,
    as_json: AsJson = False,
) -> None:
    """List runs, the newest first. Nothing is healed."""
    conditions = {
        "older_than": older_than,
        "newer_than": newer_than,
        "error": error,
        "owner": owner,
        "cancel_requested": cancel_requested,
        "after": after,
    }
    if counts and (status or any(value is not None for value in conditions.values())):
        raise CommandError("--counts counts every run; leave the other conditions out.")
    with OpenRuns(target, url) as opened:
        if counts:
            _write_counts(opened.counts(), as_json=as_json)
            return
        statuses = None if not status else [_status(opened, each) for each in status]
        found = opened.find(status=statuses, limit=limit + 1, **conditions)
        _write(found[:limit], Idents(opened.rows), as_json=as_json)
    if as_json:
        return
    if not found:
        say("no such runs" if statuses or any(value is not None for value in conditions.values()) else "no runs")
    elif len(found) > limit:
        say(f"There are more: --after {found[limit - 1].cursor}")


def _write(found: Sequence[RunSummary], idents: Idents, *, as_json: bool) -> None:
    if as_json:
        for summary in found:
            write_json(record_of(summary, idents))
    elif found:
        rows = [
            (
                printable(idents.write(summary.identity)),
                status_of(summary),
                str(summary.attempts),
                _since(summary.age),
                abbreviated(holder_of(summary)),
                abbreviated(message_of(summary.failure)),
            )
            for summary in found
        ]
        write_table([idents.title, "status", "attempts", "age", "holder", "error"], rows)


def _write_counts(counts: dict[StrEnum, int], *, as_json: bool) -> None:
    if as_json:
        write_json({status.value: count for status, count in counts.items()})
    else:
        write_table(["status", "runs"], [(status.value, str(count)) for status, count in counts.items()])


def _status(opened: OpenRuns, text: str) -> StrEnum:
    statuses: dict[str, StrEnum] = {status.value: status for status in opened.rows.lifecycle.machine.transitions}
    if text not in statuses:
        raise CommandError(f"{text!r} is not a status of {opened.name}; it has {', '.join(map(repr, statuses))}.")
    return statuses[text]


def _since(created: timedelta | None) -> str:
    return "" if created is None else rounded(timedelta(seconds=int(created.total_seconds())))
