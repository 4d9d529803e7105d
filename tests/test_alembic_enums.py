"""A status column that held members' names, as SQLAlchemy stores an enumeration, is converted as the page says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support_alembic import NOTHING_NEW, Project

CONVERT = """op.execute("UPDATE plan SET status = lower(status)")"""
READY = """op.execute("UPDATE plan SET status = 'ready' WHERE status = 'running'")"""
DROP_CHECK = """op.drop_constraint("planstatus", "plan", type_="check")"""
DROP_TYPE = """op.execute("DROP TYPE IF EXISTS planstatus")"""
FIRST_CHECK = "    op.create_check_constraint("
BEFORE = """
from enum import StrEnum

import sqlalchemy as sa
from sqlalchemy.orm import Mapped, mapped_column

from app.base import Base


class PlanStatus(StrEnum):
    PENDING = "pending"
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Plan(Base):
    __tablename__ = "plan"
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[PlanStatus] {status}
    note: Mapped[str | None]
"""
COLUMNS = {
    "native": "",
    "native with a default": '= mapped_column(server_default="PENDING")',
    "names in a text": "= mapped_column(sa.Enum(PlanStatus, native_enum=False))",
    "names in a text with a check": "= mapped_column(sa.Enum(PlanStatus, native_enum=False, create_constraint=True))",
}


@pytest.fixture
def project(tmp_path: Path, empty_url: str) -> Project:
    project = Project.set_up(tmp_path, empty_url)
    project.configure("metadata", "app.models:Base")
    return project


@pytest.mark.parametrize("column", COLUMNS)
def test_a_column_of_members_names_is_converted_by_the_lines_of_the_page(project: Project, column: str) -> None:
    project.models()
    project.write("app/models.py", BEFORE.format(status=COLUMNS[column]))
    project.alembic("revision --autogenerate -m existing", "upgrade head")
    project.sql("INSERT INTO plan (id, status) VALUES (1, 'PENDING'), (2, 'READY'), (3, 'RUNNING'), (4, 'DONE')")

    project.models()
    project.change("app/models.py", '"it\'s ready"', '"ready"')
    assert 'check constraint "ck_plan_' in project.refused("revision --autogenerate -m durable", "upgrade head")

    (migration,) = (project.folder / "migrations/versions").glob("*_durable.py")
    above, checks, below = migration.read_text().partition(FIRST_CHECK)
    lines = [CONVERT, READY]
    if column.startswith("native"):
        lines.append(DROP_TYPE)
    if column == "names in a text with a check":
        lines.insert(0, DROP_CHECK)
    migration.write_text(above + "".join(f"    {line}\n" for line in lines) + checks + below)
    assert NOTHING_NEW in project.alembic("upgrade head", "check")
    assert project.sql("SELECT status FROM plan ORDER BY id") == [("pending",), ("ready",), ("ready",), ("done",)]

    migrated = project.catalogue()
    project.start_anew()
    project.create_all()
    assert project.catalogue() == migrated
