"""A service outside the database: it remembers what it was asked to do in a file, whoever dies in between."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import PENDING, Pending, Run
from sqla_durable.testing import make_due
from tests.support import Plan

KEY = "batch"
EVERY = timedelta(hours=1)


@dataclass(frozen=True)
class Batch:
    """What the service knows an operation by."""

    number: int
    queue: tuple[str, ...] = ("main",)


class Service:
    """Takes batches in, and has each result once it was told to."""

    def __init__(self, folder: Path) -> None:
        self._issued = folder / "issued"
        self._result = folder / "result"
        self.polls = 0

    def _append(self, line: str) -> None:
        descriptor = os.open(self._issued, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{line}\n".encode())
        os.close(descriptor)

    @property
    def issues(self) -> int:
        """How often an operation was issued."""
        return len(self._issued.read_text().splitlines()) if self._issued.exists() else 0

    def finish(self, result: object) -> None:
        """Let the operation end."""
        written = self._result.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        written.write_text(json.dumps(result))
        written.rename(self._result)

    def reset(self) -> None:
        """Forget everything."""
        self._issued.unlink(missing_ok=True)
        self._result.unlink(missing_ok=True)

    def start(self) -> Batch:
        """Issue an operation."""
        self._append("issued")
        return Batch(self.issues)

    def poll(self, batch: Batch) -> dict[str, int] | Pending:
        """Ask for its result."""
        self.polls += 1
        assert batch == Batch(batch.number), "the ids came back as they were"
        if not self._result.exists():
            return PENDING
        result: dict[str, int] = json.loads(self._result.read_text())
        return result

    def carry_out(self, run: Run[Plan]) -> dict[str, int]:
        """A handler with one operation that is polled every hour."""
        return run.operation(KEY, start=self.start, poll=self.poll, every=EVERY)


def due(factory: sessionmaker[Session], ident: UUID) -> None:
    """The time of the next poll has come."""
    with factory.begin() as session:
        make_due(session, Plan, ident)


def state(engine: Engine, ident: UUID) -> tuple[Any, ...] | None:
    """The outcome, the ids and the fence of the operation's receipt as they are committed."""
    query = text("SELECT outcome, ids, fence FROM plan_step WHERE plan_id = :ident AND step = :step")
    with engine.connect() as connection:
        row = connection.execute(query, {"ident": ident, "step": KEY}).one_or_none()
    return None if row is None else tuple(row)
