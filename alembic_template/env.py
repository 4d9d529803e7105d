"""How migrations find the models and the database. This file is yours: change what does not fit."""

import asyncio
import os
from functools import cache
from logging.config import fileConfig
from pkgutil import resolve_name
from typing import Any

from alembic import context
from alembic.util import CommandError
from sqlalchemy import URL, Connection, Engine, MetaData, engine_from_config, event, make_url, pool, text

config = context.config

# Checks are compared by their names too, so that one of your own is not left out of an existing table.
PLUGINS = ["alembic.autogenerate.*", "alembic.ext.checkconstraint_byname"]

PARTITIONS = """
SELECT nspname, relname, NULL FROM pg_catalog.pg_class JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace
 WHERE relispartition
UNION ALL
SELECT nspname, relname, conname FROM pg_catalog.pg_constraint JOIN pg_catalog.pg_class ON pg_class.oid = conrelid
  JOIN pg_catalog.pg_namespace ON pg_namespace.oid = relnamespace
 WHERE contype = 'f' AND conparentid <> 0
"""


def find_metadata() -> list[MetaData]:
    """Resolve the ini option ``metadata``."""
    targets = (config.get_main_option("metadata") or "").replace(",", " ").split()
    if not targets:
        raise CommandError(
            "No models to migrate: set metadata in the [alembic] section of the ini file to where your models' "
            "metadata is, as in  metadata = app.models:Base"
        )
    # Two bases may share one MetaData, and Alembic takes none twice.
    return list(dict.fromkeys(map(resolve, targets)))


def resolve(target: str) -> MetaData:
    """Import the metadata that is called ``module:attribute``."""
    try:
        found = resolve_name(target)
    except Exception as error:
        error.add_note(f"while reading metadata = {target} in the ini file")
        raise
    metadata = getattr(found, "metadata", found)
    if not isinstance(metadata, MetaData):
        raise CommandError(f"metadata = {target} in the ini file leads to no MetaData, but to {found!r}.")
    return metadata


def find_url() -> URL:
    """Take the database from the environment, else from the ini file."""
    given = os.environ.get("DATABASE_URL") or config.get_main_option("sqlalchemy.url")
    if not given:
        raise CommandError("No database to migrate: set DATABASE_URL, or sqlalchemy.url in the ini file.")
    url = make_url(given)
    if url.drivername not in {"postgres", "postgresql"}:
        return url
    # Without a driver SQLAlchemy 2.0 means psycopg2, and postgres:// means nothing to it at all.
    return url.set(drivername=f"postgresql+{config.get_main_option('driver') or 'psycopg'}")


def find_plugins() -> list[str]:
    """Add what compares statuses, indexes, storage parameters, guards and partitions, if it is installed.

    Migrations need nothing of it, and work when it is gone.
    """
    try:
        from sqla_durable.alembic import register
    except ImportError:
        return PLUGINS
    return [*PLUGINS, register()]


def process_revision_directives(migration_context: Any, revision: Any, directives: Any) -> None:
    """Have autogenerate write two migrations for tables that are in use: ``-x online``, or the ini option ``online``."""
    if config.get_main_option("online") != "true" and "online" not in context.get_x_argument(as_dictionary=True):
        return
    try:
        from sqla_durable.alembic import keep_online
    except ImportError as error:
        raise CommandError("Migrations of tables in use are written by sqla_durable, which is not installed.") from error
    keep_online(migration_context, revision, directives)


def include_object(_object: Any, _name: str | None, type_: str, reflected: bool, compare_to: Any) -> bool:
    """Leave alone a check that only the database knows: one that the models leave unnamed looks the same."""
    return not (type_ == "check_constraint" and reflected and compare_to is None)


