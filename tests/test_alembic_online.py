"""Migrations of a table that is in use: what autogenerate writes with ``-x online``."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import DeclarativeBase
from sqlalchemy.schema import CreateColumn

from sqla_durable import (
    AttemptsMixin,
    DeadlineMixin,
    ExpiryMixin,
    FunctionMixin,
    KeyMixin,
    PriorityMixin,
    ReceiptMixin,
    SignalMixin,
    WaitMixin,
)
from sqla_durable.alembic.rewriting import adding_rewrites
from sqla_durable.plain_sql import plain_dialect
from tests.support_alembic import NOTHING_NEW, USUAL, Project, script
from tests.test_alembic_changes import (
    ADDED,
    GUARDED,
    HELD,
    LET_GO,
    ONE_IN_FLIGHT,
    REACHED,
    RENAMED,
    change_models,
    fill_in,
    is_refused,
)
from tests.test_alembic_existing import becomes_durable, exists

ONLINE = "-x online revision --autogenerate -m next"
LOCKED = '    op.execute("LOCK TABLE plan IN ACCESS EXCLUSIVE MODE")'
STORAGE = "SELECT pg_relation_filenode('plan')"


@pytest.fixture
def project(tmp_path: Path, empty_url: str) -> Project:
    project = Project.set_up(tmp_path, empty_url)
    project.models()
    project.configure("metadata", "app.models:Base")
    return project


def create(project: Project) -> set[tuple[str, ...]]:
    """The tables as a migration makes them that nobody has to wait for."""
    project.alembic("revision --autogenerate -m plans", "upgrade head")
    return project.catalogue()


def assert_there_and_back(project: Project, before: set[tuple[str, ...]], revisions: int = 2) -> None:
    """What was migrated can be undone and done again, from each point on the way, and is what ``create_all`` makes."""
    after = project.catalogue()
    project.alembic(f"downgrade -{revisions}")
    assert project.catalogue() == before
    up_and_down = [f"upgrade +{each}" if each > 0 else f"downgrade {each}" for each in (1, -1, 2, -1, 1, -1, -1, 2)]
    assert NOTHING_NEW in project.alembic(*(up_and_down if revisions == 2 else ["upgrade head"]), "check")
    assert project.catalogue() == after
    project.start_anew()
    project.create_all()
    assert project.catalogue() == after


@pytest.mark.parametrize("convention", ["", USUAL], ids=["none", "usual"])
def test_a_table_full_of_rows_becomes_a_run_and_back_and_is_not_rewritten(project: Project, convention: str) -> None:
    exists(project, convention)
    before = project.catalogue()
    project.sql("INSERT INTO plan (id, note) SELECT id, 'kept' FROM generate_series(1, 1000) id")
    stored = project.sql(STORAGE)
    becomes_durable(project, convention)
    assert NOTHING_NEW in project.alembic(ONLINE, "upgrade head", "check")
    _, first, second = project.migrations()
    assert "sqla_durable" not in first + second
    first, second = first.partition("def downgrade")[0], second.partition("def downgrade")[0]
    assert re.findall(r"^    op\..*$", first, re.MULTILINE)[0] == LOCKED
    assert first.count("op.create_check_constraint") == first.count("postgresql_not_valid=True") == 2
    assert second.count("VALIDATE CONSTRAINT") == 2
    assert "create_index" not in first
    assert second.count("op.create_index") * 2 == second.count("postgresql_concurrently=True") == 4
    assert project.sql("SELECT DISTINCT note, status, fence, attempts FROM plan") == [("kept", "pending", 0, 0)]
    assert project.sql(STORAGE) == stored
    assert_there_and_back(project, before)


def test_a_status_that_is_added_is_validated_without_a_lock(project: Project) -> None:
    before = create(project)
    change_models(project, ADDED, REACHED)
    assert NOTHING_NEW in project.alembic(ONLINE, "upgrade head", "check")
    _, first, second = project.migrations()
    assert "postgresql_not_valid=True" in first
    assert "DO $" not in first.partition("def downgrade")[0] + second
    assert "VALIDATE" in second
    assert "sqla_durable" not in first + second
    assert_there_and_back(project, before)


def test_a_status_that_is_removed_is_refused_by_the_second_migration_which_can_be_repeated(project: Project) -> None:
    change_models(project, *HELD)
    before = create(project)
    project.sql("INSERT INTO plan (status) VALUES ('it''s held'), ('pending')")
    change_models(project, *LET_GO)
    told = project.refused(ONLINE, "upgrade head")
    assert "1 rows are in a status that this migration removes" in told
    assert project.alembic("current").count("(head)") == 0
    project.sql("UPDATE plan SET status = 'pending'")
    assert NOTHING_NEW in project.alembic("upgrade head", "check")
    project.sql("DELETE FROM plan")
    assert_there_and_back(project, before)


@pytest.mark.parametrize("guarded", [False, True])
def test_a_status_is_renamed_with_one_line_in_the_second_migration(project: Project, guarded: bool) -> None:
    change_models(project, *([GUARDED] if guarded else []))
    before = create(project)
    running = (
        "INSERT INTO plan (status, fence, attempts, lease_owner, lease_expires_at) VALUES ('running', 1, 1, 'w', now())"
    )
    project.sql("SET LOCAL sqla_durable.override = 'as a claim'", running)
    change_models(project, RENAMED)
    project.alembic(ONLINE)
    fill_in(project, "UPDATE plan SET status = 'under way' WHERE status = 'running'")
    assert NOTHING_NEW in project.alembic("upgrade head", "check")
    assert project.sql("SELECT status, lease_owner FROM plan") == [("under way", "w")]
    after = project.catalogue()
    told = project.refused("downgrade -2")
    assert "1 rows are in a status that this migration removes: plan.status IN ('under way')" in told
    project.sql("DELETE FROM plan")
    project.alembic("downgrade -1")
    assert project.catalogue() == before
    project.alembic("upgrade head")
    assert project.catalogue() == after
    assert is_refused(project) is guarded


def test_an_index_that_changes_is_there_until_the_new_one_is(project: Project) -> None:
    change_models(project, ONE_IN_FLIGHT)
    before = create(project)
    reached = ("{PlanStatus.RUNNING},", "{PlanStatus.RUNNING},\n        PlanStatus.LOST: {PlanStatus.READY},")
    change_models(project, ADDED, REACHED, reached)
    project.alembic(ONLINE, "upgrade +1")
    project.sql("INSERT INTO plan (status, note) VALUES ('lost', 'n'), ('lost', 'n')")
    told = project.refused("upgrade head")
    assert "could not create unique index" in told
    assert {"ix_plan_one_in_flight", "ix_plan_one_in_flight_new"} <= {name for _, _, name, _ in project.catalogue()}
    project.sql("DELETE FROM plan WHERE id = 2")
    assert NOTHING_NEW in project.alembic("upgrade head", "check")
    assert project.sql("SELECT count(*) FROM pg_index WHERE NOT indisvalid") == [(0,)]
    project.sql("DELETE FROM plan")
    assert_there_and_back(project, before)


def test_rows_that_a_check_refuses_are_put_right_and_the_second_migration_repeated(project: Project) -> None:
    exists(project, status="status: Mapped[str] = mapped_column(sa.String(20))")
    project.sql("INSERT INTO plan (id, status) VALUES (1, 'running'), (2, 'done')")
    becomes_durable(project)
    told = project.refused(ONLINE, "upgrade head")
    assert 'check constraint "ck_plan_lease" of relation "plan" is violated by some row' in told
    project.sql("UPDATE plan SET status = 'it''s ready' WHERE status = 'running'")
    assert NOTHING_NEW in project.alembic("upgrade head", "check")


def test_a_column_that_no_longer_takes_null_is_looked_through_without_a_lock(project: Project) -> None:
    exists(project, status="status: Mapped[str | None] = mapped_column(sa.String(20))")
    before = project.catalogue()
    project.sql("INSERT INTO plan (id, status) VALUES (1, 'pending'), (2, NULL)")
    becomes_durable(project)
    told = project.refused(ONLINE, "upgrade head")
    assert 'check constraint "plan_status_not_null" of relation "plan" is violated by some row' in told
    project.sql("UPDATE plan SET status = 'pending' WHERE status IS NULL")
    assert NOTHING_NEW in project.alembic("upgrade head", "check")
    assert_there_and_back(project, before, revisions=2)


def test_a_mixin_that_is_taken_away_comes_back_with_the_downgrade(project: Project) -> None:
    mixed_in = [("(RunMixin, Base)", "(KeyMixin, RunMixin, Base)"), ("import Lifecycle", "import KeyMixin, Lifecycle")]
    change_models(project, *mixed_in)
    before = create(project)
    change_models(project, *((new, old) for old, new in mixed_in))
    assert NOTHING_NEW in project.alembic(ONLINE, "upgrade head", "check")
    assert_there_and_back(project, before, revisions=len(project.migrations()) - 1)


def test_a_column_alone_and_an_index_alone_are_one_migration_each(project: Project) -> None:
    before = create(project)
    change_models(project, ("note: Mapped[str | None]", "note: Mapped[str | None]\n    more: Mapped[str | None]"))
    project.alembic(ONLINE, "upgrade head")
    change_models(project, ("more: Mapped[str | None]", "more: Mapped[str | None] = mapped_column(index=True)"))
    assert NOTHING_NEW in project.alembic(ONLINE, "upgrade head", "check")
    assert len(project.migrations()) == 3
    assert project.migrations()[-1].count("op.create_index") == 1
    assert_there_and_back(project, before)


def test_an_existing_table_of_steps_becomes_one_of_receipts_without_being_rewritten(project: Project) -> None:
    models = (project.folder / "app/models.py").read_text()
    steps = """
        class PlanStep(Base):
            __tablename__ = "plan_step"
            plan_id: Mapped[int] = mapped_column(primary_key=True)
            step: Mapped[str] = mapped_column(sa.String(200), primary_key=True)
            effect: Mapped[str] = mapped_column(sa.String(20))
            fence: Mapped[int] = mapped_column(sa.BigInteger)
        """
    project.write("app/models.py", models.partition("class PlanStep")[0] + dedent(steps))
    before = create(project)
    project.sql("INSERT INTO plan DEFAULT VALUES", "INSERT INTO plan_step VALUES (1, 'a', 'transactional', 1)")
    stored = project.sql("SELECT pg_relation_filenode('plan_step')")
    project.write("app/models.py", models)
    project.alembic(ONLINE, "upgrade +1")
    assert project.sql("SELECT count(*) FROM pg_constraint WHERE contype = 'f' AND NOT convalidated") == [(2,)]
    project.sql("UPDATE plan_step SET outcome = 'succeeded', result = '1'")
    assert NOTHING_NEW in project.alembic("upgrade head", "check")
    assert project.sql("SELECT pg_relation_filenode('plan_step')") == stored
    assert project.sql("SELECT recorded_at <= now() FROM plan_step") == [(True,)]
    project.sql("DELETE FROM plan_step")
    assert_there_and_back(project, before)


def test_a_change_that_rewrites_the_table_all_the_same_is_named(project: Project) -> None:
    create(project)
    change_models(
        project,
        ("note: Mapped[str | None]", "note: Mapped[int | None]\n    token: Mapped[str] = mapped_column(sa.Uuid,"),
        ("sa.Uuid,", "sa.Uuid, server_default=sa.text('gen_random_uuid()'))"),
    )
    told = project.alembic(ONLINE)
    assert "Table plan stays locked for long: adding the column 'token' rewrites it" in told
    assert "Table plan stays locked for long: the new type of the column 'note' rewrites it" in told


def test_tables_in_schemas_and_names_of_all_kinds(project: Project) -> None:
    project.models('schema="My \\"App\\""', table="100% plan: of :x")
    project.sql('CREATE SCHEMA "My ""App"""')
    change_models(project, ONE_IN_FLIGHT)
    project.alembic("revision --autogenerate -m plans", "upgrade head")
    before = project.catalogue('"My ""App"""')
    change_models(project, ADDED, REACHED, RENAMED)
    assert NOTHING_NEW in project.alembic(ONLINE, "upgrade head", "check", "downgrade -2")
    assert project.catalogue('"My ""App"""') == before
    assert NOTHING_NEW in project.alembic("upgrade head", "check")


