"""Carries out one plan, step by step. This is the process that the demo kills.

Run as ``DATABASE_URL=... python -m sqla_durable.demo.carry_out PLAN_ID``.
"""

from __future__ import annotations

import os
import sys
import time
from decimal import Decimal
from pathlib import Path
from uuid import UUID, uuid4

from sqlalchemy import create_engine, func, select
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, Run, Runs
from sqla_durable.demo.models import Account, PaymentEntry, Plan, PlanStep, Stock, StockEntry
from sqla_durable.demo.plan import Label, Payment, StockMove, actions


def carry_out(run: Run[Plan]) -> None:
    """Do what the plan says. A position in it is the key of a step: the same in every attempt."""
    for position, action in enumerate(actions.validate_python(run.row.actions)):
        match action:
            case StockMove():
                run.step(position, move_stock, position, action)
            case Payment():
                run.step(position, pay, position, action)
            case Label():
                run.external(position, print_label, position, action)


def move_stock(session: Session, position: int, move: StockMove) -> int:
    """Move pieces between two sites, with a ledger entry; return how many are left at the source."""
    both = select(Stock).where(Stock.article == move.article, Stock.site.in_([move.source, move.target]))
    stock = {row.site: row for row in session.scalars(both.order_by(Stock.site).with_for_update())}
    if stock[move.source].quantity < move.quantity:
        raise ValueError(f"{move.source} has {stock[move.source].quantity} × {move.article}, not {move.quantity}")
    stock[move.source].quantity -= move.quantity
    stock[move.target].quantity += move.quantity
    take_time(session)
    session.add(StockEntry(position=position, **move.model_dump(exclude={"kind"})))
    return stock[move.source].quantity


def pay(session: Session, position: int, payment: Payment) -> Decimal:
    """Pay from one account to another, with a ledger entry; return the payer's new balance."""
    both = select(Account).where(Account.name.in_([payment.payer, payment.payee]))
    accounts = {row.name: row for row in session.scalars(both.order_by(Account.name).with_for_update())}
    if accounts[payment.payer].balance < payment.amount:
        raise ValueError(f"{payment.payer} has {accounts[payment.payer].balance} €, not {payment.amount}")
    accounts[payment.payer].balance -= payment.amount
    accounts[payment.payee].balance += payment.amount
    take_time(session)
    session.add(PaymentEntry(position=position, **payment.model_dump(exclude={"kind"})))
    return accounts[payment.payer].balance


def print_label(position: int, label: Label) -> str:
    """Print a label, and wait for the printer; return the number on it. No transaction can undo it."""
    number = f"L-{uuid4().hex[:8]}"
    with Path(os.environ["LABEL_PRINTER"]).open("a") as printer:
        printer.write(f"{position} {number} {label.parcel}: {label.address}\n")
    time.sleep(0.015)
    return number


def take_time(session: Session) -> None:
    """Be as slow as a busier database, so that a kill is likely to come between two writes."""
    session.flush()
    session.execute(select(func.pg_sleep(0.01)))


def main() -> None:
    """Carry the plan out; where another process holds it, wait until its lease has lapsed, and go on from there."""
    plans = Runs(sessionmaker(create_engine(os.environ["DATABASE_URL"])), Plan, PlanStep)
    while plans.execute(UUID(sys.argv[1]), carry_out).ending is not Ending.LANDED:
        time.sleep(0.02)


if __name__ == "__main__":
    main()
