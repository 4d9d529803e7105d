"""The arguments and options that several commands have."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from sqla_durable.cli.durations import duration

RUNS = (
    "a Runs, an AsyncRuns, a Functions of either form, a run class with --url, or a callable that returns one of these"
)
FUNCTIONS = "a Functions, an AsyncFunctions, or a callable that returns one of these"

Target = Annotated[str, typer.Argument(metavar="TARGET", help=f"{RUNS[0].upper()}{RUNS[1:]}, as module:object.")]
Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="The database, where TARGET is a run class. Default: DATABASE_URL."),
]
FunctionsTarget = Annotated[
    str, typer.Argument(metavar="TARGET", help=f"{FUNCTIONS[0].upper()}{FUNCTIONS[1:]}, as module:object.")
]
Ident = Annotated[list[str], typer.Argument(metavar="IDENT", help="Its primary key; a composite one with commas.")]
Idents = Annotated[
    list[str], typer.Argument(metavar="IDENT...", help="Primary keys; the parts of a composite one with commas.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON.")]


SomeIdents = Annotated[
    list[str] | None,
    typer.Argument(metavar="[IDENT...]", help="Primary keys; or none, and conditions that say which runs are meant."),
]


def age(text: str) -> timedelta:
    """Read a duration, or have the usage shown."""
    try:
        return duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


Statuses = Annotated[
    list[str] | None, typer.Option("--status", metavar="STATUS", help="Only these; may be given several times.")
]
OlderThan = Annotated[
    timedelta | None,
    typer.Option(parser=age, metavar="DURATION", help="Only runs inserted longer ago: 90s, 15m, 2h, 7d."),
]
NewerThan = Annotated[timedelta | None, typer.Option(parser=age, metavar="DURATION", help="Only runs inserted since.")]
ErrorText = Annotated[
    str | None,
    typer.Option("--error", metavar="TEXT", help="Only runs with this in the type or message of their error."),
]
Owner = Annotated[str | None, typer.Option("--owner", metavar="NAME", help="Only runs whose lease carries this name.")]
Function = Annotated[str | None, typer.Option("--function", metavar="NAME", help="Only runs of this function.")]
Key = Annotated[str | None, typer.Option("--key", metavar="KEY", help="Only runs with this idempotency key.")]
Tenant = Annotated[str | None, typer.Option("--tenant", metavar="NAME", help="Only runs of functions of this tenant.")]
AtMost = Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="How many at the most.")]
Everything = Annotated[bool, typer.Option("--all", help="All runs that it can be done to, without a condition.")]
