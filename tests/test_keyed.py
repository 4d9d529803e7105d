"""Keyed steps: each call is made with the same idempotency key, whoever makes it, and no two steps share one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from ipaddress import ip_address
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import (
    Date,
    DateTime,
    Engine,
    Enum,
    Integer,
    LargeBinary,
    Numeric,
    String,
    Text,
    TypeDecorator,
    create_engine,
    event,
    text,
)
from sqlalchemy.dialects.postgresql import INT4RANGE, Range
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import Ending, NestedStep, ReceiptMixin, ResultError, Run, RunMixin, Runs, StepReused, UsageError
from sqla_durable.idempotency import NAMESPACE, canonical, idempotency_key
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, entries, let_lapse, write_entry
from tests.support_async import carried_out
from tests.support_jobs import JobStatus, job_lifecycle

CREATED = datetime(2024, 2, 29, 12, 30, 15, 250, tzinfo=UTC)


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep)


class Gateway:
    """A payment service that knows the keys it has seen."""

    def __init__(self) -> None:
        self.charges: dict[str, int] = {}
        self.calls: list[str] = []

    def charge(self, idempotency_key: str, amount: int, *, currency: str = "EUR") -> str:
        self.calls.append(idempotency_key)
        self.charges.setdefault(idempotency_key, amount)
        return f"{amount} {currency}"


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


# --- the step


def test_the_call_is_given_the_key_and_its_own_arguments_and_its_result_is_a_receipt(
    session_factory: sessionmaker[Session], plans: Runs[Plan], gateway: Gateway
) -> None:
    ident = approved_plan(session_factory)
    results: list[str] = []

    def carry_out(run: Run[Plan]) -> None:
        results.append(run.keyed("charge", gateway.charge, 100, currency="CHF"))
        assert gateway.calls == [run.idempotency_key("charge")]
        with pytest.raises(StepReused):
            run.keyed("charge", gateway.charge, 100)

    outcome = plans.execute(ident, carry_out)
    assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.EXECUTED)
    assert results == ["100 CHF"]
    assert [(receipt.effect, receipt.result, receipt.ids) for receipt in outcome.receipts] == [
        ("keyed", "100 CHF", None)
    ]
    assert plans.receipts(ident) == outcome.receipts


def test_a_keyed_step_that_has_a_receipt_is_not_called_again(
    session_factory: sessionmaker[Session], plans: Runs[Plan], gateway: Gateway
) -> None:
    ident = approved_plan(session_factory)
    run = plans.claim(ident)
    assert run is not None
    run.keyed("charge", gateway.charge, 100)
    run.release()
    assert plans.execute(ident, lambda run: run.keyed("charge", gateway.charge, 100)).status is PlanStatus.EXECUTED
    assert len(gateway.calls) == 1


def test_a_keyed_step_is_no_transaction_and_no_body_for_other_steps(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    def call(key: str) -> tuple[int]:
        with engine.begin() as connection:
            connection.execute(text("SELECT 1 FROM plan FOR UPDATE NOWAIT"))
        with pytest.raises(NestedStep):
            run.step("inner", write_entry, "inner")
        return (1,)

    run = plans.claim(approved_plan(session_factory))
    assert run is not None
    assert run.keyed("only", call) == (1,)
    with pytest.raises(ResultError):
        run.keyed("other", lambda key: (1,))
    assert entries(engine) == []


def test_a_failure_of_a_keyed_step_is_its_receipt(session_factory: sessionmaker[Session], plans: Runs[Plan]) -> None:
    outcome = plans.execute(approved_plan(session_factory), lambda run: run.keyed("charge", lambda key: 1 / 0))
    assert outcome.status is PlanStatus.FAILED
    assert [(receipt.effect, receipt.outcome) for receipt in outcome.receipts] == [("keyed", "failed")]


# --- the same key, whoever makes the call, and when


def test_the_key_is_the_same_in_every_attempt_and_after_a_requeue_and_in_both_forms(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], gateway: Gateway
) -> None:
    ident = approved_plan(session_factory)

    def die(key: str) -> None:
        gateway.charge(key, 100)
        raise KeyboardInterrupt

    def fail(key: str) -> None:
        gateway.charge(key, 100)
        raise ValueError

    with suppress(KeyboardInterrupt):
        plans.execute(ident, lambda run: run.keyed("charge", die))
    assert plans.claim(ident) is not None
    let_lapse(session_factory, ident)
    assert plans.execute(ident, lambda run: run.keyed("charge", fail)).status is PlanStatus.FAILED
    assert plans.requeue(ident)

    async def charge(key: str, amount: int) -> str:
        return gateway.charge(key, amount)

    async def carry_out(run: Any) -> None:
        assert await run.keyed("charge", charge, 100) == "100 EUR"
        assert gateway.calls[-1] == run.idempotency_key("charge")

    outcome = carried_out(engine, lambda plans: plans.execute(ident, carry_out))
    assert outcome.status is PlanStatus.EXECUTED, outcome.exception
    assert len(gateway.calls) == 3
    assert list(gateway.charges.values()) == [100]
    assert plans.receipts(ident) == outcome.receipts


def test_the_key_is_the_same_however_the_run_was_claimed(
    session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    keys: list[str] = []

    def note(run: Run[Plan]) -> None:
        keys.append(run.idempotency_key("charge"))
        run.release()

    claims: list[Callable[[], Any]] = [lambda: [plans.claim(ident)], lambda: plans.claim_due(1)]
    for claim in claims:
        (run,) = claim()
        assert run is not None
        keys.append(plans.hold(run.lease).idempotency_key("charge"))
        note(run)
    plans.execute(ident, note)
    assert len(keys) == 5
    assert len(set(keys)) == 1


@pytest.mark.parametrize("zone", ["UTC", "Asia/Kathmandu", "America/St_Johns"])
def test_the_key_depends_on_no_time_zone_of_a_session(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], zone: str
) -> None:
    ident = approved_plan(session_factory)
    run = plans.claim(ident)
    assert run is not None
    key = run.idempotency_key("charge")
    run.release()
    elsewhere = create_engine(engine.url, connect_args={"options": f"-c timezone={zone} -c datestyle=ISO,DMY"})
    again = Runs(sessionmaker(elsewhere), Plan, PlanStep).claim(ident)
    assert again is not None
    assert again.idempotency_key("charge") == key
    elsewhere.dispose()


PROGRAM = """
import sys
from uuid import UUID
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker
from sqla_durable import Runs
from tests.support import Plan, PlanStep
run = Runs(sessionmaker(create_engine(sys.argv[1])), Plan, PlanStep).claim(UUID(sys.argv[2]))
print(run.idempotency_key("charge"))
run.release()
"""


def test_the_key_is_the_same_in_another_process_of_another_time_zone_and_hash_seed(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    url = engine.url.render_as_string(hide_password=False)
    keys = set()
    for seed, zone in ("1", "Asia/Tokyo"), ("2", "America/New_York"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "TZ": zone, "PGTZ": zone}
        command = [sys.executable, "-c", PROGRAM, url, str(ident)]
        keys.add(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip())
    run = plans.claim(ident)
    assert run is not None
    assert keys == {run.idempotency_key("charge")}


def test_the_key_does_not_follow_what_the_handler_does_to_its_own_object(
    session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    run = plans.claim(approved_plan(session_factory))
    assert run is not None
    key = run.idempotency_key("charge")
    run.row.note = "changed"
    run.row.created_at = datetime(2000, 1, 1, tzinfo=UTC)
    assert run.idempotency_key("charge") == key


# --- another key for everything else


def test_no_two_steps_runs_tables_schemas_or_instants_share_a_key() -> None:
    keys = {
        idempotency_key(*parts)
        for parts in [
            ("plan", (1,), CREATED, "charge"),
            ("plan", (1,), CREATED, "refund"),
            ("plan", (2,), CREATED, "charge"),
            ("job", (1,), CREATED, "charge"),
            ("tenant.plan", (1,), CREATED, "charge"),
            ("plan", (1,), CREATED + timedelta(microseconds=1), "charge"),
            ("plan", (1, 1), CREATED, "charge"),
            ("plan", ("1", "1"), CREATED, 'char","ge'),
            ("plan", ('1","1',), CREATED, "charge"),
            ("plan", (11,), CREATED, "charge"),
        ]
    }
    assert len(keys) == 10


def test_two_databases_with_the_same_table_and_primary_key_have_other_keys(
    session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    keys = []
    for _ in range(2):
        ident = approved_plan(session_factory, id=UUID(int=1))
        run = plans.claim(ident)
        assert run is not None
        keys.append(run.idempotency_key("charge"))
        with session_factory.begin() as session:
            session.delete(session.get_one(Plan, ident))
    assert keys[0] != keys[1]


def test_an_int_step_key_is_taken_as_it_is_stored(session_factory: sessionmaker[Session], plans: Runs[Plan]) -> None:
    run = plans.claim(approved_plan(session_factory))
    assert run is not None
    seen: list[str] = []
    run.keyed(7, seen.append)
    assert seen == [run.idempotency_key(7)]
    with pytest.raises(UsageError, match="digits only"):
        run.idempotency_key("7")
    assert UUID(seen[0]).version == 5


def test_the_key_is_the_one_it_has_always_been() -> None:
    assert UUID("6b1f8a52-3c0e-4d7b-9a64-1d2f70c5e8b3") == NAMESPACE
    ident = UUID(int=7)
    assert idempotency_key("app.plan", (ident, 3), CREATED, "charge") == GOLDEN


GOLDEN = "8e828b4a-a7ac-5604-b7e2-41e0bea2a9e6"


# --- primary keys of every kind


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, "true"),
        (10**30, "1" + 30 * "0"),
        (-5, "-5"),
        ("Zoë\n", "Zoë\n"),
        (JobStatus.READY, "ready"),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (Decimal("1.50"), "1.5"),
        (Decimal(100), "100"),
        (Decimal("1E+2"), "100"),
        (Decimal("0.00"), "0"),
        (Decimal("1." + 40 * "1"), "1." + 40 * "1"),
        (0.1, "0.1"),
        (b"\0\xff", "00ff"),
        (memoryview(b"\0\xff"), "00ff"),
        (CREATED, "2024-02-29T12:30:15.000250+00:00"),
        (CREATED.astimezone(timezone(timedelta(hours=5, minutes=45))), "2024-02-29T12:30:15.000250+00:00"),
        (CREATED.replace(tzinfo=None), "2024-02-29T12:30:15.000250"),
        (date(2024, 2, 29), "2024-02-29"),
        (time(1, 2), "01:02:00.000000"),
        (timedelta(days=-1, microseconds=1), "-86399999999"),
        (ip_address("::1"), "::1"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_part_of_a_primary_key_has_one_text(value: object, expected: str) -> None:
    assert canonical(value) == expected


@pytest.mark.parametrize("value", [None, object(), [1], Range(1, 2)], ids=lambda value: type(value).__name__)
def test_a_part_of_a_primary_key_without_a_text_of_its_own_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match="is part of the run's primary key"):
        canonical(value)


class Shouted(TypeDecorator[str]):
    """Upper case in Python, lower case in the database."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        return None if value is None else value.lower()

    def process_result_value(self, value: str | None, dialect: Any) -> str | None:
        return None if value is None else value.upper()


