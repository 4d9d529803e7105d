"""A project that goes through revisions: from tables of its own to runs that are guarded and partitioned, and on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from difflib import unified_diff
from pathlib import Path
from typing import Final

from sqlalchemy import create_engine, make_url, text

from tests.support_alembic import NOTHING_NEW, Project, comparable, script

BEFORE: Final = """
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.orm import Mapped, mapped_column

from app.base import Base
from sqla_durable import uuid7
{above}

class Plan(Base):
    __tablename__ = {plan!r}
    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid7)
    note: Mapped[str] = mapped_column({note!r}, sa.Text, server_default="100%")


class Line(Base):
    __tablename__ = {line!r}
    id: Mapped[int] = mapped_column(primary_key=True)
    plan_id: Mapped[UUID] = mapped_column(sa.ForeignKey(Plan.id, name={refers!r}))
"""

AFTER: Final = """
from enum import StrEnum
from uuid import UUID

import sqlalchemy as sa
from sqlalchemy.orm import Mapped, mapped_column

from app.base import Base
from sqla_durable import Lifecycle, Monthly, ReceiptMixin, RunMixin, StatusMachine, uuid7
{above}

class PlanStatus(StrEnum):
    PENDING = "pending"
    READY = "it's ready"
    RUNNING = "{running}"
    DONE = "done"
    FAILED = "failed"
    {held}


statuses = StatusMachine(
    PlanStatus,
    initial=PlanStatus.PENDING,
    transitions={{
        PlanStatus.PENDING: {{PlanStatus.READY{holds}}},
        PlanStatus.READY: {{PlanStatus.RUNNING}},
        PlanStatus.RUNNING: {{PlanStatus.DONE, PlanStatus.FAILED, PlanStatus.READY}},
    }},
)


class Plan(RunMixin, Base):
    __tablename__ = {plan!r}
    __guard__ = {guard}
    __lifecycle__ = Lifecycle(
        statuses,
        ready=PlanStatus.READY,
        running=PlanStatus.RUNNING,
        done=PlanStatus.DONE,
        failed=PlanStatus.FAILED,
        lapsed=PlanStatus.READY,
    )
    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid7)
    status: Mapped[PlanStatus] = statuses.column({status!r})
    note: Mapped[str] = mapped_column({note!r}, sa.Text, server_default="100%")


class PlanStep(ReceiptMixin[Plan], Base):
    __tablename__ = {step!r}
    __partition__ = {partition}


class Line(Base):
    __tablename__ = {line!r}
    id: Mapped[int] = mapped_column(primary_key=True)
    plan_id: Mapped[UUID] = mapped_column(sa.ForeignKey(Plan.id, name={refers!r}))
