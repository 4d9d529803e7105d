"""The options of ``sqla-durable demo``; what it does is in :mod:`sqla_durable.demo.performance`."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from pathlib import Path
from random import Random
from types import FrameType
from typing import Annotated, NoReturn

import typer

from sqla_durable.demo.exc import DemoError
from sqla_durable.extras import needing


def demo(
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Another plan, as a JSON file like sqla_durable/demo/plan.json."),
    ] = None,
    kills: Annotated[int, typer.Option(min=0, metavar="N", help="How often to kill the process that is at work.")] = 8,
    seed: Annotated[
        int | None, typer.Option(metavar="S", help="Choose the instants of the kills as an earlier demo did.")
    ] = None,
) -> None:
    """Carry out a plan in a process that is killed again and again.

    At the end every effect is counted. Each one in the database must be there
    exactly once, and each external one (the labels) at least once.

    The tables are in a PostgreSQL that comes with the demo and goes with it;
    where DATABASE_URL is set, in a database on that server that the demo
    creates and drops.

    Exit code 0: the plan is executed, and each effect is there as often as it
    must be. 1: it is not. 2: the demo could not be run.
    """
    try:
        with needing("demo"):
            import_module("psycopg")  # which SQLAlchemy would import too late for the message
            from sqla_durable.demo.performance import perform  # noqa: PLC0415
    except SystemExit as missing:
        typer.echo(missing.code, err=True)
        raise typer.Exit(2) from None

    signal.signal(signal.SIGTERM, _end)
    try:
        fine = perform(plan, kills, Random().randrange(10_000) if seed is None else seed)  # noqa: S311
    except DemoError as error:
        typer.echo(f"sqla-durable demo: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("\nsqla-durable demo: interrupted; the process is killed, and its database is gone.", err=True)
        raise typer.Exit(128 + signal.SIGINT) from None
    raise typer.Exit(0 if fine else 1)


def _end(number: int, _: FrameType | None) -> NoReturn:
    """End as on Ctrl-C, with the process killed and the database put away."""
    sys.exit(128 + number)
