"""A toy of a hosting API, with all the faults of a real one; what it knows is in the file ``HOSTING_STATE``.

::

    POST /projects/{project}/branches/{branch}/reset    202 and {"operation": ...}, or 409
    GET  /projects/{project}/operations                 all resets of a project
    GET  /projects/{project}/operations/{operation}     one of them
    PUT  /conduct/{project}                             how it is to behave: see Conduct
    GET  /counts/{project}                              how often it was asked to do what
"""

import asyncio
import os
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send


class Conduct(BaseModel):
    """How the service behaves towards one project."""

    takes: float = 3.0
    """How many seconds a reset takes."""
    fails: bool = False
    """Whether a reset ends as failed."""
    loses_answers: bool = False
    """Whether a reset is taken, and the connection closed without an answer."""
    dawdles: float = 0.0
    """How many seconds an answer is late."""
    is_away: bool = False
    """Whether everything is answered with 503."""


class Operation(BaseModel):
    """A reset."""

    id: str
    project: str
    branch: str
    status: str = "running"
    issued_at: datetime
    ended_at: datetime | None = None
    problem: str | None = None

    def is_due(self, conduct: Conduct) -> bool:
        return self.ended_at is None and (datetime.now(UTC) - self.issued_at).total_seconds() >= conduct.takes

    def end(self, conduct: Conduct) -> None:
        self.ended_at = datetime.now(UTC)
        self.status, self.problem = ("failed", "the disk is full") if conduct.fails else ("finished", None)


class State(BaseModel):
    """All that the service knows."""

    operations: list[Operation] = []
    conduct: dict[str, Conduct] = {}
    issued: Counter[str] = Counter()
    asked: Counter[str] = Counter()

    @classmethod
    def load(cls) -> "State":
        """Read it as it is now; there is one process, which does not await between this and :meth:`save`."""
        file = Path(os.environ["HOSTING_STATE"])
        state = cls.model_validate_json(file.read_bytes()) if file.exists() else cls()
        for operation in state.operations:
            if operation.is_due(conduct := state.of(operation.project)):
                operation.end(conduct)
                state.save()
        return state

    def save(self) -> None:
        file = Path(os.environ["HOSTING_STATE"])
        written = file.with_suffix(".new")
        written.write_text(self.model_dump_json(indent=1))
        written.replace(file)

    def of(self, project: str) -> Conduct:
        return self.conduct.get(project, Conduct())


async def lost_answer(_: Scope, __: Receive, send: Send) -> None:
    """The head of an answer, and then the end of the connection."""
    await send({"type": "http.response.start", "status": 202, "headers": [(b"content-length", b"100")]})


AWAY = JSONResponse({"problem": "away for a while"}, 503)


async def reset(request: Request) -> ASGIApp:
    project, branch = request.path_params["project"], request.path_params["branch"]
    state = State.load()
    conduct = state.of(project)
    if conduct.is_away:
        return AWAY
    if any(each.project == project and each.ended_at is None for each in state.operations):
        return JSONResponse({"problem": "another reset of this project is under way"}, 409)
    ident = f"op-{len(state.operations) + 1}"
    state.operations.append(Operation(id=ident, project=project, branch=branch, issued_at=datetime.now(UTC)))
    state.issued[project] += 1
    state.save()
    await asyncio.sleep(conduct.dawdles)
    return lost_answer if conduct.loses_answers else JSONResponse({"operation": ident}, 202)


async def show(request: Request) -> Response:
    project = request.path_params["project"]
    state = State.load()
    conduct = state.of(project)
    if conduct.is_away:
        return AWAY
    found = [each for each in state.operations if each.project == project and each.id == request.path_params["id"]]
    if not found:
        return JSONResponse({"problem": "no such operation"}, 404)
    state.asked[project] += 1
    state.save()
    await asyncio.sleep(conduct.dawdles)
    return JSONResponse(found[0].model_dump(mode="json"), headers={"Retry-After": "1"})


async def show_all(request: Request) -> Response:
    state = State.load()
    if state.of(request.path_params["project"]).is_away:
        return AWAY
    shown = [each for each in state.operations if each.project == request.path_params["project"]]
    return JSONResponse([each.model_dump(mode="json") for each in shown])


async def behave(request: Request) -> Response:
    conduct = Conduct.model_validate_json(await request.body())
    state = State.load()
    state.conduct[request.path_params["project"]] = conduct
    state.save()
    return JSONResponse(conduct.model_dump())


async def count(request: Request) -> Response:
    state, project = State.load(), request.path_params["project"]
    return JSONResponse({"issued": state.issued[project], "asked": state.asked[project]})


app = Starlette(
    routes=[
        Route("/projects/{project}/branches/{branch}/reset", reset, methods=["POST"]),
        Route("/projects/{project}/operations", show_all),
        Route("/projects/{project}/operations/{id}", show),
        Route("/conduct/{project}", behave, methods=["PUT"]),
        Route("/counts/{project}", count),
    ]
)
