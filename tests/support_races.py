"""Two parties on connections of their own, the first of which can be made to wait between its write and its commit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Cancelled, LostLease, Run, Runs, TransactionConflict
from tests.support import (
    Background,
    Plan,
    PlanStatus,
    PlanStep,
    blocked_backends,
    eventually,
    plan_statuses,
    wait_until_blocked,
    write_entry,
)

GATE = 7301
WON, LOST, CANCELLED = "won", "lost", "cancelled"


def install_gate(engine: Engine) -> None:
    """Let every update of a plan by the first party wait, with its row lock, while a gate is closed."""
    with engine.begin() as connection:
        connection.execute(
            text(
                f"CREATE FUNCTION wait_at_gate() RETURNS trigger LANGUAGE plpgsql AS"
                f" 'BEGIN PERFORM pg_advisory_xact_lock_shared({GATE}); RETURN NULL; END'"
            )
        )
        connection.execute(
            text(
                "CREATE TRIGGER gate AFTER UPDATE ON plan FOR EACH ROW"
                " WHEN (current_setting('application_name') = 'first') EXECUTE FUNCTION wait_at_gate()"
            )
        )


@contextmanager
def closed_gate(engine: Engine) -> Iterator[Callable[[], None]]:
    """Close the gate, and yield what opens it."""
    with engine.connect() as connection:
        connection.execute(text(f"SELECT pg_advisory_xact_lock({GATE})"))
        yield connection.rollback


class Party:
    """One of the two, with an engine and a helper of its own, and a handle on the lease that both share."""

    def __init__(self, engine: Engine, name: str, isolation: str) -> None:
        self.name = name
        self.engine = create_engine(engine.url, isolation_level=isolation, connect_args={"application_name": name})
        self.factory = sessionmaker(self.engine)
        self.plans: Runs[Plan] = Runs(self.factory, Plan, PlanStep, owner=name)
        self.handle: Run[Plan] | None = None
        self.isolation = isolation
        self.conflicts = 0

    @property
    def held(self) -> Run[Plan]:
        assert self.handle is not None
        return self.handle

    def act(self, verb: str, ident: UUID) -> str:
        """Do what ``verb`` says and return what the party was told."""
        try:
            won = getattr(self, f"_{verb}")(ident)
        except LostLease:
            return LOST
        except Cancelled:
            return CANCELLED
        return WON if won else LOST

    def _step(self, ident: UUID) -> bool:
        assert self.held.step("only", write_entry, self.name) in {"first", "second"}
        return True

    def _renew(self, ident: UUID) -> bool:
        self.held.renew()
        return True

    def _finish(self, ident: UUID) -> bool:
        self.held.finish(note=self.name)
        return True

    def _fail(self, ident: UUID) -> bool:
        self.held.fail(ValueError(self.name))
        return True

    def _release(self, ident: UUID) -> bool:
        self.held.release()
        return True

    def _heal(self, ident: UUID) -> bool:
        return self.plans.heal(ident)

    def _reap(self, ident: UUID) -> bool:
        return self.plans.reap(10) == 1

    def _requeue(self, ident: UUID) -> bool:
        return self.plans.requeue(ident)

    def _claim(self, ident: UUID) -> bool:
        return self.plans.claim(ident) is not None

    def _claim_due(self, ident: UUID) -> bool:
        return len(self.plans.claim_due(10)) == 1

    def _transition(self, ident: UUID) -> bool:
        return self._transact(
            lambda session: plan_statuses.transition(
                session, (Plan, ident), PlanStatus.FAILED, from_=PlanStatus.EXECUTING
            )
        )

    def _reject(self, ident: UUID) -> bool:
        return self._transact(
            lambda session: plan_statuses.transition(
                session, (Plan, ident), PlanStatus.CANCELLED, from_=PlanStatus.APPROVED
            )
        )

    def _cancel(self, ident: UUID) -> bool:
        return self._transact(lambda session: self.plans.request_cancel(session, ident))

    def _transact(self, work: Callable[[Session], bool]) -> bool:
        """Do ``work`` in a caller's transaction, which its caller retries where it conflicts."""
        while True:
            try:
                with self.factory.begin() as session:
                    return work(session)
            except TransactionConflict:
                self.conflicts += 1
                assert self.conflicts < 10


@dataclass(frozen=True)
class Told:
    """What the parties of a race were told, and whether the second had to wait for the first."""

    first: str
    second: str
    waited: bool


def race(engine: Engine, first: Callable[[], Any], second: Callable[[], Any]) -> Told:
    """Let ``first`` make its write and wait before its commit, start ``second``, then let both go on."""
    with closed_gate(engine) as open_gate:
        ahead = Background(first)
        wait_until_blocked(engine)
        behind = Background(second)
        eventually(lambda: not behind.is_alive() or blocked_backends(engine) >= 2, "the second to answer or to wait")
        waited = behind.is_alive()
        open_gate()
        return Told(ahead.result(), behind.result(), waited)
