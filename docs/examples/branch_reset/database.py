"""The engine, and the resets in its database. As a program: makes the tables."""

import asyncio
import os

from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from sqla_durable.asyncio import AsyncRuns

from .models import Base, Reset, ResetStep

engine = create_async_engine(os.environ["DATABASE_URL"])
new_session = async_sessionmaker(engine, expire_on_commit=False)
resets = AsyncRuns(new_session, Reset, ResetStep)


async def main() -> None:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(main())
