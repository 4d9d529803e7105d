"""What autogenerate sees of a table that is a run already: other statuses, other indexes, other storage parameters."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url, text
from sqlalchemy.dialects import postgresql
from sqlalchemy.exc import DBAPIError

from sqla_durable.alembic.verbatim import escaped
from tests.support_alembic import NOTHING_NEW, PLUGIN, USUAL, Project, script

ADDED = ('    FAILED = "failed"', '    FAILED = "failed"\n    LOST = "lost"')
REACHED = ("PlanStatus.FAILED, PlanStatus.READY}", "PlanStatus.FAILED, PlanStatus.READY, PlanStatus.LOST}")
HELD = [
    ('    PENDING = "pending"\n', '    PENDING = "pending"\n    HELD = "it\'s held"\n'),
    ("PlanStatus.PENDING: {PlanStatus.READY}", "PlanStatus.PENDING: {PlanStatus.READY, PlanStatus.HELD}"),
]
LET_GO = [(new, old) for old, new in HELD]
RENAMED = ('RUNNING = "running"', 'RUNNING = "under way"')
ONE_IN_FLIGHT = ("lapsed=PlanStatus.READY,", 'lapsed=PlanStatus.READY,\n        one_in_flight=("note",),')
GUARDED = ('__tablename__ = "plan"\n', '__tablename__ = "plan"\n    __guard__ = True\n')
STRANGER = """
from sqlalchemy.orm import Mapped, mapped_column

from app.base import Base


class Stranger(Base):
    __tablename__ = "stranger"
    id: Mapped[str] = mapped_column(primary_key=True)
