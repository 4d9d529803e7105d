"""The template is found wherever the package lies, and its env.py says what is missing and gives up politely."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from itertools import takewhile
from pathlib import Path
from textwrap import dedent, indent

import pytest
from sqlalchemy import create_engine, make_url, text

from sqla_durable.alembic import template_folder
from tests.support_alembic import NOTHING_NEW, PACKAGES, Project, script

CHECKOUT = Path(__file__).parents[1]


def python(*arguments: str, path: Path, folder: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture
def project(tmp_path: Path, empty_url: str) -> Project:
    return Project.set_up(tmp_path, empty_url)


def test_neither_the_package_nor_its_alembic_module_imports_alembic(tmp_path: Path) -> None:
    code = "import sys, sqla_durable.alembic; print([name for name in sys.modules if name.split('.')[0] == 'alembic'])"
    assert python("-c", code, path=PACKAGES, folder=tmp_path) == "[]\n"


def test_the_checkouts_template_sets_up_a_project(tmp_path: Path) -> None:
    printed = python("-m", "sqla_durable.alembic", path=PACKAGES, folder=tmp_path).removesuffix("\n")
    python("-m", "alembic", "init", "-t", printed, "migrations", path=PACKAGES, folder=tmp_path)
    made = {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*")}
    assert made == {
        "alembic.ini",
        "migrations",
        "migrations/README",
        "migrations/env.py",
        "migrations/script.py.mako",
        "migrations/versions",
    }


def test_the_template_in_a_wheel_sets_up_the_same_project(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="the wheel is built with it; it comes with the extra dev")
    source = tmp_path / "source"
    for name in "sqla_durable", "alembic_template":
        shutil.copytree(CHECKOUT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in "pyproject.toml", "LICENSE", "README.md":
        (source / name).write_bytes((CHECKOUT / name).read_bytes() if (CHECKOUT / name).exists() else b"")
    python("-m", "hatchling", "build", "-t", "wheel", path=source, folder=source)
    shutil.move(next(source.glob("dist/*.whl")), tmp_path / "wheel.zip")
    shutil.rmtree(source)

    installed = tmp_path / "installed"
    zipfile.ZipFile(tmp_path / "wheel.zip").extractall(installed)
    printed = python("-m", "sqla_durable.alembic", path=installed, folder=tmp_path).removesuffix("\n")
    assert Path(printed).is_relative_to(installed)
    for folder, template in (tmp_path / "one", printed), (tmp_path / "other", str(CHECKOUT / "alembic_template")):
        folder.mkdir()
        python("-m", "alembic", "init", "-t", template, "migrations", path=installed, folder=folder)
    files = sorted(file.relative_to(tmp_path / "one") for file in (tmp_path / "one").rglob("*") if file.is_file())
    assert len(files) == 4
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes()


def test_the_readmes_first_line_is_its_synopsis() -> None:
    synopsis = (template_folder() / "README").read_text().splitlines()[0]
    assert "sqla_durable" in synopsis
    assert len(synopsis) < 120


def test_a_project_that_names_no_models_is_told_how(project: Project) -> None:
    said = project.refused("upgrade head")
    assert "No models to migrate: set metadata in the [alembic] section" in said
    assert "Traceback" not in said


def test_models_that_cannot_be_imported_show_their_own_error_and_where_they_are_named(project: Project) -> None:
    project.write("broken.py", "import there_is_no_such_module")
    project.configure("metadata", "broken:Base")
    said = project.refused("upgrade head")
    assert "No module named 'there_is_no_such_module'" in said
    assert "while reading metadata = broken:Base in the ini file" in said


def test_something_that_has_no_metadata_is_refused(project: Project) -> None:
    project.write("wrong.py", "Base = 1")
    project.configure("metadata", "wrong:Base")
    assert "metadata = wrong:Base in the ini file leads to no MetaData, but to 1." in project.refused("upgrade head")


def test_a_metadata_object_may_be_named_itself(project: Project) -> None:
    project.models()
    project.configure("metadata", "app.models:Base.metadata")
    project.alembic("revision --autogenerate -m plans")
    assert "'plan_step'" in project.migrations()[0]


def test_a_project_without_a_database_is_told_how(project: Project) -> None:
    project.models()
    project.configure("metadata", "app.models:Base")
    said = project.refused("upgrade head", DATABASE_URL="")
    assert "No database to migrate: set DATABASE_URL, or sqlalchemy.url in the ini file." in said
    assert "Traceback" not in said


def test_the_environment_goes_before_the_ini_file(project: Project) -> None:
    project.models()
    project.configure("metadata", "app.models:Base")
    project.configure("sqlalchemy.url", "postgresql+psycopg://127.0.0.1:1/nowhere")
    project.alembic("upgrade head")
    assert "connection failed" in project.refused("upgrade head", DATABASE_URL="")
    project.configure("sqlalchemy.url", project.url.replace("%", "%%").replace("\\", "\\\\"))
    project.alembic("upgrade head", DATABASE_URL="")


@pytest.mark.parametrize("scheme", ["postgres", "postgresql"])
def test_a_url_without_a_driver_means_psycopg(project: Project, scheme: str) -> None:
    project.models()
    project.configure("metadata", "app.models:Base")
    url = make_url(project.url).set(drivername=scheme).render_as_string(hide_password=False)
    project.alembic("upgrade head", DATABASE_URL=url)


def test_migrations_are_written_as_sql_without_any_database(project: Project) -> None:
    project.models()
    project.configure("metadata", "app.models:Base")
    project.alembic("revision --autogenerate -m plans")
    assert "CREATE TABLE plan_step" in project.alembic("upgrade head --sql", DATABASE_URL="")


def test_models_that_define_no_table_drop_none(project: Project) -> None:
    project.models()
    project.sql("CREATE TABLE precious (id int)")
    project.configure("metadata", "app.base:Base")
    project.alembic("revision --autogenerate -m nothing")
    assert "drop_table" not in project.migrations()[0]


HAND_WRITTEN = '''
"""{id}"""
from alembic import op

revision = "{id}"
down_revision = {down!r}
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("{up}")
'''


def test_a_migration_that_waits_for_a_lock_is_rolled_back_and_can_be_repeated(project: Project) -> None:
    project.models()
    project.configure("metadata", "app.models:Base")
    project.configure("lock_timeout", "50ms")
    project.sql("CREATE TABLE busy (id int)")
    versions = "migrations/versions"
    project.write(f"{versions}/a.py", HAND_WRITTEN.format(id="a", down=None, up="CREATE TABLE first (id int)"))
    project.write(f"{versions}/b.py", HAND_WRITTEN.format(id="b", down="a", up="ALTER TABLE busy ADD more int"))
    engine = create_engine(project.url)
    with engine.begin() as reader:
        reader.execute(text("SELECT * FROM busy"))
        said = project.refused("upgrade head", PGOPTIONS="-c statement_timeout=20s")
        assert "canceling statement due to lock timeout" in said
    engine.dispose()
    assert project.sql("SELECT version_num FROM alembic_version, first") == []
    assert project.sql("SELECT version_num FROM alembic_version") == [("a",)], "each migration has its own transaction"
    project.alembic("upgrade head")
    assert project.sql("SELECT more FROM busy") == []


def test_without_a_lock_timeout_the_servers_own_holds(project: Project) -> None:
    project.models()
    project.configure("metadata", "app.models:Base")
    project.configure("lock_timeout", "")
    seen = "CREATE TABLE seen AS SELECT current_setting('lock_timeout') AS value"
    project.write("migrations/versions/a.py", HAND_WRITTEN.format(id="a", down=None, up=seen))
    project.alembic("upgrade head", PGOPTIONS="-c lock_timeout=12345")
    assert project.sql("SELECT value FROM seen") == [("12345ms",)]


def readme_code(first: str) -> str:
    """The lines of the README's example that begins with these words."""
    lines = (template_folder() / "README").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"  {first}"))
    return dedent("\n".join(takewhile(lambda line: line.startswith("  "), lines[start:])))


