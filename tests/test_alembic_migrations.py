"""What autogenerate makes of the mixins: plain SQLAlchemy, once, the same as ``create_all``, there and back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sqlalchemy import make_url

from tests.support_alembic import NOTHING_NEW, PLUGIN, USUAL, Project, script

BY_CONSTRAINT_NAME = """naming_convention={
    "ix": "index_%(table_name)s_%(constraint_name)s",
    "ck": "check_%(table_name)s_%(constraint_name)s",
    "fk": "foreign_%(table_name)s_%(constraint_name)s",
}"""
BY_COLUMN = """naming_convention={
    "ck": "check_%(table_name)s_%(column_0_name)s",
    "fk": "foreign_%(table_name)s_%(referred_table_name)s",
}"""
CONVENTIONS = {
    "": {
        "ck_plan_lease",
        "ck_plan_status_values",
        "ck_plan_step_outcome",
        "fk_plan_step_plan_id",
        "fk_plan_step_unsealed_plan_id",
        "ix_plan_available_at",
        "ix_plan_started_at",
        "plan_pkey",
        "plan_step_pkey",
    },
    USUAL: {
        "ck_plan_lease",
        "ck_plan_status_values",
        "ck_plan_step_outcome",
        "fk_plan_step_plan_id_plan",
        "fk_plan_step_unsealed_plan_step",
        "ix_plan_available_at",
        "ix_plan_started_at",
        "pk_plan",
        "pk_plan_step",
    },
    BY_CONSTRAINT_NAME: {
        "check_plan_lease",
        "check_plan_status_values",
        "check_plan_step_outcome",
        "foreign_plan_step_plan_id",
        "foreign_plan_step_unsealed_plan_id",
        "index_plan_available_at",
        "index_plan_started_at",
        "plan_pkey",
        "plan_step_pkey",
    },
    BY_COLUMN: {
        "ck_plan_lease",
        "ck_plan_status_values",
        "ck_plan_step_outcome",
        "foreign_plan_step_plan",
        "foreign_plan_step_plan_step",
        "ix_plan_available_at",
        "ix_plan_started_at",
        "plan_pkey",
        "plan_step_pkey",
    },
}
COMPOSITE = """tenant: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)"""


@pytest.fixture
def project(tmp_path: Path, empty_url: str) -> Project:
    project = Project.set_up(tmp_path, empty_url)
    project.models()
    project.configure("metadata", "app.models:Base")
    return project


def names(catalogue: set[tuple[str, ...]]) -> set[str]:
    return {name for kind, _, name, _ in catalogue if kind in {"constraint", "index"}}


def is_empty(migration: str) -> bool:
    code = re.sub(r"^ *#.*$", "", migration, flags=re.MULTILINE)
    return len(re.findall(r"^    pass$", code, re.MULTILINE)) == 2 and "op." not in code


@pytest.mark.parametrize("convention", CONVENTIONS, ids=["none", "usual", "by-constraint-name", "by-column"])
def test_the_tables_are_the_same_by_migration_and_by_create_all(project: Project, convention: str) -> None:
    project.models(convention)
    said = project.alembic(
        "revision --autogenerate -m plans",
        "upgrade head",
        "check",
        "revision --autogenerate -m again",
        "upgrade head",
        "downgrade base",
        "upgrade head",
    )
    assert NOTHING_NEW in said
    assert is_empty(project.migrations()[1])
    migrated = project.catalogue()
    assert names(migrated) == CONVENTIONS[convention]
    assert ("storage", "plan", "", "fillfactor=80") in migrated

    project.start_anew()
    project.create_all()
    assert project.catalogue() == migrated


def test_nothing_is_new_either_where_checks_are_not_compared(project: Project) -> None:
    project.change("migrations/env.py", PLUGIN, "")
    said = project.alembic("revision --autogenerate -m plans", "upgrade head", "check")
    assert NOTHING_NEW in said
    assert "checkconstraint_byname" not in said
    assert "ck_plan_lease" in names(project.catalogue())


def test_a_composite_key_migrates_like_any_other(project: Project) -> None:
    project.models(USUAL, key=COMPOSITE)
    said = project.alembic(
        "revision --autogenerate -m plans", "upgrade head", "check", "downgrade base", "upgrade head"
    )
    assert NOTHING_NEW in said
    assert len(names(project.catalogue())) == 9


def test_names_longer_than_postgresql_takes_are_shortened_alike(project: Project) -> None:
    project.models(table="plan_" + "x" * 45, key=COMPOSITE)
    assert NOTHING_NEW in project.alembic("revision --autogenerate -m plans", "upgrade head", "check")
    migrated = project.catalogue()
    assert len(names(migrated)) == 9
    project.start_anew()
    project.create_all()
    assert project.catalogue() == migrated


def test_a_migration_runs_where_sqla_durable_cannot_be_imported(project: Project) -> None:
    project.alembic("revision --autogenerate -m plans")
    assert "durable" not in project.migrations()[0]
    project.write("blocked/sqla_durable.py", "raise ImportError('sqla_durable is blocked')")
    blocked = [project.folder / "blocked"]
    project.configure("metadata", "app.base:Base")
    project.alembic("upgrade head", "downgrade base", "upgrade head", first=blocked)
    migrated = project.catalogue()
    project.start_anew()
    project.create_all()
    assert project.catalogue() == migrated


def test_migrations_written_as_sql_apply_in_psql(project: Project, request: pytest.FixtureRequest) -> None:
    option = request.config.getoption("--postgres")
    bin_dir = None if option is None else Path(option)
    project.models(USUAL)
    project.alembic("revision --autogenerate -m plans", "upgrade head")
    migrated = project.catalogue()
    (revision,) = project.sql("SELECT version_num FROM alembic_version")[0]

    project.psql(script(project.alembic(f"downgrade {revision}:base --sql")), bin_dir)
    assert project.catalogue() == set()
    project.start_anew()
    project.psql(script(project.alembic("upgrade head --sql")), bin_dir)
    assert project.catalogue() == migrated
    assert NOTHING_NEW in project.alembic("check")


@pytest.mark.parametrize("search_path", ["", "app,public", "public,app"])
def test_models_in_a_schema_of_their_own_do_not_churn(project: Project, search_path: str) -> None:
    project.start_anew("app", "other")
    project.sql("CREATE TABLE other.precious (id int)")
    if search_path:
        url = make_url(project.url).update_query_dict({"options": f"-csearch_path={search_path}"})
        project.url = url.render_as_string(hide_password=False)
    project.models(f'schema="app", {USUAL}')
    said = project.alembic(
        "revision --autogenerate -m plans",
        "upgrade head",
        "check",
        "revision --autogenerate -m again",
        "upgrade head",
        "downgrade base",
        "upgrade head",
    )
    assert NOTHING_NEW in said
    first, second = project.migrations()
    assert "precious" not in first
    assert is_empty(second)
    assert len(names(project.catalogue("app"))) == 9


def test_models_in_a_schema_are_the_same_by_migration_and_by_create_all(project: Project) -> None:
    project.start_anew("app")
    project.models('schema="app"')
    project.alembic("revision --autogenerate -m plans", "upgrade head")
    migrated = project.catalogue("app")
    project.start_anew("app")
    project.create_all()
    assert project.catalogue("app") == migrated


def test_the_comparison_sees_what_it_is_there_for(project: Project) -> None:
    project.create_all()
    project.sql(
        "ALTER TABLE plan ALTER status TYPE varchar(63)",
        "ALTER TABLE plan ALTER attempts SET DEFAULT 1",
        "ALTER TABLE plan ALTER failures SET DEFAULT '{}'",
        "ALTER TABLE plan ALTER fence DROP NOT NULL",
        "ALTER TABLE plan DROP CONSTRAINT ck_plan_status_values",
        "ALTER TABLE plan DROP CONSTRAINT ck_plan_lease",
        "DROP INDEX ix_plan_available_at",
        "ALTER TABLE plan_step DROP CONSTRAINT fk_plan_step_unsealed_plan_id",
    )
    detected = project.refused("check").split("FAILED: ")[1]
    assert sorted(re.findall(r"\('((?:add|modify|remove)_\w+)'", detected)) == [
        "add_constraint",
        "add_constraint",
        "add_fk",
        "add_index",
        "modify_default",
        "modify_default",
        "modify_nullable",
        "modify_type",
    ]
