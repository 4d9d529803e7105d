"""``sqla-durable requeue``, ``cancel`` and ``reap``: what an operator does to runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import Annotated

import typer

from sqla_durable.cli.form import OpenRuns
from sqla_durable.cli.idents import Idents as IdentsOf
from sqla_durable.cli.options import AsJson, Idents, Target, Url
from sqla_durable.cli.output import printable, write_json
from sqla_durable.machine import names_of


def requeue(target: Target, idents: Idents, *, url: Url = None, as_json: AsJson = False) -> None:
    """Give terminal runs another life: ready, attempts reset.

    Exit status 1 where one was not requeued.
    """
    with OpenRuns(target, url) as opened:
        _each(
            opened,
            idents,
            opened.requeue,
            ("requeued", "not requeued"),
            as_json=as_json,
            taken_from=opened.rows.lifecycle.requeue,
        )


def cancel(target: Target, idents: Idents, *, url: Url = None, as_json: AsJson = False) -> None:
    """Ask for live runs to be cancelled.

    A running one lands at its next step or heartbeat.

    Exit status 1 where one has ended already, or is not there.
    """
    with OpenRuns(target, url) as opened:
        _each(opened, idents, opened.request_cancel, ("cancel requested", "cancel refused"), as_json=as_json)


def reap(
    target: Target,
    *,
    url: Url = None,
    limit: Annotated[int, typer.Option(min=1, metavar="N", help="How many at the most.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Turn lapsed runs into what their lifecycle says."""
    with OpenRuns(target, url) as opened:
        reaped = opened.reap(limit)
    if as_json:
        write_json({"reaped": reaped})
    else:
        typer.echo(f"{reaped} {'run' if reaped == 1 else 'runs'} reaped")


def _each(
    opened: OpenRuns,
    arguments: Sequence[str],
    verb: Callable[[object], bool],
    words: tuple[str, str],
    *,
    as_json: bool,
    taken_from: AbstractSet[StrEnum] | None = None,
) -> None:
    idents = IdentsOf(opened.rows)
    refused = False
    for identity in idents.read(arguments):
        won = verb(identity)
        refused |= not won
        # What it is now: somebody else may have moved it meanwhile.
        seen = opened.describe(identity)
        ident, status = idents.write(identity), None if seen is None else seen.status.value
        if as_json:
            write_json({"ident": ident, words[0].replace(" ", "_"): won, "status": status})
        else:
            state = f"it is {status}" if status else f"there is no such {opened.name}"
            if seen is not None and not won and taken_from is not None and seen.status not in taken_from:
                state += f"; its lifecycle allows this from {names_of(taken_from) or 'no status'}"
            typer.echo(f"{printable(ident)}: {words[0] if won else words[1]}; {state}")
    if refused:
        raise typer.Exit(1)
