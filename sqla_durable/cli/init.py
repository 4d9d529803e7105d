"""``sqla-durable init``: sets up a project's migrations by Alembic's own command, from the template of this library."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Final

import typer

from sqla_durable.alembic import template_folder
from sqla_durable.cli.errors import CommandError
from sqla_durable.exc import ConfigurationError
from sqla_durable.extras import needing

_INI: Final = Path("alembic.ini")
_TARGET: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_NEXT: Final = """\
alembic.ini and {directory} are yours from here on. Next:
{models}  export DATABASE_URL=postgresql://user@host/database
  alembic revision --autogenerate -m "create the tables"
  alembic upgrade head"""
_MODELS: Final = "  write into alembic.ini where your models are, as in  metadata = app.models:Base\n"


def init(
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="Where the migrations will be; it must be new, or empty.")
    ],
    *,
    metadata: Annotated[
        str | None,
        typer.Option(
            "--metadata", metavar="MODELS", help="Where your models are, as in app.models:Base; several with commas."
        ),
    ] = None,
    over_asyncio: Annotated[
        bool, typer.Option("--async", help="Migrate over asyncio, by psycopg's driver for it.")
    ] = False,
) -> None:
    """Set up migrations in DIRECTORY, and alembic.ini in this folder, by alembic init with this library's template.

    Nothing is imported and no database is needed.
    """
    options = {} if metadata is None else {"metadata": ", ".join(_targets(metadata))}
    if over_asyncio:
        options["driver"] = "psycopg_async"
    if _INI.exists():
        raise CommandError(
            f"there is an {_INI} in this folder already, and it would go on to lead to other migrations; give these a "
            f'file of their own: alembic -c other.ini init -t "$(python -m sqla_durable.alembic)" {directory}'
        )
    _make(directory)
    for name, value in options.items():
        _set(name, value)
    typer.echo(_NEXT.format(directory=directory, models="" if metadata else _MODELS))


def _targets(metadata: str) -> list[str]:
    targets = metadata.replace(",", " ").split()
    if not targets:
        raise CommandError("--metadata is empty; write module:object, as in app.models:Base.")
    for target in targets:
        if not _TARGET.fullmatch(target):
            raise CommandError(f"{target!r} does not name an object; write module:object, as in app.models:Base.")
    return targets


def _make(directory: Path) -> None:
    try:
        with needing("demo", instead="alembic>=1.19.2"):
            from alembic import command, util
            from alembic.config import Config
    except SystemExit as missing:
        raise ConfigurationError(str(missing.code)) from None
    try:
        command.init(Config(_INI), str(directory), template=str(template_folder()))
    except util.CommandError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise ConfigurationError(f"cannot make {error.filename}: {error.strerror}.") from None


def _set(name: str, value: str) -> None:
    """Give an option that the template's ini file has another value."""
    written = re.sub(rf"(?m)^{name} =.*$", f"{name} = {value}", _INI.read_text(encoding="utf-8"))
    _INI.write_text(written, encoding="utf-8")
