"""Every public name used once, as a user would; both type checkers must accept this file as it is. It is not run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import Any, assert_type
from uuid import UUID, uuid4

from sqlalchemy import Index, String, create_engine, func, literal, select
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column, sessionmaker

import sqla_durable
from sqla_durable import (
    PENDING,
    Cancelled,
    ConfigurationError,
    DatabaseUnavailable,
    DeadlineMixin,
    DurableError,
    Effect,
    Ending,
    ExpiryMixin,
    Failure,
    Finding,
    FrozenPayload,
    FunctionMixin,
    FunctionRun,
    Functions,
    Guard,
    GuardViolation,
    HasWorks,
    HolderError,
    KeyConflict,
    KeyMixin,
    Lease,
    LeaseMixin,
    Lifecycle,
    LostLease,
    Monthly,
    NestedStep,
    NotAnswered,
    NotIssued,
    OperationFailed,
    OperationUnknown,
    Outcome,
    Partition,
    PartitionKept,
    PartitionsCreated,
    PartitionsDropped,
    Pending,
    PriorityMixin,
    Rate,
    Receipt,
    ReceiptMismatch,
    ReceiptMixin,
    ResultError,
    Retry,
    RetryableError,
    Run,
    RunConditions,
    RunInFlight,
    RunMixin,
    RunNotFound,
    RunReferenced,
    Runs,
    RunSummary,
    SchemaMismatch,
    Severity,
    SignalMismatch,
    SignalMixin,
    SignalTimeout,
    StatusMachine,
    StepFailed,
    StepOutcome,
    StepReused,
    StepTimeout,
    Suspended,
    TimedOut,
    TransactionConflict,
    TransactionEnded,
    UndeclaredTransition,
    UpdateFailed,
    UpdateTimeout,
    UsageError,
    WaitMixin,
    Work,
    Worker,
    check,
    create_partitions,
    drop_partitions,
    guard_of,
    guard_violation,
    partition_sql,
    partitions_of,
    uuid7,
)
from sqla_durable.asyncio import AsyncRun, AsyncRuns, AsyncWork, AsyncWorker, transition
from sqla_durable.testing import expire, lapse, let_pass, make_due, overrun


class PlanStatus(StrEnum):
    PENDING = "pending"
    APPROVED = "approved"
    EXECUTING = "executing"
    EXECUTED = "executed"
    FAILED = "failed"


plan_statuses = StatusMachine(
    PlanStatus,
    initial=PlanStatus.PENDING,
    transitions={
        PlanStatus.PENDING: {PlanStatus.APPROVED},
        PlanStatus.APPROVED: {PlanStatus.EXECUTING},
        PlanStatus.EXECUTING: {PlanStatus.EXECUTED, PlanStatus.FAILED, PlanStatus.APPROVED},
    },
)
plan_lifecycle = Lifecycle(
    plan_statuses,
    ready=PlanStatus.APPROVED,
    running=PlanStatus.EXECUTING,
    done=PlanStatus.EXECUTED,
    failed=PlanStatus.FAILED,
    lease=timedelta(seconds=120),
    retry=Retry(max_attempts=5, backoff=timedelta(seconds=1), factor=2, cap=timedelta(minutes=5), jitter=0.1),
    requeue={PlanStatus.FAILED},
    step_timeout=None,
    one_in_flight=("title",),
    notify=False,
)


class Base(DeclarativeBase):
    pass


class Plan(RunMixin, Base):
    """With a ``__table_args__`` tuple of the user's own."""

    __tablename__ = "plan"
    __lifecycle__ = plan_lifecycle
    __table_args__ = (Index("ix_plan_title", "title"), {"comment": "plans"})

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    status: Mapped[PlanStatus] = plan_statuses.column()
    title: Mapped[str] = mapped_column(String(50))
    actions: Mapped[list[str]] = mapped_column(JSONB)


class PlanStep(ReceiptMixin[Plan], Base):
    __tablename__ = "plan_step"


