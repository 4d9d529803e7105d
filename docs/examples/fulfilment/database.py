"""The database: that of ``DATABASE_URL``, or else an embedded PostgreSQL that all processes of the example share."""

import os
import tempfile
from pathlib import Path

from sqlalchemy import create_engine, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker

from sqla_durable import Functions, embedded
from sqla_durable.asyncio import AsyncFunctions

from .models import Base, DurableRun, DurableSignal, DurableStep, Stock

FOLDER = Path(tempfile.gettempdir()) / "fulfilment-postgres"
ONE_AT_A_TIME = 4711  # several processes may begin at once

engine = create_engine(os.environ.get("DATABASE_URL") or embedded.start(FOLDER).url)
new_session = sessionmaker(engine)
functions = Functions(new_session, DurableRun, DurableStep, signals=DurableSignal)

async_engine = create_async_engine(engine.url)
coroutines = AsyncFunctions(async_sessionmaker(async_engine), DurableRun, DurableStep, signals=DurableSignal)


def create_tables() -> None:
    """Make the tables, and a shop that has something to sell."""
    goods = [{"article": "book", "quantity": 20, "cents": 1200}, {"article": "lamp", "quantity": 5, "cents": 4900}]
    with engine.begin() as connection:
        connection.execute(select(func.pg_advisory_xact_lock(ONE_AT_A_TIME)))
        Base.metadata.create_all(connection)
        connection.execute(insert(Stock).on_conflict_do_nothing(), goods)
