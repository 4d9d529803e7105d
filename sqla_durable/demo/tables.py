"""Creates the demo's tables as a project would: by a migration that Alembic writes from the models."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import URL

from sqla_durable.alembic import template_folder

_METADATA = "sqla_durable.demo.models:Base"


def create_tables(url: URL, folder: Path) -> None:
    """Set up Alembic from this package's template, let it write a migration, and run that.

    :param url: an empty database.
    :param folder: where the migration may be written.
    """
    migrations = str(folder / "migrations")
    config = Config()  # without the file that init writes: it says how to log, which is not for a migration to say here
    config.set_main_option("script_location", migrations)
    config.set_main_option("metadata", _METADATA)
    config.set_main_option("path_separator", "os")
    with redirect_stdout(StringIO()), _named_in_environment(url):
        command.init(Config(folder / "alembic.ini"), migrations, template=str(template_folder()))
        command.revision(config, "the tables of the demo", autogenerate=True)
        command.upgrade(config, "head")


@contextmanager
def _named_in_environment(url: URL) -> Generator[None]:
    """Have the template's ``env.py`` find this database: there ``DATABASE_URL`` comes first."""
    before = os.environ.get("DATABASE_URL")
    os.environ["DATABASE_URL"] = url.render_as_string(hide_password=False)
    try:
        yield
    finally:
        if before is None:
            del os.environ["DATABASE_URL"]
        else:
            os.environ["DATABASE_URL"] = before
