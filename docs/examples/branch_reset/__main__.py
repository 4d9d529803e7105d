"""The application's commands."""

import argparse
import asyncio
import sys

from sqla_durable import KeyConflict, RunInFlight

from .database import create_tables, engine, resets
from .hosting import Hosting
from .request import Unresolved, request_reset
from .resolve import attach, never_issued, unclaimed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m branch_reset", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    request = commands.add_parser("request", help="ask for a branch to be reset")
    request.add_argument("project")
    request.add_argument("branch")
    request.add_argument("key", help="the same for the same request, however often it is made")
    for name, help_ in {
        "operations": "list the service's operations on its project that none of our resets knows",
        "attach": "say that the service has a reset",
        "never-issued": "say that it certainly does not",
    }.items():
        command = commands.add_parser(name, help=help_)
        command.add_argument("reset", type=int)
        if name == "attach":
            command.add_argument("operation")
    return parser.parse_args()


async def request(project: str, branch: str, key: str) -> bool:
    try:
        reset = await request_reset(project, branch, key)
    except (RunInFlight, Unresolved, KeyConflict) as refused:
        print(refused)
        return False
    print(f"reset {reset.id} is {reset.status}")
    return True


async def operations(reset_id: int) -> bool:
    async with Hosting() as hosting:
        for operation in await unclaimed(hosting, reset_id):
            print(f"{operation.id}  {operation.branch}  {operation.status}  issued at {operation.issued_at}")
    return True


async def main(given: argparse.Namespace) -> bool:
    try:
        if given.command == "request":
            return await request(given.project, given.branch, given.key)
        if await resets.describe(given.reset) is None:
            print(f"there is no reset {given.reset}")
            return False
        match given.command:
            case "operations":
                return await operations(given.reset)
            case "attach":
                done = await attach(given.reset, given.operation)
            case _:
                done = await never_issued(given.reset)
        print("recorded; requeue it now" if done else "refused: its outcome is known, or a worker is at it")
        return done
    finally:
        await engine.dispose()


if __name__ == "__main__":
    create_tables()
    sys.exit(not asyncio.run(main(arguments())))
