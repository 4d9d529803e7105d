"""The database: that of ``DATABASE_URL``, or else an embedded PostgreSQL that all processes of the example share."""

import os
import tempfile
from pathlib import Path

from sqlalchemy import create_engine, func, select
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from sqla_durable import embedded
from sqla_durable.asyncio import AsyncRuns

from .models import Base, Reset, ResetStep

FOLDER = Path(tempfile.gettempdir()) / "branch-reset-postgres"
ONE_AT_A_TIME = 4711  # several processes may begin at once

engine = create_async_engine(os.environ.get("DATABASE_URL") or embedded.start(FOLDER).url)
new_session = async_sessionmaker(engine, expire_on_commit=False)
resets = AsyncRuns(new_session, Reset, ResetStep)


def create_tables() -> None:
    sync_engine = create_engine(engine.url)
    with sync_engine.begin() as connection:
        connection.execute(select(func.pg_advisory_xact_lock(ONE_AT_A_TIME)))
        Base.metadata.create_all(connection)
    sync_engine.dispose()
