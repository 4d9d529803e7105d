"""``sqla-durable start`` and ``result``: a run of a function is started, and waited for."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from sqla_durable.cli.chosen import OneRun
from sqla_durable.cli.durations import rounded
from sqla_durable.cli.form import OpenFunctions
from sqla_durable.cli.groups import grouped
from sqla_durable.cli.idents import Idents
from sqla_durable.cli.options import AsJson, FunctionsTarget, Ident, age, json_of
from sqla_durable.cli.output import jsonable, say, write_json
from sqla_durable.cli.target import functions_at
from sqla_durable.exc import RunNotFound, RunNotLanded


def start(
    target: FunctionsTarget,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the function.")],
    given: Annotated[
        str | None, typer.Argument(metavar="JSON", help="Its input, if it takes one; - to read it from standard input.")
    ] = None,
    *,
    key: Annotated[str | None, typer.Option("--key", metavar="KEY", help="The idempotency key.")] = None,
    tenant: Annotated[str | None, typer.Option("--tenant", metavar="NAME", help="Whose run it is.")] = None,
    delay: Annotated[
        timedelta | None, typer.Option(parser=age, metavar="DURATION", help="Not due before: 90s, 15m, 2h, 7d.")
    ] = None,
    priority: Annotated[
        int | None, typer.Option(metavar="N", help="From 0 to 9; a higher one is carried out first.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start a run of a function, and write its IDENT."""
    inputs = [] if given is None else [json_of(given)]
    with OpenFunctions(functions_at(target)) as functions:
        # Asked before: what a worker has taken at once is no sign of it.
        same = [] if key is None else functions.find(function=name, key=key, tenant=tenant)
        handle = functions.start(name, *inputs, key=key, tenant=tenant, run_at=delay, priority=priority)
        ident = Idents(functions.rows).write((handle.id,))
        seen = functions.describe((handle.id,))
    if as_json:
        write_json(
            {
                "ident": ident,
                "function": handle.function,
                "idempotency_key": handle.key,
                "tenant": handle.tenant,
                "status": seen and seen.status.value,
            }
        )
    else:
        typer.echo(ident)
        if seen is not None and (handle.id,) in [summary.identity for summary in same]:
            say(f"This run was started before, with the same key, and is {seen.status}; nothing was started.")


@grouped
def result(
    target: FunctionsTarget,
    ident: Ident = None,
    *,
    which: OneRun,
    timeout: Annotated[
        timedelta | None, typer.Option(parser=age, metavar="DURATION", help="How long to wait at the most: 90s, 15m.")
    ] = None,
) -> None:
    """Wait for a run of a function, and write what it has returned as JSON.

    Exit status 1 where it has failed, was cancelled or timed out, or has not ended in time.
    """
    with OpenFunctions(functions_at(target)) as functions:
        idents = Idents(functions.rows)
        identity = which.identity(functions, ident or (), "result")
        summary = functions.describe(identity)
        if summary is None:
            raise RunNotFound(f"there is no {functions.name} with the key {idents.write(identity)}.")
        written = idents.write(identity)
        if timeout is None and summary.status not in functions.rows.lifecycle.machine.terminal:
            say(f"{written} is {summary.status}: waiting until it ends, without a --timeout.")
        try:
            answer = functions.result(summary.handle, timeout)
        except RunNotLanded as error:
            late = "" if timeout is None else f" after {rounded(timeout)}"
            seen = functions.describe(identity)
            state = "gone" if seen is None else seen.status.value
            raise RunNotLanded(
                f"{written} has not ended{late}, and is {state}; it goes on, and sqla-durable show says how far it is."
            ) from error
        write_json(jsonable(answer))
