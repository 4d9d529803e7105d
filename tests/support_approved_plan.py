"""The application of approved plans as real processes, asked over real HTTP."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any, Self
from uuid import uuid4

import httpx
from sqlalchemy import Engine, select, text
from sqlalchemy.orm import Session

import sqla_durable
from docs.examples.approved_plan.__main__ import add_samples
from docs.examples.approved_plan.models import Account, Base, Note, Plan, Stock
from tests.support import DEADLINE, eventually

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
MOVE = {"kind": "move_stock", "article": "tea", "source": "Hamburg", "target": "Berlin", "quantity": 24}
PAY = {"kind": "transfer", "payer": "shop", "payee": "Elbe Haulage", "amount": "84.50"}
NOTE = {"kind": "write_note", "text": "On its way."}
TOO_MUCH = {**PAY, "amount": "5000"}


class Process:
    """A running module of the application, killed at the latest when the ``with`` block ends."""

    def __init__(self, module: str, database_url: str) -> None:
        self.said: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", module],
            cwd=EXAMPLES,
            env={
                **os.environ,
                "DATABASE_URL": database_url,
                "PORT": "0",
                "PYTHONPATH": str(Path(sqla_durable.__file__).parents[1]),
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._reader.join(DEADLINE)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait(DEADLINE)

    def stop(self) -> int:
        """Tell it to stop, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait until it has said something."""

        def found() -> re.Match[str] | None:
            assert self.process.poll() is None, "".join(self.said)
            return re.search(pattern, "".join(self.said))

        return eventually(found, pattern)

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.said.extend(iter(self.process.stdout.readline, ""))


class Server(Process):
    """A server on a port of its own."""

    def __init__(self, database_url: str) -> None:
        super().__init__("approved_plan", database_url)
        self.client = httpx.Client(timeout=DEADLINE)

    def __enter__(self) -> Self:
        self.client.base_url = httpx.URL(self.wait_for(r"running on (http://\S+)")[1])
        return self

    def __exit__(self, *details: object) -> None:
        self.client.close()
        super().__exit__(*details)

    @property
    def address(self) -> str:
        return f"{self.client.base_url.host}:{self.client.base_url.port}"

    def propose(self, *actions: dict[str, Any], key: str | None = None) -> httpx.Response:
        body = {"author": "assistant", "actions": actions}
        return self.client.post("/plans", json=body, headers={"Idempotency-Key": key or uuid4().hex})

    def pending(self, *actions: dict[str, Any]) -> str:
        """Propose a plan, and return its path."""
        answer = self.propose(*actions)
        assert answer.status_code == 201, answer.text
        return answer.headers["Location"]

    def approved(self, *actions: dict[str, Any]) -> str:
        """Propose a plan and have it approved; return its path."""
        plan = self.pending(*actions)
        answer = self.post(plan, "approve", by="ada", revision=1)
        assert answer.status_code == 200, answer.text
        return plan

    def post(self, plan: str, verb: str, **body: Any) -> httpx.Response:
        return self.client.post(f"{plan}/{verb}", json=body) if body else self.client.post(f"{plan}/{verb}")

    def get(self, plan: str) -> dict[str, Any]:
        answer = self.client.get(plan)
        assert answer.status_code == 200, answer.text
        shown: dict[str, Any] = answer.json()
        return shown


def reset(engine: Engine) -> None:
    """Leave nothing but the samples."""
    with Session(engine) as session, session.begin():
        tables = ", ".join(f'"{mapper.local_table.name}"' for mapper in Base.registry.mappers)
        session.execute(text(f"TRUNCATE {tables} RESTART IDENTITY"))
        add_samples(session)


def effects(engine: Engine) -> tuple[dict[str, int], dict[str, Decimal], list[str]]:
    """What is committed: the tea at each site, the balance of each account, and the notes."""
    with Session(engine) as session:
        return (
            {stock.site: stock.quantity for stock in session.scalars(select(Stock))},
            {account.name: account.balance for account in session.scalars(select(Account))},
            list(session.scalars(select(Note.text))),
        )


@contextmanager
def payee_locked(engine: Engine) -> Iterator[None]:
    """Hold up a transfer after its payer has paid, and before its payee has anything."""
    with Session(engine) as session, session.begin():
        session.get_one(Account, "Elbe Haulage", with_for_update=True)
        yield


@contextmanager
def plan_locked(engine: Engine, plan: str) -> Iterator[Session]:
    """Hold the lock on a plan's row."""
    with Session(engine) as session, session.begin():
        session.execute(select(Plan.id).where(Plan.id == ident(plan)).with_for_update())
        yield session


def ident(plan: str) -> str:
    return plan.removeprefix("/plans/")
