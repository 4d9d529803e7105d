"""``sqla-durable requeue``, ``cancel`` and ``reap``: what an operator does to runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from enum import StrEnum
from typing import Annotated

import typer

from sqla_durable.cli.chosen import SomeRuns
from sqla_durable.cli.conditions import statuses_of
from sqla_durable.cli.form import OpenRuns, opened
from sqla_durable.cli.groups import grouped
from sqla_durable.cli.idents import Idents
from sqla_durable.cli.options import AsJson, AtMost, SomeIdents, Statuses, Target, Url, age
from sqla_durable.cli.output import printable, write_json
from sqla_durable.machine import names_of
from sqla_durable.rows import Ident


@grouped
def requeue(
    target: Target, idents: SomeIdents = None, *, url: Url = None, which: SomeRuns, as_json: AsJson = False
) -> None:
    """Give terminal runs another life: ready, attempts reset.

    Exit status 1 where one was not requeued.
    """
    with opened(target, url) as runs:
        if (named := which.named(runs, idents)) is None:
            _said(runs.requeue_all(**which.options(runs)), "requeued", as_json=as_json)
        else:
            words = "requeued", "not requeued"
            _each(runs, named, runs.requeue, words, as_json=as_json, taken_from=runs.rows.lifecycle.requeue)


@grouped
def cancel(
    target: Target, idents: SomeIdents = None, *, url: Url = None, which: SomeRuns, as_json: AsJson = False
) -> None:
    """Ask for live runs to be cancelled.

    A running one lands at its next step or heartbeat.

    Exit status 1 where one has ended already, or is not there.
    """
    with opened(target, url) as runs:
        if (named := which.named(runs, idents)) is None:
            _said(runs.cancel_all(**which.options(runs)), "asked to be cancelled", as_json=as_json)
        else:
            _each(runs, named, runs.request_cancel, ("cancel requested", "cancel refused"), as_json=as_json)


def reap(
    target: Target,
    *,
    url: Url = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="How many at the most.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Turn lapsed runs into what their lifecycle says."""
    with opened(target, url) as runs:
        reaped = runs.reap(limit)
    _said(reaped, "reaped", as_json=as_json)


def purge(
    target: Target,
    *,
    older_than: Annotated[
        timedelta, typer.Option(parser=age, metavar="DURATION", help="Those that ended longer ago: 12h, 30d.")
    ],
    url: Url = None,
    status: Statuses = None,
    limit: AtMost = None,
    as_json: AsJson = False,
) -> None:
    """Delete runs that ended long enough ago, with their receipts."""
    with opened(target, url) as runs:
        statuses = statuses_of(runs, status) if status else None
        purged = runs.purge(older_than, status=statuses, limit=limit)
    _said(purged, "purged", as_json=as_json)


def _said(count: int, done: str, *, as_json: bool) -> None:
    if as_json:
        write_json({done.replace(" ", "_"): count})
    else:
        typer.echo(f"{count} {'run' if count == 1 else 'runs'} {done}")


def _each(
    runs: OpenRuns,
    identities: Sequence[Ident],
    verb: Callable[[object], bool],
    words: tuple[str, str],
    *,
    as_json: bool,
    taken_from: AbstractSet[StrEnum] | None = None,
) -> None:
    idents = Idents(runs.rows)
    refused = False
    for identity in identities:
        won = verb(identity)
        refused |= not won
        # What it is now: somebody else may have moved it meanwhile.
        seen = runs.describe(identity)
        ident, status = idents.write(identity), None if seen is None else seen.status.value
        if as_json:
            write_json({"ident": ident, words[0].replace(" ", "_"): won, "status": status})
        else:
            state = f"it is {status}" if status else f"there is no such {runs.name}"
            if seen is not None and not won and taken_from is not None and seen.status not in taken_from:
                state += f"; its lifecycle allows this from {names_of(taken_from) or 'no status'}"
            typer.echo(f"{printable(ident)}: {words[0] if won else words[1]}; {state}")
    if refused:
        raise typer.Exit(1)