KEYS: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    "int": (Integer, 1, "1"),
    "str": (lambda: String(5), "a", "a"),
    "numeric": (lambda: Numeric(10, 2), Decimal("1.5"), "1.5"),
    "date": (Date, date(2024, 2, 29), "2024-02-29"),
    "instant": (lambda: DateTime(timezone=True), CREATED, "2024-02-29T12:30:15.000250+00:00"),
    "bytes": (LargeBinary, b"\0\xff", "00ff"),
    "enum by value": (
        lambda: Enum(JobStatus, native_enum=False, values_callable=lambda kind: [member.value for member in kind]),
        JobStatus.READY,
        "ready",
    ),
    "enum by name": (lambda: Enum(JobStatus, native_enum=False), JobStatus.READY, "READY"),
    "decorated": (Shouted, "LOUD", "loud"),
}


@pytest.mark.parametrize("case", KEYS)
def test_the_key_is_made_of_what_the_driver_is_given(engine: Engine, case: str) -> None:
    type_, value, expected = KEYS[case]

    class Base(DeclarativeBase):
        pass

    class Task(RunMixin, Base):
        __tablename__ = "task"
        __lifecycle__ = job_lifecycle()
        id: Mapped[Any] = mapped_column(type_(), primary_key=True, autoincrement=False)
        status: Mapped[JobStatus] = __lifecycle__.machine.column()

    class TaskStep(ReceiptMixin[Task], Base):
        __tablename__ = "task_step"

    Base.metadata.create_all(engine)
    factory = sessionmaker(engine)
    with factory.begin() as session:
        session.add(Task(id=value, created_at=CREATED))
    run = Runs(factory, Task, TaskStep).claim(value)
    assert run is not None
    assert run.idempotency_key("charge") == idempotency_key("task", (expected,), CREATED, "charge")


