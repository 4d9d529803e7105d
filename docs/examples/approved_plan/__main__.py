"""Serve the plans on port 8000, on the database of DATABASE_URL or on a PostgreSQL of its own."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from decimal import Decimal

import uvicorn
from sqlalchemy import create_engine, func, select
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from sqla_durable import embedded

from .api import create_app
from .models import Account, Base, Stock

ONE_AT_A_TIME = 4711  # several processes may begin at once


def main() -> None:
    with database() as url:
        prepare(url)
        print(f"export DATABASE_URL='{url}'", flush=True)
        uvicorn.run(create_app(create_async_engine(url)), port=int(os.environ.get("PORT", "8000")))


@contextmanager
def database() -> Generator[str]:
    if given := os.environ.get("DATABASE_URL"):
        yield given
        return
    with embedded.start() as server:  # it goes when this program ends
        yield server.url


def prepare(url: str) -> None:
    """Create the tables, and something to move and to pay with."""
    engine = create_engine(url)
    with Session(engine) as session, session.begin():
        session.execute(select(func.pg_advisory_xact_lock(ONE_AT_A_TIME)))
        Base.metadata.create_all(session.connection())
        if session.get(Account, "shop") is None:
            add_samples(session)
    engine.dispose()


def add_samples(session: Session) -> None:
    for site, quantity in {"Hamburg": 100, "Berlin": 0}.items():
        session.add(Stock(article="tea", site=site, quantity=quantity))
    for name, balance in {"shop": Decimal(500), "Elbe Haulage": Decimal(0)}.items():
        session.add(Account(name=name, balance=balance))


if __name__ == "__main__":
    main()
