"""A run as the commands write it: a JSON object with names that stay, or words for people."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, cast

from sqla_durable.cli.durations import rounded
from sqla_durable.cli.idents import Idents
from sqla_durable.cli.output import jsonable
from sqla_durable.failure import Failure
from sqla_durable.functions import FunctionSummary
from sqla_durable.listing import RunSummary
from sqla_durable.run import RunRows

_TIMES = "created_at", "started_at", "finished_at", "available_at", "lease_expires_at", "cancel_requested_at"


def record_of(summary: RunSummary, idents: Idents, rows: RunRows[Any], *, traceback: bool = False) -> dict[str, Any]:
    """Return a run as a JSON object."""
    return {
        "ident": idents.write(summary.identity),
        "key": idents.as_json(summary.identity),
        "status": summary.status.value,
        "attempts": summary.attempts,
        "fence": summary.fence,
        "lease_owner": summary.lease_owner,
        "lapsed": summary.lapsed,
        **{name: jsonable(getattr(summary, name)) for name in _TIMES},
        "age_seconds": _seconds(summary.age),
        "error": error_of(summary.failure, traceback=traceback),
        "cursor": summary.cursor,
        **({} if rows.idempotency_key is None else {"idempotency_key": summary.key}),
        **({} if rows.waits_for is None else {"waits_for": summary.waits_for}),
        **(_function_of(summary) if isinstance(summary, FunctionSummary) else {}),
    }


def _function_of(summary: FunctionSummary) -> dict[str, Any]:
    return {
        "function": summary.function,
        "tenant": summary.tenant,
        "priority": summary.priority,
        "waiting": summary.waiting,
        "steps": summary.steps,
        "last_step": summary.last_step,
        "state": summary.state,
    }


def error_of(failure: Failure | None, *, traceback: bool) -> dict[str, Any] | None:
    """Return a failure as a JSON object."""
    if failure is None:
        return None
    error = failure.to_json()
    return error if traceback else {"type": error["type"], "message": error["message"]}


def status_of(summary: RunSummary) -> str:
    """Return the status, and what is special about it."""
    remarks = ["lapsed"] if summary.lapsed else []
    if summary.cancel_requested_at is not None and summary.finished_at is None:
        remarks.append("cancel requested")
    return f"{summary.status.value} ({', '.join(remarks)})" if remarks else summary.status.value


def holder_of(summary: RunSummary) -> str:
    """Return the name of who holds the run; nothing where nobody does, though a lapsed run keeps its last owner."""
    return "" if summary.lease_expires_at is None else summary.lease_owner or ""


def message_of(failure: Failure | None) -> str:
    """Return a failure in a line."""
    return "" if failure is None else f"{failure.type}: {failure.message}".removesuffix(": ")


def time_of(instant: datetime | None, summary: RunSummary) -> str:
    """Return an instant, and how far it was from the database's present when the run was read."""
    if instant is None:
        return ""
    shown = instant.isoformat(" ", "milliseconds")
    created = cast("datetime | None", summary.created_at)  # a column of the user's own may be null, or naive
    if created is None or (created.tzinfo is None) != (instant.tzinfo is None):
        return shown
    ago = created + summary.age - instant
    return f"{shown}, {rounded(ago)} ago" if ago >= timedelta(0) else f"{shown}, in {rounded(-ago)}"


def _seconds(age: timedelta | None) -> float | None:
    return None if age is None else age.total_seconds()
