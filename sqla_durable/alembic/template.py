"""The template that sets up Alembic for run and receipt tables: ``alembic init -t <folder> migrations``.

``python -m sqla_durable.alembic`` prints that folder.
"""

from __future__ import annotations

from pathlib import Path

from sqla_durable.exc import ConfigurationError


def template_folder() -> Path:
    """Return the folder of the template, as ``alembic init --template`` takes it.

    :raises ConfigurationError: where the package was installed without it.
    """
    package = Path(__file__).resolve().parents[1]
    # A wheel carries the template inside the package; in a checkout it lies beside it.
    for folder in package / "_alembic_template", package.parent / "alembic_template":
        if (folder / "env.py").is_file():
            return folder
    raise ConfigurationError(f"The Alembic template is missing from the installation in {package}; install it again.")
