"""Looks at a plan from outside: at its row, its receipts, and the transactions of the process that carries it out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Engine, select, text

from sqla_durable.demo.models import Plan, PlanStatus, PlanStep, plan_statuses

_BETWEEN_LOOKS = 0.001


@dataclass(frozen=True)
class Committed:
    """A step whose receipt is committed."""

    position: int
    outcome: str
    effect: str
    fence: int
    result: object
    error: str | None


@dataclass(frozen=True)
class Sight:
    """A plan at one instant.

    :param status: its status.
    :param fence: the fence of its last claim; 0 before the first.
    :param attempts: how often it was claimed.
    :param steps: its receipts, in the order they were recorded.
    :param error: why it failed.
    """

    status: PlanStatus
    fence: int
    attempts: int
    steps: tuple[Committed, ...]
    error: str | None

    @property
    def landed(self) -> bool:
        """Whether the plan is in a terminal status."""
        return self.status in plan_statuses.terminal


class Watch:
    """Reads the plan with plain statements: ``Runs.get()`` would heal it, which is for the next process to do.

    :param engine: the demo's database.
    :param plan: the plan's primary key.
    """

    def __init__(self, engine: Engine, plan: UUID) -> None:
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")
        plans, steps = Plan.__table__.c, PlanStep.__table__.c
        self._plan = select(plans.status, plans.fence, plans.attempts, plans.error).where(plans.id == plan)
        self._steps = (
            select(steps.step, steps.outcome, steps.effect, steps.fence, steps.result, steps.error)
            .where(steps.plan_id == plan, steps.outcome.is_not(None))
            .order_by(steps.recorded_at)
        )

    def look(self) -> Sight:
        """Look at the plan."""
        with self._engine.connect() as connection:
            # The plan first: nothing is recorded after the landing, so a landed plan is seen with all its steps.
            status, fence, attempts, error = connection.execute(self._plan).one()
            steps = tuple(
                Committed(int(step), outcome, effect, at, result, _message(failure))
                for step, outcome, effect, at, result, failure in connection.execute(self._steps)
            )
        return Sight(status, fence, attempts, steps, _message(error))

    def connected(self, name: str) -> bool:
        """Whether a process has a connection.

        :param name: the name that its connections carry.
        """
        return bool(self._backends(name))

    def transaction_of(self, name: str) -> str | None:
        """Return the last statement of a frozen process's open transaction; None where none is open.

        :param name: the name that its connections carry.
        """
        while any(state == "active" for state, _ in self._backends(name)):
            # A statement, or a COMMIT, that was sent is carried out whatever becomes of the client.
            time.sleep(_BETWEEN_LOOKS)
        return next((query for state, query in self._backends(name) if state.startswith("idle in transaction")), None)

    def _backends(self, name: str) -> list[tuple[str, str]]:
        activity = text(
            "SELECT state, query FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = :name AND state IS NOT NULL"
        )
        with self._engine.connect() as connection:
            return [(state, query) for state, query in connection.execute(activity, {"name": name})]


def _message(error: dict[str, str] | None) -> str | None:
    return None if error is None else f"{error['type']}: {error['message']}"
