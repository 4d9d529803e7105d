"""The client of the hosting API. It says of each request what is known: done, certainly not done, or neither."""

import os
from datetime import datetime, timedelta
from typing import Self

import httpx
from pydantic import BaseModel, TypeAdapter

from sqla_durable import NotIssued, OperationFailed, Pending

NOT_SENT = httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout  # there was no connection to send it on
REFUSED = 404, 409  # answers by which the API says that it has not taken the request


class Issued(BaseModel, frozen=True):
    """What the API knows a reset by."""

    operation: str


class Ended(BaseModel, frozen=True):
    """How a reset has ended, and when, on the clock of the API."""

    operation: str
    ended_at: datetime


class Operation(BaseModel):
    """A reset as the API shows it."""

    id: str
    branch: str
    status: str
    issued_at: datetime
    ended_at: datetime | None
    problem: str | None


class Hosting:
    """The hosting API.

    :param url: where it is.
    :param timeout: for how many seconds to wait for a connection, and for each part of an answer.
    """

    def __init__(self, url: str | None = None, timeout: float = 2.0) -> None:
        # A connection that is used again may turn out to be closed when the request is on its way already.
        limits = httpx.Limits(max_keepalive_connections=0)
        if not (url := url or os.environ.get("HOSTING_URL")):
            raise SystemExit("set HOSTING_URL to where the hosting API is, as in http://127.0.0.1:8070")
        self._client = httpx.AsyncClient(base_url=url, timeout=timeout, limits=limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def issue(self, project: str, branch: str) -> Issued:
        """Have a branch reset; any other error than ``NotIssued`` may come before the API has done so, or after."""
        try:
            answer = await self._client.post(f"/projects/{project}/branches/{branch}/reset")
        except NOT_SENT as error:
            raise NotIssued(f"the hosting API could not be reached: {error!r}") from error
        if answer.status_code in REFUSED:
            raise NotIssued(f"the hosting API says {answer.status_code}: {answer.text}")
        return Issued.model_validate_json(answer.raise_for_status().content)

    async def ask(self, project: str, issued: Issued) -> Ended | Pending:
        """Ask how a reset is going; an error says nothing about it."""
        answer = await self._client.get(f"/projects/{project}/operations/{issued.operation}")
        operation = Operation.model_validate_json(answer.raise_for_status().content)
        if operation.ended_at is None:
            return Pending(after=timedelta(seconds=float(answer.headers["Retry-After"])))
        if operation.status == "failed":
            raise OperationFailed(operation.problem)
        return Ended(operation=operation.id, ended_at=operation.ended_at)

    async def operations(self, project: str) -> list[Operation]:
        """List what the API has done to a project, for somebody who has to find out."""
        answer = await self._client.get(f"/projects/{project}/operations")
        return TypeAdapter(list[Operation]).validate_json(answer.raise_for_status().content)