"""
UNGUARDED = GUARDED[::-1]
FORBIDDEN = "UPDATE plan SET status = 'done'"


@pytest.fixture
def project(tmp_path: Path, empty_url: str) -> Project:
    project = Project.set_up(tmp_path, empty_url)
    project.models()
    project.configure("metadata", "app.models:Base")
    return project


def migrate(project: Project, *more: str) -> str:
    return project.alembic("revision --autogenerate -m next", "upgrade head", "check", *more)


def assert_there_and_back(project: Project, before: set[tuple[str, ...]]) -> None:
    """The last migration can be undone and done again, and leaves what ``create_all`` makes."""
    after = project.catalogue()
    project.alembic("downgrade -1")
    assert project.catalogue() == before
    assert NOTHING_NEW in project.alembic("upgrade head", "check")
    assert project.catalogue() == after
    project.start_anew()
    project.create_all()
    assert project.catalogue() == after


def change_models(project: Project, *changes: tuple[str, str]) -> None:
    for old, new in changes:
        project.change("app/models.py", old, new)


def fill_in(project: Project, statement: str) -> None:
    """Write a statement where the last migration has proposed one."""
    file = max((project.folder / "migrations/versions").glob("*.py"), key=lambda each: each.stat().st_mtime_ns)
    upgrade, _, downgrade = file.read_text().partition("def downgrade")
    proposed = re.search(r"# op\.execute\(.*\)", upgrade)
    assert proposed
    file.write_text(f"{upgrade.replace(proposed[0], f'op.execute({statement!r})')}def downgrade{downgrade}")


def test_a_status_that_is_added_can_be_written_after_the_migration(project: Project) -> None:
    migrate(project)
    before = project.catalogue()
    change_models(project, ADDED, REACHED)
    assert NOTHING_NEW in migrate(project)
    migration = project.migrations()[-1]
    assert "sqla_durable" not in migration
    assert "DO $" not in migration.partition("def downgrade")[0]
    project.sql("INSERT INTO plan (status) VALUES ('lost')", "DELETE FROM plan")
    assert_there_and_back(project, before)


def test_a_status_that_is_removed_is_refused_while_rows_are_in_it_and_nothing_is_changed(project: Project) -> None:
    change_models(project, *HELD)
    migrate(project)
    before = project.catalogue()
    project.sql("INSERT INTO plan (status) VALUES ('it''s held'), ('it''s held'), ('pending')")
    change_models(project, *LET_GO)
    project.alembic("revision --autogenerate -m next")
    told = project.refused("upgrade head")
    assert "2 rows are in a status that this migration removes: plan.status IN ('it''s held')" in told
    assert "UPDATE plan SET status = '...' WHERE status IN ('it''s held')" in told
    assert project.catalogue() == before
    project.sql("UPDATE plan SET status = 'pending'")
    assert NOTHING_NEW in project.alembic("upgrade head", "check")
    project.sql("DELETE FROM plan")
    assert_there_and_back(project, before)


def test_a_status_is_renamed_with_one_line_in_the_migration(project: Project) -> None:
    migrate(project)
    before = project.catalogue()
    project.sql(
        "INSERT INTO plan (status, fence, attempts, lease_owner, lease_expires_at) VALUES ('running', 1, 1, 'w', now())"
    )
    change_models(project, RENAMED)
    project.alembic("revision --autogenerate -m next")
    assert "1 rows are in a status" in project.refused("upgrade head")
    assert "# op.execute(\"UPDATE plan SET status = '...' WHERE status IN ('running')\")" in project.migrations()[-1]
    fill_in(project, "UPDATE plan SET status = 'under way' WHERE status = 'running'")
    assert NOTHING_NEW in project.alembic("upgrade head", "check")
    assert project.sql("SELECT status, lease_owner FROM plan") == [("under way", "w")]
    told = project.refused("downgrade -1")
    assert "1 rows are in a status that this migration removes: plan.status IN ('under way')" in told
    project.sql("DELETE FROM plan")
    assert_there_and_back(project, before)


@pytest.mark.parametrize("compared", ["by name", "not at all"])
def test_every_index_and_check_that_names_a_renamed_status_is_made_anew(project: Project, compared: str) -> None:
    if compared == "not at all":
        project.change("migrations/env.py", PLUGIN, "")
    migrate(project)
    before = project.catalogue()
    change_models(project, RENAMED)
    assert NOTHING_NEW in migrate(project)
    migration = project.migrations()[-1]
    upgrade = migration.partition("def downgrade")[0]
    for name in ("ck_plan_lease", "ck_plan_status_values", "ix_plan_started_at"):
        assert upgrade.count(name) == 2, name
    assert "ix_plan_available_at" not in upgrade
    assert_there_and_back(project, before)


def test_an_index_over_the_statuses_that_are_not_terminal_follows_them(project: Project) -> None:
    change_models(project, ONE_IN_FLIGHT)
    migrate(project)
    before = project.catalogue()
    change_models(
        project,
        ADDED,
        REACHED,
        ("{PlanStatus.RUNNING},", "{PlanStatus.RUNNING},\n        PlanStatus.LOST: {PlanStatus.READY},"),
    )
    assert NOTHING_NEW in migrate(project)
    assert project.migrations()[-1].partition("def downgrade")[0].count("ix_plan_one_in_flight") == 2
    assert_there_and_back(project, before)


def test_a_storage_parameter_of_an_existing_table_is_set(project: Project) -> None:
    project.alembic("revision --autogenerate -m plans", "upgrade head")
    project.sql("ALTER TABLE plan SET (fillfactor = 100, autovacuum_vacuum_threshold = 7)")
    before = project.catalogue()
    assert NOTHING_NEW in migrate(project)
    assert "ALTER TABLE plan SET (fillfactor = 80)" in project.migrations()[-1]
    project.alembic("downgrade -1")
    assert project.catalogue() == before
    project.sql("ALTER TABLE plan RESET (fillfactor)")
    before = project.catalogue()
    project.alembic("upgrade head", "downgrade -1")
    assert ("storage", "plan", "", "autovacuum_vacuum_threshold=7 fillfactor=100") in project.catalogue()


@pytest.mark.parametrize("table", ["Ordered 100% Plan", 'it\'s a \\"plan\\"', "p" * 63, "plan: of :x"])
def test_a_table_of_any_name_is_compared(project: Project, table: str) -> None:
    project.models(USUAL, table=table, key="id: Mapped[str] = mapped_column(primary_key=True)")
    project.change("app/models.py", f'"{table}_step"', '"step"')
    change_models(project, *HELD)
    migrate(project)
    before = project.catalogue()
    change_models(project, *LET_GO, RENAMED)
    assert NOTHING_NEW in migrate(project)
    assert_there_and_back(project, before)


def test_columns_of_any_name_are_compared(project: Project) -> None:
    change_models(
        project,
        ("statuses.column()", """statuses.column('100% "status" of :it')"""),
        ONE_IN_FLIGHT,
    )
    migrate(project)
    before = project.catalogue()
    project.sql("INSERT INTO plan DEFAULT VALUES", "DELETE FROM plan")
    change_models(project, RENAMED)
    assert NOTHING_NEW in migrate(project)
    assert_there_and_back(project, before)


def test_what_would_go_with_a_column_is_dropped_before_it_and_comes_back(project: Project) -> None:
    check = "__table_args__ = (sa.CheckConstraint(\"note <> '' OR status = 'pending'\", name=\"own\"),)"
    change_models(project, ("    id: Mapped[int]", f"    {check}\n    id: Mapped[int]"))
    migrate(project)
    before = project.catalogue()
    change_models(project, (f"{check}\n", "\n"), ("statuses.column()", 'statuses.column("state")'))
    assert NOTHING_NEW in migrate(project)
    assert {"own", "ck_plan_lease"} & {name for _, _, name, _ in project.catalogue()} == {"ck_plan_lease"}
    assert_there_and_back(project, before)


def test_tables_in_schemas_are_compared(project: Project) -> None:
    project.models('schema="My \\"App\\""')
    project.sql('CREATE SCHEMA "My ""App"""')
    migrate(project)
    before = project.catalogue('"My ""App"""')
    change_models(project, ADDED, REACHED, RENAMED)
    assert NOTHING_NEW in migrate(project, "downgrade -1")
    assert project.catalogue('"My ""App"""') == before
    assert NOTHING_NEW in project.alembic("upgrade head", "check")


