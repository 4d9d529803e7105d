# carry_out_plan.py
import os
import time

from plan_models import Account, Base, Plan, PlanStep, Transfer
from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Run, Runs

engine = create_engine(os.environ["DATABASE_URL"])
new_session = sessionmaker(engine)
plans = Runs(new_session, Plan, PlanStep)


def pay(session: Session, transfer: Transfer) -> int:
    """Move the money, and return what the payer has left."""
    payer = session.get_one(Account, transfer["payer"], with_for_update=True)
    payee = session.get_one(Account, transfer["payee"], with_for_update=True)
    if payer.balance < transfer["amount"]:
        raise ValueError(f"{payer.name} has {payer.balance}, not {transfer['amount']}")
    payer.balance -= transfer["amount"]
    session.flush()
    time.sleep(0.1)  # the money has left, and has not arrived: a bad moment to be killed
    payee.balance += transfer["amount"]
    return payer.balance


def carry_out(run: Run[Plan]) -> None:
    for position, transfer in enumerate(run.row.transfers):
        left = run.step(position, pay, transfer)
        print(f"transfer {position}: {transfer['payer']} has {left} left", flush=True)


def main() -> None:
    Base.metadata.create_all(engine)
    for run in plans.claim_due(limit=10):
        outcome = plans.execute(run, carry_out)
        print(f"plan {run.row.id}: {outcome.status}", outcome.failure or "")


if __name__ == "__main__":
    main()
