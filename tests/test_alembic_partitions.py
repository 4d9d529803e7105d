"""Partitioned tables and migrations: created with their default partition, and months are nobody's to drop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support_alembic import NOTHING_NEW, Project
from tests.test_alembic_migrations import script

MONTHLY = """
class Monthly_(RunMixin, Base):
    __tablename__ = "monthly"
    __table_args__ = {{"schema": {schema!r}}}
    __lifecycle__ = Plan.__lifecycle__
    __partition__ = Monthly()
    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid7)
    status: Mapped[PlanStatus] = statuses.column()


class MonthlyStep(ReceiptMixin[Monthly_], Base):
    __tablename__ = "monthly_step"
    __table_args__ = {{"schema": {schema!r}}}
    __partition__ = Monthly()
"""
MONTHS = """
from datetime import date
from app.models import Monthly_, MonthlyStep
from sqla_durable import partition_sql
for entity in Monthly_, MonthlyStep:
    for statement in partition_sql(entity, date(2026, 1, 31), 14):
        print(statement)
"""


@pytest.fixture
def project(tmp_path: Path, empty_url: str) -> Project:
    project = Project.set_up(tmp_path, empty_url)
    project.configure("metadata", "app.models:Base")
    return project


def model(project: Project, schema: str | None = None) -> None:
    project.models(more=MONTHLY.format(schema=schema))
    imported = "from uuid import UUID\nfrom sqla_durable import Monthly, uuid7\n"
    project.change("app/models.py", "from enum import StrEnum\n", f"from enum import StrEnum\n{imported}")


@pytest.mark.parametrize("schema", [None, "app"])
def test_a_migration_creates_the_default_partition_and_leaves_the_months_alone(
    project: Project, schema: str | None
) -> None:
    model(project, schema)
    if schema is not None:
        project.sql(f"CREATE SCHEMA {schema}")
    project.alembic("revision --autogenerate -m one", "upgrade head")
    (migration,) = project.migrations()
    assert "sqla_durable" not in migration
    assert migration.count("PARTITION OF") == 2
    assert NOTHING_NEW in project.alembic("check")
    where = schema or "public"
    migrated = project.catalogue(where)
    months = project.python(MONTHS).splitlines()
    assert months
    project.sql(*months)
    assert len(project.catalogue(where)) > len(migrated)
    assert NOTHING_NEW in project.alembic("check")
    project.alembic("downgrade base")
    assert not [row for row in project.catalogue(where) if "monthly" in row[1]]
    project.start_anew(*([] if schema is None else [schema]))
    project.create_all()
    assert project.catalogue(where) == migrated


def test_a_migration_may_hold_the_sql_of_the_months(project: Project, request: pytest.FixtureRequest) -> None:
    model(project)
    project.alembic("revision --autogenerate -m one", "revision -m months")
    (file,) = (project.folder / "migrations/versions").glob("*months*")
    lines = "".join(f"    op.execute({statement!r})\n" for statement in project.python(MONTHS).splitlines())
    head, _, tail = file.read_text().partition("def upgrade() -> None:\n")
    body, _, tail = tail.partition("    pass\n")
    file.write_text(f"{head}def upgrade() -> None:\n{body}{lines}{tail}")
    bin_dir = request.config.getoption("--postgres")
    project.psql(script(project.alembic("upgrade head --sql")), None if bin_dir is None else Path(bin_dir))
    names = {row[0] for row in project.sql("SELECT relname FROM pg_class WHERE relispartition AND relkind = 'r'")}
    assert len(names) == 30
    assert {"monthly_2026_01", "monthly_step_2027_02", "monthly_default", "monthly_step_default"} <= names
    assert NOTHING_NEW in project.alembic("check")


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ("number: Mapped[int] = mapped_column(sa.Identity())", "number has an identity, which is not taken along"),
        ('__table_args__ = (sa.UniqueConstraint("step", name="once"),)', "once must then have monthly_id among"),
        ('__table_args__ = (sa.Index("once", "step", unique=True),)', "once must then have monthly_id among"),
    ],
    ids=["identity", "unique constraint", "unique index"],
)
def test_a_table_that_cannot_become_partitioned_is_refused_before_a_migration_is_written(
    project: Project, own: str, told: str
) -> None:
    model(project)
    project.change("app/models.py", '    __table_args__ = {"schema": None}\n', "")
    receipts, partition = '__tablename__ = "monthly_step"\n', "    __partition__ = Monthly()\n"
    project.change("app/models.py", f"{receipts}{partition}", f"{receipts}    {own}\n")
    project.alembic("revision --autogenerate -m one", "upgrade head", "check")
    project.change("app/models.py", receipts, f"{receipts}{partition}")
    assert told in project.refused("revision --autogenerate -m two")
    assert len(project.migrations()) == 1
