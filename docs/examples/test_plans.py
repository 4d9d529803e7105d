# test_plans.py
import os
from collections.abc import Iterator

import pytest
from carry_out_plan import carry_out
from plan_models import Account, Base, Plan, PlanStatus, PlanStep
from sqlalchemy import create_engine, select
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, LostLease, Runs
from sqla_durable.testing import lapse


@pytest.fixture
def new_session() -> Iterator[sessionmaker[Session]]:
    engine = create_engine(os.environ["DATABASE_URL"])
    Base.metadata.create_all(engine)
    yield sessionmaker(engine)
    Base.metadata.drop_all(engine)
    engine.dispose()


@pytest.fixture
def plan_id(new_session: sessionmaker[Session]) -> int:
    with new_session.begin() as session:
        ada, ben = Account(name="ada", balance=100), Account(name="ben", balance=0)
        plan = Plan(
            status=PlanStatus.APPROVED,
            transfers=[
                {"payer": "ada", "payee": "ben", "amount": 30},
                {"payer": "ada", "payee": "ben", "amount": 20},
            ],
        )
        session.add_all([ada, ben, plan])
        session.flush()
        return plan.id


def test_a_plan_moves_the_money(new_session: sessionmaker[Session], plan_id: int) -> None:
    outcome = Runs(new_session, Plan, PlanStep).execute(plan_id, carry_out)
    assert outcome.ending is Ending.LANDED
    assert [receipt.result for receipt in outcome.receipts] == [70, 50]


def test_a_process_that_was_presumed_dead_moves_no_money(new_session: sessionmaker[Session], plan_id: int) -> None:
    plans = Runs(new_session, Plan, PlanStep)
    stale = plans.claim(plan_id)
    assert stale is not None
    with new_session.begin() as session:
        lapse(session, Plan, plan_id)  # as if its heartbeats had stopped for longer than the lease

    assert plans.execute(plan_id, carry_out).status is PlanStatus.EXECUTED
    with pytest.raises(LostLease):
        carry_out(stale)
    with new_session() as session:
        assert session.scalars(select(Account.balance).order_by(Account.name)).all() == [50, 50]
