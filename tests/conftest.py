"""One real PostgreSQL for the whole run, one database for each worker, and empty schemas for each test."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, make_url, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import embedded
from tests.support import Base


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--postgres", metavar="BIN_DIR", help="run on the PostgreSQL whose programs are in this folder")
    parser.addoption("--guards", action="store_true", help="guard every run class; see tests/__init__.py")


@pytest.fixture(autouse=True)
def _past_guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``--guards``, a test so marked may write in SQL what no verb does; every connection then says so."""
    if request.config.getoption("--guards"):
        if request.node.get_closest_marker("unguarded"):
            pytest.skip("tells what is so without guards")
        if request.node.get_closest_marker("past_guards"):
            monkeypatch.setenv("PGOPTIONS", "-c sqla_durable.override=test")


@pytest.fixture(scope="session")
def server_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server on which databases may be created."""
    bin_dir = request.config.getoption("--postgres")
    if "DATABASE_URL" in os.environ and bin_dir is None:
        yield os.environ["DATABASE_URL"]
        return
    settings = {
        "max_connections": "200",
        "shared_buffers": "64MB",
        "max_prepared_transactions": "10",
        "fsync": "off",  # no test pulls the plug; it halves the time
    }
    with embedded.start(bin_dir=None if bin_dir is None else Path(bin_dir), settings=settings) as server:
        yield server.url


@pytest.fixture(scope="session")
def database_url(server_url: str) -> Iterator[str]:
    """A database of this worker's own."""
    name = f"sqla_durable_{uuid.uuid4().hex[:12]}"
    admin = create_engine(server_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    yield make_url(server_url).set(database=name).render_as_string(hide_password=False)
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture
def empty_url(database_url: str) -> Iterator[str]:
    """The worker's database, in which every schema the test leaves behind is dropped."""
    yield database_url
    admin = create_engine(database_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        )
        schemas = connection.scalars(
            text("SELECT nspname FROM pg_namespace WHERE nspname !~ '^(pg_|information_schema)'")
        ).all()
        for schema in schemas:
            quoted = schema.replace('"', '""')
            connection.execute(text(f'DROP SCHEMA "{quoted}" CASCADE'.replace(":", "\\:")))
        connection.execute(text("CREATE SCHEMA public"))
    admin.dispose()


@pytest.fixture
def engine(empty_url: str) -> Iterator[Engine]:
    """An engine on the empty database with the tables of :mod:`tests.support`."""
    engine = create_engine(empty_url)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def session_factory(engine: Engine) -> sessionmaker[Session]:
    return sessionmaker(engine)
