"""What is done for a reset: the operation, and then a step that writes its outcome into the application's table."""

from collections.abc import Awaitable, Callable
from datetime import timedelta

from sqlalchemy.ext.asyncio import AsyncSession

from sqla_durable import OperationFailed, Pending, StepFailed
from sqla_durable.asyncio import AsyncRun

from .hosting import Ended, Hosting, Issued
from .models import Branch, Reset

OPERATION = "reset"
EVERY = timedelta(seconds=1)  # while the API cannot be asked; else it says itself when to come back


async def note_success(session: AsyncSession, project: str, name: str, ended: Ended) -> int:
    branch = await session.get_one(Branch, (project, name), with_for_update=True)
    branch.resets += 1
    branch.reset_at = ended.ended_at
    branch.problem = None
    return branch.resets


async def note_failure(session: AsyncSession, project: str, name: str, problem: str) -> None:
    branch = await session.get_one(Branch, (project, name), with_for_update=True)
    branch.problem = problem


def resetting(hosting: Hosting) -> Callable[[AsyncRun[Reset]], Awaitable[None]]:
    """Return the handler."""

    async def reset(run: AsyncRun[Reset]) -> None:
        project, branch = run.row.project, run.row.branch

        async def issue() -> Issued:
            return await hosting.issue(project, branch)

        async def ask(issued: Issued) -> Ended | Pending:
            return await hosting.ask(project, issued)

        try:
            ended = await run.operation(OPERATION, start=issue, poll=ask, every=EVERY)
        except (OperationFailed, StepFailed) as failed:  # the latter where it was known to have failed before
            await run.step("note failure", note_failure, project, branch, str(failed))
            raise
        await run.step("note success", note_success, project, branch, ended)

    return reset
