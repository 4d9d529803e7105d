"""The priority of runs: which of those that are due is claimed first, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import PriorityMixin, ReceiptMixin, RunMixin, Runs
from tests.support_jobs import JobStatus, job_lifecycle
from tests.support_statements import statements
from tests.test_plans_of_statements import analysed, nodes


class PriorityBase(DeclarativeBase):
    pass


class Ranked(PriorityMixin, RunMixin, PriorityBase):
    __tablename__ = "ranked"
    __lifecycle__ = job_lifecycle()
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[JobStatus] = __lifecycle__.machine.column()


class RankedStep(ReceiptMixin[Ranked], PriorityBase):
    __tablename__ = "ranked_step"


@pytest.fixture
def engine(empty_url: str) -> Iterator[Engine]:
    engine = create_engine(empty_url)
    PriorityBase.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def ranked(engine: Engine) -> Runs[Ranked]:
    return Runs(sessionmaker(engine), Ranked, RankedStep)


def add(engine: Engine, *rows: tuple[int, str]) -> None:
    """Add runs with a priority, each due at an SQL expression."""
    with engine.begin() as connection:
        for priority, due in rows:
            connection.execute(text(f"INSERT INTO ranked (priority, available_at) VALUES ({priority}, {due})"))


def test_a_run_of_a_higher_priority_is_claimed_first_and_of_equal_ones_that_due_for_longest(
    engine: Engine, ranked: Runs[Ranked]
) -> None:
    due = [(0, "3 hours"), (5, "1 hour"), (5, "2 hours"), (9, "1 second"), (0, "4 hours")]
    add(engine, *((priority, f"now() - interval '{ago}'") for priority, ago in due))
    claimed = [(run.row.id, run.row.priority) for run in ranked.claim_due(10)]
    assert claimed == [(4, 9), (3, 5), (2, 5), (5, 0), (1, 0)]


def test_a_batch_takes_no_more_than_it_may_across_priorities(engine: Engine, ranked: Runs[Ranked]) -> None:
    add(engine, *((priority, "now()") for priority in (0, 1, 1, 2, 2)))
    assert [run.row.priority for run in ranked.claim_due(3)] == [2, 2, 1]
    assert [run.row.priority for run in ranked.claim_due(3)] == [1, 0]


def test_a_run_that_is_not_due_is_not_claimed_before_one_of_a_lower_priority_that_is(
    engine: Engine, ranked: Runs[Ranked]
) -> None:
    add(engine, (9, "now() + interval '1 hour'"), (0, "now()"))
    assert [run.row.priority for run in ranked.claim_due(2)] == [0]


def test_rows_that_others_are_claiming_are_skipped_in_every_priority(engine: Engine, ranked: Runs[Ranked]) -> None:
    add(engine, (9, "now()"), (9, "now()"), (0, "now()"), (0, "now()"))
    with engine.begin() as connection:
        connection.execute(text("SELECT id FROM ranked WHERE id IN (1, 3) FOR UPDATE"))
        assert [run.row.id for run in ranked.claim_due(4)] == [2, 4]


@pytest.mark.parametrize("priority", [-1, 10])
def test_postgresql_refuses_a_priority_out_of_its_range(engine: Engine, priority: int) -> None:
    with pytest.raises(IntegrityError, match="ck_ranked_priority"):
        add(engine, (priority, "now()"))


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
def test_a_claim_reads_neither_history_nor_what_is_not_due(engine: Engine, ranked: Runs[Ranked], mode: str) -> None:
    many: list[Any] = [
        "'done', i % 10, now() FROM generate_series(1, 50000)",
        "'ready', i % 10, now() + i * interval '1 min' FROM generate_series(1, 50000)",
        "'ready', 0, now() - i * interval '1 second' FROM generate_series(1, 200)",
    ]
    with Session(engine) as session:
        for rows in many:
            session.execute(text(f"INSERT INTO ranked (status, priority, available_at) SELECT {rows} AS i"))
        session.commit()
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE ranked"))
    with statements(engine) as sent:
        assert len(ranked.claim_due(5)) == 5
    (statement,) = sent
    with engine.connect() as connection:
        plan = analysed(connection, statement, sent.parameters[0], mode)
        connection.rollback()
    assert not [node for node in nodes(plan) if node["Node Type"] == "Seq Scan" and node["Relation Name"] == "ranked"]
    scans = [node for node in nodes(plan) if node.get("Index Name") == "ix_ranked_priority"]
    assert len(scans) == 10
    assert sum(node["Actual Rows"] for node in scans) < 300
