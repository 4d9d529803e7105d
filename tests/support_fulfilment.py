"""The example of fulfilment: its shop and functions in this process, its worker and commands in others."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

from tests.support import eventually
from tests.support_branch_reset import EXAMPLES, Process, environ

NAME = "fulfilment"
MODULES = "models", "messages", "payments", "database", "steps", "fulfil", "report", "shop", "worker"
LONG = timedelta(hours=1)
DUE = "SELECT count(*) FROM fulfilment_run WHERE (status = 'running' OR status = 'ready' AND available_at <= now()"


class App:
    """The example's application: its tables in an empty database, and a payment service of its own.

    :param folder: where the file of the payment service is.
    :param modules: those of the example.
    """

    def __init__(self, folder: Path, modules: Mapping[str, ModuleType]) -> None:
        self.folder = folder
        self.modules: Any = modules
        self.models: Any = modules["models"]
        self.messages: Any = modules["messages"]
        self.shop: Any = modules["shop"]
        self.payments: Any = modules["payments"]
        self.functions: Any = modules["database"].functions
        self.coroutines: Any = modules["database"].coroutines
        self.engine: Any = modules["database"].engine
        modules["database"].create_tables()

    def close(self) -> None:
        self.engine.dispose()

    # acting

    def session(self) -> Session:
        session: Session = self.modules["database"].new_session()
        return session

    def order(
        self,
        number: int,
        article: str = "book",
        quantity: int = 1,
        *,
        pack_within: timedelta = LONG,
        return_within: timedelta = LONG,
    ) -> Any:
        """Place an order; return the handle."""
        with self.session() as session, session.begin():
            return self.shop.place_order(
                session,
                number,
                article,
                quantity,
                "1 High Street",
                pack_within=pack_within,
                return_within=return_within,
            )

    def pack(self, number: int) -> bool:
        with self.session() as session, session.begin():
            return bool(self.shop.pack(session, number, f"P-{number}"))

    def send_back(self, number: int) -> bool:
        with self.session() as session, session.begin():
            return bool(self.shop.send_back(session, number, "torn"))

    def tell(self, number: int, what: Any) -> bool:
        """Say something of an order, and do not wait for the answer."""
        with self.session() as session, session.begin():
            return bool(self.functions.signal(session, self.shop.handle_of(number), "said", what))

    def say_that_it_comes_back(self, number: int) -> None:
        """Say it of a parcel that need not be on its way yet."""
        with self.session() as session, session.begin():
            handle = self.shop.handle_of(number)
            assert self.functions.signal(session, handle, "returned", self.messages.Returned(reason="torn"))

    def withdrawal(self) -> Any:
        return self.messages.Withdrawal(reason="no")

    def new_address(self, address: str = "2 Low Road") -> Any:
        return self.messages.NewAddress(address=address)

    def behave(self, conduct: str) -> None:
        """Say how the payment service is to behave from now on."""
        with self.payments.ledger() as book:
            book.conduct = self.payments.Conduct(conduct)

    def work(self) -> Counter[Any]:
        """Carry out what is due, in this process."""

        async def run_due() -> Counter[Any]:
            try:
                return Counter(await self.modules["worker"].worker().run_due(timedelta(seconds=20)))
            finally:
                await self.modules["database"].async_engine.dispose()

        return asyncio.run(run_due())

    @contextmanager
    def worker(self) -> Iterator[Process]:
        """A worker, in a process of its own."""
        with Process("-m", "sqla_durable.cli", "worker", f"{NAME}.worker:worker", log=self.folder / "log") as process:
            yield process

    # looking

    @property
    def book(self) -> Any:
        """What the payment service knows."""
        with self.payments.ledger() as book:
            return book

    def described(self, number: int) -> Any:
        return self.functions.describe(self.shop.handle_of(number))

    def status(self, number: int) -> str:
        with self.session() as session:
            return str(session.get_one(self.models.Order, number).status)

    def stock(self, article: str = "book") -> int:
        with self.session() as session:
            return int(session.get_one(self.models.Stock, article).quantity)

    def wait_for(self, number: int, *statuses: str) -> None:
        """Wait until an order is in one of these statuses."""
        eventually(lambda: self.status(number) in statuses, f"an order that is {' or '.join(statuses)}")

    def is_listening(self) -> bool:
        """Whether a worker has begun."""
        listening = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN %'"
        with self.engine.connect() as connection:
            return bool(connection.scalar(text(listening)))

    def is_working(self) -> bool:
        """Whether a run is carried out."""
        with self.engine.connect() as connection:
            return bool(connection.scalar(text("SELECT count(*) FROM fulfilment_run WHERE status = 'running'")))

    def is_idle(self) -> bool:
        """Whether nothing is carried out, or due."""
        with self.engine.connect() as connection:
            return connection.scalar(text(f"{DUE})")) == 0

    def is_settled(self) -> bool:
        """Whether, besides, no order is waiting for another attempt."""
        again = "OR status = 'ready' AND waits_for IS NULL) AND function = 'fulfil-order'"
        with self.engine.connect() as connection:
            return self.is_idle() and connection.scalar(text(f"{DUE} {again}")) == 0


class Shell:
    """Somebody who types the commands of the page, one after the other.

    :param folder: stands for the folder in which the page keeps things.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name, module in {"python": "", "sqla-durable": "-m sqla_durable.cli"}.items():
            file = folder / "bin" / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
            file.chmod(0o755)

    def type(self, command: str, **environment: str) -> str:
        """Return what a command writes."""
        done = subprocess.run(
            command,
            shell=True,
            cwd=EXAMPLES,
            env={**environ(**environment), "PATH": f"{self._folder / 'bin'}{os.pathsep}{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            check=False,
        )
        return done.stdout
