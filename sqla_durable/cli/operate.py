"""``sqla-durable requeue``, ``cancel`` and ``reap``: what an operator does to runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import timedelta
from enum import StrEnum
from typing import Annotated

import typer

from sqla_durable.cli.conditions import conditions_of, statuses_of
from sqla_durable.cli.errors import CommandError
from sqla_durable.cli.form import OpenRuns, opened
from sqla_durable.cli.idents import Idents
from sqla_durable.cli.options import (
    AsJson,
    AtMost,
    ErrorText,
    Everything,
    Function,
    NewerThan,
    OlderThan,
    SomeIdents,
    Statuses,
    Target,
    Tenant,
    Url,
    age,
)
from sqla_durable.cli.output import printable, write_json
from sqla_durable.machine import names_of


def requeue(
    target: Target,
    idents: SomeIdents = None,
    *,
    url: Url = None,
    status: Statuses = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    error: ErrorText = None,
    function: Function = None,
    tenant: Tenant = None,
    everything: Everything = False,
    limit: AtMost = None,
    as_json: AsJson = False,
) -> None:
    """Give terminal runs another life: ready, attempts reset.

    Exit status 1 where one was not requeued.
    """
    with opened(target, url) as runs:
        conditions = conditions_of(
            runs,
            status=status,
            older_than=older_than,
            newer_than=newer_than,
            error=error,
            function=function,
            tenant=tenant,
        )
        if _are_named(idents, conditions, everything=everything, limit=limit):
            words = "requeued", "not requeued"
            taken_from = runs.rows.lifecycle.requeue
            _each(runs, idents or (), runs.requeue, words, as_json=as_json, taken_from=taken_from)
        else:
            _said(runs.requeue_all(limit=limit, everything=everything, **conditions), "requeued", as_json=as_json)


def cancel(
    target: Target,
    idents: SomeIdents = None,
    *,
    url: Url = None,
    status: Statuses = None,
    older_than: OlderThan = None,
    newer_than: NewerThan = None,
    error: ErrorText = None,
    function: Function = None,
    tenant: Tenant = None,
    everything: Everything = False,
    limit: AtMost = None,
    as_json: AsJson = False,
) -> None:
    """Ask for live runs to be cancelled.

    A running one lands at its next step or heartbeat.

    Exit status 1 where one has ended already, or is not there.
    """
    with opened(target, url) as runs:
        conditions = conditions_of(
            runs,
            status=status,
            older_than=older_than,
            newer_than=newer_than,
            error=error,
            function=function,
            tenant=tenant,
        )
        if _are_named(idents, conditions, everything=everything, limit=limit):
            words = "cancel requested", "cancel refused"
            _each(runs, idents or (), runs.request_cancel, words, as_json=as_json)
        else:
            _said(
                runs.cancel_all(limit=limit, everything=everything, **conditions),
                "asked to be cancelled",
                as_json=as_json,
            )


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


def _are_named(
    idents: Sequence[str] | None, conditions: Mapping[str, object], *, everything: bool, limit: int | None
) -> bool:
    """Whether runs are named one by one, having refused what says both, or nothing."""
    chosen = bool(conditions) or everything
    if idents and (chosen or limit is not None):
        raise CommandError("IDENTs say which runs are meant; leave the conditions out.")
    if not idents and not chosen:
        raise CommandError("nothing says which runs are meant; give IDENTs, a condition, or --all.")
    return bool(idents)


def _said(count: int, done: str, *, as_json: bool) -> None:
    if as_json:
        write_json({done.replace(" ", "_"): count})
    else:
        typer.echo(f"{count} {'run' if count == 1 else 'runs'} {done}")


def _each(
    runs: OpenRuns,
    arguments: Sequence[str],
    verb: Callable[[object], bool],
    words: tuple[str, str],
    *,
    as_json: bool,
    taken_from: AbstractSet[StrEnum] | None = None,
) -> None:
    idents = Idents(runs.rows)
    refused = False
    for identity in idents.read(arguments):
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
