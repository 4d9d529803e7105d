"""Monthly partitions of a run table: every verb keeps to its index, and months go whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from typing import Any, ClassVar
from uuid import RFC_4122, UUID, uuid4

import pytest
from sqlalchemy import BigInteger, Date, DateTime, Engine, Uuid, create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import (
    ConfigurationError,
    FunctionMixin,
    KeyMixin,
    Lifecycle,
    Monthly,
    ReceiptMixin,
    Retry,
    Run,
    RunMixin,
    Runs,
    StatusMachine,
    UsageError,
    create_partitions,
    drop_partitions,
    partition_sql,
    partitions_of,
    uuid7,
)
from sqla_durable.testing import lapse
from tests.support import PlanStatus, plan_statuses
from tests.support_statements import statements
from tests.test_partitions import at, months_ago
from tests.test_plans_of_statements import explained, nodes

NOW = timedelta(0)
# Of its own: what takes a bare key goes by the one class that a machine serves.
statuses = StatusMachine(PlanStatus, initial=plan_statuses.initial, transitions=plan_statuses.transitions)


def lifecycle(**options: Any) -> Lifecycle[PlanStatus]:
    return Lifecycle(
        statuses,
        ready=PlanStatus.APPROVED,
        running=PlanStatus.EXECUTING,
        done=PlanStatus.EXECUTED,
        failed=PlanStatus.FAILED,
        lease=timedelta(seconds=30),
        retry=Retry(max_attempts=3, backoff=NOW, cap=NOW),
        requeue={PlanStatus.FAILED},
        **options,
    )


class Base(DeclarativeBase):
    pass


class Job(RunMixin, Base):
    __tablename__ = "monthly_job"
    __lifecycle__ = lifecycle()
    __partition__ = Monthly()

    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid7)
    status: Mapped[PlanStatus] = statuses.column()


class JobStep(ReceiptMixin[Job], Base):
    __tablename__ = "monthly_job_step"
    __partition__ = Monthly()


@pytest.fixture
def monthly(empty_url: str) -> Iterator[Engine]:
    engine = create_engine(empty_url)
    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        create_partitions(session, Job)
        create_partitions(session, JobStep)
    yield engine
    engine.dispose()


@pytest.fixture
def jobs(monthly: Engine) -> Runs[Job]:
    return Runs(sessionmaker(monthly), Job, JobStep)


def ready(engine: Engine, *months: date, count: int = 1) -> list[UUID]:
    with Session(engine) as session, session.begin():
        jobs = [Job(id=at(month), status=PlanStatus.APPROVED) for month in months for _ in range(count)]
        session.add_all(jobs)
        session.flush()
        return [job.id for job in jobs]


def a_month(engine: Engine, month: date) -> None:
    with engine.begin() as connection:
        for entity in Job, JobStep:
            for statement in partition_sql(entity, month):
                connection.execute(text(statement))


def two_steps(run: Run[Job]) -> None:
    run.step("one", lambda session: 1)
    run.step("two", lambda session: 2)


def refused(run: Run[Job]) -> None:
    run.step("one", lambda session: 1)
    run.step("two", lambda session: 1 / 0)


def counts(engine: Engine) -> tuple[int, int]:
    with engine.connect() as connection:
        return tuple(
            connection.scalar(text(f"SELECT count(*) FROM {name}")) or 0 for name in ("monthly_job", "monthly_job_step")
        )  # type: ignore[return-value]


def test_claims_heartbeats_steps_reaping_requeue_and_purge_work_across_months(monthly: Engine, jobs: Runs[Job]) -> None:
    a_month(monthly, months_ago(1))
    idents = ready(monthly, months_ago(1), months_ago(0), months_ago(9))
    held = jobs.claim_due(10)
    assert {run.lease.identity for run in held} == {(ident,) for ident in idents}
    for run in held:
        run.renew()
    with jobs.session_factory.begin() as session:
        for run in held:
            lapse(session, Job, run.lease.identity)
    assert jobs.reap() == 3
    held[0].step("one", lambda session: 1)  # its lease was reaped, and its fence is still the last
    held[0].release()
    for run in jobs.claim_due(10):
        run.step("one", lambda session: 1)
        run.release()
    done, failed, again = idents
    for ident in done, again:
        assert jobs.execute(ident, two_steps, run_now=True).status == PlanStatus.EXECUTED
    assert jobs.execute(failed, refused, run_now=True).status == PlanStatus.FAILED
    assert jobs.requeue(failed)
    assert jobs.execute(failed, two_steps).status == PlanStatus.EXECUTED
    assert counts(monthly) == (3, 6)
    assert jobs.purge(NOW, batch=2) == 3
    assert counts(monthly) == (0, 0)


# plans

CROWD = """
INSERT INTO monthly_job (id, status, fence, attempts, lease_owner, lease_expires_at, available_at, started_at)
SELECT CAST(lpad(to_hex(CAST(extract(epoch FROM now() - i %% 4 * interval '31 days') * 1000 AS bigint)), 12, '0')
            || '7' || substr(md5(i || :status), 1, 19) AS uuid), :status, 1, 1, {} FROM generate_series(1, :many) AS i
