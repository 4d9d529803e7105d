"""Resolves a reset whose outcome is unknown.

As a program: RESET lists what the hosting API has and no reset of ours; RESET OPERATION says that it is this one;
RESET never says that it has none. The reset is requeued afterwards.
"""

import asyncio
import sys

from sqlalchemy import select

from .database import engine, new_session, resets
from .handler import OPERATION
from .hosting import Hosting, Issued, Operation
from .models import Reset, ResetStep


async def unclaimed(reset_id: int, hosting: Hosting) -> list[Operation]:
    """Return the operations of the reset's project that no reset has the ids of."""
    async with new_session() as session:
        project = (await session.get_one(Reset, reset_id)).project
        known = set(await session.scalars(select(ResetStep.ids["operation"].astext)))
    return [operation for operation in await hosting.operations(project) if operation.id not in known]


async def it_is(reset_id: int, operation: str) -> bool:
    async with new_session.begin() as session:
        return await resets.attach_ids(session, reset_id, OPERATION, Issued(operation=operation), type_=Issued)


async def never_issued(reset_id: int) -> bool:
    async with new_session.begin() as session:
        return await resets.never_issued(session, reset_id, OPERATION)


async def main(ident: str, what: str | None = None) -> int:
    reset_id = int(ident)
    try:
        if what is None:
            async with Hosting() as hosting:
                for operation in await unclaimed(reset_id, hosting):
                    print(operation.id, operation.branch, operation.status, f"issued at {operation.issued_at}")
            return 0
        said = await (never_issued(reset_id) if what == "never" else it_is(reset_id, what))
        print("recorded; now requeue it" if said else "refused: its outcome is not unknown, or a worker is at it")
        return 0 if said else 1
    finally:
        await engine.dispose()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