class ConsentStatus(StrEnum):
    PENDING = "pending"
    APPROVED = "approved"
    EXECUTING = "executing"
    EXECUTED = "executed"
    FAILED = "failed"
    EXPIRED = "expired"


consent_statuses = StatusMachine(
    ConsentStatus,
    initial=ConsentStatus.PENDING,
    transitions={
        ConsentStatus.PENDING: {ConsentStatus.APPROVED, ConsentStatus.EXPIRED},
        ConsentStatus.APPROVED: {ConsentStatus.EXECUTING, ConsentStatus.EXPIRED},
        ConsentStatus.EXECUTING: {ConsentStatus.EXECUTED, ConsentStatus.FAILED, ConsentStatus.APPROVED},
    },
)


consent_lifecycle = Lifecycle(
    consent_statuses,
    ready=ConsentStatus.APPROVED,
    running=ConsentStatus.EXECUTING,
    done=ConsentStatus.EXECUTED,
    failed=ConsentStatus.FAILED,
    expired=ConsentStatus.EXPIRED,
    frozen=("title",),
    requeue={ConsentStatus.EXPIRED},
)
assert_type(consent_lifecycle.expired, ConsentStatus | None)
assert_type(consent_lifecycle.expirable, frozenset[ConsentStatus])
assert_type(consent_lifecycle.drafts, frozenset[ConsentStatus])


class Consent(ExpiryMixin, RunMixin, Base):
    __tablename__ = "consent"
    __lifecycle__ = consent_lifecycle

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[ConsentStatus] = consent_statuses.column()
    title: Mapped[str]


def consents(session: Session, consent: Consent) -> None:
    assert_type(consent.expires_at, datetime | None)
    assert_type(consent_statuses.reachable(ConsentStatus.APPROVED), frozenset[ConsentStatus])
    consent.expires_at = datetime.max
    Consent(title="title", expires_at=func.now() + timedelta(hours=1))
    select(Consent).where(Consent.expires_at < func.now())
    values = {"title": "approved", "expires_at": func.now() + timedelta(hours=1)}
    assert_type(consent_statuses.transition(session, consent, ConsentStatus.APPROVED, values=values), bool)
    expire(session, Consent, consent)


class JobStatus(StrEnum):
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed out"


job_statuses = StatusMachine(
    JobStatus,
    initial=JobStatus.READY,
    transitions={
        JobStatus.READY: {JobStatus.RUNNING},
        JobStatus.RUNNING: {JobStatus.DONE, JobStatus.FAILED, JobStatus.TIMED_OUT, JobStatus.READY},
    },
)


