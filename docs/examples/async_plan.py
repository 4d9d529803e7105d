# async_plan.py
import asyncio
import os

from plan_models import Account, Base, Plan, PlanStatus, PlanStep, Transfer, plan_statuses
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from sqla_durable.asyncio import AsyncRun, AsyncRuns, transition


async def pay(session: AsyncSession, transfer: Transfer) -> int:
    payer = await session.get_one(Account, transfer["payer"], with_for_update=True)
    payee = await session.get_one(Account, transfer["payee"], with_for_update=True)
    payer.balance -= transfer["amount"]
    payee.balance += transfer["amount"]
    return payer.balance


async def carry_out(run: AsyncRun[Plan]) -> None:
    for position, transfer in enumerate(run.row.transfers):
        await run.step(position, pay, transfer)


async def main() -> None:
    engine = create_async_engine(os.environ["DATABASE_URL"])
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    new_session = async_sessionmaker(engine)
    plans = AsyncRuns(new_session, Plan, PlanStep)

    async with new_session.begin() as session:
        plan = Plan(transfers=[{"payer": "ada", "payee": "ben", "amount": 30}])
        session.add(plan)
        await session.merge(Account(name="ada", balance=100))
        await session.merge(Account(name="ben", balance=0))
        await session.flush()
        assert await transition(plan_statuses, session, plan, PlanStatus.APPROVED)
        plan_id = plan.id

    outcome = await plans.execute(plan_id, carry_out)
    print(outcome.status, [receipt.result for receipt in outcome.receipts], outcome.failure or "")
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(main())
