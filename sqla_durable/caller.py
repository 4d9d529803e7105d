"""The caller's own session: taken from behind its proxy, and refused where it does not reach PostgreSQL."""

from __future__ import annotations

from typing import Any, cast

from sqlalchemy import Connection, Engine
from sqlalchemy.orm import Session, scoped_session

from sqla_durable.exc import ConfigurationError

AnySession = Session | scoped_session[Any]
"""What a caller may give: a session, or the proxy that stands for the one of this thread."""


def unproxied(session: AnySession) -> Session:
    """Return the session behind a :class:`~sqlalchemy.orm.scoped_session`."""
    return cast(Session, session()) if isinstance(session, scoped_session) else session


def require_postgresql(bind: Engine | Connection) -> None:
    """Refuse a bind of another dialect.

    :raises ConfigurationError: where it is not PostgreSQL.
    """
    if bind.dialect.name != "postgresql":
        raise ConfigurationError(
            f"{bind.engine!r} is not PostgreSQL through psycopg 3; use a URL that starts with postgresql+psycopg://."
        )
