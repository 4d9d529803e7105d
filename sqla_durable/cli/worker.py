"""``sqla-durable worker``: runs a worker until it has drained."""

from __future__ import annotations

import inspect
import logging
import sys
from enum import StrEnum
from typing import Annotated, Any

import typer

from sqla_durable.cli.form import new_loop
from sqla_durable.cli.target import find

EXPECTED = "a Worker, an AsyncWorker, or a callable that returns one of these"


class Level(StrEnum):
    """The levels of :mod:`logging`."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"
    CRITICAL = "CRITICAL"


def worker(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=f"{EXPECTED[0].upper()}{EXPECTED[1:]}.")],
    *,
    log_level: Annotated[
        Level, typer.Option(case_sensitive=False, help="What is logged on standard error.")
    ] = Level.INFO,
) -> None:
    """Run a worker until it is told to stop, and has finished what it is at."""
    # Before the import, so that a module that configures logging itself has the last word.
    logging.basicConfig(
        level=log_level.value, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )
    found: Any = find(target, _runs, EXPECTED)
    running = found.run()
    if inspect.iscoroutine(running):
        with new_loop() as loop:
            loop.run(running)


def _runs(found: object) -> bool:
    return not isinstance(found, type) and callable(getattr(found, "run", None))
