"""Holds what there is against the plan: every effect in the database exactly once, every external one at least once?"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from uuid import UUID

from sqlalchemy import select
from sqlalchemy.orm import Session

from sqla_durable.demo.models import Account, PaymentEntry, Plan, PlanStatus, PlanStep, Stock, StockEntry
from sqla_durable.demo.plan import Action, Key, Label, Payment, PlanFile, StockMove


@dataclass(frozen=True)
class Tally:
    """One kind of thing, counted.

    :param what: what was counted.
    :param wanted: how many the plan asks for.
    :param found: how many there are.
    :param faults: what is wrong, one sentence each.
    :param right: what can be said of it where there are no faults.
    """

    what: str
    wanted: int
    found: int
    faults: tuple[str, ...]
    right: str


def check(session: Session, ident: UUID, plan: PlanFile, labels: Sequence[str]) -> list[Tally]:
    """Count every effect of a plan that has landed.

    An executed plan must have the effects of all its actions; a failed one those of the steps that succeeded.

    :param session: a session on the demo's database.
    :param ident: the plan's primary key.
    :param plan: what was to be done.
    :param labels: the lines that were printed.
    """
    executed = session.get_one(Plan, ident).status is PlanStatus.EXECUTED
    steps = PlanStep.__table__.c
    recorded = session.execute(select(steps.step, steps.outcome).where(steps.plan_id == ident))
    receipts = Counter(int(step) for step, outcome in recorded if outcome == "succeeded")
    due = {position: action for position, action in enumerate(plan.actions) if executed or position in receipts}
    moves = {position: action for position, action in due.items() if isinstance(action, StockMove)}
    payments = {position: action for position, action in due.items() if isinstance(action, Payment)}
    to_print = {position: action for position, action in due.items() if isinstance(action, Label)}
    stock: dict[Key, int] = {(row.article, row.site): row.quantity for row in session.scalars(select(Stock))}
    balances: dict[Key, Decimal] = {(row.name,): row.balance for row in session.scalars(select(Account))}
    return [
        _ledger("stock movements", moves, session.scalars(select(StockEntry))),
        _ledger("payments", payments, session.scalars(select(PaymentEntry))),
        _sums("stocks", _moved(plan.opening_stock(), moves.values()), stock),
        _sums("balances", _paid(plan.opening_balances(), payments.values()), balances),
        _receipts(due, receipts),
        _labels(to_print, Counter(int(line.split()[0]) for line in labels)),
    ]


def _ledger(what: str, due: Mapping[int, StockMove | Payment], entries: Iterable[StockEntry | PaymentEntry]) -> Tally:
    written: dict[int, list[StockEntry | PaymentEntry]] = defaultdict(list)
    for entry in entries:
        written[entry.position].append(entry)
    faults: list[str] = []
    for position in sorted(due.keys() | written.keys()):
        action, there = due.get(position), written[position]
        if len(there) != (0 if action is None else 1):
            wanted = f"once: {action}" if action is not None else "not at all"
            faults.append(f"step {position} is in the ledger {_times(len(there))}, and should be {wanted}")
        elif action is not None and any(
            getattr(there[0], field) != value for field, value in action.model_dump(exclude={"kind"}).items()
        ):
            faults.append(f"step {position} is in the ledger as another action than {action}")
    return Tally(what, len(due), sum(map(len, written.values())), tuple(faults), "each exactly once")


def _sums(what: str, wanted: Mapping[Key, Any], found: Mapping[Key, Any]) -> Tally:
    faults = tuple(
        f"{', '.join(key)} should be {wanted.get(key, 'absent')}, and is {found.get(key, 'absent')}"
        for key in sorted(wanted.keys() | found.keys())
        if wanted.get(key) != found.get(key)
    )
    return Tally(what, len(wanted), len(found), faults, "all as they should be")


def _receipts(due: Mapping[int, Action], receipts: Counter[int]) -> Tally:
    faults = tuple(f"step {position} has no receipt: {action}" for position, action in due.items()
                   if not receipts[position])  # fmt: skip
    return Tally("receipts", len(due), receipts.total(), faults, "each exactly once")


def _labels(due: Mapping[int, Label], printed: Counter[int]) -> Tally:
    faults = tuple(f"step {position} was never printed: {label}" for position, label in due.items()
                   if not printed[position])  # fmt: skip
    return Tally("labels printed", len(due), printed.total(), faults, "external, so each at least once")


def _moved(stock: dict[Key, int], moves: Iterable[StockMove]) -> dict[Key, int]:
    for move in moves:
        stock[move.article, move.source] -= move.quantity
        stock[move.article, move.target] += move.quantity
    return stock


def _paid(balances: dict[Key, Decimal], payments: Iterable[Payment]) -> dict[Key, Decimal]:
    for payment in payments:
        balances[payment.payer,] -= payment.amount
        balances[payment.payee,] += payment.amount
    return balances


def _times(number: int) -> str:
    return {0: "not at all", 1: "once", 2: "twice"}.get(number, f"{number} times")
