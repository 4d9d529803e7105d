"""The shop's commands."""

import argparse
import sys
from collections.abc import Callable
from datetime import timedelta

from sqlalchemy import select

from sqla_durable import DurableError

from . import payments, shop
from .database import create_tables, functions, new_session
from .messages import NewAddress, Withdrawal
from .models import Stock

Given = argparse.Namespace


def order(given: Given) -> str:
    with new_session.begin() as session:
        shop.place_order(
            session,
            given.number,
            given.article,
            given.quantity,
            given.address,
            pack_within=given.pack_within,
            return_within=given.return_within,
        )
    return f"order {given.number} is placed"


def status(given: Given) -> str:
    with new_session() as session:
        placed = shop.find(session, given.number)
        run = functions.describe(shop.handle_of(given.number), session=session)
    waits = f" for {run.waits_for!r}" if run.waits_for else ""
    says = f"; {run.state}" if run.state else ""
    return (
        f"order {placed.id}: {placed.quantity} {placed.article} to {placed.address}, {placed.status}\n"
        f"its run: {run.status}{waits}; steps done: {run.steps}{says}"
    )


def result(given: Given) -> str:
    with new_session() as session:
        shop.find(session, given.number)
    ended = functions.result(shop.handle_of(given.number), timeout=timedelta(seconds=30))
    return f"{type(ended).__name__}: {ended}"


def address(given: Given) -> str:
    shop.say(given.number, NewAddress(address=given.address))
    return f"order {given.number} goes to {given.address}"


def cancel(given: Given) -> str:
    shop.say(given.number, Withdrawal(reason="the customer has changed their mind"))
    return f"order {given.number} is withdrawn"


def pack(given: Given) -> str:
    with new_session.begin() as session:
        return "said" if shop.pack(session, given.number, given.parcel) else "too late"


def send_back(given: Given) -> str:
    with new_session.begin() as session:
        return "said" if shop.send_back(session, given.number, given.reason) else "too late"


def stock(_: Given) -> str:
    with new_session() as session:
        return ", ".join(
            f"{each.quantity} {each.article}" for each in session.scalars(select(Stock).order_by(Stock.article))
        )


def pay(given: Given) -> str:
    with payments.ledger() as book:
        book.conduct = given.conduct or book.conduct
        asked = book.requests.total()
        return f"{book.conduct}: {len(book.charges)} charges and {len(book.refunds)} refunds, in {asked} requests"


def arguments() -> Given:
    parser = argparse.ArgumentParser(prog="python -m fulfilment", description=__doc__)
    commands = parser.add_subparsers(required=True)

    def command(name: str, do: Callable[[Given], str], *takes: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name)
        added.set_defaults(do=do)
        for each in takes:
            added.add_argument(each, type=int if each in {"number", "quantity"} else str)
        return added

    placing = command("order", order, "number", "article", "quantity")
    placing.add_argument("--address", default="1 High Street")
    for option in "--pack-within", "--return-within":
        placing.add_argument(option, type=seconds, default=timedelta(minutes=5), metavar="SECONDS")
    command("status", status, "number")
    command("result", result, "number")
    command("address", address, "number", "address")
    command("cancel", cancel, "number")
    command("pack", pack, "number", "parcel")
    command("return", send_back, "number", "reason")
    command("stock", stock)
    command("payments", pay).add_argument("conduct", nargs="?", type=payments.Conduct)
    return parser.parse_args()


def seconds(text: str) -> timedelta:
    return timedelta(seconds=float(text))


if __name__ == "__main__":
    given = arguments()
    create_tables()
    try:
        print(given.do(given))
    except (DurableError, shop.NotThere, shop.Unfit) as refused:
        sys.exit(f"{type(refused).__name__}: {refused}")