class Job(DeadlineMixin, RunMixin, Base):
    __tablename__ = "job"
    __lifecycle__ = Lifecycle(
        job_statuses,
        ready=JobStatus.READY,
        running=JobStatus.RUNNING,
        done=JobStatus.DONE,
        failed=JobStatus.FAILED,
        timed_out=JobStatus.TIMED_OUT,
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[JobStatus] = job_statuses.column()


class JobStep(ReceiptMixin[Job], Base):
    __tablename__ = "job_step"


def deadlines(factory: sessionmaker[Session]) -> None:
    jobs = Runs(factory, Job, JobStep)
    with factory.begin() as session:
        job = jobs.start(session, max_duration=timedelta(hours=1))
        assert_type(job.max_duration, timedelta | None)
        job.max_duration = None
        select(Job).where(Job.max_duration > timedelta(hours=1))
        overrun(session, Job, job)


class DataclassBase(MappedAsDataclass, DeclarativeBase):
    pass


class Task(RunMixin, DataclassBase):
    __tablename__ = "task"
    __lifecycle__ = plan_lifecycle

    id: Mapped[int] = mapped_column(primary_key=True, init=False)
    title: Mapped[str]
    status: Mapped[PlanStatus] = plan_statuses.column(init=False)


class Order(KeyMixin, PriorityMixin, RunMixin, Base):
    __tablename__ = "order"
    __lifecycle__ = plan_lifecycle
    __key_scope__ = ("tenant_id",)

    id: Mapped[int] = mapped_column(primary_key=True)
    tenant_id: Mapped[int]
    title: Mapped[str]
    status: Mapped[PlanStatus] = plan_statuses.column()


class OrderStep(ReceiptMixin[Order], Base):
    __tablename__ = "order_step"


class Request(WaitMixin, RunMixin, Base):
    __tablename__ = "request"
    __lifecycle__ = plan_lifecycle

    id: Mapped[int] = mapped_column(primary_key=True)
    title: Mapped[str]
    status: Mapped[PlanStatus] = plan_statuses.column()


class RequestStep(ReceiptMixin[Request], Base):
    __tablename__ = "request_step"


class RequestSignal(SignalMixin[Request], Base):
    __tablename__ = "request_signal"


class Leased(LeaseMixin, Base):
    __tablename__ = "leased"
    id: Mapped[int] = mapped_column(primary_key=True)


@dataclass
class Payment:
    amount: Decimal
    at: datetime


def pay(session: Session, amount: Decimal, *, note: str = "") -> Payment:
    return Payment(session.scalars(select(literal(amount))).one(), datetime.max)


def count(session: Session) -> int:
    return 1


def call(url: str) -> bytes:
    return url.encode()


def charge(idempotency_key: str, amount: Decimal, *, note: str = "") -> Payment:
    return Payment(amount, datetime.max)


def start() -> UUID:
    return uuid4()


def poll(ids: UUID) -> Payment | Pending:
    return Pending(after=timedelta(minutes=1)) if ids.int else PENDING


def poll_at_once(ids: UUID) -> Payment:
    return Payment(Decimal(ids.int), datetime.max)


def poll_or_nothing(ids: UUID) -> Payment | Pending | None:
    return None


def by_status(error: Exception) -> bool | timedelta:
    return timedelta(seconds=30) if "429" in str(error) else isinstance(error, OSError)


policies = [
    Retry(on=OSError),
    Retry(on=(OSError, ValueError)),
    Retry(on=by_status),
    Retry(on=lambda error: isinstance(error, OSError)),
]


def carry_out(run: Run[Plan]) -> None:
    assert_type(run.row, Plan)
    assert_type(run.lease, Lease)
    assert_type(run.receipts, tuple[Receipt, ...])
    for position, _ in enumerate(run.row.actions):
        assert_type(run.step(position, pay, Decimal(1), note="first"), Payment)
    assert_type(run.step("count", count), int)
    assert_type(run.step("inline", lambda session: session.connection().closed), bool)
    assert_type(run.external("call", call, "https://example.org"), bytes)
    assert_type(run.keyed("charge", charge, Decimal(1), note="once"), Payment)
    assert_type(run.idempotency_key("charge"), str)
    assert_type(run.operation("report", start=start, poll=poll), Payment)
    assert_type(run.operation(1, start=start, poll=poll, every=timedelta(minutes=1)), Payment)
    assert_type(run.operation("at once", start=start, poll=poll_at_once), Payment)
    assert_type(run.operation("nothing", start=start, poll=poll_or_nothing), Payment | None)
    run.renew()
    run.finish(title="done")


def many_at_a_time(plans: Runs[Plan], session: Session) -> None:
    conditions: RunConditions = {"error": "no"}
    assert_type(plans.requeue_all(limit=5, **conditions), int)
    assert_type(plans.cancel_all(session, everything=True), int)
    assert_type(plans.purge(timedelta(30), batch=100), int)


def synchronous(plan: Plan, task: Task) -> None:
    factory = sessionmaker(create_engine("postgresql+psycopg://"))
    plans = Runs(factory, Plan, PlanStep, owner="me")
    assert_type(plans, Runs[Plan])
    run = plans.claim(plan.id, run_now=True)
    assert_type(run, Run[Plan] | None)
    assert_type(plans.claim_due(10), list[Run[Plan]])
    outcome = plans.execute(plan.id, carry_out, run_now=False)
    assert_type(outcome, Outcome)
    assert_type(outcome.ending, Ending)
    assert_type(outcome.status, StrEnum)
    assert_type(outcome.receipts, tuple[Receipt, ...])
    assert_type(outcome.failure, Failure | None)
    assert_type(outcome.exception, BaseException | None)
    assert_type(outcome.replayed, bool)
    assert_type(plans.get(plan.id), Plan | None)
    assert_type(plans.get(plan.id, heal=False), Plan | None)
    assert_type(plans.heal(plan.id), bool)
    assert_type(plans.reap(), int)
    assert_type(plans.requeue(plan.id), bool)
    receipts: Sequence[Receipt] = plans.receipts(plan.id)
    for receipt in receipts:
        assert_type(receipt.effect, Effect)
        assert_type(receipt.outcome, StepOutcome)
        assert_type(receipt.outcome.terminal, bool)
        assert_type(receipt.ids, Any)
    if run is not None:
        with factory.begin() as session:
            plans.fence(session, run.lease)
            plans.record(session, run.lease, "by hand", {"a": 1})
            plans.record(session, run.lease, 2, Decimal(1), type_=Decimal)
            assert_type(plans.request_cancel(session, plan.id), bool)
        assert_type(plans.hold(run.lease), Run[Plan])
        run.fail(ValueError("no"), title="failed")
        run.fail(Failure("ValueError", "no", None))
        run.release()
    with factory.begin() as session:
        won = plan_statuses.transition(
            session,
            plan,
            PlanStatus.APPROVED,
            from_={PlanStatus.PENDING},
            where=Plan.created_at > func.now(),
            values={"title": "approved"},
        )
        assert_type(won, bool)
        assert_type(plan_statuses.transition(session, (Plan, plan.id), PlanStatus.APPROVED), bool)
        lapse(session, Plan, plan.id)
        make_due(session, Plan, plan)
    assert_type(plan_statuses.to_mermaid(), str)
    assert_type(plan_statuses.terminal, frozenset[PlanStatus])
    assert_type(plan.status, PlanStatus)
    assert_type(plan.fence, int)
    assert_type(plan.lease_expires_at, datetime | None)
    assert_type(plan.failures, list[dict[str, Any]])
    assert_type(task.attempts, int)
    assert_type(PlanStep().step, str)
    select(Plan).where(Plan.attempts > 1, Plan.lease_owner.is_(None), Leased.fence == 0)
    Task(title="task")


def starting(factory: sessionmaker[Session], order: Order) -> None:
    orders = Runs(factory, Order, OrderStep)
    with factory.begin() as session:
        assert_type(orders.start(session), Order)
        assert_type(orders.start(session, key="a", title="t", available_at=timedelta(hours=1), priority=9), Order)
    try:
        raise KeyConflict("message", "key", (1,))
    except KeyConflict as error:
        assert_type(error.key, str)
        assert_type(error.identity, tuple[Any, ...] | None)
    except RunInFlight as error:
        assert_type(error.identity, tuple[Any, ...] | None)
    assert_type(order.idempotency_key, str | None)
    assert_type(order.key_fingerprint, str | None)
    assert_type(order.priority, int)
    select(Order).where(Order.idempotency_key == "a", Order.priority > 3)


async def async_starting(factory: async_sessionmaker[AsyncSession]) -> None:
    orders = AsyncRuns(factory, Order, OrderStep)
    async with factory.begin() as session:
        assert_type(await orders.start(session, key="a", title="t"), Order)


def decide(session: Session, payment: Payment) -> UUID:
    return uuid4()


def waiting(run: Run[Request]) -> None:
    assert_type(run.wait("paid", Payment), Payment)
    assert_type(run.wait("paid", int, timeout=timedelta(days=1), key=1), int)
    assert_type(run.wait("paid"), Any)
    found: int | None = run.wait("paid", int | None)
    print(found)
    assert_type(run.answer("asked", decide, timeout=timedelta(days=1), key="answer"), UUID)
    run.sleep("nap", timedelta(days=1))
    run.sleep(2, datetime.max)


def signalling(factory: sessionmaker[Session], request: Request) -> None:
    requests = Runs(factory, Request, RequestStep, signals=RequestSignal)
    with factory.begin() as session:
        assert_type(requests.signal(session, request, "paid", 7), bool)
        assert_type(
            requests.signal(session, request.id, "paid", Payment(Decimal(1), datetime.max), type_=Payment), bool
        )
        assert_type(requests.signal(session, request, "go"), bool)
        let_pass(session, RequestStep, request, "paid")
    soon = timedelta(seconds=5)
    try:
        assert_type(requests.update(request, "asked", 7, timeout=soon), Any)
        assert_type(requests.update(request, "asked", 7, timeout=soon, type_=int, returns=UUID), UUID)
    except UpdateFailed as error:
        assert_type(error.failure, Failure)
        assert_type(error.name, str)
    except (UpdateTimeout, NotAnswered):
        pass
    try:
        raise SignalTimeout("message", "step")
    except SignalTimeout as error:
        assert_type(error.step, str)
    except SignalMismatch:
        pass
    assert_type(request.waits_for, str | None)
    assert_type(RequestSignal().step, str | None)
    assert_type(RequestSignal().answered_at, datetime | None)
    select(RequestSignal.id).where(RequestSignal.name == "paid", Request.waits_for.is_(None))


async def async_decide(session: AsyncSession, payment: Payment) -> UUID:
    return uuid4()


async def async_waiting(run: AsyncRun[Request]) -> None:
    assert_type(await run.wait("paid", Payment), Payment)
    assert_type(await run.wait("paid", list[int]), list[int])
    assert_type(await run.answer("asked", async_decide), UUID)
    await run.sleep("nap", timedelta(days=1))


async def async_signalling(factory: async_sessionmaker[AsyncSession]) -> None:
    requests = AsyncRuns(factory, Request, RequestStep, signals=RequestSignal)
    async with factory.begin() as session:
        assert_type(await requests.signal(session, 1, "paid", 7), bool)
    assert_type(await requests.update(1, "asked", 7, timeout=timedelta(seconds=5), returns=int), int)


def looks(plans: Runs[Plan], plan: Plan) -> None:
    found = plans.find(
        status={PlanStatus.FAILED, PlanStatus.EXECUTED},
        older_than=timedelta(hours=1),
        newer_than=timedelta(days=7),
        error="refused",
        owner="me",
        cancel_requested=False,
        limit=10,
    )
    assert_type(found, list[RunSummary])
    assert_type(plans.find(status=PlanStatus.FAILED, after=found[-1].cursor), list[RunSummary])
    assert_type(found[-1].key, str | None)
    assert_type(found[-1].waits_for, str | None)
    assert_type(found[0].age, timedelta)
    assert_type(found[0].failure, Failure | None)
    assert_type(found[0].lapsed, bool)
    assert_type(plans.describe(plan.id), RunSummary | None)
    assert_type(plans.counts(), dict[StrEnum, int])
    assert_type(plans.run_class, type[Plan])
    assert_type(plans.session_factory, sessionmaker[Any])


def operators(plans: Runs[Plan], session: Session, plan: Plan) -> None:
    assert_type(plans.attach_ids(session, plan, "report", uuid4(), type_=UUID), bool)
    assert_type(plans.never_issued(session, plan.id, 1), bool)


def deliver(run: Run[Task]) -> str:
    return run.row.title


def workers(factory: sessionmaker[Session], plans: Runs[Plan], tasks: Runs[Task]) -> None:
    assert_type(plans.handled_by(carry_out), Work)
    worker = Worker(
        plans.handled_by(carry_out),
        tasks.handled_by(deliver),
        concurrency=10,
        poll=timedelta(seconds=1),
        listen=False,
        grace=timedelta(seconds=30),
    )
    assert_type(worker.run_due(timedelta(seconds=50)), Counter[Ending])
    worker.stop()
    worker.run()


class Declared:
    """Has works, as functions have."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def works(self) -> tuple[Work, ...]:
        return (self._work,)


async def workers_of_both_forms(plans: AsyncRuns[Plan], tasks: Runs[Task]) -> None:
    declared: HasWorks[Work] = Declared(tasks.handled_by(lambda run: None))
    Worker(declared, tasks.handled_by(lambda run: None), concurrency=2)
    worker = AsyncWorker(plans.handled_by(async_carry_out), tasks.handled_by(lambda run: None), declared)
    assert_type(await worker.run_due(timedelta(seconds=50)), Counter[Ending])


async def async_workers(plans: AsyncRuns[Plan]) -> None:
    assert_type(plans.handled_by(async_carry_out), AsyncWork)
    worker = AsyncWorker(plans.handled_by(async_carry_out), concurrency=100, listen=True)
    assert_type(await worker.run_due(budget=timedelta(minutes=1)), Counter[Ending])
    worker.stop()
    await worker.run()


async def async_count(session: AsyncSession, more: int) -> int:
    return more


async def async_call(url: str) -> bytes:
    return url.encode()


async def async_charge(idempotency_key: str, amount: Decimal) -> Payment:
    return charge(idempotency_key, amount)


async def async_start() -> UUID:
    return uuid4()


async def async_poll(ids: UUID) -> Payment | Pending:
    return PENDING


async def async_carry_out(run: AsyncRun[Plan]) -> None:
    assert_type(await run.step("count", async_count, 1), int)
    assert_type(await run.external("call", async_call, url="https://example.org"), bytes)
    assert_type(await run.keyed("charge", async_charge, amount=Decimal(1)), Payment)
    assert_type(run.idempotency_key("charge"), str)
    assert_type(await run.operation("report", start=async_start, poll=async_poll, every=timedelta(1)), Payment)
    await run.renew()
    await run.finish(title="done")
    await run.fail(ValueError("no"))
    await run.release()


async def asynchronous(plan: Plan) -> None:
    factory = async_sessionmaker(create_async_engine("postgresql+psycopg://"))
    plans = AsyncRuns(factory, Plan, PlanStep)
    assert_type(await plans.execute(plan.id, async_carry_out), Outcome)
    run = await plans.claim(plan)
    assert_type(run, AsyncRun[Plan] | None)
    assert_type(await plans.claim_due(1), list[AsyncRun[Plan]])
    assert_type(await plans.get(plan.id, heal=False), Plan | None)
    assert_type(await plans.find(status=[PlanStatus.FAILED], key="k", limit=10), list[RunSummary])
    assert_type(await plans.describe(plan.id), RunSummary | None)
    assert_type(await plans.counts(), dict[StrEnum, int])
    assert_type(plans.run_class, type[Plan])
    assert_type(plans.session_factory, async_sessionmaker[Any])
    assert_type(await plans.receipts(plan.id), tuple[Receipt, ...])
    assert_type(await plans.heal(plan.id), bool)
    assert_type(await plans.reap(5), int)
    assert_type(await plans.requeue(plan.id), bool)
    assert_type(await plans.requeue_all(everything=True), int)
    assert_type(await plans.purge(timedelta(30)), int)
    async with factory.begin() as session:
        assert_type(await transition(plan_statuses, session, plan, PlanStatus.APPROVED), bool)
        assert_type(await plans.request_cancel(session, plan.id), bool)
        assert_type(await plans.attach_ids(session, plan, "report", "id"), bool)
        assert_type(await plans.never_issued(session, plan.id, "report"), bool)
        if run is not None:
            await plans.fence(session, run.lease)
            await plans.record(session, run.lease, "by hand", None)
            assert_type(await plans.hold(run.lease), AsyncRun[Plan])


def errors(failure: Failure) -> list[type[DurableError]]:
    try:
        raise StepFailed("step", failure)
    except StepFailed as error:
        assert_type(error.failure, Failure)
    except HolderError as error:
        assert_type(error.lease, Lease)
    except OperationUnknown as error:
        assert_type(error.step, str)
    return [
        Cancelled,
        ConfigurationError,
        DatabaseUnavailable,
        KeyConflict,
        FrozenPayload,
        GuardViolation,
        LostLease,
        NestedStep,
        NotIssued,
        OperationFailed,
        ReceiptMismatch,
        ResultError,
        RetryableError,
        RunInFlight,
        RunNotFound,
        RunReferenced,
        StepReused,
        StepTimeout,
        Suspended,
        TimedOut,
        TransactionConflict,
        TransactionEnded,
        UndeclaredTransition,
        UsageError,
    ]


class MonthlyJob(RunMixin, Base):
    __tablename__ = "monthly_job"
    __lifecycle__ = Plan.__lifecycle__
    __partition__ = Monthly("id")
    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid7)
    status: Mapped[PlanStatus] = plan_statuses.column()


class MonthlyStep(ReceiptMixin[MonthlyJob], Base):
    __tablename__ = "monthly_step"
    __partition__ = Monthly()


async def partitions(session: Session, async_session: AsyncSession) -> None:
    assert_type(uuid7(), UUID)
    assert_type(create_partitions(session, MonthlyJob, 3, lock_timeout=timedelta(seconds=1)), PartitionsCreated)
    assert_type(await async_session.run_sync(create_partitions, MonthlyStep, months=3), PartitionsCreated)
    assert_type(create_partitions(session, MonthlyStep).created, tuple[Partition, ...])
    dropped = drop_partitions(session, MonthlyStep, older_than=timedelta(days=365))
    assert_type(dropped, PartitionsDropped)
    assert_type(dropped.kept, tuple[PartitionKept, ...])
    assert_type([each.since for each in partitions_of(session, MonthlyJob)], list[datetime | None])
    assert_type(partition_sql(MonthlyStep, date(2026, 3, 1), months=2), list[str])


class GuardedRun(FunctionMixin, Base):
    __tablename__ = "guarded_run"
    __guard__ = True


def guards() -> None:
    guard = guard_of(GuardedRun.__table__)
    if guard is not None:
        assert_type(guard, Guard)
        assert_type(guard.create(), tuple[str, ...])
        assert_type(guard.drop(lambda table: table.schema), tuple[str, ...])
        assert_type(guard.source(), str)
        assert_type(guard.function, str)
    refused = guard_violation(ValueError())
    if refused is not None:
        assert_type(refused, GuardViolation)
        assert_type((refused.sqlstate, refused.table), tuple[str, str | None])


async def checks(async_connection: AsyncConnection) -> None:
    engine = create_engine("postgresql+psycopg://")
    try:
        found = check(engine, Base)
    except SchemaMismatch:
        return
    assert_type(found, list[Finding])
    assert_type(found[0].severity, Severity)
    assert_type(str(found[0].code), str)
    assert_type((found[0].subject, found[0].meaning, found[0].remedy), tuple[str, str, str])
    assert_type(await async_connection.run_sync(check, Base.metadata), list[Finding])
    with engine.connect() as connection:
        check(connection, sqla_durable)


class LimitedRun(FunctionMixin, Base):
    __tablename__ = "limited_run"


class LimitedStep(ReceiptMixin[LimitedRun], Base):
    __tablename__ = "limited_step"


def limits() -> None:
    functions = Functions(sessionmaker(), LimitedRun, LimitedStep, concurrency_per_tenant=10)

    @functions.function("a", concurrency=5, concurrency_per_tenant=2, rate=Rate(100, timedelta(minutes=1), burst=5))
    def a(run: FunctionRun[LimitedRun], given: int) -> str:
        assert_type(run.row.paced_at, datetime | None)
        return str(given)

    with functions.session_factory() as session:
        assert_type(functions.result(functions.start(session, a, 1)), str)


assert_type(sqla_durable.__all__, list[str])
