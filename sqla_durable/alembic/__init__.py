"""What Alembic's autogenerate does not see by itself, as ordinary operations; and the template of an environment.

::

    from sqla_durable.alembic import register

    context.configure(..., autogenerate_plugins=["alembic.autogenerate.*", register()])

A migration made with it imports nothing of this library, and works when the library is gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqla_durable.alembic.template import template_folder

if TYPE_CHECKING:
    from collections.abc import Iterable

    from alembic.operations.ops import MigrationScript
    from alembic.runtime.migration import MigrationContext

__all__ = ["keep_online", "register", "template_folder"]


def register() -> str:
    """Make the comparison of this library known to Alembic, if it is not yet, and return the name to switch it on by.

    :return: what to name in ``autogenerate_plugins`` of `EnvironmentContext.configure()
     <https://alembic.sqlalchemy.org/en/latest/api/runtime.html#alembic.runtime.environment.EnvironmentContext.configure>`_.
    """
    # Not at import: whoever looks for the template needs no Alembic.
    from sqla_durable.alembic.plugin import set_up  # noqa: PLC0415 - as said above

    return set_up()


def keep_online(
    context: MigrationContext, revision: str | Iterable[str | None] | Iterable[str], directives: list[MigrationScript]
) -> None:
    """Split what autogenerate has found for tables that are there into two migrations that nobody waits long for.

    The first one takes its locks for moments: it adds columns, and constraints as ``NOT VALID``. The second one
    validates them and builds the indexes while the tables are written to. A table that is new is created as ever.

    To be given as ``process_revision_directives`` of `EnvironmentContext.configure()
    <https://alembic.sqlalchemy.org/en/latest/api/runtime.html#alembic.runtime.environment.EnvironmentContext.configure>`_;
    ``transaction_per_migration=True`` belongs to it.

    :param context: as Alembic gives it.
    :param revision: as Alembic gives it.
    :param directives: what Alembic is about to write; changed in place.
    """
    from sqla_durable.alembic.online import split  # noqa: PLC0415 - as in register()

    split(context, revision, directives)
