"""The demo's counting finds whatever is missing, there twice, or not what the plan says."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, Runs
from sqla_durable.demo.carry_out import carry_out
from sqla_durable.demo.check import check
from sqla_durable.demo.models import Base, Plan, PlanStep
from sqla_durable.demo.performance import approved
from sqla_durable.demo.plan import Label, Payment, PlanFile, StockMove

PLAN = PlanFile(
    stock={"tea": {"Hamburg": 5}},
    balances={"shop": Decimal(100)},
    actions=[
        StockMove(article="tea", source="Hamburg", target="Berlin", quantity=3),
        Payment(payer="shop", payee="haulier", amount=Decimal("12.50")),
        Label(parcel="parcel 1", address="Berlin"),
        StockMove(article="tea", source="Hamburg", target="Berlin", quantity=2),
    ],
)


class Executed:
    """A plan that was carried out, and what it has left behind."""

    def __init__(self, engine: Engine, ident: UUID, printer: Path) -> None:
        self.engine, self.ident, self.printer = engine, ident, printer

    def faults(self, plan: PlanFile = PLAN) -> dict[str, tuple[str, ...]]:
        with Session(self.engine) as session:
            tallies = check(session, self.ident, plan, self.printer.read_text().splitlines())
        return {tally.what: tally.faults for tally in tallies if tally.faults}

    def sabotage(self, statement: str) -> None:
        with self.engine.begin() as connection:
            assert connection.execute(text(statement)).rowcount == 1


@pytest.fixture
def executed(empty_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Executed]:
    printer = tmp_path / "printer"
    monkeypatch.setenv("LABEL_PRINTER", str(printer))
    engine = create_engine(empty_url)
    Base.metadata.create_all(engine)
    ident = approved(engine, PLAN)
    assert Runs(sessionmaker(engine), Plan, PlanStep).execute(ident, carry_out).ending is Ending.LANDED
    yield Executed(engine, ident, printer)
    engine.dispose()


def test_a_plan_carried_out_is_without_faults(executed: Executed) -> None:
    assert executed.faults() == {}


MOVE_AGAIN = (
    "INSERT INTO stock_entry (position, article, source, target, quantity)"
    " SELECT position, article, source, target, quantity FROM stock_entry WHERE position = 0"
)
PAY_AGAIN = (
    "INSERT INTO payment_entry (position, payer, payee, amount)"
    " SELECT position, payer, payee, amount FROM payment_entry"
)


@pytest.mark.past_guards
@pytest.mark.parametrize(
    ("statement", "what", "fault"),
    [
        (
            "DELETE FROM stock_entry WHERE position = 3",
            "stock movements",
            "step 3 is in the ledger not at all, and should be once: 2 × tea, Hamburg → Berlin",
        ),
        (
            MOVE_AGAIN,
            "stock movements",
            "step 0 is in the ledger twice, and should be once: 3 × tea, Hamburg → Berlin",
        ),
        (
            "UPDATE stock_entry SET quantity = 4 WHERE position = 0",
            "stock movements",
            "step 0 is in the ledger as another action than 3 × tea, Hamburg → Berlin",
        ),
        (
            "INSERT INTO payment_entry (position, payer, payee, amount) VALUES (2, 'shop', 'haulier', 1)",
            "payments",
            "step 2 is in the ledger once, and should be not at all",
        ),
        (
            "DELETE FROM payment_entry",
            "payments",
            "step 1 is in the ledger not at all, and should be once: 12.50 €, shop → haulier",
        ),
        (
            PAY_AGAIN,
            "payments",
            "step 1 is in the ledger twice, and should be once: 12.50 €, shop → haulier",
        ),
        ("UPDATE stock SET quantity = 8 WHERE site = 'Berlin'", "stocks", "tea, Berlin should be 5, and is 8"),
        ("DELETE FROM account WHERE name = 'haulier'", "balances", "haulier should be 12.50, and is absent"),
        ("UPDATE account SET balance = 75 WHERE name = 'shop'", "balances", "shop should be 87.50, and is 75.00"),
        ("DELETE FROM plan_step WHERE step = '1'", "receipts", "step 1 has no receipt: 12.50 €, shop → haulier"),
    ],
)
def test_what_is_missing_or_doubled_or_other_is_found(
    executed: Executed, statement: str, what: str, fault: str
) -> None:
    executed.sabotage(statement)
    assert executed.faults() == {what: (fault,)}


def test_a_label_that_was_never_printed_is_found(executed: Executed) -> None:
    executed.printer.write_text("")
    assert executed.faults() == {"labels printed": ("step 2 was never printed: label for parcel 1, Berlin",)}


def test_a_label_printed_twice_is_counted_and_no_fault(executed: Executed) -> None:
    executed.printer.write_text(executed.printer.read_text() * 2)
    assert executed.faults() == {}
    with Session(executed.engine) as session:
        tallies = check(session, executed.ident, PLAN, executed.printer.read_text().splitlines())
    assert [(tally.wanted, tally.found) for tally in tallies if tally.what == "labels printed"] == [(1, 2)]


def test_a_plan_of_more_than_was_carried_out_is_found(executed: Executed) -> None:
    more: Any = PLAN.model_copy(update={"actions": [*PLAN.actions, PLAN.actions[1]]})
    assert set(executed.faults(more)) == {"payments", "balances", "receipts"}
