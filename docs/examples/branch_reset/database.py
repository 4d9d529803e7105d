"""The database: that of ``DATABASE_URL``, or else an embedded PostgreSQL that all processes of the example share."""

import os
import tempfile
from pathlib import Path

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from sqla_durable import embedded
from sqla_durable.asyncio import AsyncRuns

from .models import Base, Reset, ResetStep

FOLDER = Path(tempfile.gettempdir()) / "branch-reset-postgres"

engine = create_async_engine(os.environ.get("DATABASE_URL") or embedded.start(FOLDER).url)
new_session = async_sessionmaker(engine, expire_on_commit=False)
resets = AsyncRuns(new_session, Reset, ResetStep)


def create_tables() -> None:
    sync_engine = create_engine(engine.url)
    Base.metadata.create_all(sync_engine)
    sync_engine.dispose()
