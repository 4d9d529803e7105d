"""A check finds each way in which tables may differ from their models, and nothing where they do not."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import Engine, MetaData, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, sessionmaker

import tests.support_check
from sqla_durable import Finding, Functions, Runs, Severity, UsageError, check
from sqla_durable.asyncio import AsyncRuns
from tests.support_check import (
    Base,
    Job,
    JobStep,
    Order,
    OrderSignal,
    OrderStep,
    execute,
    found,
    one,
    own,
    own_server,
)

__all__ = ["own", "own_server"]  # fixtures

NOW = datetime.now(UTC)
THIS = f"{NOW:%Y_%m}"

NOT_VALID = """
DO $$ BEGIN
    EXECUTE 'ALTER TABLE ticket ADD CONSTRAINT ck_ticket_status_values '
        || (SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = 'before') || ' NOT VALID';
END $$
"""
PASSING = """
CREATE OR REPLACE FUNCTION durable_guard_order() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'
"""
LACKS: dict[str, tuple[tuple[str, str, str], tuple[str, ...]]] = {
    "a table": (("error", "missing-table", "order_signal"), ("DROP TABLE order_signal",)),
    "the table of overrides": (("error", "missing-table", "durable_override"), ("DROP TABLE durable_override",)),
    "a column": (
        ("error", "missing-column", "job_step.input_fingerprint"),
        ("ALTER TABLE job_step DROP COLUMN input_fingerprint",),
    ),
    "a column of the user's": (
        ("error", "missing-column", '"order".customer'),
        (
            'ALTER TABLE "order" DROP COLUMN customer',
            'ALTER TABLE "order" ADD COLUMN other varchar',
        ),
    ),
    "the type of a column": (
        ("error", "column-type", "job.cancel_requested_at"),
        ("ALTER TABLE job ALTER COLUMN cancel_requested_at TYPE timestamp",),
    ),
    "the length of a column": (
        ("error", "column-type", "job.function"),
        ("ALTER TABLE job ALTER COLUMN function TYPE varchar(12)",),
    ),
    "the length of a column that has more": (
        ("warning", "column-type", "job.function"),
        ("ALTER TABLE job ALTER COLUMN function TYPE text",),
    ),
    "a column that may be null": (
        ("error", "column-not-null", '"order".lease_owner'),
        ('ALTER TABLE "order" ALTER COLUMN lease_owner SET NOT NULL',),
    ),
    "a column that may not be null": (
        ("warning", "column-nullable", '"order".fence'),
        ('ALTER TABLE "order" ALTER COLUMN fence DROP NOT NULL',),
    ),
    "a default": (
        ("error", "column-default", '"order".attempts'),
        ('ALTER TABLE "order" ALTER COLUMN attempts DROP DEFAULT',),
    ),
    "the value of a default": (
        ("warning", "column-default", "ticket.status"),
        ("ALTER TABLE ticket ALTER COLUMN status SET DEFAULT 'failed'",),
    ),
    "a check": (
        ("error", "missing-constraint", "order_step ck_order_step_outcome"),
        ("ALTER TABLE order_step DROP CONSTRAINT ck_order_step_outcome",),
    ),
    "the definition of a check": (
        ("error", "other-constraint", "ticket ck_ticket_status_values"),
        (
            "ALTER TABLE ticket DROP CONSTRAINT ck_ticket_status_values",
            "ALTER TABLE ticket ADD CONSTRAINT ck_ticket_status_values CHECK (status IN ('pending', 'approved'))",
        ),
    ),
    "the validation of a check": (
        ("warning", "constraint-not-valid", "ticket ck_ticket_status_values"),
        (
            "ALTER TABLE ticket RENAME CONSTRAINT ck_ticket_status_values TO before",
            NOT_VALID,
            "ALTER TABLE ticket DROP CONSTRAINT before",
        ),
    ),
    "the foreign key to the run": (
        ("error", "missing-constraint", "order_step fk_order_step_order_id"),
        ("ALTER TABLE order_step DROP CONSTRAINT fk_order_step_order_id",),
    ),
    "what the foreign key to the run does": (
        ("error", "other-constraint", "order_step fk_order_step_order_id"),
        (
            "ALTER TABLE order_step DROP CONSTRAINT fk_order_step_order_id",
            'ALTER TABLE order_step ADD CONSTRAINT fk_order_step_order_id FOREIGN KEY (order_id) REFERENCES "order"',
        ),
    ),
    "the foreign key of unsealed receipts": (
        ("error", "missing-constraint", "order_step fk_order_step_unsealed_order_id"),
        ("ALTER TABLE order_step DROP CONSTRAINT fk_order_step_unsealed_order_id",),
    ),
    "the time of the foreign key of unsealed receipts": (
        ("error", "other-constraint", "order_step fk_order_step_unsealed_order_id"),
        ("ALTER TABLE order_step ALTER CONSTRAINT fk_order_step_unsealed_order_id DEFERRABLE INITIALLY IMMEDIATE",),
    ),
    "the name of the foreign key of unsealed receipts": (
        ("error", "constraint-name", "order_step renamed"),
        ("ALTER TABLE order_step RENAME CONSTRAINT fk_order_step_unsealed_order_id TO renamed",),
    ),
    "a primary key": (
        ("error", "missing-constraint", "ticket primary key"),
        ("ALTER TABLE ticket DROP CONSTRAINT ticket_pkey",),
    ),
    "triggers of foreign keys": (
        ("error", "disabled-constraint", "order_signal"),
        ("ALTER TABLE order_signal DISABLE TRIGGER ALL",),
    ),
    "an index": (
        ("warning", "missing-index", '"order" ix_order_available_at'),
        ("DROP INDEX ix_order_available_at",),
    ),
    "a unique index": (
        ("error", "missing-index", '"order" ix_order_one_in_flight'),
        ("DROP INDEX ix_order_one_in_flight",),
    ),
    "the definition of an index": (
        ("warning", "other-index", '"order" ix_order_available_at'),
        ("DROP INDEX ix_order_available_at", 'CREATE INDEX ix_order_available_at ON "order" (available_at)'),
    ),
    "the validity of an index": (
        ("warning", "invalid-index", '"order" ix_order_available_at'),
        ("UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'ix_order_available_at'::regclass",),
    ),
    "storage": (
        ("warning", "storage-parameter", '"order"'),
        ('ALTER TABLE "order" RESET (fillfactor)',),
    ),
    "a guard": (
        ("error", "missing-guard", '"order"'),
        ("DROP FUNCTION durable_guard_order CASCADE",),
    ),
    "the source of a guard": (
        ("error", "other-guard", '"order" durable_guard_order'),
        (PASSING,),
    ),
    "triggers of a guard": (
        ("error", "disabled-guard", '"order" durable_guard_order'),
        ('ALTER TABLE "order" DISABLE TRIGGER USER',),
    ),
    "the foreign key of a partition": (
        ("error", "missing-constraint", f"public.job_step_{THIS} fk_job_step_unsealed"),
        (f"ALTER TABLE job_step_{THIS} DROP CONSTRAINT fk_job_step_unsealed",),
    ),
    "a month": (
        ("warning", "missing-partition", f"job_step {NOW:%Y-%m}"),
        (f"DROP TABLE job_step_{THIS}",),
    ),
    "the default partition": (
        ("error", "missing-partition", "job_step default"),
        ("DROP TABLE job_step_default",),
    ),
}


@pytest.mark.unguarded
@pytest.mark.parametrize("lack", LACKS)
def test_a_check_finds_another(own: Engine, lack: str) -> None:
    expected, statements = LACKS[lack]
    assert found(own) == [], "before"
    execute(own, *statements)
    assert [each for each in found(own) if each[1] != "missing-index" or expected[1] == "missing-index"] == [expected]


SQL = [
    "a column",
    "the type of a column",
    "the length of a column",
    "a column that may be null",
    "a column that may not be null",
    "a default",
    "the value of a default",
    "a check",
    "the definition of a check",
    "the validation of a check",
    "the foreign key to the run",
    "what the foreign key to the run does",
    "the foreign key of unsealed receipts",
    "the time of the foreign key of unsealed receipts",
    "the name of the foreign key of unsealed receipts",
    "a primary key",
    "triggers of foreign keys",
    "an index",
    "a unique index",
    "the definition of an index",
    "the validity of an index",
    "storage",
    "triggers of a guard",
    "the foreign key of a partition",
    "the default partition",
]


@pytest.mark.unguarded
@pytest.mark.parametrize("lack", SQL)
def test_a_remedy_that_is_sql_mends(own: Engine, lack: str) -> None:
    execute(own, *LACKS[lack][1])
    remedy = one(own).remedy
    assert "\n" not in remedy
    execute(own, *remedy.split("; "))
    assert found(own) == []


def test_a_constraint_that_is_not_enforced_is_found(own: Engine) -> None:
    with own.connect() as connection:
        if connection.dialect.server_version_info < (18,):
            pytest.skip("PostgreSQL has such constraints since 18")
    execute(own, "ALTER TABLE order_step ALTER CONSTRAINT fk_order_step_order_id NOT ENFORCED")
    finding = one(own)
    assert (finding.severity, finding.code) == (Severity.ERROR, "constraint-not-enforced")
    execute(own, finding.remedy)
    assert found(own) == []


def test_a_guard_that_no_model_asks_for_is_found(own: Engine) -> None:
    class Other(DeclarativeBase):
        pass

    Order.__table__.to_metadata(Other.metadata)
    other = Other.metadata.tables["order"]
    other.primary_key.columns[0].info.pop("sqla_durable.guard")
    finding = one(own, Other)
    assert (finding.severity, finding.code) == (Severity.WARNING, "left-over-guard")


def test_a_table_that_is_partitioned_where_its_model_is_not_is_found(own: Engine) -> None:
    execute(
        own,
        "DROP TABLE order_signal",
        "CREATE TABLE order_signal (id bigint) PARTITION BY RANGE (id)",
    )
    assert ("error", "partitioned", "order_signal") in found(own)
    execute(own, "DROP TABLE job_step", "CREATE TABLE job_step (LIKE order_step)")
    assert ("error", "not-partitioned", "job_step") in found(own)


RESTORE = """
DO $$
DECLARE
    each record;
