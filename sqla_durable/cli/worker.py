"""``sqla-durable worker``: runs a worker until it has drained."""

from __future__ import annotations

import inspect
import logging
import sys
from enum import StrEnum
from importlib import import_module
from typing import Annotated, Any

import typer

from sqla_durable.cli.form import new_loop
from sqla_durable.cli.target import find
from sqla_durable.dispatch import AnyWork, AsyncWork, works_of
from sqla_durable.worker import Worker

EXPECTED = "a Worker, an AsyncWorker, what one is made with, or a callable that returns one of these"


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
    running = _worker(find(target, _is_wanted, EXPECTED)).run()
    if inspect.iscoroutine(running):
        with new_loop() as loop:
            loop.run(running)


def _is_wanted(found: object) -> bool:
    return not isinstance(found, type) and (_has_works(found) or callable(getattr(found, "run", None)))


def _has_works(found: object) -> bool:
    return isinstance(found, AnyWork) or callable(getattr(found, "works", None))


def _worker(found: Any) -> Any:
    """Return the worker; one with the defaults where only what to carry out was given."""
    if not _has_works(found):
        return found
    if not any(isinstance(work, AsyncWork) for work in works_of(found)):
        return Worker(found)
    # Not imported before: it needs greenlet, and whoever has made such a work has imported it.
    return import_module("sqla_durable.asyncio").AsyncWorker(found)