def test_a_range_in_the_primary_key_refuses_keyed_steps_only(engine: Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Task(RunMixin, Base):
        __tablename__ = "task"
        __lifecycle__ = job_lifecycle()
        id: Mapped[Any] = mapped_column(INT4RANGE, primary_key=True)
        status: Mapped[JobStatus] = __lifecycle__.machine.column()

    class TaskStep(ReceiptMixin[Task], Base):
        __tablename__ = "task_step"

    Base.metadata.create_all(engine)
    factory = sessionmaker(engine)
    with factory.begin() as session:
        session.add(Task(id=Range(1, 2)))
    run = Runs(factory, Task, TaskStep).claim(Range(1, 2))
    assert run is not None
    assert run.external("call", lambda: 1) == 1
    with pytest.raises(UsageError, match=r"hand it to an external step"):
        run.keyed("charge", lambda key: pytest.fail("called"))


def test_an_instant_of_insertion_that_is_not_loaded_is_an_error_that_says_so(engine: Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Task(RunMixin, Base):
        __tablename__ = "task"
        __lifecycle__ = job_lifecycle()
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[JobStatus] = __lifecycle__.machine.column()
        created_at: Mapped[datetime] = mapped_column(
            DateTime(timezone=True), server_default=text("now()"), deferred=True
        )

    class TaskStep(ReceiptMixin[Task], Base):
        __tablename__ = "task_step"

    Base.metadata.create_all(engine)
    factory = sessionmaker(engine)
    with factory.begin() as session:
        session.add(Task(id=1))
    run = Runs(factory, Task, TaskStep).claim(1)
    assert run is not None
    with pytest.raises(UsageError, match=r"Task.created_at is None .* not deferred"):
        run.keyed("charge", lambda key: pytest.fail("called"))


def test_the_schema_that_an_engine_translates_to_is_part_of_the_key(engine: Engine) -> None:
    keys = []
    for schema in "one", "two":
        translated = engine.execution_options(schema_translate_map={None: schema})
        with engine.begin() as connection:
            connection.execute(text(f"CREATE SCHEMA {schema}"))
        Plan.metadata.create_all(translated)
        factory = sessionmaker(translated)
        ident = approved_plan(factory, id=UUID(int=1), created_at=CREATED)
        run = Runs(factory, Plan, PlanStep).claim(ident)
        assert run is not None
        keys.append(run.idempotency_key("charge"))
    assert keys[0] == idempotency_key("one.plan", (UUID(int=1),), CREATED, "charge")
    assert keys[1] == idempotency_key("two.plan", (UUID(int=1),), CREATED, "charge")


def test_the_key_costs_no_statement(session_factory: sessionmaker[Session], plans: Runs[Plan], engine: Engine) -> None:
    run = plans.claim(approved_plan(session_factory))
    assert run is not None

    def refuse(*_: object) -> None:
        pytest.fail("a statement was sent")

    event.listen(engine, "before_cursor_execute", refuse)
    run.idempotency_key("charge")
    event.remove(engine, "before_cursor_execute", refuse)
