"""What Alembic's autogenerate does not see by itself, as ordinary operations; and the template of an environment.

::

    from sqla_durable.alembic import register

    context.configure(..., autogenerate_plugins=["alembic.autogenerate.*", register()])

A migration made with it imports nothing of this library, and works when the library is gone.
"""

from __future__ import annotations

from sqla_durable.alembic.template import template_folder

__all__ = ["register", "template_folder"]


def register() -> str:
    """Make the comparison of this library known to Alembic, if it is not yet, and return the name to switch it on by.

    :return: what to name in ``autogenerate_plugins`` of `EnvironmentContext.configure()
     <https://alembic.sqlalchemy.org/en/latest/api/runtime.html#alembic.runtime.environment.EnvironmentContext.configure>`_.
    """
    # Not at import: whoever looks for the template needs no Alembic.
    from sqla_durable.alembic.plugin import set_up  # noqa: PLC0415

    return set_up()
