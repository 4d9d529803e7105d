"""A toy of a payment service: what it knows is in the file ``PAYMENTS``, and it has bad days."""

import fcntl
import os
import tempfile
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel


class Conduct(StrEnum):
    UP = "up"
    DOWN = "down"
    """Nothing is taken."""
    SLOW = "slow"
    """What is taken is answered five seconds later."""


class PaymentsDown(ConnectionError):
    """The service has taken nothing."""


class Ledger(BaseModel):
    """All that the service knows: one charge, or refund, for all requests with one key."""

    conduct: Conduct = Conduct.UP
    charges: dict[str, int] = {}
    refunds: dict[str, str] = {}
    requests: Counter[str] = Counter()


def charge(idempotency_key: str, cents: int) -> str:
    """Charge the customer; the same one for all requests with one key."""
    with ledger() as book:
        refuse_down(book)
        book.charges.setdefault(idempotency_key, cents)
        book.requests[idempotency_key] += 1
    answer_in_time(book)
    return idempotency_key


def refund(idempotency_key: str, charged: str) -> None:
    """Give back what was charged."""
    with ledger() as book:
        refuse_down(book)
        book.refunds.setdefault(idempotency_key, charged)
        book.requests[idempotency_key] += 1
    answer_in_time(book)


def refuse_down(book: Ledger) -> None:
    if book.conduct is Conduct.DOWN:
        raise PaymentsDown("the payment service is down")


def answer_in_time(book: Ledger) -> None:
    if book.conduct is Conduct.SLOW:
        time.sleep(5)


@contextmanager
def ledger() -> Generator[Ledger, None, None]:
    """What the service knows, written when the block ends; one process at a time."""
    file = Path(os.environ.get("PAYMENTS") or Path(tempfile.gettempdir(), "fulfilment-payments.json"))
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        book = Ledger.model_validate_json(file.read_bytes()) if file.exists() else Ledger()
        yield book
        written = file.with_suffix(".new")
        written.write_text(book.model_dump_json(indent=1))
        written.replace(file)
