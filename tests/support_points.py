"""A plan of seven steps, and every point of carrying it out: before and after each BEGIN, statement and COMMIT."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine, event, func, insert, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Outcome, Run, Runs
from sqla_durable.asyncio import AsyncRun
from tests.support import Entry, Plan, PlanStatus, PlanStep

COMMITTED = "after commit", "after autocommit statement"
"""The points at which the database has committed something for good."""

DATABASE_STEPS = {
    "reserve": ["reserved"],
    "book": ["booked"],
    "invoice": ["invoiced 12.50"],
    "mark": [],
    "notify": ["notified", "archived"],
}
STEPS = ["reserve", "charge", "pay", "book", "invoice", "mark", "notify"]
EFFECTS = [label for labels in DATABASE_STEPS.values() for label in labels]


class Points:
    """What an engine does, as a list of points that is the same in each undisturbed run."""

    def __init__(self, visit: Callable[[int, str], None] = lambda number, label: None) -> None:
        self.labels: list[str] = []
        self.backend = 0
        """The process on the server that the point at hand speaks with."""
        self._visit = visit

    def reach(self, label: str, connection: Any = None) -> None:
        """Note a point, of a DBAPI connection or of something else, and do there what is to be done there."""
        self.labels.append(label)
        if connection is not None:
            self.backend = getattr(connection, "driver_connection", connection).info.backend_pid
        self._visit(len(self.labels) - 1, label)

    @contextmanager
    def of(self, engine: Engine) -> Iterator[None]:
        """Visit every point of ``engine``'s connections inside the block."""
        dialect: Any = engine.dialect

        def around(name: str, send: Callable[[Any], None]) -> Callable[[Any], None]:
            def visited(connection: Any) -> None:
                self.reach(f"before {name}", connection)
                send(connection)
                self.reach(f"after {name}", connection)

            return visited

        def before(connection: Connection, *_: object) -> None:
            self.reach(*_statement("before", connection))

        def after(connection: Connection, *_: object) -> None:
            self.reach(*_statement("after", connection))

        event.listen(engine, "before_cursor_execute", before)
        event.listen(engine, "after_cursor_execute", after)
        # The dialect, and not the engine's events, which come before the COMMIT only.
        dialect.do_begin = around("begin", dialect.do_begin)
        dialect.do_commit = around("commit", dialect.do_commit)
        try:
            yield
        finally:
            del dialect.do_begin, dialect.do_commit
            event.remove(engine, "before_cursor_execute", before)
            event.remove(engine, "after_cursor_execute", after)


def _statement(when: str, connection: Connection) -> tuple[str, Any]:
    driver: Any = connection.connection.dbapi_connection
    return f"{when} {'autocommit statement' if driver.autocommit else 'statement'}", driver


def commits(labels: list[str]) -> int:
    """How many commits stand at the last of these points."""
    return sum(label in COMMITTED for label in labels)


# the plan


def reserve(session: Session) -> str:
    """One insert through the unit of work, flushed by the step."""
    session.add(Entry(label="reserved"))
    return "reserved"


def charge(ledger: Path) -> str:
    """An effect outside the database: one line in a file."""
    _append(ledger, "charged")
    return "charged"


def pay(key: str, ledger: Path) -> str:
    """Another one, whose repetitions the file could tell by their key."""
    _append(ledger, f"paid {key}")
    return "paid"


def _append(ledger: Path, line: str) -> None:
    descriptor = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def book(session: Session) -> Decimal:
    """A Core statement, and a result that JSON has no type for."""
    session.execute(insert(Entry).values(label="booked"))
    return Decimal("12.50")


def invoice(session: Session, amount: Decimal) -> str:
    """A savepoint that is rolled back, and one that stays."""
    with session.begin_nested() as savepoint:
        session.add(Entry(label="a mistake"))
        session.flush()
        savepoint.rollback()
    with session.begin_nested():
        session.add(Entry(label=f"invoiced {amount}"))
    return f"invoiced {amount}"


def mark(session: Session, ident: object) -> str:
    """A change to the run's own row that shows how often it was made."""
    plan = session.get_one(Plan, ident)
    plan.note = f"{plan.note or ''}x"
    return plan.note


def notify(session: Session) -> int:
    """Two inserts at once, and a query that has to see them."""
    session.add_all([Entry(label="notified"), Entry(label="archived")])
    session.flush()
    return session.scalar(select(func.count()).select_from(Entry)) or 0


def carry_out(run: Run[Plan], ledger: Path) -> None:
    """The handler."""
    run.step("reserve", reserve)
    run.external("charge", charge, ledger)
    run.keyed("pay", pay, ledger)
    amount = run.step("book", book)
    run.step("invoice", invoice, amount)
    run.step("mark", mark, run.row.id)
    run.step("notify", notify)


async def carry_out_async(run: AsyncRun[Plan], ledger: Path) -> None:
    """The same handler as a coroutine; its receipts are the same, too."""

    async def reserve_(session: AsyncSession) -> str:
        return await session.run_sync(reserve)

    async def charge_() -> str:
        return charge(ledger)

    async def pay_(key: str) -> str:
        return pay(key, ledger)

    async def book_(session: AsyncSession) -> Decimal:
        return await session.run_sync(book)

    async def invoice_(session: AsyncSession, amount: Decimal) -> str:
        return await session.run_sync(invoice, amount)

    async def mark_(session: AsyncSession) -> str:
        return await session.run_sync(mark, run.row.id)

    async def notify_(session: AsyncSession) -> int:
        return await session.run_sync(notify)

    await run.step("reserve", reserve_)
    await run.external("charge", charge_)
    await run.keyed("pay", pay_)
    amount = await run.step("book", book_)
    await run.step("invoice", invoice_, amount)
    await run.step("mark", mark_)
    await run.step("notify", notify_)


def told(outcome: Outcome) -> dict[str, Any]:
    """An outcome as far as it is the same for every undisturbed run, whoever carried it out."""
    return {
        "ending": outcome.ending.value,
        "status": outcome.status.value,
        "receipts": [[r.step, r.outcome.value, r.result, r.effect.value] for r in outcome.receipts],
        "failure": None if outcome.failure is None else outcome.failure.message,
    }


def check_given_back(factory: sessionmaker[Session], ident: UUID) -> None:
    """The run is ready for the next claim, at once, and nothing is held against it."""
    with factory() as session:
        plan = session.get_one(Plan, ident)
    assert plan.status is PlanStatus.APPROVED
    assert (plan.lease_owner, plan.lease_expires_at) == (None, None)
    assert (plan.error, plan.failures, plan.finished_at) == (None, [], None)
    run = Runs(factory, Plan, PlanStep).claim(ident)
    assert run is not None
    assert run.lease.fence == plan.fence + 1
    assert all(receipt.failure is None for receipt in run.receipts)
