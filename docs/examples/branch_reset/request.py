"""Asks for a branch to be reset, as a request handler of the application would. As a program: PROJECT BRANCH KEY."""

import asyncio
import sys

from sqla_durable import KeyConflict, RunInFlight

from .database import engine, new_session, resets
from .models import Branch, Reset


async def request_reset(project: str, name: str, key: str) -> Reset:
    """Start a reset, or return the one that the same key has started.

    :raises RunInFlight: where another reset of the project is under way.
    :raises KeyConflict: where the key was used for another branch.
    """
    async with new_session.begin() as session:
        if await session.get(Branch, (project, name)) is None:
            session.add(Branch(project=project, name=name))
        return await resets.start(session, key=key, project=project, branch=name)


async def main(project: str, name: str, key: str) -> int:
    try:
        reset = await request_reset(project, name, key)
        print(f"reset {reset.id} is {reset.status}")
        return 0
    except (RunInFlight, KeyConflict) as error:
        print(error)
        return 1
    finally:
        await engine.dispose()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(*sys.argv[1:])))
