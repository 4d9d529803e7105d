"""Policies and triggers that go by a setting of the transaction, which the user's own events make after BEGIN."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Run
from tests.support import eventually
from tests.support_brief import Errands, errands

LEASE = timedelta(seconds=0.6)
POLICIES = """
    ALTER TABLE errand ENABLE ROW LEVEL SECURITY;
    ALTER TABLE errand_step ENABLE ROW LEVEL SECURITY;
    CREATE POLICY of_tenant ON errand USING (current_setting('app.tenant', true) = 'north');
    CREATE POLICY of_tenant ON errand_step USING (current_setting('app.tenant', true) = 'north');
    GRANT USAGE ON SCHEMA public TO tenant;
    GRANT ALL ON ALL TABLES IN SCHEMA public TO tenant;
"""
AUDIT = """
    CREATE TABLE audit (who text NOT NULL CHECK (who <> ''), status text);
    CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO audit VALUES (current_setting('app.tenant', true), new.status);
        RETURN new;
    END $$;
    CREATE TRIGGER note AFTER UPDATE ON errand FOR EACH ROW EXECUTE FUNCTION note();
"""


def set_tenant(connection: Connection) -> None:
    connection.exec_driver_sql("SELECT set_config('app.tenant', 'north', true)")


def after_begin(factory: sessionmaker[Session], _: Engine) -> None:
    event.listen(factory, "after_begin", lambda _session, _transaction, connection: set_tenant(connection))


def begin(_: sessionmaker[Session], engine: Engine) -> None:
    event.listen(engine, "begin", set_tenant)


@pytest.fixture
def brief(engine: Engine) -> Errands:
    made = errands(lease=LEASE)
    made.create(engine)
    return made


@pytest.fixture(params=[after_begin, begin])
def factory(request: pytest.FixtureRequest, engine: Engine, brief: Errands) -> Iterator[sessionmaker[Session]]:
    """Sessions of a role that sees a row only in a transaction with the setting."""
    role = f"tenant_{uuid4().hex[:12]}"  # of the whole server, which several of these may share
    with engine.begin() as connection:
        connection.execute(text(f"CREATE ROLE {role}"))
        connection.execute(text(POLICIES.replace("TO tenant", f"TO {role}")))
    theirs = create_engine(engine.url)

    @event.listens_for(theirs, "connect")
    def become(driver: Any, _: object) -> None:
        driver.execute(f"SET ROLE {role}")
        driver.commit()

    made = sessionmaker(theirs)
    request.param(made, theirs)
    yield made
    theirs.dispose()
    with engine.begin() as connection:
        connection.execute(text(f"DROP OWNED BY {role}; DROP ROLE {role}"))


def test_every_verb_of_a_run_works_where_a_row_is_visible_with_a_setting_only(
    factory: sessionmaker[Session], brief: Errands
) -> None:
    runs = brief.runs(factory)
    ident = brief.new(factory)

    def carry_out(run: Run[Any]) -> None:
        run.step("one", lambda _: None)
        run.external("two", lambda: None)
        run.renew()

    outcome = runs.execute(ident, carry_out)
    assert outcome.status == "done", outcome.exception
    assert [receipt.step for receipt in runs.receipts(ident)] == ["one", "two"]


def test_a_heartbeat_renews_a_lease_that_is_visible_with_a_setting_only(
    factory: sessionmaker[Session], brief: Errands, engine: Engine
) -> None:
    runs = brief.runs(factory)
    ident = brief.new(factory)
    table = brief.run.__table__

    def expiry() -> Any:
        with engine.connect() as connection:
            return connection.scalar(table.select().with_only_columns(table.c.lease_expires_at))

    def carry_out(run: Run[Any]) -> None:
        first = expiry()
        run.external("long", lambda: eventually(lambda: expiry() != first, "a renewal") and None)

    outcome = runs.execute(ident, carry_out)
    assert outcome.status == "done", outcome.exception


def test_a_trigger_that_needs_a_setting_does_not_keep_a_run_from_landing(engine: Engine, brief: Errands) -> None:
    with engine.begin() as connection:
        connection.execute(text(AUDIT))
    factory = sessionmaker(engine)
    after_begin(factory, engine)
    runs = brief.runs(factory)

    def carry_out(run: Run[Any]) -> None:
        run.external("long", lambda: time.sleep(LEASE.total_seconds()))

    outcome = runs.execute(brief.new(factory), carry_out)
    assert outcome.status == "done", outcome.exception
    with engine.connect() as connection:
        statuses = list(connection.scalars(text("SELECT status FROM audit")))
    assert (statuses[0], statuses[-1]) == ("running", "done")
    assert len(statuses) > 2, "no heartbeat came through"
