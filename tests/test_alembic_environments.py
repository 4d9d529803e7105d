"""Every way to have an environment: the template over asyncio and not, installed either way, and Alembic's own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url, text

from tests.support_alembic import COMMANDS, NOTHING_NEW, PLUGIN, USUAL, Project, script
from tests.test_alembic_changes import ADDED, GUARDED, REACHED, RENAMED, change_models
from tests.test_alembic_migrations import is_empty, names

ROOT = Path(__file__).parents[1]
HAND_WRITTEN = """
from alembic import op

revision = "{id}"
down_revision = {down!r}
branch_labels = None
depends_on = None


def upgrade():
    {up}


def downgrade():
    pass
"""


@pytest.fixture
def project(tmp_path: Path, empty_url: str) -> Project:
    project = Project.set_up(tmp_path, empty_url)
    project.models()
    project.configure("metadata", "app.models:Base")
    return project


def without_driver(url: str) -> str:
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


# installed


@pytest.fixture(scope="module", params=["wheel", "editable"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment in which the package is installed, and from which the checkout is not seen."""
    pytest.importorskip("hatchling", reason="the wheel is built with it; it comes with the extra dev")
    folder = tmp_path_factory.mktemp(request.param)
    build = f"from hatchling.build import build_{request.param} as build; build({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    (site / "zz_others.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "venv/bin/python"


