"""How PostgreSQL carries the statements out: partial indexes whatever else is in the table, and HOT renewals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from psycopg import sql
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Run, Runs
from tests.support import Base, Plan, PlanStep, approved_plan, eventually, let_lapse
from tests.support_statements import statements

MANY = 100_000
READY_INDEX, RUNNING_INDEX, KEY_INDEX = "ix_plan_available_at", "ix_plan_started_at", "plan_pkey"


@pytest.fixture(scope="module")
def crowded(server_url: str) -> Iterator[Engine]:
    """A table with much history, and as many ready runs that are not due yet, and a few that matter."""
    name = f"sqla_durable_{uuid4().hex[:12]}"
    admin = create_engine(server_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine = create_engine(admin.url.set(database=name))
    Base.metadata.create_all(engine)
    columns = "(id, status, fence, attempts, lease_owner, lease_expires_at, available_at, started_at, actions)"
    with engine.begin() as connection:
        for rows in [
            f"'executed', 1, 1, NULL, NULL, now(), now(), '[]' FROM generate_series(1, {MANY})",
            f"'approved', 0, 0, NULL, NULL, now() + i * interval '1 min', NULL, '[]' FROM generate_series(1, {MANY})",
            "'approved', 0, 0, NULL, NULL, now() - i * interval '1 second', NULL, '[]' FROM generate_series(1, 200)",
            "'executing', 1, 1, 'x', now() + interval '1 day', now(), now(), '[]' FROM generate_series(1, 200)",
            "'executing', 1, 1, 'x', now() - interval '1 day', now(), now(), '[]' FROM generate_series(1, 20)",
        ]:
            connection.execute(text(f"INSERT INTO plan {columns} SELECT gen_random_uuid(), {rows} AS i"))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE plan"))
    yield engine
    engine.dispose()
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture(scope="module")
def crowd(crowded: Engine) -> Runs[Plan]:
    return Runs(sessionmaker(crowded), Plan, PlanStep)


# which index


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize(
    ("verb", "indexes"),
    [
        (lambda crowd, run: crowd.claim_due(10), [{RUNNING_INDEX, READY_INDEX, KEY_INDEX}]),
        (lambda crowd, run: crowd.reap(3), [{RUNNING_INDEX, KEY_INDEX}]),
        (lambda crowd, run: crowd.heal(run.lease.identity), [{KEY_INDEX}]),
        (lambda crowd, run: crowd.claim(run.lease.identity), [{KEY_INDEX}] * 2),
        (lambda crowd, run: run.finish(), [{KEY_INDEX}]),
        (lambda crowd, run: run.renew(), [{KEY_INDEX}]),
        (lambda crowd, run: run.step("only", lambda session: None), [{KEY_INDEX}]),
    ],
    ids=["claim_due", "reap", "heal", "claim", "finish", "renew", "step"],
)
def test_no_verb_reads_the_whole_table(
    crowded: Engine, crowd: Runs[Plan], mode: str, verb: Callable[[Runs[Plan], Run[Plan]], Any], indexes: list[set[str]]
) -> None:
    (run,) = crowd.claim_due(1)
    with statements(crowded) as sent:
        verb(crowd, run)
    plans = [
        explained(crowded, statement, parameters, mode)
        for statement, parameters in zip(sent, sent.parameters, strict=True)
        if "FOR NO KEY UPDATE" in statement
    ]
    for plan in plans:
        assert not [node for node in nodes(plan) if node["Node Type"] == "Seq Scan" and node["Relation Name"] == "plan"]
    used = [{node["Index Name"] for node in nodes(plan) if "Index Name" in node} for plan in plans]
    assert used == indexes


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
def test_a_batch_claim_reads_no_row_that_is_not_due(crowded: Engine, crowd: Runs[Plan], mode: str) -> None:
    with statements(crowded) as sent:
        assert len(crowd.claim_due(5)) == 5
    (statement, parameters) = next(pair for pair in zip(sent, sent.parameters, strict=True) if "claimed" in pair[0])
    with crowded.connect() as connection:
        plan = analysed(connection, statement, parameters, mode)
        connection.rollback()
    (scan,) = [node for node in nodes(plan) if node.get("Index Name") == READY_INDEX]
    assert "available_at" in scan["Index Cond"]
    assert scan["Actual Rows"] < 300
    assert scan.get("Rows Removed by Filter", 0) == 0


def test_under_an_old_snapshot_and_churn_claims_and_reaps_keep_their_indexes(
    crowded: Engine, crowd: Runs[Plan]
) -> None:
    reader = crowded.connect().execution_options(isolation_level="REPEATABLE READ")
    reader.execute(text("SELECT count(*) FROM plan"))
    with crowded.begin() as connection:
        connection.execute(
            text(
                "UPDATE plan SET available_at = now() - interval '1 hour' WHERE id IN"
                " (SELECT id FROM plan WHERE status = 'approved' AND available_at > now() LIMIT 2000)"
            )
        )
    churned = 0
    while runs := crowd.claim_due(100):
        churned += len(runs)
        for run in runs[:50]:
            run.finish()
        with crowded.begin() as connection:
            connection.execute(
                text(
                    "UPDATE plan SET lease_expires_at = now() - interval '1 hour', attempts = 3"
                    " WHERE status = 'executing' AND lease_owner <> 'x'"
                )
            )
    assert churned >= 2000
    with statements(crowded) as sent:
        crowd.claim_due(10)
        crowd.reap(10)
    reader.close()
    for statement, parameters in zip(sent, sent.parameters, strict=True):
        if "FOR NO KEY UPDATE" in statement:
            for mode in ("force_custom_plan", "force_generic_plan"):
                used = {node.get("Index Name") for node in nodes(explained(crowded, statement, parameters, mode))}
                assert used & {READY_INDEX, RUNNING_INDEX}


# HOT


def test_renewals_write_no_index(engine: Engine, session_factory: sessionmaker[Session]) -> None:
    plans: Runs[Plan] = Runs(session_factory, Plan, PlanStep)
    run = plans.claim(ident := approved_plan(session_factory))
    assert run is not None
    before = updates(engine)
    for _ in range(90):
        run.renew()
    for key in range(10):
        let_lapse(session_factory, ident)
        run.step(key, lambda session: None)
    # Ten more are those of let_lapse(), to the lease's column as well.
    all_, hot = eventually(lambda: grown(engine, before, 110), "the statistics")
    assert all_ == 110
    assert hot >= 0.95 * all_


def grown(engine: Engine, before: tuple[int, int], by: int) -> tuple[int, int] | None:
    now = updates(engine)
    return (now[0] - before[0], now[1] - before[1]) if now[0] - before[0] >= by else None


def updates(engine: Engine) -> tuple[int, int]:
    """How many updates of plans there have been, and how many of them were HOT; flushed from every backend."""
    engine.dispose()
    with engine.connect() as connection:
        connection.execute(text("SELECT pg_stat_force_next_flush()"))
        query = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'plan'"
        return tuple(connection.execute(text(query)).one())


# the plans


def prepared(connection: Connection, statement: str, parameters: dict[str, Any], mode: str) -> str:
    """Prepare a statement as psycopg sent it, and return how it is executed."""
    order: list[str] = []

    def number(found: re.Match[str]) -> str:
        if found[1] not in order:
            order.append(found[1])
        return f"${order.index(found[1]) + 1}"

    numbered = re.sub(r"%\((\w+)\)s", number, statement).replace("%%", "%")
    driver: Any = connection.connection.dbapi_connection
    connection.exec_driver_sql(f"SET LOCAL plan_cache_mode = {mode}")
    connection.exec_driver_sql("DEALLOCATE ALL")
    driver.execute(f"PREPARE explained AS {numbered}", prepare=False)
    values = sql.SQL(", ").join(sql.Literal(parameters[name]) for name in order)
    call = sql.SQL("EXECUTE explained") if not order else sql.SQL("EXECUTE explained({})").format(values)
    return call.as_string(driver)


def explained(engine: Engine, statement: str, parameters: Any, mode: str, options: str = "") -> dict[str, Any]:
    with engine.connect() as connection:
        plan = analysed(connection, statement, parameters, mode, "")
        connection.rollback()
    return plan


def analysed(
    connection: Connection, statement: str, parameters: Any, mode: str, options: str = "ANALYZE, TIMING OFF,"
) -> dict[str, Any]:
    call = prepared(connection, statement, dict(parameters), mode)
    found = connection.exec_driver_sql(f"EXPLAIN ({options} FORMAT JSON) {call}".replace("%", "%%")).scalar_one()
    (plan,) = json.loads(found) if isinstance(found, str) else found
    root: dict[str, Any] = plan["Plan"]
    return root


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for below in plan.get("Plans", ()):
        yield from nodes(below)
