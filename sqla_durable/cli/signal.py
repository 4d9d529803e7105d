"""``sqla-durable signal``: what a run waits for is sent to it by hand."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from sqla_durable.cli.chosen import OneRun
from sqla_durable.cli.form import opened
from sqla_durable.cli.groups import grouped
from sqla_durable.cli.idents import Idents
from sqla_durable.cli.options import AsJson, Target, Url, json_of
from sqla_durable.cli.output import printable, write_json
from sqla_durable.exc import RunNotFound


@grouped
def signal(
    target: Target,
    ident: Annotated[
        list[str],
        # A parameter with a default could not stand before one without.
        typer.Argument(
            metavar="IDENT", default_factory=list, show_default=False, help="Its primary key; leave it out with --key."
        ),
    ],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the signal.")],
    *,
    url: Url = None,
    which: OneRun,
    payload: Annotated[
        str | None,
        typer.Option("--payload", metavar="JSON", help="What the run is handed; - to read it from standard input."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send a signal to a run, which takes it where it waits for it, now or later.

    Sent twice, it is there twice.

    Exit status 1 where the run has ended, or is not there: nothing is sent.
    """
    given = None if payload is None else json_of(payload)
    with opened(target, url) as runs:
        idents = Idents(runs.rows)
        identity = which.identity(runs, ident, "signal")
        sent = False
        with suppress(RunNotFound):
            sent = runs.signal(identity, name, given)
        seen = runs.describe(identity)
    written, status = idents.write(identity), None if seen is None else seen.status.value
    if as_json:
        write_json({"ident": written, "signal": name, "sent": sent, "status": status})
    else:
        said = f"signal {name!r} {'sent' if sent else 'not sent'}"
        state = f"there is no such {runs.name}" if seen is None else f"it is {status}"
        # Often a slip of the pen.
        other = seen.waits_for if sent and seen is not None and seen.waits_for != name else None
        typer.echo(f"{printable(written)}: {said}; {state}{f', and waits for {other!r}' if other else ''}")
    if not sent:
        raise typer.Exit(1)
