"""What autogenerate makes of keys, priorities and groups: plain SQLAlchemy, once, the same as ``create_all``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support_alembic import NOTHING_NEW, USUAL, Project

BY_CONSTRAINT_NAME = """naming_convention={
    "ix": "index_%(table_name)s_%(constraint_name)s",
    "ck": "check_%(table_name)s_%(constraint_name)s",
}"""
NEW = {
    "": {"ix_plan_idempotency_key", "ix_plan_one_in_flight", "ix_plan_priority", "ck_plan_priority"},
    USUAL: {"ix_plan_idempotency_key", "ix_plan_one_in_flight", "ix_plan_priority", "ck_plan_priority"},
    BY_CONSTRAINT_NAME: {
        "index_plan_idempotency_key",
        "index_plan_one_in_flight",
        "index_plan_priority",
        "check_plan_priority",
    },
}


@pytest.fixture
def project(tmp_path: Path, empty_url: str) -> Project:
    project = Project.set_up(tmp_path, empty_url)
    project.models()
    project.configure("metadata", "app.models:Base")
    return project


def add_mixins(project: Project) -> None:
    models = "app/models.py"
    project.change(models, "class Plan(RunMixin, Base):", "class Plan(KeyMixin, PriorityMixin, RunMixin, Base):")
    project.change(models, "import Lifecycle, ", "import KeyMixin, Lifecycle, PriorityMixin, ")
    project.change(
        models, "        lapsed=PlanStatus.READY,\n", '        lapsed=PlanStatus.READY, one_in_flight=("note",),\n'
    )
    project.change(
        models,
        "    status: Mapped[PlanStatus] = statuses.column()\n",
        "    status: Mapped[PlanStatus] = statuses.column()\n"
        '    tenant: Mapped[str | None]\n    __key_scope__ = ("tenant",)\n',
    )


def names(catalogue: set[tuple[str, ...]]) -> set[str]:
    return {name for kind, _, name, _ in catalogue if kind in {"constraint", "index"}}


@pytest.mark.parametrize("convention", NEW, ids=["none", "usual", "by-constraint-name"])
def test_an_existing_run_class_gets_them_by_a_migration_there_and_back(project: Project, convention: str) -> None:
    project.models(convention)
    project.alembic("revision --autogenerate -m plans", "upgrade head")
    before = project.catalogue()
    add_mixins(project)
    said = project.alembic("revision --autogenerate -m keys", "upgrade head", "check")
    assert NOTHING_NEW in said
    migrated = project.catalogue()
    assert NEW[convention] <= names(migrated)
    assert "durable" not in project.migrations()[1]
    (definition,) = [each for kind, _, name, each in migrated if kind == "index" and name.endswith("idempotency_key")]
    assert "(tenant, idempotency_key) NULLS NOT DISTINCT WHERE (idempotency_key IS NOT NULL)" in definition
    project.alembic("downgrade -1")
    assert project.catalogue() == before
    project.alembic("upgrade head")
    assert project.catalogue() == migrated
    project.start_anew()
    project.create_all()
    assert project.catalogue() == migrated


def test_names_longer_than_postgresql_takes_are_shortened_alike(project: Project) -> None:
    project.models(table="plan_" + "x" * 45)
    add_mixins(project)
    assert NOTHING_NEW in project.alembic("revision --autogenerate -m plans", "upgrade head", "check")
    migrated = project.catalogue()
    project.start_anew()
    project.create_all()
    assert project.catalogue() == migrated
