"""The command ``sqla-durable``: gives each command its name. What a command needs is imported when it is called."""

from __future__ import annotations

import sys
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
        import typer  # noqa: PLC0415

        from sqla_durable.demo.command import demo  # noqa: PLC0415

    app = typer.Typer(name="sqla-durable", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

    def show_version(asked: bool) -> None:  # noqa: FBT001
        if asked:
            typer.echo(f"sqla-durable {_version()}")
            raise typer.Exit

    shown = typer.Option(False, "--version", is_eager=True, callback=show_version, help="Show the version.")  # noqa: FBT003

    @app.callback()
    def root(*, version: bool = shown) -> None:
        """Durable step execution on your own SQLAlchemy models, in your own PostgreSQL."""

    app.command()(demo)
    return app


def _version() -> str:
    try:
        return version("sqla_durable")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    main()