def compare_with(metadata: list[MetaData], connection: Connection) -> dict[str, Any]:
    """Say what ``--autogenerate`` and ``alembic check`` look at."""
    default = connection.dialect.default_schema_name
    tables = {key: table for each in metadata for key, table in each.tables.items()}
    # Without any, as where a module was not imported, no schema is looked at, and no table dropped.
    named = {table.schema for table in tables.values()}
    version_table_schema = None
    if default in named and None not in named:
        # The models name the schema that is first in the search_path. Alembic would take its tables for unnamed ones,
        # and every foreign key for a changed one.
        version_table_schema = default
        connection.dialect.default_schema_name = default = ""
    schemas = {schema or default for schema in named}

    @cache
    def partitions() -> set[tuple[str, str, str | None]]:
        # Not before it is asked for: Alembic would take a transaction that has begun for one that is not its own.
        return {(schema, table, key) for schema, table, key in connection.exec_driver_sql(PARTITIONS)}

    def include_name(name: str | None, type_: str, parents: Any) -> bool:
        # A partition comes and goes with its month, and so does a part of a foreign key that refers to one.
        if type_ == "table" and name is not None:
            schema = parents["schema_name"]
            known = (name if schema is None else f"{schema}.{name}") in tables
            return known or (schema or default, name, None) not in partitions()
        if type_ == "foreign_key_constraint":
            return (parents["schema_name"] or default, parents["table_name"], name) not in partitions()
        # Only schemas that the models use: what is in another one is not theirs to drop.
        return type_ != "schema" or (name or default) in schemas

    return {
        "autogenerate_plugins": find_plugins(),
        "compare_server_default": True,
        "include_name": include_name,
        "include_object": include_object,
        "include_schemas": schemas != {default},
        "process_revision_directives": process_revision_directives,
        "version_table_schema": version_table_schema,
    }


def limit_lock_waits(engine: Engine) -> None:
    """Give up a migration that has to wait for a lock, before everything else waits behind it."""
    if lock_timeout := config.get_main_option("lock_timeout"):

        @event.listens_for(engine, "begin")
        def _(connection: Connection) -> None:
            # For one transaction, not for the session: behind a pooler the session is not ours alone.
            connection.execute(text("SELECT set_config('lock_timeout', :timeout, true)"), {"timeout": lock_timeout})


def migrate(metadata: list[MetaData], **options: Any) -> None:
    """Carry out the command, each migration in a transaction of its own, so that its locks end with it."""
    # A hand-written migration gets the names of its constraints by a convention only where there is one for all of it.
    target = metadata[0] if len(metadata) == 1 else metadata
    context.configure(target_metadata=target, transaction_per_migration=True, **options)
    with context.begin_transaction():
        context.run_migrations()


def run_offline(metadata: list[MetaData]) -> None:
    """Write the SQL that ``--sql`` asks for; no database is needed."""
    migrate(metadata, dialect_name="postgresql", dialect_opts={"paramstyle": "named"}, literal_binds=True)


def run_online(metadata: list[MetaData]) -> None:
    """Migrate the database, over asyncio where the driver is for that."""
    url = find_url()
    settings = {**config.get_section(config.config_ini_section, {}), "sqlalchemy.url": url}
    if url.get_dialect().is_async:
        # The loop that is usual on Windows does not do for psycopg.
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop) as runner:
            runner.run(connect_async(settings, metadata))
    else:
        connect(settings, metadata)


def connect(settings: dict[str, Any], metadata: list[MetaData]) -> None:
    """Migrate by a driver like psycopg."""
    engine = engine_from_config(settings, poolclass=pool.NullPool)
    limit_lock_waits(engine)
    with engine.connect() as connection:
        migrate(metadata, connection=connection, **compare_with(metadata, connection))


async def connect_async(settings: dict[str, Any], metadata: list[MetaData]) -> None:
    """Migrate by a driver like psycopg_async or asyncpg."""
    from sqlalchemy.ext.asyncio import async_engine_from_config  # which needs greenlet

    engine = async_engine_from_config(settings, poolclass=pool.NullPool)
    limit_lock_waits(engine.sync_engine)
    async with engine.connect() as connection:
        await connection.run_sync(lambda each: migrate(metadata, connection=each, **compare_with(metadata, each)))


if config.config_file_name is not None:
    fileConfig(config.config_file_name, disable_existing_loggers=False)
if context.is_offline_mode():
    run_offline(find_metadata())
else:
    run_online(find_metadata())