"""

RUNNING: Final = "running"
UNDER_WAY: Final = "it's under way: 100%"


@dataclass(frozen=True)
class Shape:
    """What the tables and columns are called, and where they are."""

    plan: str = "plan"
    step: str = "plan_step"
    line: str = "line"
    status: str = "status"
    note: str = "note"
    refers: str | None = None
    schema: str | None = None
    metadata: str = ""
    above: str = ""

    def name(self, table: str) -> str:
        """The name of one of the tables, in SQL."""
        name = quoted(getattr(self, table))
        return name if self.schema is None else f"{quoted(self.schema)}.{name}"

    def before(self) -> str:
        """The models without the mixins."""
        return BEFORE.format(**self._names())

    def models(
        self, *, held: bool = False, running: str = RUNNING, guard: bool = False, partition: bool = False
    ) -> str:
        """The models with the mixins."""
        return AFTER.format(
            **self._names(),
            held='HELD = "held"' if held else "",
            holds=", PlanStatus.HELD" if held else "",
            running=running,
            guard=guard,
            partition="Monthly()" if partition else None,
        )

    def _names(self) -> dict[str, str | None]:
        names = "plan", "step", "line", "status", "note", "refers", "above"
        return {name: getattr(self, name) for name in names}


@dataclass
class History:
    """The revisions of a project, each with the dump of what it left."""

    project: Project
    fresh: Project
    shape: Shape
    bin_dir: Path | None
    branch: str = ""
    dumps: list[list[str]] = field(default_factory=list)
    revisions: list[str] = field(default_factory=list)

    def begin(self) -> None:
        """Set up the project, in which there are no tables."""
        self.project.models(self.shape.metadata)
        self.project.write("app/models.py", "from app.base import Base\n")
        self.project.configure("metadata", "app.models:Base")
        drop_all(self.project, self.shape.schema)
        self.dumps.append(self.project.dump(self.bin_dir))
        self.revisions.append("base")

    def step(
        self, models: str, *, upgrade: str | None = None, downgrade: str | None = None, besides: Sequence[str] = ()
    ) -> str:
        """Change the models and migrate; with nothing left to do, and tables as ``create_all`` makes them.

        :param upgrade: a statement to execute where the upgrade proposes one.
        :param downgrade: one to execute where the downgrade does.
        :param besides: what was executed in the database besides the migrations.
        :return: the migration.
        """
        number = len(self.revisions)
        self.project.write("app/models.py", models)
        head = f"--head {self.branch}@head" if self.branch and number > 1 else ""
        if self.branch and number == 1:
            head = f"--head base --branch-label {self.branch}"
        made = f"revision --autogenerate --rev-id r{number:02} -m next {head}"
        if upgrade is None and downgrade is None:
            said = self.project.alembic(made, "upgrade heads", "check")
        else:
            self.project.alembic(made)
            self._fill_in(number, upgrade, downgrade)
            said = self.project.alembic("upgrade heads", "check")
        assert NOTHING_NEW in said
        self.revisions.append(f"r{number:02}")
        self.dumps.append(self.project.dump(self.bin_dir))
        drop_all(self.fresh, self.shape.schema)
        self.fresh.create_all()
        if besides:
            self.fresh.sql(*besides)
        assert_same(self.fresh.dump(self.bin_dir), self.dumps[-1])
        return self.migration(number)

    def migration(self, number: int) -> str:
        """The text of a migration."""
        return self._file(number).read_text()

    def down(self, to: int = 0) -> None:
        """Go down one revision after the other, each to what was there before."""
        self._travel([(f"downgrade {self.revisions[at] or 'base'}", at) for at in range(self.at() - 1, to - 1, -1)])

    def up(self) -> None:
        """Go up one revision after the other, each to what was there before."""
        self._travel([(f"upgrade {self.revisions[at]}", at) for at in range(self.at() + 1, len(self.revisions))])

    def at(self) -> int:
        """Which revision the database is at."""
        found = [row[0] for row in self.project.sql("SELECT version_num FROM alembic_version")]
        return max([self.revisions.index(name) for name in found if name in self.revisions], default=0)

    def by_script(self) -> None:
        """Go up and down again with the SQL that is written for somebody else to apply, in an empty database."""
        last = len(self.revisions) - 1
        ways = [f"upgrade {a}:{b}" for a, b in zip(self.revisions, self.revisions[1:], strict=False)]
        ways += [f"downgrade {b}:{a}" for a, b in zip(self.revisions, self.revisions[1:], strict=False)][::-1]
        told = self.project.alembic(*(f"{way} --sql" for way in ways))
        scripts = told.split("$ alembic ")[1:]
        drop_all(self.fresh, self.shape.schema)
        for sql, at in zip(scripts, [*range(1, last + 1), *range(last - 1, -1, -1)], strict=True):
            self.fresh.psql(script(sql.partition("\n")[2]), self.bin_dir)
            assert_same(self.fresh.dump(self.bin_dir), self.dumps[at])

    def _travel(self, ways: Sequence[tuple[str, int]]) -> None:
        commands: list[str] = []
        files = {at: self.project.folder / f"dump-{at}.sql" for _, at in ways}
        for command, at in ways:
            commands += [command, f"! {' '.join(self.project.dumping(self.bin_dir))} --file={files[at]}"]
        self.project.alembic(*commands)
        for at, file in files.items():
            assert_same(comparable(file.read_text()), self.dumps[at])

    def _fill_in(self, number: int, upgrade: str | None, downgrade: str | None) -> None:
        file = self._file(number)
        parts = file.read_text().partition("def downgrade")
        filled = [filled_in(part, given) for part, given in zip(parts[::2], (upgrade, downgrade), strict=True)]
        file.write_text(parts[1].join(filled))

    def _file(self, number: int) -> Path:
        (file,) = (self.project.folder / "migrations/versions").glob(f"*r{number:02}_*.py")
        return file


def filled_in(migration: str, statement: str | None) -> str:
    """Write a statement where a migration proposes one."""
    if statement is None:
        return migration
    proposed = re.search(r"# op\.execute\(.*\)", migration)
    assert proposed, migration
    escaped = statement.replace(":", "\\:")
    return migration.replace(proposed[0], f"op.execute({escaped!r})")


def assert_same(dump: list[str], expected: list[str]) -> None:
    """Two dumps are the same, or their differences are told."""
    difference = "\n".join(unified_diff(expected, dump, "expected", "found", lineterm="", n=1))
    assert not difference, difference


def quoted(name: str) -> str:
    """A name, in SQL."""
    return '"' + name.replace('"', '""') + '"'


def literal(value: str) -> str:
    """A text, in SQL."""
    return "'" + value.replace("'", "''") + "'"


def drop_all(project: Project, schema: str | None) -> None:
    """Drop every schema, and make empty ones."""
    for (there,) in project.sql("SELECT nspname FROM pg_namespace WHERE nspname !~ '^(pg_|information_schema)'"):
        project.sql(f"DROP SCHEMA {quoted(there)} CASCADE")
    project.sql("CREATE SCHEMA public", *([] if schema is None else [f"CREATE SCHEMA {quoted(schema)}"]))


def another_database(url: str, name: str) -> str:
    """Create an empty database beside one, and return its URL."""
    execute(url, f"CREATE DATABASE {name}")
    return make_url(url).set(database=name).render_as_string(hide_password=False)


def execute(url: str, statement: str) -> None:
    """Execute a statement outside of any transaction."""
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text(statement))
    engine.dispose()
