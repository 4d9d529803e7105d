"""The HTTP interface of plans."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from datetime import timedelta
from http import HTTPStatus
from typing import TypeVar
from uuid import UUID

from pydantic import BaseModel, ValidationError
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sqla_durable import FrozenPayload
from sqla_durable.asyncio import AsyncRuns, transition

from .bodies import Approval, Edit, PlanView, Proposal, Rejection
from .models import Plan, PlanStatus, PlanStep, plan_statuses
from .problems import HANDLERS, Refusal, invalid
from .steps import execute_plan

APPROVE_WITHIN = timedelta(hours=24)
EXECUTE_WITHIN = timedelta(minutes=15)
LONGEST_KEY = 255

BodyT = TypeVar("BodyT", bound=BaseModel)


class PlansApi:
    def __init__(self, new_session: async_sessionmaker[AsyncSession]) -> None:
        self.new_session = new_session
        self.plans = AsyncRuns(new_session, Plan, PlanStep)

    def routes(self) -> list[Route]:
        plan = "/plans/{plan_id:uuid}"
        return [
            Route("/plans", self.propose, methods=["POST"]),
            Route(plan, self.show, methods=["GET"]),
            Route(f"{plan}/actions", self.edit, methods=["PUT"]),
            Route(f"{plan}/approve", self.approve, methods=["POST"]),
            Route(f"{plan}/reject", self.reject, methods=["POST"]),
            Route(f"{plan}/execute", self.execute, methods=["POST"]),
            Route(f"{plan}/cancel", self.cancel, methods=["POST"]),
        ]

    async def propose(self, request: Request) -> Response:
        """Insert a plan once for each Idempotency-Key: 201, and 200 for the same again."""
        proposal = await body(request, Proposal)
        async with self.new_session.begin() as session:
            plan = await self.plans.start(
                session, key=idempotency_key(request), author=proposal.author, actions=proposal.actions
            )
            if is_new := plan.expires_at is None:  # one that was there already has its expiry
                plan.expires_at = func.now() + APPROVE_WITHIN
        return await self.answer(plan.id, HTTPStatus.CREATED if is_new else HTTPStatus.OK)

    async def show(self, request: Request) -> Response:
        """Read a plan: one whose lease has lapsed has failed, and one whose expiry has passed has expired."""
        return await self.answer(ident(request))

    async def edit(self, request: Request) -> Response:
        """Replace the actions of a pending plan; the lifecycle refuses that for any other."""
        plan_id, edit = ident(request), await body(request, Edit)
        same = select(Plan).where(Plan.id == plan_id, Plan.revision == edit.revision, Plan.expires_at > func.now())
        try:
            async with self.new_session.begin() as session:
                plan = await session.scalar(same.with_for_update(key_share=True))
                if plan is not None:
                    plan.actions, plan.revision = edit.actions, plan.revision + 1
        except FrozenPayload:
            plan = None
        if plan is None:
            raise await self.refusal(plan_id, edit.revision)
        return await self.answer(plan_id)

    async def approve(self, request: Request) -> Response:
        """Approve what the person has seen, if nobody has decided or changed anything, and it has not expired."""
        plan_id, approval = ident(request), await body(request, Approval)
        async with self.new_session.begin() as session:
            won = await transition(
                plan_statuses,
                session,
                (Plan, plan_id),
                PlanStatus.APPROVED,
                where=Plan.revision == approval.revision,
                values={"decided_by": approval.by, "expires_at": func.now() + EXECUTE_WITHIN},
            )
        if not won:
            raise await self.refusal(plan_id, approval.revision)
        return await self.answer(plan_id)

    async def reject(self, request: Request) -> Response:
        """Reject a pending plan."""
        plan_id, rejection = ident(request), await body(request, Rejection)
        async with self.new_session.begin() as session:
            won = await transition(
                plan_statuses, session, (Plan, plan_id), PlanStatus.REJECTED, values={"decided_by": rejection.by}
            )
        if not won:
            raise await self.refusal(plan_id)
        return await self.answer(plan_id)

    async def execute(self, request: Request) -> Response:
        """Execute an approved plan here and now, or answer from its receipts; 202 where another is at it."""
        plan_id = ident(request)
        await self.plans.execute(plan_id, execute_plan)
        plan = await self.read(plan_id)
        match plan.status:
            case PlanStatus.EXECUTED | PlanStatus.FAILED | PlanStatus.CANCELLED:
                return shown(plan)
            case PlanStatus.EXECUTING | PlanStatus.APPROVED:
                return shown(plan, HTTPStatus.ACCEPTED)
            case _:
                raise refused(plan)

    async def cancel(self, request: Request) -> Response:
        """Cancel a plan that waits, or ask for one that is executed to be cancelled before its next step: 202."""
        plan_id = ident(request)
        async with self.new_session.begin() as session:
            recorded = await self.plans.request_cancel(session, plan_id)
        plan = await self.read(plan_id)
        if plan.status is PlanStatus.CANCELLED:
            return shown(plan)
        if not recorded:
            raise refused(plan)
        return shown(plan, HTTPStatus.ACCEPTED)

    async def answer(self, plan_id: UUID, status: HTTPStatus = HTTPStatus.OK) -> Response:
        return shown(await self.read(plan_id), status)

    async def read(self, plan_id: UUID) -> PlanView:
        """Read a plan, healed, and then its receipts; those of a plan that has ended are all there are."""
        plan = await self.plans.get(plan_id)
        if plan is None:
            raise Refusal(HTTPStatus.NOT_FOUND, "There is no such plan.")
        return PlanView.of(plan, await self.plans.receipts(plan_id))

    async def refusal(self, plan_id: UUID, revision: int | None = None) -> Refusal:
        """Say why a decision or an edit came too late."""
        plan = await self.read(plan_id)
        if plan.status is PlanStatus.PENDING and revision not in {None, plan.revision}:
            return Refusal(
                HTTPStatus.CONFLICT,
                f"It has changed: this is about revision {revision}, and it is at revision {plan.revision}.",
                plan_status=plan.status,
            )
        return refused(plan)


def create_app(engine: AsyncEngine) -> Starlette:
    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        yield
        await engine.dispose()

    api = PlansApi(async_sessionmaker(engine, expire_on_commit=False))
    return Starlette(routes=api.routes(), lifespan=lifespan, exception_handlers=HANDLERS)


def refused(plan: PlanView) -> Refusal:
    status = HTTPStatus.GONE if plan.status is PlanStatus.EXPIRED else HTTPStatus.CONFLICT
    return Refusal(status, f"The plan is {plan.status.value}.", plan_status=plan.status)


def shown(plan: PlanView, status: HTTPStatus = HTTPStatus.OK) -> Response:
    headers = {"Location": f"/plans/{plan.id}"} if status is not HTTPStatus.OK else {}
    if status is HTTPStatus.ACCEPTED:
        headers["Retry-After"] = "1"
    return Response(plan.model_dump_json(indent=2) + "\n", status, headers, "application/json")


def ident(request: Request) -> UUID:
    plan_id: UUID = request.path_params["plan_id"]
    return plan_id


def idempotency_key(request: Request) -> str:
    key = request.headers.get("Idempotency-Key", "")
    if not (0 < len(key) <= LONGEST_KEY and key.isprintable()):
        raise Refusal(HTTPStatus.BAD_REQUEST, f"Send an Idempotency-Key of 1 to {LONGEST_KEY} printable characters.")
    return key


async def body(request: Request, model: type[BodyT]) -> BodyT:
    try:
        return model.model_validate_json(await request.body())
    except ValidationError as error:
        raise invalid(error) from error
