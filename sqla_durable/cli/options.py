"""The arguments and options that several commands have."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from typing import Annotated, Any

import typer

from sqla_durable.cli.durations import duration
from sqla_durable.cli.errors import CommandError

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
Ident = Annotated[
    list[str] | None,
    typer.Argument(metavar="IDENT", help="Its primary key; the parts of a composite one with commas."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON.")]


SomeIdents = Annotated[
    list[str] | None,
    typer.Argument(metavar="IDENT", help="Primary keys; or none, and conditions that say which runs are meant."),
]


def json_of(text: str) -> Any:
    """Read the JSON of an argument; of standard input, where it is a dash.

    :raises CommandError: where it is none.
    """
    given = sys.stdin.read() if text == "-" else text
    try:
        return json.loads(given)
    except ValueError as error:
        what = "what standard input has" if text == "-" else f"{text!r:.200}"
        raise CommandError(f"{what} is not JSON: {error}; a text has double quotes, as in '\"ada\"'.") from error


def age(text: str) -> timedelta:
    """Read a duration, or have the usage shown."""
    try:
        return duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


Statuses = Annotated[
    list[str] | None, typer.Option("--status", metavar="STATUS", help="Only these; may be given several times.")
]
Key = Annotated[str | None, typer.Option("--key", metavar="KEY", help="Only runs with this idempotency key.")]
AtMost = Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="How many at the most.")]
