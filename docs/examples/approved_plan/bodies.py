"""What requests and answers consist of."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Literal, Self
from uuid import UUID

from pydantic import BaseModel, JsonValue

from sqla_durable import Failure, Receipt, StepOutcome

from .actions import Action, Actions, Line, Strict
from .models import Plan, PlanStatus


class Proposal(Strict):
    author: Line
    actions: Actions


class Edit(Strict):
    actions: Actions
    revision: int
    """The one that the edit was made of."""


class Approval(Strict):
    by: Line
    revision: int
    """The one that the person has seen."""


class Rejection(Strict):
    by: Line


class FailureView(BaseModel):
    reason: Literal["refused", "interrupted", "error"]
    detail: str

    @classmethod
    def of(cls, failure: Failure | None) -> Self | None:
        """Say what was recorded, without the inside of this program."""
        if failure is None:
            return None
        if failure.type == "LeaseLapsed":
            return cls(reason="interrupted", detail="The process that executed the plan was gone.")
        if failure.type.endswith(".ActionRefused"):
            return cls(reason="refused", detail=failure.message)
        return cls(reason="error", detail="What happened is recorded with the plan.")


class StepView(BaseModel):
    position: int
    outcome: StepOutcome
    result: JsonValue
    failure: FailureView | None
    recorded_at: datetime

    @classmethod
    def of(cls, receipt: Receipt) -> Self:
        return cls(
            position=int(receipt.step),
            outcome=receipt.outcome,
            result=receipt.result,
            failure=FailureView.of(receipt.failure),
            recorded_at=receipt.recorded_at,
        )


class PlanView(BaseModel):
    """A plan, as every answer shows it."""

    id: UUID
    status: PlanStatus
    author: str
    revision: int
    actions: list[Action]
    decided_by: str | None
    expires_at: datetime | None
    cancel_requested: bool
    failure: FailureView | None
    receipts: list[StepView]

    @classmethod
    def of(cls, plan: Plan, receipts: Iterable[Receipt]) -> Self:
        return cls(
            id=plan.id,
            status=plan.status,
            author=plan.author,
            revision=plan.revision,
            actions=plan.actions,
            decided_by=plan.decided_by,
            expires_at=plan.expires_at,
            cancel_requested=plan.cancel_requested_at is not None,
            failure=FailureView.of(None if plan.error is None else Failure.from_json(plan.error)),
            receipts=[StepView.of(receipt) for receipt in receipts],
        )