def test_the_sql_of_changed_statuses_can_be_applied_by_somebody_else(
    project: Project, pytestconfig: pytest.Config
) -> None:
    bin_dir = pytestconfig.getoption("--postgres")
    change_models(project, *HELD)
    migrate(project)
    before = project.catalogue()
    (old,) = project.sql("SELECT version_num FROM alembic_version")[0]
    change_models(project, *LET_GO, RENAMED, ADDED, REACHED)
    project.alembic("revision --autogenerate -m next")
    project.psql(script(project.alembic(f"upgrade {old}:head --sql")), bin_dir)
    assert NOTHING_NEW in project.alembic("check")
    (new,) = project.sql("SELECT version_num FROM alembic_version")[0]
    project.psql(script(project.alembic(f"downgrade {new}:{old} --sql")), bin_dir)
    assert project.catalogue() == before


def test_sql_comes_out_of_a_migration_as_it_was_whatever_is_in_it() -> None:
    dialect: Any = postgresql.dialect
    for sql in map("".join, product(":\\ax' ", repeat=6)):
        assert str(text(escaped(sql)).compile(dialect=dialect(paramstyle="named"))) == sql


def is_refused(project: Project) -> bool:
    project.sql("INSERT INTO plan (status) VALUES ('pending')")
    told = ""
    try:
        project.sql(FORBIDDEN)
    except DBAPIError as error:
        told = str(error)
    project.sql("DELETE FROM plan")
    return "its status would go from pending to done" in told


def test_a_guard_comes_and_goes_with_migrations(project: Project) -> None:
    migrate(project)
    bare = project.catalogue()
    change_models(project, GUARDED)
    assert NOTHING_NEW in migrate(project)
    assert "sqla_durable import" not in project.migrations()[-1]
    assert is_refused(project)
    assert_there_and_back(project, bare)
    assert is_refused(project)


def test_a_guard_that_is_no_longer_wanted_is_dropped_and_comes_back_with_the_downgrade(project: Project) -> None:
    change_models(project, GUARDED)
    migrate(project)
    guarded = project.catalogue()
    assert is_refused(project)
    change_models(project, UNGUARDED)
    assert NOTHING_NEW in migrate(project)
    assert not is_refused(project)
    assert_there_and_back(project, guarded)


def test_a_guard_follows_the_edges_that_are_declared(project: Project) -> None:
    change_models(project, GUARDED)
    migrate(project)
    guarded = project.catalogue()
    change_models(
        project,
        ("PlanStatus.PENDING: {PlanStatus.READY}", "PlanStatus.PENDING: {PlanStatus.READY, PlanStatus.FAILED}"),
    )
    project.sql("INSERT INTO plan (status) VALUES ('pending')")
    with pytest.raises(DBAPIError, match="its status would go from pending to failed"):
        project.sql("UPDATE plan SET status = 'failed', finished_at = now()")
    assert NOTHING_NEW in migrate(project)
    project.sql("UPDATE plan SET status = 'failed', finished_at = now()", "DELETE FROM plan")
    assert_there_and_back(project, guarded)