def test_the_sql_can_be_applied_by_somebody_else(project: Project, pytestconfig: pytest.Config) -> None:
    bin_dir = pytestconfig.getoption("--postgres")
    exists(project)
    before = project.catalogue()
    (old,) = project.sql("SELECT version_num FROM alembic_version")[0]
    becomes_durable(project)
    project.alembic(ONLINE)
    project.psql(script(project.alembic(f"upgrade {old}:head --sql")), bin_dir)
    assert NOTHING_NEW in project.alembic("check")
    (new,) = project.sql("SELECT version_num FROM alembic_version")[0]
    project.psql(script(project.alembic(f"downgrade {new}:{old} --sql")), bin_dir)
    assert project.catalogue() == before


def test_the_ini_file_can_ask_for_it(project: Project) -> None:
    project.configure("online", "true")
    create(project)
    assert len(project.migrations()) == 1, "tables that are new are created as ever"
    change_models(project, ADDED, REACHED)
    assert "New upgrade operations detected" in project.refused("check")
    project.alembic("revision --autogenerate -m next", "revision -m empty --head heads")
    assert len(project.migrations()) == 4


def test_the_migrations_run_where_sqla_durable_is_gone_and_only_writing_others_is_refused(project: Project) -> None:
    exists(project)
    becomes_durable(project)
    project.alembic(ONLINE)
    project.write("blocked/sqla_durable.py", "raise ImportError('sqla_durable is blocked')")
    project.configure("metadata", "app.base:Base")
    project.configure("online", "true")
    project.alembic("upgrade head", "downgrade -2", "upgrade head", first=[project.folder / "blocked"])
    told = project.refused("revision --autogenerate -m more", PYTHONPATH=f"{project.folder}/blocked:{project.folder}")
    assert "Migrations of tables in use are written by sqla_durable, which is not installed." in told


