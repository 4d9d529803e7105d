"""A project that has tables, rows and migrations of its own makes one of its tables a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support_alembic import NOTHING_NEW, USUAL, Project

OTHER = """

class Other(Base):
    __tablename__ = "other"
    id: Mapped[int] = mapped_column(primary_key=True)
    data: Mapped[str] = mapped_column(sa.JSON, server_default=sa.text("'{}'"))
"""
BEFORE = """
import sqlalchemy as sa
from sqlalchemy.orm import Mapped, mapped_column

from app.base import Base


class Plan(Base):
    __tablename__ = "plan"
    __table_args__ = (sa.CheckConstraint("note <> ''"{name}),)
    id: Mapped[int] = mapped_column(primary_key=True)
    {status}
    note: Mapped[str | None]
"""
KEY = """__table_args__ = (sa.CheckConstraint("note <> ''"{name}),)
    id: Mapped[int] = mapped_column(primary_key=True)"""
NAMED = {"": "", USUAL: ', name="note"'}


@pytest.fixture
def project(tmp_path: Path, empty_url: str) -> Project:
    project = Project.set_up(tmp_path, empty_url)
    project.configure("metadata", "app.models:Base")
    return project


def exists(project: Project, convention: str = "", status: str = "") -> None:
    """The project as it was before it knew this library."""
    project.models(convention)
    project.write("app/models.py", BEFORE.format(name=NAMED[convention], status=status) + OTHER)
    project.alembic("revision --autogenerate -m existing", "upgrade head", "check")


def becomes_durable(project: Project, convention: str = "") -> None:
    """The user adds the mixin, and the receipts."""
    project.models(convention, key=KEY.format(name=NAMED[convention]), more=OTHER)


@pytest.mark.parametrize("convention", NAMED, ids=["none", "usual"])
def test_a_table_full_of_rows_becomes_a_run_and_back(project: Project, convention: str) -> None:
    exists(project, convention)
    before = project.catalogue()
    project.sql("INSERT INTO plan (id, note) SELECT id, 'kept' FROM generate_series(1, 1000) id")

    becomes_durable(project, convention)
    said = project.alembic("revision --autogenerate -m durable", "upgrade head", "check", "heads")
    assert NOTHING_NEW in said
    assert said.count("(head)") == 1
    upgrade, downgrade = project.migrations()[1].split("def downgrade()")
    assert "drop_" not in upgrade
    assert "drop_constraint(None" not in downgrade
    assert downgrade.count("drop_table") == 1
    assert project.sql("SELECT DISTINCT note, status, fence, attempts FROM plan") == [("kept", "pending", 0, 0)]
    assert project.sql("SELECT count(*) FROM plan") == [(1000,)]
    migrated = project.catalogue()

    project.alembic("downgrade -1")
    assert project.catalogue() == before
    assert project.sql("SELECT count(*) FROM plan WHERE note = 'kept'") == [(1000,)]
    project.alembic("upgrade head")
    assert project.catalogue() == migrated

    project.start_anew()
    project.create_all()
    assert project.catalogue() == migrated


def test_a_status_kept_as_text_becomes_the_machines_column(project: Project) -> None:
    exists(project, status="status: Mapped[str] = mapped_column(sa.String(20))")
    project.sql("INSERT INTO plan (id, status) VALUES (1, 'pending'), (2, 'it''s ready')")
    becomes_durable(project)
    said = project.alembic(
        "revision --autogenerate -m durable", "upgrade head", "check", "downgrade -1", "upgrade head", "check"
    )
    assert said.count(NOTHING_NEW) == 2
    assert project.sql("SELECT status FROM plan ORDER BY id") == [("pending",), ("it's ready",)]
    migrated = project.catalogue()
    project.start_anew()
    project.create_all()
    assert project.catalogue() == migrated


def test_rows_that_are_running_already_are_made_ready_in_the_migration(project: Project) -> None:
    exists(project, status="status: Mapped[str] = mapped_column(sa.String(20))")
    project.sql("INSERT INTO plan (id, status) VALUES (1, 'running'), (2, 'done')")
    before = project.catalogue()
    becomes_durable(project)
    said = project.refused("revision --autogenerate -m durable", "upgrade head")
    assert 'check constraint "ck_plan_lease"' in said
    assert project.catalogue() == before, "it was rolled back whole"

    (migration,) = (project.folder / "migrations/versions").glob("*_durable.py")
    added = "    op.create_check_constraint(op.f('ck_plan_lease')"
    ready = """    op.execute("UPDATE plan SET status = 'it''s ready' WHERE status = 'running'")\n"""
    project.change(str(migration.relative_to(project.folder)), added, ready + added)
    project.alembic("upgrade head")
    assert project.sql("SELECT status FROM plan ORDER BY id") == [("it's ready",), ("done",)]


def test_a_check_that_the_models_leave_unnamed_is_not_dropped(project: Project) -> None:
    exists(project)
    assert "plan_note_check" in {name for _, _, name, _ in project.catalogue()}
    project.alembic("revision --autogenerate -m nothing")
    assert "drop_constraint" not in project.migrations()[1]


@pytest.mark.parametrize("convention", NAMED, ids=["none", "usual"])
def test_a_run_that_comes_to_expire_gets_its_column_and_index_and_back(project: Project, convention: str) -> None:
    project.models(convention)
    for old, new in [
        ('    FAILED = "failed"\n', '    FAILED = "failed"\n    EXPIRED = "expired"\n'),
        ("PlanStatus.PENDING: {PlanStatus.READY}", "PlanStatus.PENDING: {PlanStatus.READY, PlanStatus.EXPIRED}"),
        ("PlanStatus.READY: {PlanStatus.RUNNING}", "PlanStatus.READY: {PlanStatus.RUNNING, PlanStatus.EXPIRED}"),
    ]:
        project.change("app/models.py", old, new)
    project.alembic("revision --autogenerate -m plans", "upgrade head", "check")
    before = project.catalogue()
    project.sql("INSERT INTO plan (id, status, note) SELECT id, 'it''s ready', 'kept' FROM generate_series(1, 1000) id")
    for old, new in [
        ("import Lifecycle", "import ExpiryMixin, Lifecycle"),
        ("class Plan(RunMixin,", "class Plan(RunMixin, ExpiryMixin,"),
        ("        lapsed=", '        expired=PlanStatus.EXPIRED,\n        frozen=("note",),\n        lapsed='),
    ]:
        project.change("app/models.py", old, new)
    said = project.alembic("revision --autogenerate -m expiry", "upgrade head", "check")
    assert NOTHING_NEW in said
    upgrade, downgrade = project.migrations()[1].split("def downgrade()")
    assert "durable" not in project.migrations()[1]
    assert "sa.DateTime(timezone=True), nullable=True" in upgrade
    assert "postgresql_where=sa.text(\"status IN ('it''s ready', 'pending')\")" in upgrade
    assert upgrade.count("op.create_index") == downgrade.count("op.drop_index") == 1
    assert project.sql("SELECT count(*) FROM plan WHERE expires_at IS NULL AND note = 'kept'") == [(1000,)]
    migrated = project.catalogue()
    assert {name for _, _, name, _ in migrated - before} == {"expires_at", "ix_plan_expires_at"}

    project.alembic("downgrade -1")
    assert project.catalogue() == before
    project.alembic("upgrade head")
    assert project.catalogue() == migrated
    project.start_anew()
    project.create_all()
    assert project.catalogue() == migrated