def test_a_status_of_a_guarded_table_is_renamed_with_one_line_in_the_migration(project: Project) -> None:
    change_models(project, GUARDED)
    migrate(project)
    project.sql("INSERT INTO plan (status) VALUES ('pending')")
    change_models(project, ('"pending"', '"waiting"'))
    project.alembic("revision --autogenerate -m next")
    fill_in(project, "UPDATE plan SET status = 'waiting' WHERE status = 'pending'")
    assert NOTHING_NEW in project.alembic("upgrade head", "check")
    assert project.sql("SELECT status FROM plan") == [("waiting",)]


def test_a_guard_that_somebody_has_switched_off_is_seen(project: Project) -> None:
    change_models(project, GUARDED)
    migrate(project)
    project.sql("ALTER TABLE plan DISABLE TRIGGER durable_guard_update")
    assert "Detected changed guard of table 'plan'" in project.refused("check")


def test_the_log_says_whether_a_guard_is_added_or_removed(project: Project) -> None:
    migrate(project)
    change_models(project, GUARDED)
    assert "Detected added guard of table 'plan'" in migrate(project)
    change_models(project, UNGUARDED)
    assert "Detected removed guard of table 'plan'" in project.refused("check")


def test_a_check_shows_the_sql_of_what_it_has_found(project: Project) -> None:
    """Where a status is added nothing is refused but in the downgrade."""
    migrate(project)
    change_models(project, ADDED, REACHED)
    found = project.refused("check")
    assert "Verbatim(\"(status IN ('pending'," in found
    assert "('execute in the downgrade', \"DO $refuse$" in found
    assert "('execute',)" not in found


def test_the_guard_of_a_table_that_is_removed_goes_with_it_and_comes_back(project: Project) -> None:
    change_models(project, GUARDED)
    migrate(project)
    guarded = project.catalogue()
    models = (project.folder / "app/models.py").read_text()
    project.write("app/models.py", models.partition("class PlanStep")[0])
    migrate(project)
    project.write("app/models.py", STRANGER)
    assert NOTHING_NEW in migrate(project)
    assert {place for _, place, *_ in project.catalogue()} == {"stranger"}
    project.alembic("downgrade -2")
    assert project.catalogue() == guarded
    assert is_refused(project)


def test_guards_in_the_sql_that_somebody_else_applies(project: Project, pytestconfig: pytest.Config) -> None:
    bin_dir = pytestconfig.getoption("--postgres")
    change_models(project, GUARDED)
    migrate(project)
    guarded = project.catalogue()
    project.start_anew()
    project.psql(script(project.alembic("upgrade head --sql")), bin_dir)
    assert project.catalogue() == guarded
    assert NOTHING_NEW in project.alembic("check")
    (revision,) = project.sql("SELECT version_num FROM alembic_version")[0]
    project.psql(script(project.alembic(f"downgrade {revision}:base --sql")), bin_dir)
    assert project.catalogue() == set()


def test_a_migration_of_tables_without_a_schema_names_none(project: Project) -> None:
    change_models(project, GUARDED)
    migrate(project)
    change_models(project, UNGUARDED)
    assert NOTHING_NEW in migrate(project)
    assert "public" not in project.migrations()[-1]
    guardless = project.catalogue()
    elsewhere = make_url(project.url).update_query_dict({"options": "-csearch_path=app"})
    project.sql("CREATE SCHEMA app")
    project.alembic("upgrade head", "downgrade -1", DATABASE_URL=elsewhere.render_as_string(hide_password=False))
    moved = {tuple(str(part).replace("app.", "") for part in row) for row in project.catalogue("app")}
    project.alembic("downgrade -1")
    assert {row for row in moved if row[0] == "trigger"} == {
        tuple(str(part).replace("public.", "") for part in row) for row in project.catalogue() if row[0] == "trigger"
    }
    assert guardless != project.catalogue()
