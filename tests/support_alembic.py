"""A user's project whose migrations were set up from the template, and what its migrations left in the database."""

from __future__ import annotations

import atexit
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Any, Self

import pytest
from sqlalchemy import NullPool, create_engine, make_url, text

import sqla_durable
from sqla_durable import embedded
from sqla_durable.alembic import template_folder

PACKAGES = Path(sqla_durable.__file__).parents[1]
COMMANDS = Path(__file__).with_name("programs") / "alembic_commands.py"
PLUGIN = ', "alembic.ext.checkconstraint_byname"'

NOTHING_NEW = "No new upgrade operations detected."
USUAL = """naming_convention={
    "ix": "ix_%(column_0_label)s",
    "uq": "uq_%(table_name)s_%(column_0_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}"""

BASE = """
from sqlalchemy import MetaData
from sqlalchemy.orm import DeclarativeBase


class Base(DeclarativeBase):
    metadata = MetaData({metadata})
"""

MODELS = """
from enum import StrEnum

import sqlalchemy as sa
from sqlalchemy.orm import Mapped, mapped_column

from app.base import Base
from sqla_durable import Lifecycle, ReceiptMixin, RunMixin, StatusMachine


class PlanStatus(StrEnum):
    PENDING = "pending"
    READY = "it's ready"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


statuses = StatusMachine(
    PlanStatus,
    initial=PlanStatus.PENDING,
    transitions={{
        PlanStatus.PENDING: {{PlanStatus.READY}},
        PlanStatus.READY: {{PlanStatus.RUNNING}},
        PlanStatus.RUNNING: {{PlanStatus.DONE, PlanStatus.FAILED, PlanStatus.READY}},
    }},
)


class Plan(RunMixin, Base):
    __tablename__ = "{table}"
    __lifecycle__ = Lifecycle(
        statuses,
        ready=PlanStatus.READY,
        running=PlanStatus.RUNNING,
        done=PlanStatus.DONE,
        failed=PlanStatus.FAILED,
        lapsed=PlanStatus.READY,
    )
    {key}
    status: Mapped[PlanStatus] = statuses.column()
    note: Mapped[str | None]


class PlanStep(ReceiptMixin[Plan], Base):
    __tablename__ = "{table}_step"
{more}
"""

CATALOGUE = """
SELECT 'column', c.oid::regclass::text, a.attname, concat_ws(' ', format_type(a.atttypid, a.atttypmod),
       CASE WHEN a.attnotnull THEN 'not null' END, pg_get_expr(d.adbin, d.adrelid))
  FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
  LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
 WHERE c.relkind = 'r' AND c.relnamespace = '{schema}'::regnamespace
UNION ALL
SELECT 'constraint', conrelid::regclass::text, conname, pg_get_constraintdef(oid)
  FROM pg_constraint WHERE contype <> 'n' AND connamespace = '{schema}'::regnamespace
UNION ALL
SELECT 'index', tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = '{schema}'
UNION ALL
SELECT 'storage', oid::regclass::text, '', array_to_string(ARRAY(SELECT unnest(reloptions) ORDER BY 1), ' ')
  FROM pg_class WHERE relkind = 'r' AND relnamespace = '{schema}'::regnamespace
UNION ALL
SELECT 'function', proname, '', pg_get_functiondef(oid) FROM pg_proc
 WHERE prokind = 'f' AND pronamespace = '{schema}'::regnamespace
UNION ALL
SELECT 'trigger', tgrelid::regclass::text, tgname, pg_get_triggerdef(t.oid) || tgenabled::text
  FROM pg_trigger t JOIN pg_class c ON c.oid = tgrelid
 WHERE NOT tgisinternal AND relnamespace = '{schema}'::regnamespace
UNION ALL
SELECT 'type', typname, '', '' FROM pg_type
 WHERE typtype IN ('e', 'd') AND typnamespace = '{schema}'::regnamespace
"""


@cache
def _skeleton() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="sqla_durable_alembic_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    Project(folder, "").alembic(f"init -t '{template_folder()}' migrations")
    return folder