def run(python: Path, folder: Path, url: str, *arguments: str) -> str:
    environment = {**os.environ, "DATABASE_URL": url, "PYTHONPATH": str(folder)}
    ended = subprocess.run(
        [python, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def alembic(python: Path, folder: Path, url: str, *commands: str) -> str:
    return run(python, folder, url, str(COMMANDS), json.dumps([command.split(" ") for command in commands]))


@pytest.mark.parametrize("variant", ["sync", "async"])
def test_a_project_is_set_up_and_migrated_there_and_back(
    installed: Path, variant: str, tmp_path: Path, empty_url: str, pytestconfig: pytest.Config
) -> None:
    project, url = Project(tmp_path, empty_url), without_driver(empty_url)
    chosen = ["--async"] if variant == "async" else []
    run(installed, tmp_path, url, "-m", "sqla_durable.cli", "init", "db", "--metadata", "app.models:Base", *chosen)
    project.models(USUAL)
    asked = f"assert op.get_context().as_sql or op.get_bind().dialect.is_async is {variant == 'async'}"
    project.write("db/versions/a.py", HAND_WRITTEN.format(id="a", down=None, up=asked))
    said = alembic(
        installed,
        tmp_path,
        url,
        "upgrade head",
        "revision --autogenerate -m plans --rev-id b",
        "upgrade head",
        "check",
        "downgrade base",
        "upgrade head",
    )
    assert NOTHING_NEW in said
    migrated = project.catalogue()
    assert len(names(migrated)) == 9

    bin_dir = pytestconfig.getoption("--postgres")
    project.psql(script(alembic(installed, tmp_path, "", "downgrade b:base --sql")), bin_dir)
    assert project.catalogue() == set()
    project.start_anew()
    project.psql(script(alembic(installed, tmp_path, "", "upgrade head --sql")), bin_dir)
    assert project.catalogue() == migrated
    project.start_anew()
    project.create_all()
    assert project.catalogue() == migrated


# over asyncio


@pytest.mark.parametrize("chosen", ["in the url", "in the ini file"])
def test_a_driver_for_asyncio_is_used_over_asyncio(project: Project, chosen: str) -> None:
    url = without_driver(project.url)
    if chosen == "in the url":
        url = url.replace("postgresql:", "postgresql+psycopg_async:", 1)
    else:
        project.configure("driver", "psycopg_async")
    asked = "assert op.get_bind().dialect.is_async"
    project.write("migrations/versions/a.py", HAND_WRITTEN.format(id="a", down=None, up=asked))
    project.alembic("upgrade head", DATABASE_URL=url)


def test_a_migration_over_asyncio_that_waits_for_a_lock_is_rolled_back(project: Project) -> None:
    project.configure("driver", "psycopg_async")
    project.configure("lock_timeout", "50ms")
    project.sql("CREATE TABLE busy (id int)")
    for id_, down, up in ("a", None, "CREATE TABLE first (id int)"), ("b", "a", "ALTER TABLE busy ADD more int"):
        content = HAND_WRITTEN.format(id=id_, down=down, up=f"op.execute({up!r})")
        project.write(f"migrations/versions/{id_}.py", content)
    engine = create_engine(project.url)
    with engine.begin() as reader:
        reader.execute(text("SELECT * FROM busy"))
        given = {"DATABASE_URL": without_driver(project.url), "PGOPTIONS": "-c statement_timeout=20s"}
        assert "canceling statement due to lock timeout" in project.refused("upgrade head", **given)
    engine.dispose()
    assert project.sql("SELECT version_num FROM alembic_version") == [("a",)]


# several bases and branches


BILLING = """
import sqlalchemy as sa
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from app.models import Plan, PlanStatus, statuses
from sqla_durable import RunMixin


class Billing(DeclarativeBase):
    metadata = sa.MetaData(
        naming_convention={
            "ck": "check_%(table_name)s_%(constraint_name)s",
            "fk": "foreign_%(table_name)s_%(column_0_name)s",
        },
    )


class Charge(RunMixin, Billing):
    __tablename__ = "charge"
    __table_args__ = (sa.CheckConstraint("amount > 0", name="amount"), {"schema": "billing"})
    __lifecycle__ = Plan.__lifecycle__
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[PlanStatus] = statuses.column()
    amount: Mapped[int]
    plan_id: Mapped[int] = mapped_column(sa.ForeignKey(Plan.__table__.c.id))
"""
CREATE_BILLING = """
from sqlalchemy import create_engine
from app.billing import Billing
Billing.metadata.create_all(create_engine({url!r}))
"""


@pytest.fixture
def of_two(project: Project) -> Project:
    project.start_anew("billing", "other")
    project.sql("CREATE TABLE other.precious (id int)")
    project.models(USUAL)
    project.write("app/billing.py", BILLING)
    return project


def both(project: Project) -> set[tuple[str, ...]]:
    return project.catalogue() | project.catalogue("billing")


@pytest.mark.parametrize(
    "written", ["app.models:Base, app.billing:Billing", "\n  app.models:Base\n  app.billing:Billing"]
)
def test_the_tables_of_several_bases_are_migrated_together(of_two: Project, written: str) -> None:
    of_two.configure("metadata", written.replace("\n", "\\n"))
    said = of_two.alembic("revision --autogenerate -m both", "upgrade head", "check", "revision --autogenerate -m none")
    assert NOTHING_NEW in said
    first, second = of_two.migrations()
    assert "precious" not in first
    assert is_empty(second)
    before = both(of_two)
    assert {"check_charge_lease", "check_charge_amount", "foreign_charge_plan_id", "ck_plan_lease"} <= names(before)

    change_models(of_two, ADDED, REACHED, RENAMED)
    said = of_two.alembic("upgrade head", "revision --autogenerate -m changed", "upgrade head", "check")
    assert NOTHING_NEW in said
    assert "check_charge_status_values" in of_two.migrations()[-1]
    changed = both(of_two)
    of_two.alembic("downgrade -1")
    assert both(of_two) == before
    of_two.alembic("downgrade base", "upgrade head")
    assert both(of_two) == changed

    of_two.start_anew("billing")
    of_two.create_all()
    of_two.python(CREATE_BILLING.format(url=of_two.url))
    assert both(of_two) == changed


def test_guarded_classes_of_two_bases_in_one_schema_record_overrides_in_tables_of_different_names(
    of_two: Project,
) -> None:
    guarded = '__tablename__ = "{}"\n    __guard__ = True\n'
    of_two.change("app/models.py", '__tablename__ = "plan"\n', guarded.format("plan"))
    of_two.change("app/billing.py", '__tablename__ = "charge"\n', guarded.format("charge"))
    of_two.change("app/billing.py", '{"schema": "billing"}', '{"schema": None}')
    of_two.change("app/billing.py", "sa.MetaData(\n", 'sa.MetaData(\n        info={"durable_override": "charged"},\n')
    of_two.configure("metadata", "app.models:Base, app.billing:Billing")
    assert NOTHING_NEW in of_two.alembic("revision --autogenerate -m both", "upgrade head", "check")
    of_two.sql(
        "INSERT INTO plan (status) VALUES ('pending')",
        "INSERT INTO charge (status, amount, plan_id) SELECT 'pending', 1, id FROM plan",
        "SET LOCAL sqla_durable.override = 'by hand'",
        "UPDATE charge SET status = 'failed'",
    )
    assert of_two.sql("SELECT table_name, reason FROM charged") == [("charge", "by hand")]
    assert of_two.sql("SELECT count(*) FROM durable_override") == [(0,)]


def test_bases_that_share_one_metadata_may_all_be_named(project: Project) -> None:
    project.configure("metadata", "app.models:Base app.models:Plan, app.base:Base.metadata")
    assert NOTHING_NEW in project.alembic("revision --autogenerate -m plans", "upgrade head", "check")


def test_each_base_may_have_a_branch_of_its_own(of_two: Project, pytestconfig: pytest.Config) -> None:
    of_two.alembic("revision --autogenerate -m plans --branch-label plans", "upgrade heads")
    of_two.configure("metadata", "app.models:Base, app.billing:Billing")
    said = of_two.alembic(
        "revision --autogenerate -m billing --head base --branch-label billing --depends-on plans",
        "upgrade heads",
        "check",
    )
    assert NOTHING_NEW in said
    assert "'plan'" not in of_two.migrations()[1].partition("op.f('foreign_charge_plan_id')")[0]
    change_models(of_two, ADDED, REACHED)
    said = of_two.alembic("revision --autogenerate -m status --head billing@head", "upgrade heads", "check", "heads")
    assert NOTHING_NEW in said
    assert sorted(re.findall(r"^\w+ \((plans|billing)\) \(.*head\)$", said, re.MULTILINE)) == ["billing", "plans"]
    of_two.alembic("merge -m one plans@head billing@head")
    assert NOTHING_NEW in of_two.alembic("upgrade head", "check", "downgrade base", "upgrade head", "check")
    migrated = both(of_two)
    of_two.start_anew("billing")
    of_two.psql(script(of_two.alembic("upgrade head --sql")), pytestconfig.getoption("--postgres"))
    assert both(of_two) == migrated


# with and without each comparison


def test_nothing_is_new_whichever_comparisons_are_switched_on(project: Project) -> None:
    key = """__table_args__ = (sa.CheckConstraint("note <> ''", name="note"),)
    id: Mapped[int] = mapped_column(primary_key=True)"""
    project.models(USUAL, key=key)
    change_models(project, GUARDED)
    project.alembic("revision --autogenerate -m plans", "upgrade head")
    env = project.folder / "migrations/env.py"
    whole = env.read_text()
    without_ours = whole.replace("[*PLUGINS, register()]", "PLUGINS")
    for content in whole, whole.replace(PLUGIN, ""), without_ours, without_ours.replace(PLUGIN, ""):
        env.write_text(content)
        assert NOTHING_NEW in project.alembic("check", "revision --autogenerate -m none", "upgrade head")
        assert is_empty(project.migrations()[-1])
    assert len({whole, whole.replace(PLUGIN, ""), without_ours, without_ours.replace(PLUGIN, "")}) == 4


EVERY_KIND = """

class Kinds(Base):
    __tablename__ = "kinds"
    id: Mapped[int] = mapped_column(sa.Identity(always=True), primary_key=True)
    number: Mapped[int] = mapped_column(sa.Identity(start=7))
    twice: Mapped[int] = mapped_column(sa.Computed("number * 2"))
    data: Mapped[str] = mapped_column(sa.JSON, server_default=sa.text("'{}'"))
    at: Mapped[str] = mapped_column(sa.DateTime, server_default=sa.func.now())
    flag: Mapped[bool] = mapped_column(server_default=sa.false())
    word: Mapped[str] = mapped_column(server_default="it's")
"""
IDENTITY_KEY = "id: Mapped[int] = mapped_column(sa.Identity(), primary_key=True)"


def test_every_kind_of_server_default_is_compared_and_not_new(project: Project) -> None:
    project.models(key=IDENTITY_KEY, more=EVERY_KIND)
    said = project.alembic(
        "revision --autogenerate -m plans", "upgrade head", "check", "downgrade base", "upgrade head", "check"
    )
    assert said.count(NOTHING_NEW) == 2
    project.change("app/models.py", 'server_default="it\'s"', 'server_default="other"')
    assert "modify_default" in project.refused("check")


MIXINS = """

class Job(FunctionMixin, Base):
    __tablename__ = "job"


class JobStep(ReceiptMixin[Job], Base):
    __tablename__ = "job_step"
    __partition__ = Monthly()


class JobSignal(SignalMixin[Job], Base):
    __tablename__ = "job_signal"


class Order(KeyMixin, PriorityMixin, AttemptsMixin, WaitMixin, RunMixin, Base):
    __tablename__ = "order"
    __lifecycle__ = Plan.__lifecycle__
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[PlanStatus] = statuses.column()
"""


def test_the_columns_of_every_mixin_are_written_with_plain_types(project: Project) -> None:
    found = re.findall(r"^class (?:Order\((.*), Base\))", MIXINS, re.MULTILINE)[0].split(", ")
    project.models(more=MIXINS)
    imported = ", ".join(sorted({*found, "FunctionMixin", "Monthly", "SignalMixin"} - {"RunMixin"}))
    project.change("app/models.py", "from sqla_durable import", f"from sqla_durable import {imported},")
    assert NOTHING_NEW in project.alembic("revision --autogenerate -m jobs", "upgrade head", "check")
    (migration,) = project.migrations()
    assert "durable" not in migration
    assert re.findall(r"^(?:import|from) .*", migration, re.MULTILINE) == [
        "from collections.abc import Sequence",
        "import sqlalchemy as sa",
        "from alembic import op",
        "from sqlalchemy.dialects import postgresql",
    ]


def test_a_status_that_a_migration_adds_can_be_used_in_it(project: Project) -> None:
    project.alembic("revision --autogenerate -m plans", "upgrade head")
    change_models(project, ADDED, REACHED)
    project.alembic("revision --autogenerate -m lost")
    (file,) = (project.folder / "migrations/versions").glob("*_lost.py")
    added = "    op.execute(\"INSERT INTO plan (status) VALUES ('lost')\")\n"
    above, line, below = file.read_text().partition("    # ### end Alembic commands ###\n")
    file.write_text(above + added + line + below)
    project.alembic("upgrade head")
    assert project.sql("SELECT status FROM plan") == [("lost",)]


# an env.py that is not the template's


def stock(tmp_path: Path, url: str, template: str, *plugins: str) -> Project:
    """A project that was set up with a template of Alembic's own, to which one line was added."""
    project = Project(tmp_path, url)
    project.alembic(f"init -t {template} migrations")
    project.configure("sqlalchemy.url", url.replace("%", "%%").replace("\\", "\\\\"))
    models = "from app.models import Base\nfrom sqla_durable.alembic import register\ntarget_metadata = Base.metadata"
    project.change("migrations/env.py", "target_metadata = None", models)
    named = ", ".join(['"alembic.autogenerate.*"', *plugins, "register()"])
    given = "connection=connection, target_metadata=target_metadata"
    project.change("migrations/env.py", given, f"{given}, autogenerate_plugins=[{named}], compare_server_default=True")
    return project


@pytest.mark.parametrize("template", ["generic", "async"])
def test_alembics_own_environment_needs_no_more_than_the_plugin(tmp_path: Path, empty_url: str, template: str) -> None:
    project = stock(tmp_path, empty_url, template)
    project.models(USUAL, key=IDENTITY_KEY, more=EVERY_KIND)
    change_models(project, GUARDED)
    said = project.alembic("revision --autogenerate -m plans", "upgrade head", "check")
    assert NOTHING_NEW in said
    before = project.catalogue()
    change_models(project, ADDED, REACHED, RENAMED, GUARDED[::-1])
    said = project.alembic("revision --autogenerate -m changed", "upgrade head", "check", "downgrade -1")
    assert NOTHING_NEW in said
    assert project.catalogue() == before
    assert not any("durable" in line for each in project.migrations() for line in each.splitlines() if "import" in line)
    project.alembic("downgrade base", "upgrade head")
    migrated = project.catalogue()
    project.start_anew()
    project.create_all()
    assert project.catalogue() == migrated


@pytest.mark.parametrize("plugins", [[], ['"alembic.ext.checkconstraint_byname"']], ids=["", "byname"])
def test_in_alembics_own_environment_a_table_that_exists_gets_its_checks(
    tmp_path: Path, empty_url: str, plugins: list[str]
) -> None:
    project = stock(tmp_path, empty_url, "generic", *plugins)
    project.models(USUAL)
    models = (project.folder / "app/models.py").read_text()
    plain = """
    import sqlalchemy as sa
    from sqlalchemy.orm import Mapped, mapped_column
    from app.base import Base

    class Plan(Base):
        __tablename__ = "plan"
        id: Mapped[int] = mapped_column(primary_key=True)
        note: Mapped[str | None]
    """
    project.write("app/models.py", plain)
    project.alembic("revision --autogenerate -m existing", "upgrade head")
    project.sql("INSERT INTO plan DEFAULT VALUES")
    before = project.catalogue()
    project.write("app/models.py", models)
    assert NOTHING_NEW in project.alembic("revision --autogenerate -m durable", "upgrade head", "check")
    migrated = project.catalogue()
    assert {"ck_plan_lease", "ck_plan_status_values"} <= names(migrated)
    project.alembic("downgrade -1")
    assert project.catalogue() == before
    project.start_anew()
    project.create_all()
    assert project.catalogue() == migrated
