"""Asking for a branch to be reset, as a request handler of the application does."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from sqla_durable import StepOutcome

from .database import new_session, resets
from .models import Branch, Reset, ResetStatus, ResetStep


class Unresolved(Exception):
    """An earlier reset of the project may be under way at the hosting API, for all that is known."""


async def request_reset(project: str, name: str, key: str) -> Reset:
    """Start a reset, or return the one that the same key has started.

    :raises RunInFlight: where another reset of the project is under way.
    :raises Unresolved: where somebody has to find out first what became of another one.
    :raises KeyConflict: where the key was used for another branch.
    """
    async with new_session.begin() as session:
        if await session.get(Branch, (project, name)) is None:
            session.add(Branch(project=project, name=name))
        reset = await resets.start(session, key=key, project=project, branch=name)
        if reset.status is ResetStatus.QUEUED and reset.fence == 0:  # else it was there before
            await refuse_unresolved(session, reset)
        return reset


async def refuse_unresolved(session: AsyncSession, reset: Reset) -> None:
    """Refuse a reset beside one whose outcome is unknown: that one has failed, and so is not in flight any more."""
    steps = ResetStep.__table__.c
    issued = (
        select(Reset.id)
        .join(ResetStep, steps.reset_id == Reset.id)
        .where(Reset.project == reset.project, Reset.id != reset.id, ResetStep.outcome == StepOutcome.ISSUED)
    )
    if (unresolved := await session.scalar(issued.limit(1))) is not None:
        raise Unresolved(f"the outcome of reset {unresolved} is unknown; resolve it first")
