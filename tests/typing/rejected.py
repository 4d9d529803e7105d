"""Lines that both type checkers must reject. It is not run.

Each ignore comment stands for the rejection: both checkers report one that is not needed.
"""

from __future__ import annotations

from enum import StrEnum

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import (
    Functions,
    Lifecycle,
    Monthly,
    Pending,
    Rate,
    Receipt,
    Retry,
    Run,
    Runs,
    RunSummary,
    Worker,
    create_partitions,
    drop_partitions,
    guard_of,
    guard_violation,
    partition_sql,
)
from sqla_durable.asyncio import AsyncRun, AsyncRuns, AsyncWork, AsyncWorker
from tests.typing.accepted import (
    Base,
    Consent,
    Leased,
    LimitedRun,
    Plan,
    PlanStatus,
    PlanStep,
    Task,
    async_carry_out,
    async_poll,
    async_start,
    call,
    carry_out,
    charge,
    count,
    plan_statuses,
    poll,
    start,
)


class Other(StrEnum):
    ONE = "one"


def steps(run: Run[Plan]) -> None:
    run.step("too many arguments", count, 1)  # type: ignore[call-arg]
    run.step("wrong type of argument", add, "one")  # type: ignore[arg-type]
    run.step(1.5, count)  # type: ignore[arg-type]
    run.step("no session", call, "https://example.org")  # type: ignore[arg-type, call-arg]
    run.external("a session", count)  # type: ignore[call-arg]
    run.keyed("no key", start)  # type: ignore[arg-type]
    run.keyed("too few arguments", charge)  # type: ignore[call-arg]
    run.operation("no start", poll=poll)  # type: ignore[call-arg]
    run.operation("other ids", start=call_by_name, poll=poll)  # type: ignore[misc]
    run.operation("a number", start=start, poll=poll, every=10)  # type: ignore[arg-type]
    payment: Pending = run.operation("pending", start=start, poll=poll)  # type: ignore[assignment]
    text: str = run.step("wrong result", count)  # type: ignore[assignment]
    print(text, payment, run.row.nothing)  # type: ignore[attr-defined]


def call_by_name() -> bytes:
    return b""


def answers_with_a_number(error: Exception) -> float:
    return 30.0


def policies() -> None:
    Retry(on=answers_with_a_number)  # type: ignore[arg-type]
    Retry(on=[OSError])  # type: ignore[arg-type]
    Retry(on=KeyboardInterrupt)  # type: ignore[arg-type]
    Pending(10)  # type: ignore[arg-type]


def add(session: Session, number: int) -> int:
    return number


async def coroutine(session: AsyncSession) -> int:
    return 1


async def async_steps(run: AsyncRun[Plan]) -> None:
    await run.step("not a coroutine function", count)  # type: ignore[arg-type]
    await run.operation("not coroutine functions", start=start, poll=async_poll)  # type: ignore[arg-type]
    await run.operation("nor these", start=async_start, poll=poll)  # type: ignore[arg-type]
    text: str = await run.step("wrong result", coroutine)  # type: ignore[arg-type]
    print(text)


def helpers(factory: sessionmaker[Session], async_factory: async_sessionmaker[AsyncSession]) -> None:
    Runs(factory, Base, PlanStep)  # type: ignore[type-var]
    Runs(factory, Leased, PlanStep)  # type: ignore[type-var]
    Runs(factory, Plan, Plan)  # type: ignore[arg-type]
    Runs(async_factory, Plan, PlanStep)  # type: ignore[arg-type]
    AsyncRuns(factory, Plan, PlanStep)  # type: ignore[arg-type]
    Runs(factory, Plan, PlanStep).execute(1, async_handler)
    AsyncRuns(async_factory, Plan, PlanStep).execute(1, handler)  # type: ignore[arg-type, unused-coroutine]


def starting(session: Session, async_session: AsyncSession, orders: Runs[Plan], async_orders: AsyncRuns[Plan]) -> None:
    orders.start(session, key=1)  # type: ignore[arg-type]
    orders.start(async_session)  # type: ignore[arg-type]
    orders.start(session, "key")  # type: ignore[call-arg]
    async_orders.start(session)  # type: ignore[arg-type, unused-coroutine]
    Lifecycle(
        plan_statuses,
        ready=PlanStatus.APPROVED,
        running=PlanStatus.EXECUTING,
        done=PlanStatus.EXECUTED,
        failed=PlanStatus.FAILED,
        one_in_flight="title",  # type: ignore[arg-type]
    )


