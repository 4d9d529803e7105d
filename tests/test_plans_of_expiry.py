"""How PostgreSQL finds the overdue runs among much history and many that are not overdue yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Runs
from tests.support_consent import Consent, ConsentBase, ConsentStep, Status, add_consent, consent_statuses
from tests.support_statements import statements
from tests.test_plans_of_statements import analysed, explained, nodes

MANY = 100_000
EXPIRY_INDEX, KEY_INDEX = "ix_consent_expires_at", "consent_pkey"
READY_INDEX, RUNNING_INDEX = "ix_consent_available_at", "ix_consent_started_at"


@pytest.fixture(scope="module")
def crowded(server_url: str) -> Iterator[Engine]:
    """A table with much history that has expired, as many runs that have not yet, and a few that are overdue."""
    name = f"sqla_durable_{uuid4().hex[:12]}"
    admin = create_engine(server_url, isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(text(f"CREATE DATABASE {name}"))
    engine = create_engine(admin.url.set(database=name))
    ConsentBase.metadata.create_all(engine)
    with engine.begin() as connection:
        for status, expires_at, count in [
            (Status.EXPIRED, "now() - i * interval '1 second'", MANY),
            (Status.EXECUTED, "now() - i * interval '1 second'", MANY),
            (Status.PENDING, "now() + i * interval '1 minute'", MANY),
            (Status.APPROVED, "now() + i * interval '1 minute'", 200),
            (Status.APPROVED, "NULL", 200),
            (Status.PENDING, "now() - i * interval '1 second'", 20),
            (Status.APPROVED, "now() - i * interval '1 second'", 20),
        ]:
            rows = f"SELECT :status, {expires_at}, '[]' FROM generate_series(1, {count}) i"
            connection.execute(text(f"INSERT INTO consent (status, expires_at, actions) {rows}"), {"status": status})
        columns = "(status, lease_owner, lease_expires_at, fence, started_at, actions)"
        rows = (
            f"SELECT '{Status.EXECUTING}', 'x', now() + interval '1 day', 1, now(), '[]' FROM generate_series(1, 200)"
        )
        connection.execute(text(f"INSERT INTO consent {columns} {rows}"))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE consent"))
    yield engine
    engine.dispose()
    with admin.connect() as connection:
        connection.execute(text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture(scope="module")
def crowd(crowded: Engine) -> Runs[Consent]:
    return Runs(sessionmaker(crowded), Consent, ConsentStep)


def approve(crowd: Runs[Consent], ident: int, engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        assert consent_statuses.transition(session, (Consent, ident), Status.APPROVED)


SWEEP = [{RUNNING_INDEX, KEY_INDEX}, {EXPIRY_INDEX, KEY_INDEX}]


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize(
    ("verb", "indexes"),
    [
        (lambda crowd, ident, engine: crowd.reap(3), SWEEP),
        (lambda crowd, ident, engine: crowd.claim_due(3), [{*SWEEP[0], *SWEEP[1], READY_INDEX}]),
        (lambda crowd, ident, engine: crowd.heal(ident), [{KEY_INDEX}] * 2),
        (lambda crowd, ident, engine: crowd.claim(ident), [{KEY_INDEX}] * 3),
        (approve, [{KEY_INDEX}]),
    ],
    ids=["reap", "claim_due", "heal", "claim", "approve"],
)
def test_no_verb_reads_the_whole_table(
    crowded: Engine, crowd: Runs[Consent], mode: str, verb: Callable[..., Any], indexes: list[set[str]]
) -> None:
    ident = add_consent(crowded)
    with statements(crowded) as sent:
        verb(crowd, ident, crowded)
    plans = [
        explained(crowded, statement, parameters, mode)
        for statement, parameters in zip(sent, sent.parameters, strict=True)
        if "FOR NO KEY UPDATE" in statement
    ]
    for plan in plans:
        assert not [node for node in nodes(plan) if node["Node Type"] == "Seq Scan"]
    assert [{node["Index Name"] for node in nodes(plan) if "Index Name" in node} for plan in plans] == indexes


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
def test_a_sweep_reads_no_run_that_is_not_overdue(crowded: Engine, crowd: Runs[Consent], mode: str) -> None:
    with statements(crowded) as sent:
        assert crowd.reap(2) == 2
    statement, parameters = sent[-1], sent.parameters[-1]
    with crowded.connect() as connection:
        plan = analysed(connection, statement, parameters, mode)
        connection.rollback()
    (scan,) = [node for node in nodes(plan) if node.get("Index Name") == EXPIRY_INDEX]
    assert "expires_at" in scan["Index Cond"]
    assert scan["Actual Rows"] <= 40
    assert scan.get("Rows Removed by Filter", 0) == 0
