"""Runs that are listed, counted and described: what is shown, in which order and pages, and that nothing is written."""

# ruff: noqa: RUF012 - table arguments are written as SQLAlchemy's documentation writes them

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import BigInteger, DateTime, Engine, String, TypeDecorator, create_engine, text, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from sqlalchemy.schema import CreateSchema

from sqla_durable import Failure, ReceiptMixin, Run, RunMixin, Runs, RunSummary, UsageError
from sqla_durable.asyncio import AsyncRuns
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, let_lapse
from tests.support_async import carried_out
from tests.support_models import JobStatus, jobs, lifecycle, statements
from tests.test_models_inheritance import (
    Fetch,
    Job,
    JobStep,
    Joined,
    JoinedFetch,
    JoinedStep,
    SecureFetch,
    Send,
    Single,
)
from tests.test_models_keys import Base as Keys
from tests.test_models_keys import Coloured, ColouredStep, Decorated, DecoratedStep, Pair, PairStep
from tests.test_models_schemas import Job as TenantJob
from tests.test_models_schemas import JobStep as TenantJobStep
from tests.test_models_schemas import tenant


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep, owner="me")


@pytest.fixture
def bare(empty_url: str) -> Iterator[Engine]:
    """An engine on a database without tables, in which there are schemas."""
    engine = create_engine(empty_url)
    with engine.begin() as connection:
        for schema in ("app", "north", "south"):
            connection.execute(CreateSchema(schema))
    yield engine
    engine.dispose()


def made(factory: sessionmaker[Session], count: int) -> list[UUID]:
    """Plans, the first one the newest, each an hour older than the one before."""
    idents = [approved_plan(factory) for _ in range(count)]
    with factory.begin() as session:
        session.execute(text("SET LOCAL sqla_durable.override = 'runs of some age'"))
        for hours, ident in enumerate(idents):
            age = text(f"now() - interval '{hours} hours'")
            session.execute(update(Plan).where(Plan.id == ident).values(created_at=age))
    return idents


def keys(found: list[RunSummary]) -> list[Any]:
    return [summary.identity[0] for summary in found]


def fails(run: Run[Any]) -> None:
    raise ValueError("100% of_it\nis gone")


# what a summary says


def test_a_run_that_waits_is_summed_up(plans: Runs[Plan], session_factory: sessionmaker[Session]) -> None:
    ident = approved_plan(session_factory)
    (summary,) = plans.find()
    row = plans.get(ident)
    assert row is not None
    assert summary.identity == (ident,)
    assert summary.status is PlanStatus.APPROVED
    assert (summary.attempts, summary.fence, summary.lease_owner, summary.failure) == (0, 0, None, None)
    assert (summary.created_at, summary.available_at) == (row.created_at, row.available_at)
    assert (summary.started_at, summary.finished_at, summary.lease_expires_at) == (None, None, None)
    assert (summary.cancel_requested_at, summary.lapsed) == (None, False)
    assert timedelta(0) < summary.age < timedelta(minutes=1)


def test_a_run_that_is_held_shows_its_holder(plans: Runs[Plan], session_factory: sessionmaker[Session]) -> None:
    run = plans.claim(approved_plan(session_factory))
    assert run is not None
    (summary,) = plans.find()
    row = plans.get(run.row.id)
    assert row is not None
    assert (summary.attempts, summary.fence, summary.lease_owner) == (1, 1, "me")
    assert (summary.started_at, summary.lease_expires_at) == (row.started_at, row.lease_expires_at)
    assert not summary.lapsed


def test_the_last_error_is_listed_without_its_traceback_and_described_with_it(
    plans: Runs[Plan], session_factory: sessionmaker[Session]
) -> None:
    ident = approved_plan(session_factory)
    outcome = plans.execute(ident, fails)
    (summary,) = plans.find()
    assert summary.failure == Failure("ValueError", "100% of_it\nis gone", None)
    assert summary.finished_at is not None
    described = plans.describe(ident)
    assert described is not None
    assert described.failure == outcome.failure
    assert described.failure is not None
    assert described.failure.traceback is not None


