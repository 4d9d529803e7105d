"""Resolving a reset whose outcome is unknown: looking at the service, and saying what is there."""

from sqlalchemy import select

from .database import new_session, resets
from .handler import OPERATION
from .hosting import Hosting, Issued, Operation
from .models import Reset, ResetStep


async def unclaimed(hosting: Hosting, reset_id: int) -> list[Operation]:
    """Return the operations of the reset's project that no reset of ours has the ids of."""
    async with new_session() as session:
        project = (await session.get_one(Reset, reset_id)).project
        known = set(await session.scalars(select(ResetStep.ids["operation"].astext)))
    return [operation for operation in await hosting.operations(project) if operation.id not in known]


async def attach(reset_id: int, operation: str) -> bool:
    """Say that the service has the reset, and as which operation."""
    async with new_session.begin() as session:
        return await resets.attach_ids(session, reset_id, OPERATION, Issued(operation=operation), type_=Issued)


async def never_issued(reset_id: int) -> bool:
    """Say that the service certainly does not have the reset."""
    async with new_session.begin() as session:
        return await resets.never_issued(session, reset_id, OPERATION)