def test_every_column_of_the_mixins_is_added_without_rewriting_but_those_that_are_known(empty_url: str) -> None:
    class Base(DeclarativeBase):
        pass

    class Everything(FunctionMixin, Base):  # with all other mixins but one
        __tablename__ = "everything"

    assert issubclass(Everything, KeyMixin | PriorityMixin | DeadlineMixin | AttemptsMixin | WaitMixin)
    assert [name for name in vars(ExpiryMixin) if not name.startswith("_")] == ["expires_at"]

    class Receipt(ReceiptMixin[Everything], Base):
        __tablename__ = "receipt"

    class Signal(SignalMixin[Everything], Base):
        __tablename__ = "signal"

    engine = create_engine(empty_url)
    rewritten: set[str] = set()
    for table in Everything.__table__, Receipt.__table__, Signal.__table__:
        for column in table.columns:
            if _is_rewritten(engine, str(CreateColumn(column).compile(dialect=plain_dialect()))):
                rewritten.add(f"{table.name}.{column.name}")
            with engine.connect() as connection:
                assert adding_rewrites(connection, column) == (f"{table.name}.{column.name}" in rewritten)
    engine.dispose()
    assert rewritten == {"receipt.recorded_at", "signal.id", "signal.created_at"}


def _is_rewritten(engine: Engine, column: str) -> bool:
    with engine.connect() as connection:
        connection.execute(text("CREATE TABLE filled (filler int)"))
        connection.execute(text("INSERT INTO filled SELECT generate_series(1, 10)"))
        before = connection.scalar(text("SELECT pg_relation_filenode('filled')"))
        connection.execute(text(f"ALTER TABLE filled ADD COLUMN {column.removesuffix(' NOT NULL')}"))
        after = connection.scalar(text("SELECT pg_relation_filenode('filled')"))
        connection.rollback()
    return bool(before != after)
