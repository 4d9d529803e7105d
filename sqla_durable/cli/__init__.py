"""The command ``sqla-durable``: gives each command its name. Nothing here is imported unless it is called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from sqla_durable.extras import needing

if TYPE_CHECKING:
    import typer


def main() -> None:
    """Run the command line."""
    if (reconfigure := getattr(sys.stdout, "reconfigure", None)) is not None:
        reconfigure(errors="replace")  # where there is no "✓", a "?" and not a traceback
    make_app()()


def make_app() -> typer.Typer:
    """Return the command line with all its commands.

    :raises SystemExit: where the extra ``cli`` is not installed; the message says how to install it.
    """
    with needing("cli"):
        import typer

        from sqla_durable.cli.check import check
        from sqla_durable.cli.diagram import diagram
        from sqla_durable.cli.errors import reporting
        from sqla_durable.cli.functions import result, start
        from sqla_durable.cli.init import init
        from sqla_durable.cli.operate import cancel, purge, reap, requeue
        from sqla_durable.cli.partitions import partitions
        from sqla_durable.cli.runs import runs
        from sqla_durable.cli.show import show
        from sqla_durable.cli.signal import signal
        from sqla_durable.cli.worker import worker
        from sqla_durable.demo.command import demo

    app = typer.Typer(name="sqla-durable", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

    def show_version(asked: bool) -> None:  # noqa: FBT001
        if asked:
            typer.echo(f"sqla-durable {_version()}")
            raise typer.Exit

    shown = typer.Option(False, "--version", is_eager=True, callback=show_version, help="Show the version.")  # noqa: FBT003

    @app.callback()
    def root(*, version: bool = shown) -> None:
        """Durable step execution on your own SQLAlchemy models, in your own PostgreSQL.

        Exit status: 0 done; 1 refused, not there, or an error, of which a line says what to do; 2 the command cannot be
        meant like that, and nothing was done.
        """

    of_runs: list[Callable[..., None]] = [runs, show, start, result, signal, requeue, cancel, reap, purge]
    of_tables: list[Callable[..., None]] = [init, check, partitions, worker, diagram]
    for command in (*of_runs, *of_tables):
        app.command()(reporting(command))
    app.command()(demo)
    return app


def _version() -> str:
    try:
        return version("sqla_durable")
    except PackageNotFoundError:
        return "(not installed)"
