# test_plans.py
from collections.abc import Iterator

import pytest
from carry_out_plan import carry_out
from plan_models import Account, Base, Plan, PlanStatus, PlanStep
from sqlalchemy import Engine, create_engine, select
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, LostLease, Runs, embedded
from sqla_durable.testing import lapse


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with embedded.start() as server:  # a server for this run of the tests, which nobody else has data in
        engine = create_engine(server.url)
        Base.metadata.create_all(engine)
        yield engine
        engine.dispose()


@pytest.fixture
def new_session(engine: Engine) -> Iterator[sessionmaker[Session]]:
    yield sessionmaker(engine)
    with engine.begin() as connection:
        for table in reversed(Base.metadata.sorted_tables):
            connection.execute(table.delete())


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
