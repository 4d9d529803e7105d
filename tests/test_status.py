"""The conditional transition: one statement that says whether it won, and objects that show the truth either way."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, create_engine, delete, func, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import (
    ConfigurationError,
    RunMixin,
    Runs,
    StatusMachine,
    TransactionConflict,
    UndeclaredTransition,
    UsageError,
)
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, column, plan_statuses
from tests.support_jobs import JobStatus, job_lifecycle
from tests.support_statements import statements

PENDING, APPROVED, REJECTED = PlanStatus.PENDING, PlanStatus.APPROVED, PlanStatus.REJECTED


class Light(StrEnum):
    RED = "r"
    GREEN = "g"


class SignalBase(DeclarativeBase):
    pass


light_machine = StatusMachine(Light, initial=Light.RED, transitions={Light.RED: {Light.GREEN}})


class Signal(SignalBase):
    __tablename__ = "signal"
    id: Mapped[int] = mapped_column(primary_key=True)
    light: Mapped[Light] = light_machine.column("colour")


@pytest.fixture
def ident(session_factory: sessionmaker[Session]) -> UUID:
    with session_factory.begin() as session:
        plan = Plan(note="as it was")
        session.add(plan)
        session.flush()
        return plan.id


@pytest.fixture
def session(session_factory: sessionmaker[Session]) -> Iterator[Session]:
    with session_factory() as session:
        yield session


def elsewhere(engine: Engine, ident: UUID, **values: Any) -> None:
    """Another transaction changes the plan and commits."""
    with engine.begin() as connection:
        connection.execute(update(Plan).where(Plan.id == ident).values(**values))


# won and lost


def test_a_won_transition_is_true_and_a_loaded_object_shows_it_without_another_statement(
    engine: Engine, session: Session, ident: UUID
) -> None:
    plan = session.get_one(Plan, ident)
    with statements(engine) as sent:
        assert plan_statuses.transition(session, plan, APPROVED) is True
        assert plan.status is APPROVED
        assert plan.note == "as it was"
    assert len(sent) == 1
    assert column(engine, ident, "status") is PENDING
    session.commit()
    assert column(engine, ident, "status") is APPROVED


def test_a_lost_transition_is_false_and_a_loaded_object_shows_who_won(
    engine: Engine, session: Session, ident: UUID
) -> None:
    plan = session.get_one(Plan, ident)
    session.commit()
    assert plan.status is PENDING
    elsewhere(engine, ident, status=REJECTED, note="theirs")
    assert plan_statuses.transition(session, plan, APPROVED, values={"note": "ours"}) is False
    with statements(engine) as sent:
        assert plan.status is REJECTED
        assert plan.note == "theirs"
    assert sent == []
    assert not session.dirty


def test_a_transition_by_key_shows_on_the_object_that_the_session_has(session: Session, ident: UUID) -> None:
    plan = session.get_one(Plan, ident)
    assert plan_statuses.transition(session, (Plan, ident), APPROVED)
    assert plan.status is APPROVED


def test_a_transition_is_rolled_back_with_the_callers_transaction(
    engine: Engine, session: Session, ident: UUID
) -> None:
    assert plan_statuses.transition(session, (Plan, ident), APPROVED)
    session.rollback()
    assert column(engine, ident, "status") is PENDING


def test_pending_changes_of_the_object_are_flushed_and_kept(engine: Engine, session: Session, ident: UUID) -> None:
    plan = session.get_one(Plan, ident)
    plan.note = "edited"
    assert plan_statuses.transition(session, plan, APPROVED)
    session.commit()
    assert column(engine, ident, "note") == "edited"


def test_an_object_that_is_only_added_is_flushed_and_moves(session: Session) -> None:
    plan = Plan()
    session.add(plan)
    assert plan_statuses.transition(session, plan, APPROVED)
    assert plan.status is APPROVED


# how the row is named


@pytest.mark.parametrize(
    "name", [lambda ident: ident, lambda ident: (Plan, ident), lambda ident: (Plan, {"id": ident})], ids=range(3)
)
def test_a_row_is_named_by_its_key_with_or_without_its_class(
    engine: Engine, session: Session, ident: UUID, name: Any
) -> None:
    with statements(engine) as sent:
        assert plan_statuses.transition(session, name(ident), APPROVED)
    assert len(sent) == 1


def test_a_detached_object_shows_the_truth_too(engine: Engine, session: Session, ident: UUID) -> None:
    with Session(engine, expire_on_commit=False) as other:
        plan = other.get_one(Plan, ident)
    assert plan_statuses.transition(session, plan, APPROVED)
    assert plan.status is APPROVED
    with Session(engine, expire_on_commit=False) as other:
        lost = other.get_one(Plan, approved_plan(sessionmaker(engine)))
    elsewhere(engine, lost.id, status=PlanStatus.CANCELLED)
    assert not plan_statuses.transition(session, lost, PlanStatus.CANCELLED)
    assert lost.status is PlanStatus.CANCELLED


def test_an_object_of_another_session_is_refused_before_any_sql(engine: Engine, session: Session, ident: UUID) -> None:
    with Session(engine) as other:
        plan = other.get_one(Plan, ident)
        with statements(engine) as sent, pytest.raises(UsageError, match=r"another session; pass .* \(Class, ident\)"):
            plan_statuses.transition(session, plan, APPROVED)
    assert sent == []


def test_an_object_that_was_never_added_is_refused(engine: Engine, session: Session) -> None:
    with statements(engine) as sent, pytest.raises(UsageError, match="not in the database yet; add it to a session"):
        plan_statuses.transition(session, Plan(), APPROVED)
    assert sent == []


@pytest.mark.parametrize("wrong", [None, (1, 2), {}], ids=repr)
def test_what_is_no_key_of_the_class_is_refused_and_the_key_named(
    engine: Engine, session: Session, wrong: object
) -> None:
    with statements(engine) as sent, pytest.raises(UsageError, match=r"does not identify a Plan; its key is \(id\)"):
        plan_statuses.transition(session, (Plan, wrong), APPROVED)
    assert sent == []


def test_a_deleted_row_is_a_lost_race_whether_its_object_is_attached_detached_or_not_loaded(
    engine: Engine, session: Session, session_factory: sessionmaker[Session]
) -> None:
    idents = [approved_plan(session_factory) for _ in range(3)]
    attached = session.get_one(Plan, idents[0])
    with Session(engine) as other:
        detached = other.get_one(Plan, idents[1])
    with engine.begin() as connection:
        connection.execute(delete(Plan))
    for target in (attached, detached, (Plan, idents[2]), (Plan, uuid4())):
        assert plan_statuses.transition(session, target, PlanStatus.CANCELLED) is False
    assert detached.status is APPROVED


def test_a_bare_key_needs_a_machine_that_one_run_class_uses(session: Session) -> None:
    class Base(DeclarativeBase):
        pass

    lifecycle = job_lifecycle()
    machine = lifecycle.machine
    with pytest.raises(UsageError, match=r"no run class uses this machine, so 1 does not say .* \(Class, ident\)"):
        machine.transition(session, 1, JobStatus.DONE)

    class One(RunMixin, Base):
        __tablename__ = "one"
        __lifecycle__ = lifecycle
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[JobStatus] = machine.column()

    class Two(RunMixin, Base):
        __tablename__ = "two"
        __lifecycle__ = lifecycle
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[JobStatus] = machine.column()

    with pytest.raises(UsageError, match=r"One, Two uses? this machine"):
        machine.transition(session, 1, JobStatus.DONE)


def test_a_class_without_a_column_of_the_machine_is_refused(session: Session) -> None:
    with pytest.raises(ConfigurationError, match=r"PlanStep has 0 columns made by .*\.column\(\)"):
        plan_statuses.transition(session, (PlanStep, (uuid4(), "a")), APPROVED)


# edges


@pytest.mark.parametrize(
    ("to", "from_", "message"),
    [
        (PlanStatus.EXECUTED, PENDING, "no edge pending -> executed"),
        (APPROVED, [PENDING, REJECTED], "no edge rejected -> approved; .*terminal"),
        (PENDING, None, "pending"),
        (APPROVED, [], "approved"),
        (JobStatus.DONE, None, "is not a status of PlanStatus"),
        ("approved", None, "is not a status of PlanStatus"),
        (APPROVED, "pending", "is not a status of PlanStatus"),
    ],
    ids=["edge", "one of several", "no edge leads there", "from nothing", "stranger", "plain text", "plain from"],
)
def test_an_undeclared_edge_is_refused_before_any_sql(
    engine: Engine, session: Session, ident: UUID, to: Any, from_: Any, message: str
) -> None:
    with statements(engine) as sent, pytest.raises(UndeclaredTransition, match=message):
        plan_statuses.transition(session, (Plan, ident), to, from_=from_)
    assert sent == []


def test_becoming_running_is_left_to_a_claim(engine: Engine, session: Session, ident: UUID) -> None:
    with statements(engine) as sent, pytest.raises(UsageError, match=r"by a claim, .*Runs.claim\(\) or Runs.execute"):
        plan_statuses.transition(session, (Plan, ident), PlanStatus.EXECUTING)
    assert sent == []


@pytest.mark.parametrize("from_", [PENDING, [PENDING], (PENDING, APPROVED), {APPROVED}, None], ids=repr)
def test_only_the_named_statuses_are_left(session: Session, ident: UUID, from_: Any) -> None:
    won = plan_statuses.transition(session, (Plan, ident), PlanStatus.CANCELLED, from_=from_)
    assert won is (from_ != {APPROVED})


# where= and values=


def test_a_condition_is_part_of_the_same_statement(engine: Engine, session: Session, ident: UUID) -> None:
    young = Plan.created_at > func.statement_timestamp() - timedelta(hours=1)
    with statements(engine) as sent:
        assert not plan_statuses.transition(session, (Plan, ident), APPROVED, where=~young)
        assert plan_statuses.transition(session, (Plan, ident), APPROVED, where=young & Plan.note.is_not(None))
    assert len(sent) == 2


def test_values_are_set_if_and_only_if_the_transition_is_won(engine: Engine, session: Session, ident: UUID) -> None:
    plan = session.get_one(Plan, ident)
    assert not plan_statuses.transition(session, plan, APPROVED, where=Plan.note.is_(None), values={"note": "never"})
    assert plan.note == "as it was"
    values = {"note": func.upper(Plan.note), "actions": ["a", {"b": 1}]}
    assert plan_statuses.transition(session, plan, APPROVED, values=values)
    assert (plan.note, plan.actions) == ("AS IT WAS", ["a", {"b": 1}])
    session.commit()
    assert column(engine, ident, "note") == "AS IT WAS"


def test_a_value_for_what_is_no_attribute_is_refused_before_any_sql(
    engine: Engine, session: Session, ident: UUID
) -> None:
    with statements(engine) as sent, pytest.raises(UsageError, match="maps no attribute 'notes' to a column of table"):
        plan_statuses.transition(session, (Plan, ident), APPROVED, values={"notes": "x"})
    assert sent == []


# what a transition does to a run


def test_an_operator_who_ends_a_running_plan_takes_the_lease_and_notes_the_time(
    engine: Engine, session: Session, session_factory: sessionmaker[Session]
) -> None:
    run = Runs(session_factory, Plan, PlanStep).claim(approved_plan(session_factory))
    assert run is not None
    plan = session.get_one(Plan, run.lease.identity)
    assert plan_statuses.transition(session, plan, PlanStatus.FAILED, from_=PlanStatus.EXECUTING)
    assert (plan.lease_owner, plan.lease_expires_at) == (None, None)
    assert isinstance(plan.finished_at, datetime)
    session.commit()
    assert column(engine, plan.id, "fence") == 1


def test_a_holder_loses_its_run_to_a_transition_only_where_that_is_said(
    engine: Engine, session: Session, session_factory: sessionmaker[Session]
) -> None:
    run = Runs(session_factory, Plan, PlanStep).claim(approved_plan(session_factory))
    assert run is not None
    target = (Plan, run.lease.identity[0])
    assert not plan_statuses.transition(session, target, PlanStatus.CANCELLED)
    with (
        statements(engine) as sent,
        pytest.raises(UndeclaredTransition, match=r"only executing leads to failed.* from_="),
    ):
        plan_statuses.transition(session, target, PlanStatus.FAILED)
    assert sent == []
    assert plan_statuses.transition(session, target, PlanStatus.CANCELLED, from_=PlanStatus.EXECUTING)


def test_a_model_without_a_run_has_transitions_too(engine: Engine, session: Session) -> None:
    SignalBase.metadata.create_all(engine)
    signal = Signal()
    session.add(signal)
    assert light_machine.transition(session, signal, Light.GREEN)
    assert not light_machine.transition(session, signal, Light.GREEN)
    assert session.scalar(text("SELECT colour FROM signal")) == "g"


# the column


def test_the_database_holds_values_and_refuses_others(engine: Engine, session: Session, ident: UUID) -> None:
    assert session.scalar(text("SELECT status FROM plan")) == "pending"
    with pytest.raises(IntegrityError, match="plan_status_values"):
        session.execute(text("UPDATE plan SET status = 'PENDING'"))


def test_a_new_row_is_in_the_initial_status_in_python_and_on_the_server(engine: Engine, session: Session) -> None:
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO plan (id, actions) VALUES (gen_random_uuid(), '[]')"))
    assert session.scalars(select(Plan.status)).all() == [PENDING]


# under the levels that keep a snapshot


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_race_lost_to_a_later_snapshot_is_a_conflict_that_tells_the_caller_to_retry(
    engine: Engine, ident: UUID, isolation: str
) -> None:
    keeping = create_engine(engine.url, isolation_level=isolation)
    try:
        with Session(keeping) as session:
            plan = session.get_one(Plan, ident)
            elsewhere(engine, ident, status=REJECTED)
            with pytest.raises(TransactionConflict, match="retry the whole transaction"):
                plan_statuses.transition(session, plan, APPROVED)
            session.rollback()
            assert plan_statuses.transition(session, plan, APPROVED) is False
            assert plan.status is REJECTED
    finally:
        keeping.dispose()


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_row_deleted_after_the_snapshot_is_a_conflict_too(engine: Engine, ident: UUID, isolation: str) -> None:
    keeping = create_engine(engine.url, isolation_level=isolation)
    try:
        with Session(keeping) as session:
            session.get_one(Plan, ident)
            with engine.begin() as connection:
                connection.execute(delete(Plan))
            with pytest.raises(TransactionConflict):
                plan_statuses.transition(session, (Plan, ident), APPROVED)
    finally:
        keeping.dispose()