@pytest.mark.parametrize("way", ["online", "as sql"])
def test_the_batches_that_the_readme_shows_move_every_row(
    project: Project, way: str, pytestconfig: pytest.Config
) -> None:
    project.sql(
        "CREATE TABLE plan (id bigint PRIMARY KEY, status text, moved xid8)",
        "INSERT INTO plan SELECT id, 'held' FROM generate_series(1, 25000) id",
        "INSERT INTO plan VALUES (0, 'done')",
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.moved := pg_current_xact_id();"
        " RETURN NEW; END $$",
        "CREATE TRIGGER note BEFORE UPDATE ON plan FOR EACH ROW EXECUTE FUNCTION note()",
    )
    project.models()
    project.configure("metadata", "app.base:Base")
    migration = HAND_WRITTEN.format(id="a", down=None, up="UPDATE plan SET status = status")
    batches = indent(readme_code("with op.get_context()"), "    ").strip()
    project.write(
        "migrations/versions/a.py", migration.replace('op.execute("UPDATE plan SET status = status")', batches)
    )
    if way == "online":
        project.alembic("upgrade head")
    else:
        project.psql(script(project.alembic("upgrade head --sql")), pytestconfig.getoption("--postgres"))
    moved = project.sql("SELECT status, count(*), count(DISTINCT moved) FROM plan GROUP BY status ORDER BY status")
    assert moved == [("done", 1, 0), ("ready", 25000, 3)]


OWN = """

class Own(Base):
    __tablename__ = "own"
    __table_args__ = (sa.CheckConstraint("number > 0", name="positive"), sa.UniqueConstraint("number", "plan_id"))
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(index=True)
    plan_id: Mapped[int] = mapped_column(sa.ForeignKey("plan.id"))
"""
BARE = """

class Own(Base):
    __tablename__ = "own"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int]
    plan_id: Mapped[int]
"""


@pytest.mark.parametrize("named", [True, False])
def test_constraints_without_names_can_be_dropped_only_with_the_convention_of_the_readme(
    project: Project, named: bool
) -> None:
    convention = readme_code("MetaData(").removeprefix("MetaData(").removesuffix(")") if named else ""
    project.models(convention, more=BARE)
    project.configure("metadata", "app.models:Base")
    project.alembic("revision --autogenerate -m bare", "upgrade head")
    bare = project.catalogue()
    project.models(convention, more=OWN)
    said = project.alembic("revision --autogenerate -m own", "upgrade head", "check")
    assert NOTHING_NEW in said
    if not named:
        assert "it has no name" in project.refused("downgrade -1")
        return
    own = project.catalogue()
    assert {"uq_own_number_plan_id", "fk_own_plan_id_plan", "ck_own_positive", "ix_own_number"} <= {
        name for _, _, name, _ in own - bare
    }
    project.alembic("downgrade -1")
    assert project.catalogue() == bare
    project.alembic("upgrade head")
    project.start_anew()
    project.create_all()
    assert project.catalogue() == own
