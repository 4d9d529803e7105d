"""An expiry: until it has passed a run may leave its status; then only for expired, by a sweep or on being read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import DateTime, Engine, create_engine, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import (
    ConfigurationError,
    Ending,
    ExpiryMixin,
    Lifecycle,
    LostLease,
    Run,
    RunMixin,
    RunNotFound,
    Runs,
    StatusMachine,
    UsageError,
)
from sqla_durable.asyncio import AsyncRun, AsyncRuns, transition
from sqla_durable.testing import expire, lapse
from tests.support import Plan, PlanStep, approved_plan
from tests.support_consent import (
    AHEAD,
    HOUR,
    PASSED,
    SECOND,
    Consent,
    ConsentBase,
    ConsentStep,
    Status,
    add_consent,
    consent_lifecycle,
    consent_statuses,
    database_clock,
    status_of,
    stored,
)
from tests.support_statements import statements


@pytest.fixture
def engine(empty_url: str) -> Iterator[Engine]:
    engine = create_engine(empty_url)
    ConsentBase.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def consents(session_factory: sessionmaker[Session]) -> Runs[Consent]:
    return Runs(session_factory, Consent, ConsentStep)


def move(factory: sessionmaker[Session], ident: int, to: Status, **options: Any) -> bool:
    with factory.begin() as session:
        return consent_statuses.transition(session, (Consent, ident), to, **options)


# transitions


@pytest.mark.parametrize("to", [Status.APPROVED, Status.REJECTED])
@pytest.mark.parametrize(("expires_at", "won"), [(None, True), (AHEAD, True), (PASSED, False)], ids=str)
def test_a_run_leaves_a_status_that_can_expire_until_its_expiry_has_passed(
    engine: Engine, session_factory: sessionmaker[Session], to: Status, expires_at: Any, won: bool
) -> None:
    ident = add_consent(engine, expires_at=expires_at)
    assert move(session_factory, ident, to) is won
    assert status_of(engine, ident) is (to if won else Status.PENDING)


def test_a_loaded_object_shows_that_an_expired_run_was_not_approved(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    ident = add_consent(engine, expires_at=PASSED)
    with session_factory.begin() as session:
        consent = session.get_one(Consent, ident)
        assert not consent_statuses.transition(session, consent, Status.APPROVED, values={"note": "approved"})
        assert (consent.status, consent.note) == (Status.PENDING, None)


@pytest.mark.parametrize("expires_at", [None, AHEAD, PASSED], ids=str)
@pytest.mark.parametrize("status", [Status.PENDING, Status.APPROVED])
def test_an_operator_may_expire_a_run_at_any_time(
    engine: Engine, session_factory: sessionmaker[Session], expires_at: Any, status: Status
) -> None:
    ident = add_consent(engine, status, expires_at=expires_at)
    assert move(session_factory, ident, Status.EXPIRED)
    row = stored(engine, ident)
    assert row.status is Status.EXPIRED
    assert row.finished_at is not None


def test_a_status_without_an_edge_to_expired_is_left_at_any_time(
    engine: Engine, session_factory: sessionmaker[Session], consents: Runs[Consent]
) -> None:
    ident = add_consent(engine, Status.DRAFT, expires_at=PASSED)
    assert consents.reap() == 0
    assert move(session_factory, ident, Status.PENDING)


def test_of_several_statuses_only_those_that_can_expire_are_kept_from_being_left(
    engine: Engine, session_factory: sessionmaker[Session], consents: Runs[Consent]
) -> None:
    ready, running = (add_consent(engine, Status.APPROVED) for _ in range(2))
    assert consents.claim(running) is not None
    with engine.begin() as connection:
        connection.execute(update(Consent).values(expires_at=PASSED))
    leave = {"from_": {Status.APPROVED, Status.EXECUTING}}
    assert move(session_factory, running, Status.CANCELLED, **leave)
    assert not move(session_factory, ready, Status.CANCELLED, **leave)
    with engine.begin() as connection:
        connection.execute(update(Consent).values(expires_at=AHEAD))
    assert move(session_factory, ready, Status.CANCELLED, **leave)


def test_an_expiry_is_set_along_with_the_approval_that_it_limits(
    engine: Engine, session_factory: sessionmaker[Session], consents: Runs[Consent]
) -> None:
    ident = add_consent(engine)
    before = database_clock(engine)
    assert move(session_factory, ident, Status.APPROVED, values={"expires_at": func.now() + HOUR})
    assert before + HOUR <= stored(engine, ident).expires_at <= database_clock(engine) + HOUR
    assert consents.claim(ident) is not None


@pytest.mark.parametrize("value", [datetime(2999, 1, 1, tzinfo=UTC), func.now() + HOUR], ids=["aware", "SQL"])
def test_an_expiry_is_an_aware_datetime_or_an_expression(
    engine: Engine, session_factory: sessionmaker[Session], value: Any
) -> None:
    with session_factory.begin() as session:
        consent = Consent(status=Status.PENDING, expires_at=value)
        session.add(consent)
        session.flush()
        assert consent_statuses.transition(session, consent, Status.APPROVED, values={"expires_at": value})


@pytest.mark.parametrize(
    "use",
    [
        lambda session: Consent(expires_at=datetime(2999, 1, 1)),
        lambda session: consent_statuses.transition(
            session, (Consent, 1), Status.APPROVED, values={"expires_at": datetime(2999, 1, 1)}
        ),
    ],
    ids=["attribute", "transition"],
)
def test_a_datetime_without_a_zone_is_refused_before_any_sql(
    engine: Engine, session_factory: sessionmaker[Session], use: Callable[[Session], object]
) -> None:
    with (
        session_factory() as session,
        statements(engine) as sent,
        pytest.raises(UsageError, match=r"no time zone; pass an aware datetime, or better an SQL expression"),
    ):
        use(session)
    assert sent == []


# claims


@pytest.mark.parametrize("run_now", [False, True], ids=["due", "now"])
@pytest.mark.parametrize(("expires_at", "won"), [(None, True), (AHEAD, True), (PASSED, False)], ids=str)
def test_a_claim_by_key_takes_no_run_whose_expiry_has_passed(
    engine: Engine, consents: Runs[Consent], run_now: bool, expires_at: Any, won: bool
) -> None:
    ident = add_consent(engine, Status.APPROVED, expires_at=expires_at)
    assert (consents.claim(ident, run_now=run_now) is not None) is won
    row = stored(engine, ident)
    assert (row.status, row.attempts, row.fence) == ((Status.EXECUTING, 1, 1) if won else (Status.EXPIRED, 0, 0))


def test_a_batch_takes_no_run_whose_expiry_has_passed(engine: Engine, consents: Runs[Consent]) -> None:
    never, ahead, passed = (add_consent(engine, Status.APPROVED, expires_at=at) for at in (None, AHEAD, PASSED))
    assert {run.lease.identity[0] for run in consents.claim_due(10)} == {never, ahead}
    assert status_of(engine, passed) is Status.EXPIRED


def test_a_batch_takes_none_that_there_was_no_room_to_expire_either(engine: Engine, consents: Runs[Consent]) -> None:
    for _ in range(5):
        add_consent(engine, Status.APPROVED, expires_at=PASSED)
    due = add_consent(engine, Status.APPROVED)
    assert [run.lease.identity[0] for run in consents.claim_due(1)] == [due]


def test_executing_an_expired_run_answers_so_and_runs_nothing(engine: Engine, consents: Runs[Consent]) -> None:
    ident = add_consent(engine, Status.APPROVED, expires_at=PASSED)
    outcome = consents.execute(ident, lambda run: pytest.fail("an expired run ran"))
    assert (outcome.ending, outcome.status, outcome.replayed) == (Ending.LANDED, Status.EXPIRED, True)


def test_a_run_under_way_does_not_expire(
    engine: Engine, session_factory: sessionmaker[Session], consents: Runs[Consent]
) -> None:
    ident = add_consent(engine, Status.APPROVED, expires_at=AHEAD)

    def carry_out(run: Run[Consent]) -> None:
        run.step("first", lambda session: None)
        with session_factory.begin() as session:
            session.execute(update(Consent).values(expires_at=PASSED))
        assert consents.reap() == 0
        assert not consents.heal(ident)
        run.renew()
        run.step("second", lambda session: None)

    assert consents.execute(ident, carry_out).status is Status.EXECUTED


def test_the_holder_of_a_reaped_run_that_did_not_expire_yet_may_resume_and_one_that_did_has_lost_it(
    engine: Engine, session_factory: sessionmaker[Session], consents: Runs[Consent]
) -> None:
    ident = add_consent(engine, Status.APPROVED, expires_at=AHEAD)
    run = consents.claim(ident)
    assert run is not None
    for passed in (False, True):
        with session_factory.begin() as session:
            lapse(session, Consent, ident)
            if passed:
                session.execute(update(Consent).values(expires_at=PASSED))
        assert consents.heal(ident)
        if not passed:
            run.renew()
    row = stored(engine, ident)
    assert (row.status, row.lease_owner, row.lease_expires_at) == (Status.EXPIRED, None, None)
    assert row.error["type"] == "LeaseLapsed"
    with pytest.raises(LostLease):
        run.finish()


# swept, and found


@pytest.mark.parametrize("status", [Status.PENDING, Status.APPROVED])
@pytest.mark.parametrize("verb", ["reap", "claim_due", "heal", "get", "claim"])
def test_an_overdue_run_is_expired_by_every_verb_that_comes_by(
    engine: Engine, consents: Runs[Consent], status: Status, verb: str
) -> None:
    ident = add_consent(engine, status, expires_at=PASSED, note="kept", attempts=2, fence=7)
    other = add_consent(engine, status, expires_at=AHEAD)
    before, at = stored(engine, ident), database_clock(engine)
    told = {
        "reap": consents.reap,
        "claim_due": lambda: consents.claim_due(10),
        "heal": lambda: consents.heal(ident),
        "get": lambda: consents.get(ident),
        "claim": lambda: consents.claim(ident),
    }[verb]()
    if verb in {"reap", "heal"}:
        assert told == 1
    if verb == "get":
        assert told.status is Status.EXPIRED
    row = stored(engine, ident)
    assert at <= row.finished_at <= database_clock(engine)
    assert row._asdict() == {**before._asdict(), "status": Status.EXPIRED, "finished_at": row.finished_at}
    assert status_of(engine, other) is not Status.EXPIRED
    assert consents.reap() == 0
    assert not consents.heal(ident)
    assert stored(engine, ident) == row


def test_those_whose_expiry_passed_first_are_expired_first_and_no_more_than_asked(
    engine: Engine, consents: Runs[Consent]
) -> None:
    late, early, middle = (add_consent(engine, expires_at=func.now() - timedelta(hours=hours)) for hours in (1, 3, 2))
    assert consents.reap(2) == 2
    assert [status_of(engine, ident) for ident in (late, early, middle)] == [
        Status.PENDING,
        Status.EXPIRED,
        Status.EXPIRED,
    ]
    assert consents.reap(2) == 1


def test_lapsed_and_overdue_runs_are_counted_together(
    engine: Engine, session_factory: sessionmaker[Session], consents: Runs[Consent]
) -> None:
    running = add_consent(engine, Status.APPROVED)
    assert consents.claim(running) is not None
    with session_factory.begin() as session:
        lapse(session, Consent, running)
    add_consent(engine, expires_at=PASSED)
    assert consents.reap() == 2


def test_a_model_without_expiry_sends_no_statement_for_it(
    empty_url: str, session_factory: sessionmaker[Session]
) -> None:
    Plan.metadata.create_all(session_factory.kw["bind"])
    plans: Runs[Plan] = Runs(session_factory, Plan, PlanStep)
    ident = approved_plan(session_factory)
    with statements(session_factory.kw["bind"]) as sent:
        plans.reap()
        plans.heal(ident)
        plans.get(ident)
        plans.claim_due(1)
        plans.claim(ident)
    assert not [statement for statement in sent if "expires_at" in statement.replace("lease_expires_at", "")]
    assert len(sent) == 1 + 1 + 2 + 1 + 3


# started


def test_a_run_is_started_with_an_expiry_that_counts_on_the_databases_clock(
    session_factory: sessionmaker[Session], consents: Runs[Consent]
) -> None:
    with session_factory.begin() as session:
        started = consents.start(session, expires_at=timedelta(hours=1))
        now = session.scalar(select(func.clock_timestamp()))
        assert started.expires_at is not None
        assert timedelta(minutes=59) < started.expires_at - now <= timedelta(hours=1)


@pytest.mark.parametrize(("expiry", "named"), [(datetime(2031, 1, 1), "naive"), (60, "timedelta")])
def test_an_expiry_that_is_no_instant_is_refused_before_any_sql(
    session_factory: sessionmaker[Session], consents: Runs[Consent], expiry: Any, named: str
) -> None:
    with session_factory.begin() as session, pytest.raises(UsageError, match=rf"expires_at=.*{named}"):
        consents.start(session, expires_at=expiry)


# cancelled, and requeued


@pytest.mark.parametrize("status", [Status.PENDING, Status.APPROVED])
def test_a_request_to_cancel_an_overdue_run_is_not_recorded(
    engine: Engine, session_factory: sessionmaker[Session], consents: Runs[Consent], status: Status
) -> None:
    ident = add_consent(engine, status, expires_at=PASSED)
    with session_factory.begin() as session:
        assert consents.request_cancel(session, ident) is False
    row = stored(engine, ident)
    assert (row.status, row.cancel_requested_at) == (status, None)


def test_a_request_to_cancel_a_run_under_way_stands_whatever_its_expiry(
    engine: Engine, session_factory: sessionmaker[Session], consents: Runs[Consent]
) -> None:
    ident = add_consent(engine, Status.APPROVED, expires_at=AHEAD)
    assert consents.claim(ident) is not None
    with session_factory.begin() as session:
        session.execute(update(Consent).values(expires_at=PASSED))
        assert consents.request_cancel(session, ident) is True


def test_a_requeued_run_never_expires_unless_its_expiry_is_still_to_come(
    engine: Engine, consents: Runs[Consent]
) -> None:
    passed = add_consent(engine, Status.EXPIRED, expires_at=PASSED)
    ahead = add_consent(engine, Status.FAILED, expires_at=AHEAD)
    still = stored(engine, ahead).expires_at
    for ident, expires_at in ((passed, None), (ahead, still)):
        assert consents.requeue(ident)
        assert consents.reap() == 0
        row = stored(engine, ident)
        assert (row.status, row.expires_at) == (Status.APPROVED, expires_at)
        assert consents.claim(ident) is not None


# the helper for tests


@pytest.mark.parametrize("status", [Status.PENDING, Status.APPROVED])
def test_the_helper_for_tests_lets_an_expiry_have_passed(
    engine: Engine, session_factory: sessionmaker[Session], consents: Runs[Consent], status: Status
) -> None:
    ident = add_consent(engine, status)
    with session_factory.begin() as session:
        expire(session, Consent, ident)
    assert database_clock(engine) - timedelta(seconds=20) < stored(engine, ident).expires_at
    assert stored(engine, ident).expires_at < database_clock(engine) - SECOND
    assert status_of(engine, ident) is status
    assert consents.heal(ident)


def test_the_helper_for_tests_says_what_cannot_expire(engine: Engine, session_factory: sessionmaker[Session]) -> None:
    ident = add_consent(engine, Status.DRAFT)
    with session_factory() as session:
        with pytest.raises(RunNotFound, match=r"no Consent with the key \(1,\) is asked 'for' 100%, may start"):
            expire(session, Consent, ident)
        with pytest.raises(UsageError, match="Plan does not expire; add ExpiryMixin"):
            expire(session, Plan, ident)


# asyncio


def test_asyncio_expires_and_refuses_the_same(engine: Engine) -> None:
    late, swept, overdue, asked = (add_consent(engine, Status.APPROVED, expires_at=PASSED) for _ in range(4))
    pending = add_consent(engine, expires_at=PASSED)

    async def handler(run: AsyncRun[Consent]) -> None:
        pytest.fail("an expired run ran")

    async def main() -> None:
        through = create_async_engine(engine.url)
        factory = async_sessionmaker(through)
        consents: AsyncRuns[Consent] = AsyncRuns(factory, Consent, ConsentStep)
        session: AsyncSession
        async with factory.begin() as session:
            assert not await transition(consent_statuses, session, (Consent, pending), Status.APPROVED)
            assert not await consents.request_cancel(session, asked)
        assert (await consents.execute(late, handler)).status is Status.EXPIRED
        found = await consents.get(overdue)
        assert found is not None
        assert found.status is Status.EXPIRED
        assert await consents.claim(swept) is None
        assert await consents.reap() == 2
        await through.dispose()

    asyncio.run(main())
    assert {status_of(engine, ident) for ident in (late, swept, overdue, asked, pending)} == {Status.EXPIRED}


# declared


class Base(DeclarativeBase):
    pass


def declared(*bases: Any, **options: Any) -> type[Any]:
    """A run class with these mixins, made anew."""

    class New(DeclarativeBase):
        pass

    attributes = {
        "__tablename__": "made",
        "__lifecycle__": consent_lifecycle(**options),
        "__annotations__": {"id": Mapped[int]},
        "id": mapped_column(primary_key=True),
        "status": consent_statuses.column(),
    }
    made: type[Any] = type("Made", (*bases, New), attributes)
    return made


@pytest.mark.parametrize("bases", [(ExpiryMixin, RunMixin), (RunMixin, ExpiryMixin)], ids=["before", "after"])
def test_the_mixin_stands_on_either_side_of_the_runs(bases: Any) -> None:
    table = declared(*bases).__table__
    (index,) = [index for index in table.indexes if index.columns.keys() == ["expires_at"]]
    assert index.name == "ix_made_expires_at"
    assert table.c.expires_at.nullable
    assert table.c.expires_at.type.timezone
    assert table.c.keys()[-1] == "expires_at"


def test_a_lifecycle_and_a_class_that_disagree_on_expiry_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"has ExpiryMixin, and nothing to become; add Lifecycle\(expired="):
        declared(RunMixin, ExpiryMixin, expired=None, requeue=frozenset())
    with pytest.raises(ConfigurationError, match=r"names Lifecycle\(expired=...\), and has no expiry; add ExpiryMixin"):
        declared(RunMixin)


def test_the_mixin_where_it_does_nothing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="ExpiryMixin goes beside RunMixin"):

        class Alone(ExpiryMixin, Base):
            __tablename__ = "alone"
            id: Mapped[int] = mapped_column(primary_key=True)

    class Root(RunMixin, Base):
        __tablename__ = "root"
        __lifecycle__ = consent_lifecycle(expired=None, requeue=frozenset())
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "root"}  # noqa: RUF012
        id: Mapped[int] = mapped_column(primary_key=True)
        kind: Mapped[str]
        status: Mapped[Status] = consent_statuses.column()

    with pytest.raises(ConfigurationError, match="goes on the class that owns the root table, here Root, not on one"):

        class Child(ExpiryMixin, Root):
            __mapper_args__ = {"polymorphic_identity": "child"}  # noqa: RUF012


def test_a_column_that_cannot_hold_an_expiry_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"expires_at is .*, but RunMixin writes a DateTime with time zone"):

        class Naive(RunMixin, ExpiryMixin, Base):
            __tablename__ = "naive"
            __lifecycle__ = consent_lifecycle()
            id: Mapped[int] = mapped_column(primary_key=True)
            status: Mapped[Status] = consent_statuses.column()
            expires_at: Mapped[datetime | None] = mapped_column(DateTime)


@pytest.mark.parametrize(
    ("expired", "more", "said"),
    [
        (Status.REJECTED, {Status.REJECTED: {Status.EXPIRED}}, "lands in a terminal status, but edges leave this one"),
        (Status.EXPIRED, {Status.EXECUTING: {Status.EXPIRED}}, "but a run under way does not expire; remove that edge"),
        (Status.EXECUTED, {}, "under way -> all done is declared, but a run under way does not expire"),
        ("expired", {}, "'expired' is not a status of"),
    ],
)
def test_an_expired_status_that_cannot_be_one_is_refused(expired: Any, more: Any, said: str) -> None:
    edges = {status: following | more.get(status, set()) for status, following in consent_statuses.transitions.items()}
    machine = StatusMachine(Status, initial=Status.DRAFT, transitions=edges)
    with pytest.raises(ConfigurationError, match=said):
        Lifecycle(
            machine,
            ready=Status.APPROVED,
            running=Status.EXECUTING,
            done=Status.EXECUTED,
            failed=Status.FAILED,
            expired=expired,
        )


def test_the_statuses_that_can_expire_are_those_with_an_edge_to_expired() -> None:
    assert consent_lifecycle().expirable == {Status.PENDING, Status.APPROVED}
    assert consent_lifecycle(expired=None, requeue=frozenset()).expirable == frozenset()
