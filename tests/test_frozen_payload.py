"""A frozen payload: what was approved is what is carried out, whoever flushes what and when."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import (
    ConfigurationError,
    Ending,
    FrozenPayload,
    ReceiptMixin,
    Run,
    RunMixin,
    Runs,
    TransactionConflict,
)
from sqla_durable.asyncio import transition
from tests.support import Background, wait_until_blocked
from tests.support_consent import (
    AHEAD,
    Consent,
    ConsentBase,
    ConsentStep,
    Status,
    add_consent,
    consent_lifecycle,
    consent_statuses,
    stored,
)
from tests.support_jobs import JobStatus, job_lifecycle
from tests.support_statements import statements

LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]
DRAFTS = [Status.DRAFT, Status.PENDING]
SETTLED = [Status.APPROVED, Status.EXECUTING, Status.EXECUTED, Status.FAILED, Status.REJECTED, Status.EXPIRED]


@pytest.fixture
def engine(empty_url: str) -> Iterator[Engine]:
    engine = create_engine(empty_url)
    ConsentBase.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def consents(session_factory: sessionmaker[Session]) -> Runs[Consent]:
    return Runs(session_factory, Consent, ConsentStep)


def consent_in(engine: Engine, status: Status) -> int:
    leased = {"lease_owner": "x", "lease_expires_at": AHEAD, "fence": 1} if status is Status.EXECUTING else {}
    return add_consent(engine, status, title="one", **leased)


def assign(consent: Consent) -> None:
    consent.actions = ["b"]


def append(consent: Consent) -> None:
    consent.actions.append("b")


def remove(consent: Consent) -> None:
    consent.actions[:] = []


def rename(consent: Consent) -> None:
    consent.title = "two"


CHANGES = [assign, append, remove, rename]
every_change = pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)


# a flush


@every_change
@pytest.mark.parametrize("status", DRAFTS)
def test_the_payload_of_a_draft_changes(
    engine: Engine, session_factory: sessionmaker[Session], status: Status, change: Callable[[Consent], None]
) -> None:
    ident = consent_in(engine, status)
    before = stored(engine, ident)
    with session_factory.begin() as session:
        change(session.get_one(Consent, ident))
    assert stored(engine, ident) != before


@every_change
@pytest.mark.parametrize("status", SETTLED)
def test_the_payload_of_what_is_no_draft_any_more_does_not(
    engine: Engine, session_factory: sessionmaker[Session], status: Status, change: Callable[[Consent], None]
) -> None:
    ident = consent_in(engine, status)
    before = stored(engine, ident)
    name = "title" if change is rename else "actions"
    with session_factory() as session:
        change(session.get_one(Consent, ident))
        with pytest.raises(
            FrozenPayload, match=f"^{name} of Consent {ident} cannot change in {status.value}: .* only while it is"
        ):
            session.flush()
    assert stored(engine, ident) == before


@pytest.mark.parametrize("to", [Status.APPROVED, Status.DRAFT, Status.PENDING])
def test_nor_together_with_the_status(engine: Engine, session_factory: sessionmaker[Session], to: Status) -> None:
    ident = consent_in(engine, Status.REJECTED)
    with session_factory() as session:
        consent = session.get_one(Consent, ident)
        consent.status = to
        consent.actions = ["b"]
        with pytest.raises(FrozenPayload):
            session.flush()
    assert stored(engine, ident).actions == ["a"]


def test_an_object_whose_old_payload_was_never_loaded_does_not_get_past(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    ident = consent_in(engine, Status.APPROVED)
    with session_factory() as session:
        consent = session.get_one(Consent, ident)
        session.expire(consent)
        consent.actions = ["b"]
        with pytest.raises(FrozenPayload):
            session.commit()
    with session_factory() as session:
        session.merge(Consent(id=ident, actions=["c"]))
        with pytest.raises(FrozenPayload):
            session.commit()
    assert stored(engine, ident).actions == ["a"]


def test_what_is_not_frozen_or_not_changed_costs_no_statement_and_is_flushed(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    ident = consent_in(engine, Status.APPROVED)
    with session_factory() as session:
        consent = session.get_one(Consent, ident)
        consent.actions, consent.title = ["a"], "one"
        consent.note = "free"
        with statements(engine) as sent:
            session.commit()
    assert [statement.split()[0] for statement in sent] == ["UPDATE"]
    assert stored(engine, ident).note == "free"


def test_a_run_may_be_inserted_in_any_status_with_its_payload(session_factory: sessionmaker[Session]) -> None:
    with session_factory.begin() as session:
        session.add_all([Consent(status=status, actions=["a"]) for status in (Status.PENDING, Status.APPROVED)])


def test_a_row_that_is_gone_is_reported_by_sqlalchemy_as_ever(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    from sqlalchemy.orm.exc import StaleDataError

    ident = consent_in(engine, Status.PENDING)
    with session_factory() as session:
        consent = session.get_one(Consent, ident)
        with engine.begin() as connection:
            connection.exec_driver_sql("DELETE FROM consent")
        consent.actions = ["b"]
        with pytest.raises(StaleDataError):
            session.flush()


# two sessions


@pytest.mark.parametrize("level", LEVELS)
@every_change
def test_a_change_made_to_a_draft_that_was_approved_meanwhile_is_refused(
    engine: Engine, level: str, change: Callable[[Consent], None]
) -> None:
    ident = consent_in(engine, Status.PENDING)
    keeping = create_engine(engine.url, isolation_level=level)
    with Session(keeping) as editor:
        consent = editor.get_one(Consent, ident)
        change(consent)
        with Session(engine) as approver, approver.begin():
            assert consent_statuses.transition(approver, (Consent, ident), Status.APPROVED)
        before = stored(engine, ident)
        with pytest.raises(FrozenPayload if level == "READ COMMITTED" else TransactionConflict):
            editor.flush()
    keeping.dispose()
    assert stored(engine, ident) == before


@pytest.mark.parametrize("level", LEVELS)
def test_a_change_waits_for_an_approval_under_way_and_is_refused(engine: Engine, level: str) -> None:
    ident = consent_in(engine, Status.PENDING)
    keeping = create_engine(engine.url, isolation_level=level)

    def edit() -> None:
        with Session(keeping) as editor, editor.begin():
            editor.get_one(Consent, ident).actions = ["b"]

    with Session(engine) as approver, approver.begin():
        assert consent_statuses.transition(approver, (Consent, ident), Status.APPROVED)
        editing = Background(edit)
        wait_until_blocked(engine)
    with pytest.raises(FrozenPayload if level == "READ COMMITTED" else TransactionConflict):
        editing.result()
    keeping.dispose()
    row = stored(engine, ident)
    assert (row.status, row.actions) == (Status.APPROVED, ["a"])


@pytest.mark.parametrize("level", LEVELS)
def test_an_approval_waits_for_a_change_under_way_and_approves_what_was_changed(engine: Engine, level: str) -> None:
    ident = consent_in(engine, Status.PENDING)
    keeping = create_engine(engine.url, isolation_level=level)

    def approve() -> bool:
        with Session(keeping) as approver, approver.begin():
            return consent_statuses.transition(approver, (Consent, ident), Status.APPROVED)

    with Session(keeping) as editor, editor.begin():
        editor.get_one(Consent, ident).actions = ["b"]
        editor.flush()
        approving = Background(approve)
        wait_until_blocked(engine)
    if level == "READ COMMITTED":
        assert approving.result() is True
    else:
        with pytest.raises(TransactionConflict):
            approving.result()
        assert approve() is True
    keeping.dispose()
    row = stored(engine, ident)
    assert (row.status, row.actions) == (Status.APPROVED, ["b"])


def test_an_approval_of_what_was_seen_loses_to_a_change(engine: Engine) -> None:
    ident = consent_in(engine, Status.PENDING)

    def approve() -> bool:
        seen = Consent.actions == ["a"]
        with Session(engine) as approver, approver.begin():
            return consent_statuses.transition(approver, (Consent, ident), Status.APPROVED, where=seen)

    with Session(engine) as editor, editor.begin():
        editor.get_one(Consent, ident).actions = ["b"]
        editor.flush()
        approving = Background(approve)
        wait_until_blocked(engine)
    assert approving.result() is False
    assert stored(engine, ident).status is Status.PENDING


@pytest.mark.unguarded
def test_the_lock_that_a_change_takes_lets_others_insert_what_refers_to_the_run(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    ident = consent_in(engine, Status.PENDING)
    with session_factory() as session:
        session.get_one(Consent, ident).actions = ["b"]
        session.flush()
        with engine.begin() as other:
            other.exec_driver_sql("SET LOCAL lock_timeout = '2s'")
            other.exec_driver_sql(
                "INSERT INTO consent_step (consent_id, step, outcome, effect, fence, result)"
                f" VALUES ({ident}, 'x', 'succeeded', 'external', 1, '1')"
            )


# transitions and landings


@pytest.mark.parametrize("from_", [None, Status.PENDING])
def test_a_transition_that_leaves_a_draft_may_set_what_it_approves(
    engine: Engine, session_factory: sessionmaker[Session], from_: Any
) -> None:
    ident = consent_in(engine, Status.PENDING)
    with session_factory.begin() as session:
        assert consent_statuses.transition(
            session, (Consent, ident), Status.APPROVED, from_=from_, values={"actions": ["b"]}
        )
    assert stored(engine, ident).actions == ["b"]


@pytest.mark.parametrize(
    "from_", [None, Status.APPROVED, [Status.PENDING, Status.APPROVED]], ids=["any", "one", "both"]
)
def test_a_transition_that_may_leave_anything_else_sets_no_payload_and_says_so_before_any_sql(
    engine: Engine, session_factory: sessionmaker[Session], from_: Any
) -> None:
    ident = consent_in(engine, Status.PENDING)
    with (
        session_factory() as session,
        statements(engine) as sent,
        pytest.raises(FrozenPayload, match="actions of Consent cannot change in may start"),
    ):
        consent_statuses.transition(session, (Consent, ident), Status.REJECTED, from_=from_, values={"actions": []})
    assert sent == []


@pytest.mark.parametrize(
    "land",
    [lambda run: run.finish(actions=[], note="n"), lambda run: run.fail(ValueError(), title=None)],
    ids=["finish", "fail"],
)
def test_a_landing_sets_no_payload_and_says_so_before_any_sql(
    engine: Engine, consents: Runs[Consent], land: Callable[[Run[Consent]], None]
) -> None:
    run = consents.claim(consent_in(engine, Status.APPROVED))
    assert run is not None
    with statements(engine) as sent, pytest.raises(FrozenPayload, match="cannot change in under way"):
        land(run)
    assert sent == []
    run.finish(note="not frozen")


def test_a_step_that_changes_the_payload_of_its_run_has_no_effect_and_fails_it(
    engine: Engine, consents: Runs[Consent]
) -> None:
    ident = consent_in(engine, Status.APPROVED)

    def body(session: Session) -> None:
        consent = session.get_one(Consent, ident)
        consent.note = "written"
        consent.actions.append("b")

    outcome = consents.execute(ident, lambda run: run.step("only", body))
    assert (outcome.ending, outcome.status) == (Ending.LANDED, Status.FAILED)
    assert outcome.receipts == ()
    assert outcome.failure is not None
    assert outcome.failure.type == "sqla_durable.exc.FrozenPayload"
    row = stored(engine, ident)
    assert (row.actions, row.note) == (["a"], None)


def test_a_conflict_over_a_draft_inside_a_step_has_the_step_tried_again(engine: Engine) -> None:
    ident, other = consent_in(engine, Status.APPROVED), consent_in(engine, Status.PENDING)
    keeping = create_engine(engine.url, isolation_level="REPEATABLE READ")
    seen: list[Status] = []

    def body(session: Session) -> None:
        consent = session.get_one(Consent, other)
        seen.append(consent.status)
        if len(seen) == 1:
            with Session(engine) as approver, approver.begin():
                assert consent_statuses.transition(approver, (Consent, other), Status.APPROVED)
        consent.actions = ["b"]

    def carry_out(run: Run[Consent]) -> None:
        with pytest.raises(FrozenPayload):
            run.step("only", body)

    Runs(sessionmaker(keeping), Consent, ConsentStep).execute(ident, carry_out)
    keeping.dispose()
    assert seen == [Status.PENDING, Status.APPROVED]
    assert stored(engine, other).actions == ["a"]


def test_the_whole_life_of_a_run_leaves_its_payload_alone(
    engine: Engine, session_factory: sessionmaker[Session], consents: Runs[Consent]
) -> None:
    ident = consent_in(engine, Status.APPROVED)

    def merge(session: Session, row: Consent) -> None:
        session.merge(row).note = "merged"

    assert consents.execute(ident, lambda run: run.step("only", merge, run.row)).status is Status.EXECUTED
    row = stored(engine, ident)
    assert (row.actions, row.note) == (["a"], "merged")


@pytest.mark.parametrize("way", ["bulk update", "mappings", "raw"])
def test_what_goes_past_the_unit_of_work_goes_past_the_guard(
    engine: Engine, session_factory: sessionmaker[Session], way: str
) -> None:
    """The documentation says so; only the database could refuse these."""
    ident = consent_in(engine, Status.APPROVED)
    with session_factory.begin() as session:
        if way == "bulk update":
            session.execute(update(Consent).values(actions=["b"]))
        elif way == "mappings":
            session.execute(update(Consent), [{"id": ident, "actions": ["b"]}])
        else:
            session.connection().exec_driver_sql("UPDATE consent SET actions = '[\"b\"]'")
    assert stored(engine, ident).actions == ["b"]


# asyncio


def test_asyncio_refuses_the_same(engine: Engine) -> None:
    approved, draft = (consent_in(engine, status) for status in (Status.APPROVED, Status.PENDING))

    async def main() -> None:
        through = create_async_engine(engine.url)
        factory = async_sessionmaker(through)
        async with factory() as session:
            changed = await session.get_one(Consent, draft)
            changed.actions.append("b")
            await session.commit()
            refused = await session.get_one(Consent, approved)
            refused.actions.append("b")
            with pytest.raises(FrozenPayload):
                await session.commit()
        async with factory() as session:
            with pytest.raises(FrozenPayload):
                await transition(
                    consent_statuses, session, (Consent, approved), Status.CANCELLED, values={"actions": []}
                )
        await through.dispose()

    asyncio.run(main())
    assert (stored(engine, draft).actions, stored(engine, approved).actions) == (["a", "b"], ["a"])


# declared


def test_a_draft_leads_to_ready_and_cannot_be_come_back_to() -> None:
    assert consent_lifecycle().drafts == set(DRAFTS)
    assert job_lifecycle().drafts == frozenset()


def test_where_a_run_is_ready_from_the_start_its_payload_is_frozen_once_inserted(bare_jobs: Engine) -> None:
    with Session(bare_jobs, expire_on_commit=False) as session:
        job = Job(payload=["a"])
        session.add(job)
        session.flush()
        job.payload = ["b"]
        with pytest.raises(FrozenPayload, match=r"payload of .* cannot change in ready: .* never, once it is inserted"):
            session.commit()


class Base(DeclarativeBase):
    pass


class Job(RunMixin, Base):
    __tablename__ = "frozen_job"
    __lifecycle__ = job_lifecycle(frozen=["payload"])
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[JobStatus] = __lifecycle__.machine.column()
    payload: Mapped[list[str]] = mapped_column(JSONB)


class JobStep(ReceiptMixin[Job], Base):
    __tablename__ = "frozen_job_step"


@pytest.fixture
def bare_jobs(engine: Engine) -> Engine:
    Base.metadata.create_all(engine)
    return engine


@pytest.mark.parametrize(
    ("frozen", "said"),
    [
        (("nothing",), r"Lifecycle\(frozen=\): Made maps no attribute 'nothing' to a column of table 'made'"),
        (("status",), "Made.status is the status, the key, or written by the library; name attributes of your own"),
        (("id",), "Made.id is the status, the key"),
        (("payload", "fence"), "Made.fence is the status, the key"),
        (("available_at",), "Made.available_at is the status, the key"),
        ("payload", r"Lifecycle\(frozen='payload'\): pass a tuple of names, \('payload',\)"),
    ],
)
def test_what_cannot_be_frozen_is_refused_at_class_definition(frozen: Any, said: str) -> None:
    class New(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match=said):

        class Made(RunMixin, New):
            __tablename__ = "made"
            __lifecycle__ = job_lifecycle(frozen=frozen)
            id: Mapped[int] = mapped_column(primary_key=True)
            status: Mapped[JobStatus] = __lifecycle__.machine.column()
            payload: Mapped[list[str]] = mapped_column(JSONB)
