"""Errors as problem details (RFC 9457)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ValidationError
from sqlalchemy.exc import OperationalError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from sqla_durable import KeyConflict, RetryableError, RunNotFound

from .models import PlanStatus


class Invalid(BaseModel):
    field: str
    message: str


class Problem(BaseModel):
    title: str
    status: int
    detail: str
    plan_status: PlanStatus | None = None
    invalid: list[Invalid] | None = None


class Refusal(Exception):
    """An answer that is not what was asked for."""

    def __init__(self, status: HTTPStatus, detail: str, **members: Any) -> None:
        super().__init__(detail)
        self.status = status
        self.members = members


def invalid(error: ValidationError) -> Refusal:
    """The body of a request is not what it should be."""
    faults = error.errors(include_url=False)
    if faults[0]["type"] == "json_invalid":
        return Refusal(HTTPStatus.BAD_REQUEST, faults[0]["msg"])
    fields = [Invalid(field=".".join(map(str, fault["loc"])), message=fault["msg"]) for fault in faults]
    return Refusal(HTTPStatus.UNPROCESSABLE_ENTITY, "The body is not as it must be.", invalid=fields)


def answer(_: Request, error: Exception) -> Response:
    """Answer with the problem that an exception stands for."""
    match error:
        case Refusal():
            return _problem(error.status, str(error), **error.members)
        case HTTPException():
            return _problem(HTTPStatus(error.status_code), error.detail, error.headers)
        case RunNotFound():
            return _problem(HTTPStatus.NOT_FOUND, "There is no such plan.")
        case KeyConflict():
            return _problem(HTTPStatus.UNPROCESSABLE_ENTITY, "This Idempotency-Key was used for another proposal.")
        case RetryableError() | OperationalError():
            return _problem(HTTPStatus.SERVICE_UNAVAILABLE, "Nothing was decided; try again.", {"Retry-After": "1"})
        case _:
            return _problem(HTTPStatus.INTERNAL_SERVER_ERROR, "It is in the log.")


HANDLERS: dict[Any, Callable[[Request, Exception], Response]] = dict.fromkeys(
    [Refusal, HTTPException, RunNotFound, KeyConflict, RetryableError, OperationalError, Exception], answer
)


def _problem(status: HTTPStatus, detail: str, headers: Mapping[str, str] | None = None, **members: Any) -> Response:
    problem = Problem(title=status.phrase, status=status, detail=detail, **members)
    text = problem.model_dump_json(indent=2, exclude_none=True) + "\n"
    return Response(text, status, headers, "application/problem+json")
