"""The arguments and options that several commands have."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import typer

from sqla_durable.cli.durations import duration

RUNS = "a Runs, an AsyncRuns, a run class with --url, or a callable that returns one of these"

Target = Annotated[str, typer.Argument(metavar="TARGET", help=f"{RUNS[0].upper()}{RUNS[1:]}, as module:object.")]
Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", help="The database, where TARGET is a run class. Default: DATABASE_URL."),
]
Idents = Annotated[
    list[str], typer.Argument(metavar="IDENT...", help="Primary keys; the parts of a composite one with commas.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON.")]


def age(text: str) -> timedelta:
    """Read a duration, or have the usage shown."""
    try:
        return duration(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
