"""Ways round a guard that were found and closed: each is refused, or seen by a check and by autogenerate."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqla_durable import Monthly, RunMixin, Severity, check, uuid7
from tests.support_alembic import NOTHING_NEW, Project
from tests.support_guards import World
from tests.support_models import JobStatus, job_machine, lifecycle
from tests.test_alembic_changes import GUARDED, change_models
from tests.test_partitions import at, months_ago


@pytest.fixture
def world(empty_url: str) -> Iterator[World]:
    engine = create_engine(empty_url)
    yield World(engine, True)
    engine.dispose()


def test_a_temporary_table_of_the_same_name_does_not_stand_in_for_the_runs(world: World) -> None:
    ident = world.done()
    forge = text(
        "INSERT INTO public.job_step (job_id, step, outcome, result, effect, fence)"
        " VALUES (:id, 'forged', 'succeeded', '1', 'external', 77)"
    )
    with world.engine.connect() as connection:
        connection.execute(text("CREATE TEMPORARY TABLE job AS SELECT * FROM public.job"))
        connection.execute(text("UPDATE pg_temp.job SET status = 'running', fence = 77"))
        with pytest.raises(DBAPIError, match="its run is not running: it is done"):
            connection.execute(forge, {"id": ident})


def test_a_temporary_table_of_the_same_name_does_not_take_the_record_of_an_override(world: World) -> None:
    ident = world.done()
    with world.engine.begin() as connection:
        connection.execute(text("CREATE TEMPORARY TABLE durable_override AS SELECT * FROM public.durable_override"))
        connection.execute(text("SET LOCAL sqla_durable.override = 'unseen'"))
        connection.execute(text("UPDATE job SET status = 'ready', attempts = 0 WHERE id = :id"), {"id": ident})
        assert connection.execute(text("SELECT reason FROM public.durable_override")).scalars().all() == ["unseen"]


def test_operators_of_ones_own_do_not_stand_in_for_those_of_postgresql(world: World) -> None:
    ident = world.done()
    with world.engine.connect() as connection:
        connection.execute(text("CREATE SCHEMA mine"))
        never = "CREATE FUNCTION mine.never(bigint, bigint) RETURNS boolean LANGUAGE sql AS 'SELECT false'"
        connection.execute(text(never))
        for operator in "<", "<>":
            connection.execute(
                text(f"CREATE OPERATOR mine.{operator} (FUNCTION = mine.never, LEFTARG = bigint, RIGHTARG = bigint)")
            )
        connection.execute(text("SET LOCAL search_path = mine, pg_catalog, public"))
        with pytest.raises(DBAPIError, match="its fence would go back"):
            connection.execute(text("UPDATE job SET fence = fence - 1 WHERE id = :id"), {"id": ident})


@pytest.fixture
def parted(empty_url: str) -> Iterator[Engine]:
    machine = job_machine()

    class Base(DeclarativeBase):
        pass

    class Job(RunMixin, Base):
        __tablename__ = "job"
        __guard__ = True
        __partition__ = Monthly()
        __lifecycle__ = lifecycle(machine)
        id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid7)
        status: Mapped[JobStatus] = machine.column()

    engine = create_engine(empty_url)
    Base.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(text(f"INSERT INTO job (id, status) VALUES ('{at(months_ago(0))}', 'may start')"))
        connection.execute(
            text(
                "CREATE TABLE job_other PARTITION OF job FOR VALUES FROM"
                f" ('00000000-0000-0000-0000-000000000000') TO ('{UUID(int=at(months_ago(2)).int & ~((1 << 80) - 1))}')"
            )
        )
    yield engine
    engine.dispose()


def test_a_run_does_not_move_to_another_partition_past_the_guard(parted: Engine) -> None:
    with parted.connect() as connection, pytest.raises(DBAPIError, match="its primary key or created_at would change"):
        connection.execute(text("UPDATE job SET id = :old, status = 'all done'"), {"old": at(months_ago(5))})


UPDATED = "CREATE OR REPLACE TRIGGER durable_guard_update AFTER UPDATE ON plan FOR EACH ROW"
CHANGES = {
    "a trigger that never fires": [f"{UPDATED} WHEN (false) EXECUTE FUNCTION durable_guard_plan()"],
    "a trigger that calls another function": [
        "CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'",
        f"{UPDATED} EXECUTE FUNCTION nothing()",
    ],
    "another search path": ["ALTER FUNCTION durable_guard_plan() SET search_path = public"],
    "the rights of its owner": ["ALTER FUNCTION durable_guard_plan() SECURITY DEFINER"],
}


def test_a_guard_that_somebody_has_changed_is_seen_by_autogenerate_and_mended(tmp_path: Path, empty_url: str) -> None:
    project = Project.set_up(tmp_path, empty_url)
    project.models()
    project.configure("metadata", "app.models:Base")
    change_models(project, GUARDED)
    project.alembic("revision --autogenerate -m plans", "upgrade head", "check")
    guarded = project.catalogue()
    for change in CHANGES.values():
        project.sql(*change)
        assert NOTHING_NEW in project.alembic("revision --autogenerate -m again", "upgrade head", "check")
        assert project.catalogue() - {row for row in project.catalogue() if row[1] == "nothing"} == guarded


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_a_guard_that_somebody_has_changed_is_seen_by_a_check(world: World, change: list[str]) -> None:
    assert errors(world) == []
    with world.engine.begin() as connection:
        for statement in change:
            connection.execute(text(statement.replace("plan", "job")))
    assert errors(world) == ["other-guard"]


def errors(world: World) -> list[str]:
    found = check(world.engine, world.models.job.metadata)
    return [finding.code for finding in found if finding.severity is Severity.ERROR]


def test_a_key_of_a_guarded_table_gets_another_type(tmp_path: Path, empty_url: str) -> None:
    project = Project.set_up(tmp_path, empty_url)
    project.models(key="id: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)")
    project.configure("metadata", "app.models:Base")
    change_models(project, GUARDED)
    project.alembic("revision --autogenerate -m plans", "upgrade head")
    before = project.catalogue()
    change_models(project, ("mapped_column(primary_key", "mapped_column(sa.BigInteger, primary_key"))
    said = project.alembic("revision --autogenerate -m wide", "upgrade head", "check", "downgrade -1")
    assert NOTHING_NEW in said
    assert project.catalogue() == before
