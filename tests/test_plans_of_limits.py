"""How PostgreSQL carries out a claim under limits: it reads what may be claimed, whatever else is in the table."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, create_engine, text

from sqla_durable import Rate
from tests.support_limits import Limited, LimitsBase, claimed, declare, functions_on, whose
from tests.support_statements import statements
from tests.test_plans_of_statements import analysed, nodes

MANY = 100_000
DECLARED: dict[str, dict[str, Any]] = {
    "full": {"concurrency": 2},
    "whale": {"concurrency_per_tenant": 2},
    "spent": {"rate": Rate(1, timedelta(days=1))},
    "open": {"concurrency": 5000, "rate": Rate(10**6, timedelta(seconds=1))},
}


@pytest.fixture(scope="module", params=["VACUUM ANALYZE limited_run", "SELECT 1"], ids=["analysed", "unknown"])
def crowded(server_url: str, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Much history, as many runs that are not due yet, long queues that have no place, and a few runs that have one."""
    name = f"sqla_durable_{uuid4().hex[:12]}"
    admin = create_engine(server_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine = create_engine(admin.url.set(database=name))
    LimitsBase.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE limited_run SET (autovacuum_enabled = off)"))
    columns = "id, function, tenant, status, fence, lease_owner, lease_expires_at, available_at, started_at, paced_at"
    ready, running = "'ready', 0, NULL, NULL::timestamptz", "'running', 1, 'x', now() + interval '1 day'"
    past, future = "now() - i * interval '1 ms', NULL, NULL", "now() + i * interval '1 min', NULL, NULL"
    history = f"'done', 1, NULL, NULL, now(), now(), now() - i * interval '1 s' FROM generate_series(1, {MANY}) AS i"
    with engine.begin() as connection:
        for rows in [
            f"'open', 'ada', {history}",
            f"'whale', 'ada', {history}",
            f"'open', NULL, {ready}, {future} FROM generate_series(1, {MANY}) AS i",
            f"'whale', 'ben', {ready}, {future} FROM generate_series(1, {MANY}) AS i",
            f"'full', NULL, {ready}, {past} FROM generate_series(1, 20000) AS i",
            f"'spent', NULL, {ready}, {past} FROM generate_series(1, 20000) AS i",
            f"'whale', 'ada', {ready}, {past} FROM generate_series(1, 20000) AS i",
            f"'whale', 'eve', {ready}, {past} FROM generate_series(1, 50) AS i",
            f"'open', 'ada', {ready}, {past} FROM generate_series(1, 50) AS i",
            f"'full', NULL, {running}, now(), now(), now() FROM generate_series(1, 2) AS i",
            f"'whale', 'ada', {running}, now(), now(), now() FROM generate_series(1, 2) AS i",
            f"'spent', NULL, {running}, now(), now(), now() + interval '1 day' FROM generate_series(1, 1) AS i",
        ]:
            connection.execute(text(f"INSERT INTO limited_run ({columns}) SELECT gen_random_uuid(), {rows}"))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text(request.param))
    yield engine
    engine.dispose()
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture
def functions(crowded: Engine) -> Limited:
    functions = functions_on(crowded)
    declare(functions, DECLARED)
    return functions


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
def test_a_claim_reads_no_more_than_it_may_claim(crowded: Engine, functions: Limited, mode: str) -> None:
    with statements(crowded) as sent:
        found = whose(claimed(functions, 5))
    assert set(found) <= {("open", "ada"), ("whale", "eve")}
    assert len(found) == 5
    statement, parameters = next(pair for pair in zip(sent, sent.parameters, strict=True) if "claimed" in pair[0])
    with crowded.connect() as connection:
        plan = analysed(connection, statement, parameters, mode)
        connection.rollback()
    reads_little(plan)


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
def test_a_look_for_the_next_token_reads_no_more_than_the_first_due_runs(crowded: Engine, mode: str) -> None:
    functions = functions_on(crowded)
    rate = Rate(1, timedelta(days=1))
    declare(functions, DECLARED | {"open": {"rate": rate}, "whale": {"rate": rate, "concurrency_per_tenant": 1}})
    with statements(crowded) as sent:
        for holder in claimed(functions, 100):
            holder.release()
    statement, parameters = next(pair for pair in zip(sent, sent.parameters, strict=True) if "EXTRACT" in pair[0])
    with crowded.connect() as connection:
        reads_little(analysed(connection, statement, parameters, mode))
        connection.rollback()


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
def test_a_claim_by_key_reads_its_row_and_what_is_live(crowded: Engine, functions: Limited, mode: str) -> None:
    (holder,) = claimed(functions, 1)
    holder.release()
    with statements(crowded) as sent:
        (work,) = functions.works()
        assert work.verbs.claim(holder.lease.identity, run_now=True) is not None
    for statement, parameters in zip(sent, sent.parameters, strict=True):
        if "FOR NO KEY UPDATE" in statement:
            with crowded.connect() as connection:
                reads_little(analysed(connection, statement, parameters, mode))
                connection.rollback()


def reads_little(plan: dict[str, Any]) -> None:
    for scan in nodes(plan):
        if scan.get("Relation Name") == "limited_run":
            assert scan["Node Type"] != "Seq Scan"
            read = (scan["Actual Rows"] + scan.get("Rows Removed by Filter", 0)) * scan["Actual Loops"]
            assert read < 500, scan
