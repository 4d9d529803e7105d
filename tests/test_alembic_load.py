"""A table of a million rows becomes a run while it is written to and read all the time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text

from tests.support import Background, wait_until_blocked
from tests.support_alembic import NOTHING_NEW, Project
from tests.support_processes import Program
from tests.test_alembic_existing import becomes_durable, exists

ROWS = 1_000_000
LOCK_TIMEOUT = 4.0
ONLINE = "-x online revision --autogenerate -m online"
STORAGE = "SELECT pg_relation_filenode('plan')"
CLAIM = """
    from sqlalchemy import create_engine
    from sqlalchemy.orm import sessionmaker
    from app.models import Plan, PlanStep
    from sqla_durable import Runs

    engine = create_engine({url!r})
    print(len(Runs(sessionmaker(engine), Plan, PlanStep).claim_due(3)))
"""


@pytest.fixture
def project(tmp_path: Path, empty_url: str) -> Project:
    project = Project.set_up(tmp_path, empty_url)
    project.configure("metadata", "app.models:Base")
    project.configure("lock_timeout", f"{LOCK_TIMEOUT}s")
    exists(project, status="status: Mapped[str] = mapped_column(sa.String(20))")
    return project


def fill(project: Project, rows: int) -> None:
    project.sql(
        f"INSERT INTO plan (status, note) SELECT 'it''s ready', 'kept' FROM generate_series(1, {rows})",
        "ANALYZE plan",
    )


@contextmanager
def under_load(project: Project, rows: int) -> Iterator[dict[str, Any]]:
    """Others use the table all the time; what they have noticed is known afterwards."""
    noticed: dict[str, Any] = {}
    dsn = make_url(project.url).set(drivername="postgresql").render_as_string(hide_password=False)
    with Program("load", dsn, str(rows)) as program:
        assert program.receive() == "begun"
        yield noticed
        noticed |= program.ask("end")
    assert noticed["errors"] == []
    assert noticed["transactions"] > 0


@pytest.mark.slow
def test_a_million_rows_in_use_become_runs_and_nobody_waits_for_long(project: Project) -> None:
    fill(project, ROWS)
    becomes_durable(project)
    stored = project.sql(STORAGE)
    project.alembic(ONLINE)
    with under_load(project, ROWS) as noticed:
        project.alembic("upgrade head")
    assert project.sql(STORAGE) == stored
    assert noticed["slowest"] < LOCK_TIMEOUT

    assert NOTHING_NEW in project.alembic("check")
    assert project.sql("SELECT count(*) FROM pg_constraint WHERE NOT convalidated") == [(0,)]
    assert project.sql("SELECT count(*) FROM pg_index WHERE NOT indisvalid") == [(0,)]
    assert project.python(CLAIM.format(url=project.url)).strip() == "3"
    migrated = project.catalogue()
    project.start_anew()
    project.create_all()
    assert project.catalogue() == migrated


def test_a_migration_gives_up_on_a_table_that_somebody_holds_and_is_repeated(project: Project) -> None:
    project.configure("lock_timeout", "300ms")
    fill(project, 1000)
    before = project.catalogue()
    becomes_durable(project)
    project.alembic(ONLINE)
    engine = create_engine(project.url)
    with engine.connect() as holder:
        holder.execute(text("SELECT FROM plan LIMIT 1"))
        with under_load(project, 1000) as noticed:
            told = project.refused("upgrade head")
        assert "canceling statement due to lock timeout" in told
        assert "LOCK TABLE plan IN ACCESS EXCLUSIVE MODE" in told
        assert project.catalogue() == before
    engine.dispose()
    assert noticed["slowest"] < LOCK_TIMEOUT
    assert NOTHING_NEW in project.alembic("upgrade head", "check")


def test_the_second_migration_waits_for_a_transaction_and_nobody_waits_for_the_migration(project: Project) -> None:
    project.configure("lock_timeout", "300ms")
    fill(project, 1000)
    becomes_durable(project)
    project.alembic(ONLINE, "upgrade +1")
    engine = create_engine(project.url)
    with engine.connect() as holder, engine.connect() as other:
        holder.execute(text("UPDATE plan SET note = 'held' WHERE id = 1"))
        migration = Background(lambda: project.alembic("upgrade head", "check"))
        wait_until_blocked(engine)
        other.execute(text("SET lock_timeout = '1ms'"))
        other.execute(text("UPDATE plan SET note = 'written' WHERE id = 2"))
        other.execute(text("SELECT FROM plan LIMIT 1"))
        other.commit()
        assert migration.is_alive()
        holder.commit()
        assert NOTHING_NEW in migration.result()
    engine.dispose()