BEGIN
    FOR each IN SELECT conrelid::regclass AS of, conname, pg_get_constraintdef(oid) AS definition
                  FROM pg_constraint WHERE connamespace = 'public'::regnamespace AND contype = 'c' AND conparentid = 0
    LOOP
        EXECUTE format('ALTER TABLE %s DROP CONSTRAINT %I', each.of, each.conname);
        EXECUTE format('ALTER TABLE %s ADD CONSTRAINT %I %s', each.of, each.conname, each.definition);
    END LOOP;
    FOR each IN SELECT indexrelid::regclass AS index, pg_get_indexdef(indexrelid) AS definition
                  FROM pg_index JOIN pg_class ON pg_class.oid = indrelid
                 WHERE relnamespace = 'public'::regnamespace AND NOT indisprimary
    LOOP
        EXECUTE format('DROP INDEX %s', each.index);
        EXECUTE each.definition;
    END LOOP;
END $$
"""


def test_definitions_that_were_dumped_and_restored_are_no_others(own: Engine) -> None:
    """PostgreSQL reads its own words in another way than it wrote them."""
    execute(own, "DROP TABLE job_step CASCADE")
    query = text("SELECT md5(string_agg(pg_get_expr(indpred, indrelid), ' ')) FROM pg_index")
    with own.connect() as connection:
        before = connection.scalar(query)
        connection.execute(text(RESTORE.replace(":", "\\:")))
        assert connection.scalar(query) != before
        connection.commit()
    assert [each for each in found(own) if each[1] != "missing-table"] == []


def test_what_is_the_users_alone_is_not_compared(own: Engine) -> None:
    execute(own, "DROP TABLE customer", 'ALTER TABLE "order" ALTER COLUMN customer TYPE text')
    execute(own, 'ALTER TABLE "order" ADD COLUMN more integer', 'CREATE INDEX more ON "order" (customer)')
    assert found(own) == []


def test_a_table_is_looked_for_where_the_engine_has_it(own: Engine) -> None:
    tenant = own.execution_options(schema_translate_map={None: "tenant"})
    execute(own, "DROP SCHEMA IF EXISTS tenant CASCADE", "CREATE SCHEMA tenant")
    assert {code for _, code, _ in found(tenant)} == {"missing-table"}
    Base.metadata.create_all(tenant)
    missing = {(code, subject) for _, code, subject in found(tenant)}
    assert {code for code, _ in missing} == {"missing-partition"}
    execute(own, "ALTER TABLE tenant.order_step DROP CONSTRAINT ck_order_step_outcome")
    assert ("error", "missing-constraint", "tenant.order_step ck_order_step_outcome") in found(tenant)
    assert found(own) == []
    execute(own, "DROP SCHEMA tenant CASCADE")


def test_a_check_leaves_nothing_behind(own: Engine) -> None:
    query = text("SELECT count(*) FROM pg_class WHERE relname = 'sqla_durable_shadow'")
    execute(own, "ALTER TABLE ticket DROP CONSTRAINT ck_ticket_status_values")
    with own.connect() as connection:
        connection.execute(text("INSERT INTO customer (name) VALUES ('ada')"))
        assert [each.code for each in check(connection, Base)] == ["missing-constraint"]
        assert connection.scalar(text("SELECT count(*) FROM customer")) == 1, "the transaction stands"
        assert connection.scalar(query) == 0
        connection.rollback()
    autocommit = own.execution_options(isolation_level="AUTOCOMMIT")
    assert [each.code for each in check(autocommit, Base)] == ["missing-constraint"]
    with autocommit.connect() as connection, pytest.raises(UsageError, match="AUTOCOMMIT"):
        check(connection, Base)


# what may be given


@pytest.fixture
def lacking(own: Engine) -> Engine:
    execute(own, "ALTER TABLE order_step DROP COLUMN ids CASCADE", "ALTER TABLE job_step DROP COLUMN error CASCADE")
    return own


def columns(findings: list[Finding]) -> list[str]:
    return sorted(each.subject for each in findings if each.code == "missing-column")


@pytest.mark.parametrize("models", [Base, Base.metadata, tests.support_check], ids=["Base", "MetaData", "module"])
def test_all_models_may_be_given_as(lacking: Engine, models: Any) -> None:
    assert columns(check(lacking, models)) == ["job_step.error", "order_step.ids"]


def test_of_runs_and_functions_only_their_own_tables_are_compared(lacking: Engine) -> None:
    factory = sessionmaker(lacking)
    execute(lacking, "ALTER TABLE order_signal DROP COLUMN name CASCADE", "DROP TABLE ticket")
    runs = Runs(factory, Order, OrderStep, signals=OrderSignal)
    assert columns(check(lacking, runs)) == ["order_signal.name", "order_step.ids"]
    assert columns(check(lacking, Functions(factory, Job, JobStep))) == ["job_step.error"]
    assert "missing-table" not in {each.code for each in check(lacking, runs)}


@pytest.mark.parametrize("models", [MetaData(), 7, "app", ModuleType("empty")], ids=repr)
def test_what_has_no_models_is_refused(own: Engine, models: Any) -> None:
    with pytest.raises(UsageError, match=r"module that declares|no models"):
        check(own, models)


async def over_asyncio(url: Any) -> list[Finding]:
    engine = create_async_engine(url)
    async with engine.connect() as connection:
        of_base = await connection.run_sync(check, Base)
        runs = AsyncRuns(async_sessionmaker(engine), Order, OrderStep)
        of_runs = await connection.run_sync(check, runs)
    await engine.dispose()
    assert columns(of_runs) == ["order_step.ids"]
    return of_base


def test_a_check_works_over_asyncio(lacking: Engine) -> None:
    assert columns(asyncio.run(over_asyncio(lacking.url))) == ["job_step.error", "order_step.ids"]
