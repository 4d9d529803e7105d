# async_functions.py
import asyncio
import os
from datetime import timedelta

from pydantic import BaseModel
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqla_durable import FunctionMixin, ReceiptMixin
from sqla_durable.asyncio import AsyncFunctionRun, AsyncFunctions, AsyncWorker


class Base(DeclarativeBase):
    pass


class DurableRun(FunctionMixin, Base):
    __tablename__ = "async_run"


class DurableStep(ReceiptMixin[DurableRun], Base):
    __tablename__ = "async_step"


class Guest(Base):
    __tablename__ = "async_guest"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


async_engine = create_async_engine(os.environ["DATABASE_URL"])
new_session = async_sessionmaker(async_engine)
coroutines = AsyncFunctions(new_session, DurableRun, DurableStep)


class Invitation(BaseModel):
    name: str
    address: str


class Welcome(BaseModel):
    number: int
    mail: str


async def add_guest(session: AsyncSession, name: str) -> int:
    guest = Guest(name=name)
    session.add(guest)
    await session.flush()
    return guest.id


async def send_mail(idempotency_key: str, address: str) -> str:
    await asyncio.sleep(0.1)  # a mail service is asked here
    return f"{address}, request {idempotency_key}"


@coroutines.function("welcome")
async def welcome(run: AsyncFunctionRun, invitation: Invitation) -> Welcome:
    number = await run.step("add", add_guest, invitation.name)
    mail = await run.keyed("mail", send_mail, invitation.address)
    return Welcome(number=number, mail=mail)


async def main() -> None:
    async with async_engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)

    ada = Invitation(name="ada", address="ada@example.org")
    async with new_session.begin() as session:
        handle = await coroutines.start(session, welcome, ada, key="welcome-ada")

    worker = AsyncWorker(coroutines, concurrency=20)
    await worker.run_due(timedelta(minutes=1))  # a process that stays: await worker.run()

    print(await coroutines.result(handle, timeout=timedelta(seconds=10)))
    print([receipt.step for receipt in await coroutines.steps(handle)])
    await async_engine.dispose()


if __name__ == "__main__":
    asyncio.run(main())
