"""Looks at a plan from outside: at its row, its receipts, and the transactions of the process that carries it out."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from sqlalchemy import Engine, select, text

from sqla_durable.demo.models import Plan, PlanStatus, PlanStep, plan_statuses


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
            # The plan first: a step that is not seen yet shows in the next look, a status too early would be an end.
            status, fence, attempts, error = connection.execute(self._plan).one()
            steps = tuple(
                Committed(int(step), outcome, effect, at, result, _message(failure))
                for step, outcome, effect, at, result, failure in connection.execute(self._steps)
            )
        return Sight(status, fence, attempts, steps, _message(error))

    def transaction_of(self, name: str) -> str | None:
        """Return the statement last sent in the open transaction of a process; None where none is open."""
        activity = text(
            "SELECT query FROM pg_stat_activity WHERE datname = current_database() AND application_name = :name"
            " AND xact_start IS NOT NULL"
        )
        with self._engine.connect() as connection:
            return connection.execute(activity, {"name": name}).scalars().first()


def _message(error: dict[str, str] | None) -> str | None:
    return None if error is None else f"{error['type']}: {error['message']}"