def looks(runs: Runs[Plan], summary: RunSummary) -> None:
    runs.find(limit="10")  # type: ignore[arg-type]
    runs.find(status="failed")  # type: ignore[arg-type]
    runs.find(key=7)  # type: ignore[arg-type]
    runs.find(older_than=60)  # type: ignore[arg-type]
    runs.find(after=summary)  # type: ignore[arg-type]
    summary.status = PlanStatus.FAILED  # type: ignore[misc]


def handler(run: AsyncRun[Plan]) -> None: ...


async def async_handler(run: Run[Plan]) -> None: ...


class OfCoroutines:
    def works(self) -> list[AsyncWork]:
        return []


def workers(plans: Runs[Plan], async_plans: AsyncRuns[Plan], tasks: Runs[Task]) -> None:
    tasks.handled_by(carry_out)  # type: ignore[arg-type]
    plans.handled_by(handler)  # type: ignore[arg-type]
    async_plans.handled_by(carry_out)  # type: ignore[arg-type]
    worker = Worker(plans)  # type: ignore[arg-type]
    AsyncWorker(async_plans)  # type: ignore[arg-type]
    Worker(async_plans.handled_by(async_carry_out))  # type: ignore[arg-type]
    Worker(plans.handled_by(carry_out), async_plans.handled_by(async_carry_out))  # type: ignore[arg-type]
    Worker(OfCoroutines())  # type: ignore[arg-type]
    Worker(plans.handled_by(carry_out), poll=1)  # type: ignore[arg-type]
    Worker(plans.handled_by(carry_out), 10)  # type: ignore[arg-type]
    worker.run_due(30)  # type: ignore[arg-type]
    worker.run_due()  # type: ignore[call-arg]


def machines(session: Session, plan: Plan, consent: Consent, receipt: Receipt) -> None:
    plan_statuses.transition(session, plan, Other.ONE)  # type: ignore[arg-type]
    Lifecycle(plan_statuses, ready=PlanStatus.APPROVED)  # type: ignore[call-arg]
    plan.fence = "1"  # type: ignore[assignment]
    print(plan.expires_at)  # type: ignore[attr-defined]
    consent.expires_at = "tomorrow"  # type: ignore[assignment]
    receipt.step = "other"  # type: ignore[misc]


def waits_without_session(payload: int) -> None: ...


async def answers_later(session: AsyncSession, payload: int) -> int:
    return payload


def waiting(run: Run[Plan], async_run: AsyncRun[Plan], factory: sessionmaker[Session], runs: Runs[Plan]) -> None:
    run.wait(1, int)  # type: ignore[call-overload]
    run.wait("paid", int, timeout=5)  # type: ignore[call-overload]
    run.answer("paid", waits_without_session)  # type: ignore[arg-type]
    run.answer("paid", answers_later)  # type: ignore[arg-type, unused-coroutine]
    run.sleep("nap", 5)  # type: ignore[arg-type]
    Runs(factory, Plan, PlanStep, signals=PlanStep)  # type: ignore[arg-type]
    runs.update(1, "paid", 7)  # type: ignore[call-overload]


def limits(functions: Functions[LimitedRun]) -> None:
    functions.function("a", concurrency="5")  # type: ignore[arg-type]
    functions.function("b", rate=100)  # type: ignore[arg-type]
    Rate(100, per=60)  # type: ignore[arg-type]
    Rate(100)  # type: ignore[call-arg]


def guards() -> None:
    guard_of(Plan)  # type: ignore[arg-type]
    guard_violation("SD001")  # type: ignore[arg-type]


def partitions(session: Session) -> None:
    Monthly(7)  # type: ignore[arg-type]
    create_partitions(session, PlanStep())  # type: ignore[arg-type]
    drop_partitions(session, PlanStep, 365)  # type: ignore[arg-type]
    partition_sql(PlanStep, "2026-03")  # type: ignore[arg-type]