class Project:
    """A folder with the packages ``app`` and ``migrations`` and an ``alembic.ini``, as a user has them."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url

    @classmethod
    def set_up(cls, folder: Path, url: str) -> Self:
        """Make a project with ``alembic init``; it knows no models yet."""
        shutil.copytree(_skeleton(), folder, dirs_exist_ok=True)
        return cls(folder, url)

    def models(
        self,
        metadata: str = "",
        *,
        table: str = "plan",
        key: str = "id: Mapped[int] = mapped_column(primary_key=True)",
        more: str = "",
    ) -> None:
        """Write the user's models."""
        self.write("app/__init__.py", "")
        self.write("app/base.py", BASE.format(metadata=metadata))
        self.write("app/models.py", MODELS.format(table=table, key=key, more=more))

    def write(self, path: str, content: str) -> None:
        """Write a file of the project."""
        file = self.folder / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(dedent(content))

    def change(self, path: str, old: str, new: str) -> None:
        """Replace something that must be there."""
        file = self.folder / path
        content = file.read_text()
        assert old in content
        file.write_text(content.replace(old, new))

    def configure(self, option: str, value: str) -> None:
        """Set an option that the template's ini file has."""
        file = self.folder / "alembic.ini"
        content, found = re.subn(rf"(?m)^{re.escape(option)} =.*$", f"{option} = {value}", file.read_text())
        assert found == 1
        file.write_text(content)

    def alembic(self, *commands: str, first: Iterable[Path] = (), **environment: str) -> str:
        """Carry out command lines, each of which must succeed, and return all they wrote."""
        ended = self._run(commands, first, environment)
        assert ended.returncode == 0, ended.stdout
        return ended.stdout

    def refused(self, *commands: str, **environment: str) -> str:
        """Carry out command lines of which the last one must fail, and return all they wrote."""
        ended = self._run(commands, (), environment)
        assert ended.returncode != 0, ended.stdout
        assert f"$ alembic {commands[-1]}" in ended.stdout
        return ended.stdout

    def python(self, code: str) -> str:
        """Run Python code in the project."""
        arguments = [sys.executable, "-c", dedent(code)]
        ended = subprocess.run(arguments, capture_output=True, text=True, check=False, **self._surroundings((), {}))
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    def create_all(self) -> None:
        """Create the tables of the models without a migration."""
        self.python(
            f"""
            from sqlalchemy import create_engine
            from app.models import Base
            Base.metadata.create_all(create_engine({self.url!r}))
            """
        )

    def dump(self, bin_dir: Path | None) -> list[str]:
        """What ``pg_dump --schema-only`` writes, as :func:`comparable` has it."""
        ended = subprocess.run(self.dumping(bin_dir), capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        return comparable(ended.stdout)

    def dumping(self, bin_dir: Path | None) -> list[str]:
        """The command line that dumps the schema, but for Alembic's own table."""
        url = make_url(self.url).set(drivername="postgresql").render_as_string(hide_password=False)
        return [program("pg_dump", bin_dir), "--schema-only", "--exclude-table=*.alembic_version*", url]

    def start_anew(self, *schemas: str) -> None:
        """Empty the database, but for the named schemas."""
        for schema in "public", *schemas:
            self.sql(f"DROP SCHEMA IF EXISTS {schema} CASCADE", f"CREATE SCHEMA {schema}")

    def migrations(self) -> list[str]:
        """The text of each migration, in order of creation."""
        files = (self.folder / "migrations/versions").glob("*.py")
        return [file.read_text() for file in sorted(files, key=lambda file: file.stat().st_mtime_ns)]

    def catalogue(self, schema: str = "public") -> set[tuple[str, ...]]:
        """What PostgreSQL says there is in a schema, except for what is Alembic's own."""
        rows = self.sql(CATALOGUE.format(schema=schema))
        return {tuple(row) for row in rows if not any("alembic_version" in str(value) for value in row)}

    def sql(self, *statements: str) -> list[Any]:
        """Execute SQL and return the last statement's rows."""
        engine = create_engine(self.url, poolclass=NullPool)
        with engine.begin() as connection:
            results = [connection.execute(text(statement.replace(":", "\\:"))) for statement in statements]
            return list(results[-1].all()) if results[-1].returns_rows else []

    def psql(self, script: str, bin_dir: Path | None) -> None:
        """Pipe a script into psql, which stops at the first error."""
        url = make_url(self.url).set(drivername="postgresql").render_as_string(hide_password=False)
        ended = subprocess.run(
            [program("psql", bin_dir), "--no-psqlrc", "--quiet", "--set=ON_ERROR_STOP=1", url],
            input=script,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr

    def _run(
        self, commands: Iterable[str], first: Iterable[Path], environment: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        arguments = [sys.executable, str(COMMANDS), json.dumps([shlex.split(command) for command in commands])]
        return subprocess.run(
            arguments,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            **self._surroundings(first, environment),
        )

    def _surroundings(self, first: Iterable[Path], environment: dict[str, str]) -> dict[str, Any]:
        paths = os.pathsep.join(str(path) for path in (*first, self.folder, PACKAGES))
        given = {**os.environ, "DATABASE_URL": self.url, "PYTHONPATH": paths, **environment}
        return {"cwd": self.folder, "env": {name: value for name, value in given.items() if value}}


def script(said: str) -> str:
    """The SQL among what ``--sql`` wrote."""
    return "".join(
        line for line in said.splitlines(keepends=True) if not line.startswith(("$ alembic", "INFO ", "Generating"))
    )


def comparable(dump: str) -> list[str]:
    """The lines of a dump, but for what cannot be the same by migrations and by ``create_all``.

    That is the order of columns: ALTER TABLE appends a column, and PostgreSQL has no way to put it between others. So
    the lines within the parentheses of a CREATE TABLE are sorted. Comments go, which tell the versions of server and
    client, and the random key of the ``\\restrict`` that recent releases write.
    """
    lines: list[str] = []
    columns: list[str] | None = None
    for line in dump.splitlines():
        if not line or line.startswith(("--", "\\restrict", "\\unrestrict")):
            continue
        if columns is not None and line.startswith(")"):
            lines += sorted(columns)
            columns = None
        if columns is None:
            lines.append(line)
        else:
            columns.append(line.removesuffix(","))
        if line.startswith("CREATE TABLE ") and line.endswith(" ("):
            columns = []
    return lines


def program(name: str, bin_dir: Path | None) -> str:
    """One of PostgreSQL's programs, of the server's own release if need be."""
    if bin_dir is None:
        try:
            bin_dir = embedded.find_binaries()
        except embedded.EmbeddedError:
            bin_dir = None
    found = shutil.which(name, path=bin_dir) or shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name}, neither beside the server's programs nor on PATH")
    return found
