"""The check itself: a live database compared with the models, and its server looked at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqlalchemy import Connection, Engine

from sqla_durable import catalogue
from sqla_durable.caller import require_postgresql
from sqla_durable.checkup.columns import columns
from sqla_durable.checkup.constraints import constraints
from sqla_durable.checkup.finding import Finding, Severity, error
from sqla_durable.checkup.guards import guards
from sqla_durable.checkup.indexes import indexes, storage
from sqla_durable.checkup.partitions import partitions
from sqla_durable.checkup.server import is_old, pooler, read_only, server, takes_writes, too_old
from sqla_durable.checkup.target import Expected, expected
from sqla_durable.checkup.vacuum import vacuum
from sqla_durable.exc import UsageError
from sqla_durable.sqlstate import translated


def check(bind: Engine | Connection, models: object) -> list[Finding]:
    """Compare a live database with the models, and look at its server; return what is not as it should be.

    Of the tables of a metadata those are compared that hold runs, receipts, signals or the status of a machine: their
    existence, their columns, and what mixins of the library have added to them. Nothing is changed: what PostgreSQL
    makes of a model it is asked on temporary tables, which are rolled back.

    :param bind: an engine, or a connection within a transaction; over asyncio
     ``await connection.run_sync(check, Base)``. Its user must be allowed to create temporary tables.
    :param models: a declarative ``Base``, a :class:`~sqlalchemy.schema.MetaData`, a module with models, or a
     :class:`.Runs` or :class:`.Functions` of either form, of which only its own tables are compared.
    :return: the findings, errors first; none where all is well.
    :raises UsageError: where no table of the library's is among the models, or the connection is in AUTOCOMMIT.
    :raises DatabaseUnavailable: where the database is not to be reached.
    """
    tables = expected(models)
    require_postgresql(bind)
    with translated():
        found = list(_within(bind, tables) if isinstance(bind, Connection) else _of_engine(bind, tables))
    return sorted(found, key=lambda finding: finding.severity is not Severity.ERROR)


def _of_engine(engine: Engine, tables: Sequence[Expected]) -> list[Finding]:
    # Whatever the engine's own isolation level is: savepoints need a transaction.
    with engine.connect().execution_options(isolation_level="READ COMMITTED") as connection:
        pids: list[int] = []
        for _ in range(2):
            with connection.begin():
                pids.append(connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one())
        with connection.begin() as transaction:
            found = list(_within(connection, tables, pids))
            transaction.rollback()
    return found


def _within(connection: Connection, tables: Sequence[Expected], pids: Sequence[int] = ()) -> Iterator[Finding]:
    driver: object = connection.connection.dbapi_connection
    if getattr(driver, "autocommit", False):
        raise UsageError(f"{connection!r} is in AUTOCOMMIT; give check() the engine, or a connection in a transaction.")
    if is_old(connection):
        yield too_old(connection)
        return
    yield from pooler(connection, pids)
    yield from server(connection, tables)
    names = {each.table: catalogue.table_name(connection, each.table) for each in tables}
    yield from vacuum(connection, names.values())
    if not takes_writes(connection):
        yield read_only()
        return
    for each in tables:
        yield from _table(connection, each, names[each.table])


def _table(connection: Connection, each: Expected, name: str) -> Iterator[Finding]:
    if not catalogue.is_there(connection, name):
        yield error(
            "missing-table",
            name,
            "The models have this table and the database does not, at least not where this user looks for it.",
            "alembic upgrade head, or Base.metadata.create_all(engine); or name the right database in the URL",
        )
        return
    yield from columns(connection, each, name)
    found = catalogue.existing(connection, each.table)
    wanted = catalogue.wanted(connection, each.table, found)
    yield from constraints(connection, each.table, name, found, wanted)
    yield from indexes(connection, each.table, name, found, wanted)
    yield from storage(name, found.storage, wanted.storage)
    yield from guards(connection, each.table, name)
    yield from partitions(connection, each, name)