"""


@pytest.fixture
def crowded(monthly: Engine) -> Engine:
    """Four months with much history, as many runs that are not due yet, and a few that matter."""
    for back in range(1, 4):
        a_month(monthly, months_ago(back))
    leased = "'x', now() + interval '1 day', now(), now()"
    with monthly.begin() as connection:
        for status, many, rest in [
            ("executed", 40_000, "NULL, NULL, now(), now()"),
            ("approved", 40_000, "NULL, NULL, now() + i * interval '1 min', NULL"),
            ("approved ", 200, "NULL, NULL, now() - i * interval '1 second', NULL"),
            ("executing", 200, leased),
        ]:
            statement = CROWD.format(rest).replace("%%", "%").replace(":status, 1", "trim(:status), 1")
            connection.execute(text(statement), {"status": status, "many": many})
    with monthly.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE monthly_job"))
    return monthly


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize(
    ("verb", "suffixes"),
    [
        (lambda jobs, run: jobs.claim_due(10), {"available_at_idx", "started_at_idx", "pkey"}),
        (lambda jobs, run: jobs.reap(3), {"started_at_idx", "pkey"}),
        (lambda jobs, run: jobs.claim(run.lease.identity), {"pkey"}),
        (lambda jobs, run: run.renew(), {"pkey"}),
        (lambda jobs, run: run.step("only", lambda session: None), {"pkey"}),
        (lambda jobs, run: run.finish(), {"pkey"}),
    ],
    ids=["claim_due", "reap", "claim", "renew", "step", "finish"],
)
def test_no_verb_reads_the_whole_of_a_month(
    crowded: Engine, mode: str, verb: Callable[[Runs[Job], Run[Job]], Any], suffixes: set[str]
) -> None:
    jobs = Runs(sessionmaker(crowded), Job, JobStep)
    (run,) = jobs.claim_due(1)
    with statements(crowded) as sent:
        verb(jobs, run)
    locking = [pair for pair in zip(sent, sent.parameters, strict=True) if "FOR NO KEY UPDATE" in pair[0]]
    assert locking
    for statement, parameters in locking:
        every = list(nodes(explained(crowded, statement, parameters, mode)))
        # These have no pages yet, and an index would be a detour.
        empty = {"monthly_job_default", *(f"monthly_job_{months_ago(-ahead):%Y_%m}" for ahead in range(1, 4))}
        assert {node["Relation Name"] for node in every if node["Node Type"] == "Seq Scan"} <= empty
        used = {node["Index Name"] for node in every if "Index Name" in node}
        assert all(any(name.endswith(suffix) for suffix in suffixes) for name in used)


# dropping


def drop(engine: Engine, entity: type[Any], older_than: timedelta = NOW) -> Any:
    with Session(engine) as session, session.begin():
        return drop_partitions(session, entity, older_than)


def names(engine: Engine, entity: type[Any]) -> list[str]:
    with Session(engine) as session:
        return [each.name for each in partitions_of(session, entity) if not each.is_default]


def test_a_month_of_receipts_goes_with_that_of_its_runs_however_they_ended(monthly: Engine, jobs: Runs[Job]) -> None:
    month = months_ago(4)
    a_month(monthly, month)
    done, failed = ready(monthly, month, count=2)
    (kept,) = ready(monthly, months_ago(0))
    jobs.execute(kept, two_steps)
    assert jobs.execute(done, two_steps).status == PlanStatus.EXECUTED
    assert drop(monthly, JobStep).kept[0].live == 1
    assert jobs.execute(failed, refused).status == PlanStatus.FAILED
    assert [each.name for each in drop(monthly, JobStep).dropped] == [f"monthly_job_step_{month:%Y_%m}"]
    assert f"monthly_job_{month:%Y_%m}" not in names(monthly, Job)
    assert counts(monthly) == (1, 2)
    assert jobs.get(done) is None
    assert jobs.execute(kept, two_steps).status == PlanStatus.EXECUTED


def test_a_month_of_runs_is_kept_with_its_receipts_while_other_rows_refer_to_it(
    monthly: Engine, jobs: Runs[Job]
) -> None:
    month = months_ago(4)
    a_month(monthly, month)
    (done,) = ready(monthly, month)
    jobs.execute(done, two_steps)
    with monthly.begin() as connection:
        connection.execute(text("CREATE TABLE note (job_id uuid REFERENCES monthly_job)"))
        connection.execute(text("INSERT INTO note VALUES (:id)"), {"id": done})
    (kept,) = drop(monthly, JobStep).kept
    assert (kept.live, kept.referenced_by) == (0, "note")
    assert counts(monthly) == (1, 2)
    with monthly.begin() as connection:
        connection.execute(text("DELETE FROM note"))
    assert len(drop(monthly, JobStep).dropped) == 1
    assert counts(monthly) == (0, 0)


def test_runs_in_the_default_partition_stay_there_and_are_told_of(empty_url: str) -> None:
    engine = create_engine(empty_url)
    Base.metadata.create_all(engine)
    ready(engine, months_ago(-1))
    with Session(engine) as session, session.begin():
        result = create_partitions(session, Job, 2)
    assert result.occupied == (months_ago(-1),)
    assert [each.name for each in result.created] == [f"monthly_job_{months_ago(-each):%Y_%m}" for each in (0, 2)]
    assert counts(engine) == (1, 0)
    engine.dispose()


def test_each_partition_leaves_room_for_renewals_and_has_the_indexes(monthly: Engine) -> None:
    with monthly.connect() as connection:
        options = connection.scalars(
            text(
                "SELECT DISTINCT reloptions FROM pg_class WHERE relispartition AND relkind = 'r' AND relname ~ 'b_[d2]'"
            )
        ).all()
    assert options == [["fillfactor=80"]]


# what can be partitioned


def test_what_needs_a_unique_index_of_the_whole_table_is_refused() -> None:
    class Other(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match=r"KeyMixin.*none across partitions"):

        class Keyed(KeyMixin, RunMixin, Other):
            __tablename__ = "keyed"
            __lifecycle__ = lifecycle()
            __partition__ = Monthly()
            id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid7)
            status: Mapped[PlanStatus] = statuses.column()

    with pytest.raises(ConfigurationError, match=r"one_in_flight.*none across partitions"):

        class Alone(RunMixin, Other):
            __tablename__ = "alone"
            __lifecycle__ = lifecycle(one_in_flight=("kind",))
            __partition__ = Monthly()
            id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid7)
            kind: Mapped[str]
            status: Mapped[PlanStatus] = statuses.column()

    with pytest.raises(ConfigurationError, match=r"KeyMixin.*none across partitions"):

        class Function(FunctionMixin, Other):
            __tablename__ = "function"
            __partition__ = Monthly()


@pytest.mark.parametrize(
    "key",
    [
        lambda: mapped_column(BigInteger, primary_key=True),
        lambda: mapped_column(Uuid, primary_key=True, default=uuid4),
        lambda: mapped_column(Uuid, primary_key=True, server_default=text("gen_random_uuid()")),
        lambda: mapped_column(Uuid(native_uuid=False), primary_key=True, default=uuid7),
        lambda: mapped_column(DateTime, primary_key=True),
    ],
    ids=["integer", "uuid4", "gen_random_uuid", "text", "naive"],
)
def test_a_key_that_does_not_say_when_the_run_was_made_is_refused(key: Any) -> None:
    class Other(DeclarativeBase):
        pass

    class Odd(RunMixin, Other):
        __tablename__ = "odd"
        __lifecycle__ = lifecycle()
        id: Mapped[Any] = key()
        status: Mapped[PlanStatus] = statuses.column()

    with pytest.raises(ConfigurationError, match=r"in which no column says when the run was made\..* default=uuid7"):

        class OddStep(ReceiptMixin[Odd], Other):
            __tablename__ = "odd_step"
            __partition__ = Monthly()


@pytest.mark.parametrize("kind", [Date, DateTime(timezone=True)], ids=["date", "timestamptz"])
def test_a_day_or_an_instant_in_a_composite_key_says_the_month(empty_url: str, kind: Any) -> None:
    class Other(DeclarativeBase):
        pass

    class Daily(RunMixin, Other):
        __tablename__ = "Daily %(x)s"
        __table_args__: ClassVar[dict[str, Any]] = {"schema": "app"}
        __lifecycle__ = lifecycle()
        __partition__ = Monthly()
        number: Mapped[int] = mapped_column("No.", primary_key=True, autoincrement=False)
        day: Mapped[Any] = mapped_column("the day", kind, primary_key=True)
        status: Mapped[PlanStatus] = statuses.column()

    class DailyStep(ReceiptMixin[Daily], Other):
        __tablename__ = "daily_step"
        __table_args__: ClassVar[dict[str, Any]] = {"schema": "app"}
        __partition__ = Monthly("day")

    engine = create_engine(empty_url, connect_args={"options": "-c timezone=Asia/Kolkata"})
    translated = engine.execution_options(schema_translate_map={"app": "tenant's"})
    with engine.begin() as connection:
        connection.execute(text("""CREATE SCHEMA "tenant's" """))
    Other.metadata.create_all(translated)
    runs = Runs(sessionmaker(translated), Daily, DailyStep)
    for entity in Daily, DailyStep:
        with runs.session_factory.begin() as session:
            create_partitions(session, entity, 1)
    with runs.session_factory.begin() as session:
        now = datetime.now(UTC)
        session.add(Daily(number=1, day=now if kind is not Date else now.date(), status=PlanStatus.APPROVED))
    (run,) = runs.claim_due(1)
    two_steps(run)
    run.finish()
    with engine.connect() as connection:
        found = connection.execute(text("""SELECT DISTINCT tableoid::regclass::text FROM "tenant's".daily_step"""))
        assert found.scalars().all() == [f""""tenant's".daily_step_{months_ago(0):%Y_%m}"""]
    with runs.session_factory.begin() as session:
        since = [each.since for each in partitions_of(session, DailyStep)]
        assert drop_partitions(session, DailyStep, NOW).dropped == ()
    assert since == [
        None,
        *(datetime(each.year, each.month, 1, tzinfo=UTC) for each in (months_ago(0), months_ago(-1))),
    ]
    engine.dispose()


def test_operations_on_a_table_without_partitions_say_how_to_declare_them(monthly: Engine) -> None:
    class Other(DeclarativeBase):
        pass

    class Whole(RunMixin, Other):
        __tablename__ = "whole"
        __lifecycle__ = lifecycle()
        id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid7)
        status: Mapped[PlanStatus] = statuses.column()

    with Session(monthly) as session:
        for call in (
            lambda: create_partitions(session, Whole),
            lambda: drop_partitions(session, Whole, NOW),
            lambda: partition_sql(Whole, months_ago(0)),
            lambda: partitions_of(session, Whole),
        ):
            with pytest.raises(UsageError, match=r"__partition__ = Monthly\(\)"):
                call()
        with pytest.raises(UsageError, match="older_than"):
            drop_partitions(session, Job, timedelta(days=-1))
        with pytest.raises(UsageError, match="at least"):
            create_partitions(session, Job, -1)


def test_keys_that_are_made_one_after_another_sort_by_time() -> None:
    before = datetime.now(UTC)
    keys = [uuid7() for _ in range(1000)]
    assert len(set(keys)) == 1000
    assert {(key.version, key.variant) for key in keys} == {(7, RFC_4122)}
    assert [key.int >> 64 for key in keys] == sorted(key.int >> 64 for key in keys)
    assert abs((keys[0].int >> 80) / 1000 - before.timestamp()) < 5