def test_an_engine_that_decodes_json_its_own_way_does_not_matter(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    ident = approved_plan(session_factory)
    Runs(session_factory, Plan, PlanStep).execute(ident, fails)
    own = create_engine(engine.url, json_deserializer=lambda text: ("decoded", text))
    summary = Runs(sessionmaker(own), Plan, PlanStep).describe(ident)
    own.dispose()
    assert summary is not None
    assert summary.failure is not None
    assert summary.failure.type == "ValueError"


def test_a_run_that_is_not_there_is_described_as_none(plans: Runs[Plan]) -> None:
    assert plans.describe(uuid4()) is None


def test_no_look_at_a_lapsed_run_heals_it(plans: Runs[Plan], session_factory: sessionmaker[Session]) -> None:
    run = plans.claim(approved_plan(session_factory))
    assert run is not None
    let_lapse(session_factory, run.row.id)
    for _ in range(2):
        (summary,) = plans.find(status=PlanStatus.EXECUTING)
        assert summary.lapsed
        assert plans.describe(run.row.id) is not None
        seen = plans.get(run.row.id, heal=False)
        assert seen is not None
        assert seen.status is PlanStatus.EXECUTING
        assert plans.counts()[PlanStatus.EXECUTING] == 1
    healed = plans.get(run.row.id)
    assert healed is not None
    assert healed.status is PlanStatus.APPROVED


def test_a_look_is_one_statement_that_a_standby_would_take(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    ident = approved_plan(session_factory)
    reading = create_engine(engine.url, connect_args={"options": "-c default_transaction_read_only=on"})
    plans = Runs(sessionmaker(reading), Plan, PlanStep)
    plans.find()
    for look in (plans.find, plans.counts, lambda: plans.describe(ident)):
        with statements(reading) as sent:
            look()
        assert len(sent) == 1
    assert plans.get(ident, heal=False) is not None
    reading.dispose()


# which runs


def test_the_newest_run_comes_first(plans: Runs[Plan], session_factory: sessionmaker[Session]) -> None:
    idents = made(session_factory, 3)
    assert keys(plans.find()) == idents
    assert keys(plans.find(limit=2)) == idents[:2]


def test_runs_of_one_transaction_are_in_the_order_of_their_keys(
    plans: Runs[Plan], session_factory: sessionmaker[Session]
) -> None:
    with session_factory.begin() as session:
        session.add_all(Plan() for _ in range(5))
    found = plans.find()
    assert len({summary.created_at for summary in found}) == 1
    assert keys(found) == sorted(keys(found), reverse=True)


def test_runs_are_found_by_status(plans: Runs[Plan], session_factory: sessionmaker[Session]) -> None:
    first, second, third = made(session_factory, 3)
    plans.execute(second, fails)
    plans.execute(third, lambda run: None)
    assert keys(plans.find(status=PlanStatus.FAILED)) == [second]
    assert keys(plans.find(status=[PlanStatus.EXECUTED, PlanStatus.APPROVED])) == [first, third]
    assert plans.find(status=[]) == []


def test_runs_are_found_by_age(plans: Runs[Plan], session_factory: sessionmaker[Session]) -> None:
    idents = made(session_factory, 4)
    half_past = timedelta(hours=1, minutes=30)
    assert keys(plans.find(older_than=half_past)) == idents[2:]
    assert keys(plans.find(newer_than=half_past)) == idents[:2]
    assert keys(plans.find(older_than=timedelta(minutes=30), newer_than=timedelta(hours=2))) == idents[1:2]
    assert keys(plans.find(older_than=timedelta(0))) == idents


@pytest.mark.parametrize("part", ["ValueError", "valueerror", "IS GONE", "100% of_it", "it\nis"])
def test_runs_are_found_by_a_part_of_their_error(
    plans: Runs[Plan], session_factory: sessionmaker[Session], part: str
) -> None:
    failed, _ = made(session_factory, 2)
    plans.execute(failed, fails)
    assert keys(plans.find(error=part)) == [failed]


@pytest.mark.parametrize("part", ["Traceback", "100_", "of%it", "fails"])
def test_a_pattern_or_a_line_of_the_traceback_is_not_a_part_of_the_error(
    plans: Runs[Plan], session_factory: sessionmaker[Session], part: str
) -> None:
    plans.execute(approved_plan(session_factory), fails)
    assert plans.find(error=part) == []


def test_runs_are_found_by_their_holder(plans: Runs[Plan], session_factory: sessionmaker[Session]) -> None:
    held, _ = made(session_factory, 2)
    plans.claim(held)
    assert keys(plans.find(owner="me")) == [held]
    assert plans.find(owner="m") == []


def test_runs_are_found_by_a_cancel_request(plans: Runs[Plan], session_factory: sessionmaker[Session]) -> None:
    asked, other = made(session_factory, 2)
    plans.claim(asked)
    with session_factory.begin() as session:
        assert plans.request_cancel(session, asked)
    assert keys(plans.find(cancel_requested=True)) == [asked]
    assert keys(plans.find(cancel_requested=False)) == [other]


def test_every_condition_must_be_met(plans: Runs[Plan], session_factory: sessionmaker[Session]) -> None:
    first, second = made(session_factory, 2)
    plans.execute(first, fails)
    plans.execute(second, fails)
    found = plans.find(status=PlanStatus.FAILED, older_than=timedelta(minutes=30), error="gone", cancel_requested=False)
    assert keys(found) == [second]
    assert plans.find(status=PlanStatus.APPROVED, error="gone") == []


def test_runs_are_counted_by_status(plans: Runs[Plan], session_factory: sessionmaker[Session]) -> None:
    assert plans.counts() == dict.fromkeys(PlanStatus, 0)
    made(session_factory, 3)
    plans.execute(approved_plan(session_factory), fails)
    counts = plans.counts()
    assert list(counts) == list(PlanStatus)
    assert {status: count for status, count in counts.items() if count} == {
        PlanStatus.APPROVED: 3,
        PlanStatus.FAILED: 1,
    }


# pages


def pages(runs: Any, limit: int, **conditions: Any) -> list[list[RunSummary]]:
    found, after = [], None
    while page := runs.find(limit=limit, after=after, **conditions):
        found.append(page)
        assert len(found) < 10, "the pages do not end"
        after = page[-1].cursor
    return found


def test_pages_hold_every_run_once(plans: Runs[Plan], session_factory: sessionmaker[Session]) -> None:
    made(session_factory, 3)
    with session_factory.begin() as session:
        session.add_all(Plan() for _ in range(8))  # of one instant, over several pages
    found = pages(plans, 3)
    assert [len(page) for page in found] == [3, 3, 3, 2]
    assert [ident for page in found for ident in keys(page)] == keys(plans.find())


def test_runs_inserted_between_two_pages_do_not_move_the_next_one(
    plans: Runs[Plan], session_factory: sessionmaker[Session]
) -> None:
    idents = made(session_factory, 4)
    first = plans.find(limit=2)
    made(session_factory, 1)
    with session_factory.begin() as session:
        session.delete(session.get_one(Plan, idents[1]))
    assert keys(plans.find(limit=2, after=first[-1].cursor)) == idents[2:]


def test_a_cursor_goes_with_the_same_conditions(plans: Runs[Plan], session_factory: sessionmaker[Session]) -> None:
    idents = made(session_factory, 5)
    plans.execute(idents[2], fails)
    found = pages(plans, 2, status=PlanStatus.APPROVED)
    assert [keys(page) for page in found] == [[idents[0], idents[1]], [idents[3], idents[4]]]


def test_a_cursor_is_a_word_for_a_command_line(plans: Runs[Plan], session_factory: sessionmaker[Session]) -> None:
    approved_plan(session_factory)
    (summary,) = plans.find()
    assert summary.cursor.replace("_", "").replace("-", "").isalnum()


# what is refused


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"status": JobStatus.FAILED}, "is not a status of .*PlanStatus"),
        ({"status": ["failed"]}, r"pass a member of PlanStatus, PlanStatus\.FAILED\.$"),
        ({"status": "gone"}, r"pass a member of PlanStatus\.$"),
        ({"status": "failed"}, "pass a member of PlanStatus"),
        ({"older_than": timedelta(seconds=-1)}, "older_than=.*from 0 to"),
        ({"newer_than": timedelta(days=100_000)}, "newer_than=.*from 0 to"),
        ({"limit": 0}, "limit=0"),
        ({"after": "nonsense"}, "'nonsense' is not a cursor of plan"),
        ({"after": "é"}, "is not a cursor of plan"),
        ({"after": "W10="}, "is not a cursor of plan"),
        ({"after": "e30="}, "is not a cursor of plan"),
        ({"after": "WyJwbGFuIiwxLDJd"}, "is not a cursor of plan"),
        ({"after": "WyJqb2IiLCJhIiwiYiJd"}, "is not a cursor of plan"),
    ],
)
def test_what_cannot_be_meant_is_refused(plans: Runs[Plan], asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plans.find(**asked)


# models


class Own(DeclarativeBase):
    pass


class Local(TypeDecorator[Any]):
    """Comes back as something of the user's own."""

    impl = DateTime
    cache_ok = True

    def process_result_value(self, value: datetime | None, dialect: Any) -> str:
        return f"made {value}"


class Renamed(RunMixin, Own):
    """Every column has another name, and the table is in a schema."""

    __tablename__ = "renamed"
    __table_args__ = {"schema": "app"}
    __lifecycle__ = lifecycle()
    number: Mapped[int] = mapped_column("no (%)", primary_key=True)
    state: Mapped[JobStatus] = jobs.column("run state")
    fence = mapped_column("the fence", BigInteger, nullable=False, server_default=text("0"))
    status: Mapped[str] = mapped_column("error text", String, default="mine")
    created_at: Mapped[Any] = mapped_column("made", Local(), server_default=text("localtimestamp"))


class RenamedStep(ReceiptMixin[Renamed], Own):
    __tablename__ = "renamed_step"
    __table_args__ = {"schema": "app"}


class Old(RunMixin, Own):
    """With a ``created_at`` of its own that not every row has."""

    __tablename__ = "old"
    __lifecycle__ = lifecycle()
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[JobStatus] = jobs.column()
    created_at: Mapped[datetime | None] = mapped_column(DateTime())  # type: ignore[assignment]


class OldStep(ReceiptMixin[Old], Own):
    __tablename__ = "old_step"


MODELS: list[tuple[Any, Any, Any]] = [
    (Keys, Pair, PairStep),
    (Keys, Decorated, DecoratedStep),
    (Keys, Coloured, ColouredStep),
    (Own, Renamed, RenamedStep),
    (Own, Old, OldStep),
    (Single, Fetch, JobStep),
    (Joined, JoinedFetch, JoinedStep),
]


@pytest.mark.parametrize(("base", "entity", "step"), MODELS)
def test_runs_of_any_model_are_listed_in_pages(bare: Engine, base: Any, entity: Any, step: Any) -> None:
    base.metadata.create_all(bare)
    factory = sessionmaker(bare)
    status = entity.__lifecycle__.machine.attribute_of(entity)
    with factory.begin() as session:
        rows = [entity(**{status: JobStatus.READY}) for _ in range(5)]
        for row in rows[:2]:
            row.created_at = datetime(2020, 1, 1, tzinfo=UTC)
        session.add_all(rows)
        session.flush()
        idents = [tuple(entity.__mapper__.primary_key_from_instance(row)) for row in rows]
    runs = Runs(factory, entity, step)
    found = pages(runs, 2)
    assert [len(page) for page in found] == [2, 2, 1]
    listed = [summary.identity for page in found for summary in page]
    assert listed == [summary.identity for summary in runs.find()]
    assert set(listed) == set(idents)
    if entity is Pair:
        assert listed[:3] == sorted(listed[:3], reverse=True), "by the key, in the order of its columns"
    dated = listed[:2] if entity is Old else listed[-2:]  # a row without a date counts as the oldest
    assert set(dated) == set(idents[:2])
    runs.execute(listed[0], fails)
    summary = runs.describe(listed[0])
    assert summary is not None
    assert (summary.identity, summary.status) == (listed[0], JobStatus.FAILED)
    assert isinstance(summary.created_at, datetime)
    assert isinstance(summary.age, timedelta)
    assert [each.identity for each in runs.find(status=JobStatus.FAILED, error="gone")] == [listed[0]]
    assert runs.counts()[JobStatus.READY] == 4


def test_a_subclass_lists_only_its_own_rows(bare: Engine) -> None:
    Single.metadata.create_all(bare)
    factory = sessionmaker(bare)
    with factory.begin() as session:
        session.add_all([Job(), Fetch(), SecureFetch(), Send()])
    whole = Runs(factory, Job, JobStep)
    assert len(whole.find()) == sum(whole.counts().values()) == 4
    fetches = Runs(factory, Fetch, JobStep)
    assert len(fetches.find()) == sum(fetches.counts().values()) == 2
    (send,) = Runs(factory, Send, JobStep).find()
    assert fetches.describe(send.identity) is None
    assert whole.describe(send.identity) is not None


def test_a_tenant_lists_only_its_own_rows_and_takes_only_its_own_cursors(bare: Engine) -> None:
    north, south = (sessionmaker(tenant(bare, schema)) for schema in ("north", "south"))
    with north.begin() as session:
        session.add_all([TenantJob(), TenantJob()])
    runs = Runs(north, TenantJob, TenantJobStep)
    (last,) = runs.find(limit=1)
    (first,) = runs.find(after=last.cursor)
    assert {last.identity, first.identity} == {(1,), (2,)}
    others = Runs(south, TenantJob, TenantJobStep)
    assert others.find() == []
    assert others.counts()[JobStatus.WAITING] == 0
    with pytest.raises(UsageError, match=r"not a cursor of south\.job"):
        others.find(after=last.cursor)


# asyncio


def test_the_asyncio_form_answers_the_same(engine: Engine, session_factory: sessionmaker[Session]) -> None:
    idents = made(session_factory, 3)
    plans = Runs(session_factory, Plan, PlanStep)
    plans.execute(idents[0], fails)
    run = plans.claim(idents[1])
    assert run is not None
    let_lapse(session_factory, idents[1])

    async def scenario(runs: AsyncRuns[Plan]) -> None:
        first = await runs.find(limit=1)
        rest = await runs.find(after=first[0].cursor)
        assert keys(first + rest) == idents
        assert await runs.find(status=PlanStatus.FAILED, error="gone", older_than=timedelta(hours=1)) == []
        assert keys(await runs.find(status=PlanStatus.FAILED, error="gone")) == idents[:1]
        described = await runs.describe(idents[0])
        assert described is not None
        assert described.failure is not None
        assert described.failure.traceback is not None
        seen = await runs.get(idents[1], heal=False)
        assert seen is not None
        assert seen.status is PlanStatus.EXECUTING
        assert await runs.counts() == plans.counts()

    carried_out(engine, scenario)
