"""A project through its revisions, up and down and up again: with rows in the tables, and always as by create_all."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy.exc import DBAPIError

from tests.support_alembic import NOTHING_NEW, Project
from tests.support_history import (
    RUNNING,
    UNDER_WAY,
    History,
    Shape,
    another_database,
    assert_same,
    execute,
    literal,
    quoted,
)

PLAIN = Shape()
MARCH = """
from datetime import date
from app.models import PlanStep
from sqla_durable import partition_sql
print("\\n".join(partition_sql(PlanStep, date(2026, 3, 1))))
"""
OWN = """

class Own(Base):
    __tablename__ = "own"
    id: Mapped[int] = mapped_column(primary_key=True)
    # more

"""
MARK = """

class Mark(Base):
    __tablename__ = "mark"
    __table_args__ = (sa.ForeignKeyConstraint(["plan_id", "step"], [PlanStep.plan_id, PlanStep.step]),)
    id: Mapped[int] = mapped_column(primary_key=True)
    plan_id: Mapped[UUID]
    step: Mapped[str]
"""
INDEXED = """
    __table_args__ = (
        sa.Index("ix_own", "effect", sa.text("lower(step)"), postgresql_include=["fence"]),
        sa.Index("uq_own", "plan_id", "fence", unique=True),
        sa.UniqueConstraint("plan_id", "step", "effect", name="own"),
    )
"""
TRIGGER = (
    "CREATE TRIGGER own BEFORE UPDATE ON plan_step FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()"
)
MOMENT = f"{int(datetime(2026, 3, 15, tzinfo=UTC).timestamp() * 1000):012x}"


@pytest.fixture
def fresh_url(database_url: str) -> Iterator[str]:
    """A database beside the test's own."""
    name = f"fresh_{uuid.uuid4().hex[:12]}"
    yield another_database(database_url, name)
    execute(database_url, f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture
def history(tmp_path: Path, empty_url: str, fresh_url: str, request: pytest.FixtureRequest) -> History:
    option = request.config.getoption("--postgres")
    project = Project.set_up(tmp_path, empty_url)
    shape = getattr(request, "param", PLAIN)
    return History(project, Project(tmp_path, fresh_url), shape, None if option is None else Path(option))


def key(number: str) -> str:
    """The key of a run that was made in March 2026, in SQL."""
    return f"CAST('{MOMENT}70008000' || lpad(CAST({number} AS text), 12, '0') AS uuid)"


def statuses(history: History) -> dict[str, int]:
    """How many runs are in each status."""
    return dict(map(tuple, history.project.sql("SELECT status, count(*) FROM plan GROUP BY 1")))


def places(history: History) -> dict[str, int]:
    """How many receipts are in each table."""
    return dict(
        map(tuple, history.project.sql("SELECT CAST(tableoid AS regclass), count(*) FROM plan_step GROUP BY 1"))
    )


def take(history: History) -> None:
    """The six revisions, after one with tables of the project's own."""
    shape, plan = history.shape, history.shape.name("plan")
    status, old, new = quoted(shape.status), literal(RUNNING), literal(UNDER_WAY)
    history.begin()
    history.step(shape.before())
    history.step(shape.models())
    history.step(shape.models(held=True))
    history.step(
        shape.models(held=True, running=UNDER_WAY),
        upgrade=f"UPDATE {plan} SET {status} = {new} WHERE {status} = {old}",
        downgrade=f"UPDATE {plan} SET {status} = {old} WHERE {status} = {new}",
    )
    history.step(shape.models(held=True, running=UNDER_WAY, guard=True))
    history.step(shape.models(held=True, running=UNDER_WAY, guard=True, partition=True))
    history.step(shape.models(held=True, running=UNDER_WAY, partition=True))


def test_six_revisions_up_and_down_and_up_again(history: History) -> None:
    take(history)
    history.down()
    history.up()
    history.by_script()


ODD = Shape(
    plan='Ordered 100% "Plan"',
    step="a Step: of :it",
    line="%(line)s",
    status='100% "Status" of :it',
    note="a :note's",
    schema='My "App" 100%',
    metadata='schema="My \\"App\\" 100%"',
)
LONG = Shape(
    plan="p" * 61 + "\u00e9", step="q" * 63, line="r" * 63, status="s" * 63, note="n" * 62 + "m", refers="f" * 63
)


@pytest.mark.slow
@pytest.mark.parametrize("history", [ODD, LONG], indirect=True, ids=["odd", "long"])
def test_tables_of_any_name_go_through_the_revisions(history: History) -> None:
    take(history)
    history.down()
    history.up()
    history.by_script()


def test_rows_survive_every_step_up_and_down(history: History) -> None:
    project, shape = history.project, history.shape
    history.begin()
    history.step(shape.before())
    project.sql(
        f"INSERT INTO plan (id, note) SELECT {key('n')}, 'kept ' || n FROM generate_series(1, 9) n",
        "INSERT INTO line (plan_id) SELECT id FROM plan",
    )
    history.step(shape.models())
    assert project.sql("SELECT count(*), status, fence FROM plan GROUP BY 2, 3") == [(9, "pending", 0)]
    project.sql(
        "UPDATE plan SET status = 'running', fence = 1, attempts = 1, lease_owner = 'w', lease_expires_at = now(),"
        f" started_at = now() WHERE id = {key('1')}",
        f"UPDATE plan SET status = 'done', fence = 1, attempts = 1, finished_at = now() WHERE id = {key('2')}",
        "INSERT INTO plan_step (plan_id, step, outcome, result, effect, fence)"
        " SELECT id, 'step ' || n, 'succeeded', '1', 'transaction', 1 FROM plan, generate_series(1, 3) n"
        " WHERE fence = 1",
    )
    history.step(shape.models(held=True))
    project.sql(f"UPDATE plan SET status = 'held' WHERE id IN ({key('3')}, {key('4')})")
    renamed = {
        "upgrade": f"UPDATE plan SET status = {literal(UNDER_WAY)} WHERE status = 'running'",
        "downgrade": f"UPDATE plan SET status = 'running' WHERE status = {literal(UNDER_WAY)}",
    }
    history.step(shape.models(held=True, running=UNDER_WAY), **renamed)
    assert statuses(history) == {UNDER_WAY: 1, "done": 1, "held": 2, "pending": 5}
    history.step(shape.models(held=True, running=UNDER_WAY, guard=True))
    history.step(shape.models(held=True, running=UNDER_WAY, guard=True, partition=True))
    assert places(history) == {"plan_step_default": 6}
    march = project.python(MARCH).splitlines()
    project.sql(*march)
    assert places(history) == {"plan_step_2026_03": 6}
    march = [each for each in march if "TRIGGER" not in each]
    history.step(shape.models(held=True, running=UNDER_WAY, partition=True), besides=march)
    receipts = project.sql("SELECT * FROM plan_step ORDER BY plan_id, step")

    project.alembic("downgrade r06", "downgrade r05")
    assert project.sql("SELECT * FROM plan_step ORDER BY plan_id, step") == receipts
    assert places(history) == {"plan_step": 6}
    project.alembic("downgrade r04", "downgrade r03")
    assert statuses(history) == {"running": 1, "done": 1, "held": 2, "pending": 5}
    told = project.refused("downgrade r02")
    assert "2 rows are in a status that this migration removes: plan.status IN ('held')" in told
    assert "UPDATE plan SET status = '...' WHERE status IN ('held')" in told
    assert history.at() == 3

    project.sql("UPDATE plan SET status = 'pending' WHERE status = 'held'")
    project.alembic("downgrade r02", "downgrade r01")
    assert project.sql("SELECT count(*) FROM plan JOIN line ON plan_id = plan.id WHERE note LIKE 'kept _'") == [(9,)]
    project.alembic("upgrade heads")
    assert statuses(history) == {"pending": 9}
    project.sql(*march)
    assert_same(project.dump(history.bin_dir), history.dumps[-1])
    project.alembic("downgrade base")
    assert_same(project.dump(history.bin_dir), history.dumps[0])


def test_the_tables_of_runs_are_on_a_branch_of_their_own(history: History) -> None:
    project, shape = history.project, history.shape
    shape = history.shape = replace(shape, above=OWN)
    history.begin()
    project.write("app/models.py", shape.before().partition("class Plan(")[0])
    project.alembic("revision --autogenerate --rev-id own1 -m own --branch-label own", "upgrade heads")
    history.dumps[0] = project.dump(history.bin_dir)
    history.branch = "runs"
    history.step(shape.models())
    history.step(shape.models(guard=True))
    more = shape.models(guard=True).replace("# more", "more: Mapped[str | None]")
    project.write("app/models.py", more)
    project.alembic("revision --autogenerate --rev-id own2 -m own --head own@head", "upgrade heads", "check")
    history.step(more.replace("__partition__ = None", "__partition__ = Monthly()"))
    heads = project.alembic("heads", "downgrade runs@base", "current")
    assert {"own2 (own) (head)", "r03 (runs) (head)"} <= set(heads.splitlines())
    assert "r0" not in heads.partition("$ alembic current")[2]
    assert project.sql("SELECT count(*) FROM information_schema.columns WHERE table_name = 'own'") == [(2,)]
    assert project.sql("SELECT count(*) FROM pg_class WHERE relname LIKE 'plan%'") == [(0,)]
    project.alembic("downgrade own@own1")
    assert_same(project.dump(history.bin_dir), history.dumps[0])
    assert NOTHING_NEW in project.alembic("upgrade heads", "check")
    assert_same(project.dump(history.bin_dir), history.dumps[-1])


def test_a_guard_holds_in_every_partition_also_in_those_that_come_later(history: History) -> None:
    project, shape = history.project, history.shape
    history.begin()
    history.step(shape.models(partition=True))
    project.sql(
        f"INSERT INTO plan (id, note, status, fence, finished_at) VALUES ({key('1')}, 'x', 'done', 1, now())",
        "INSERT INTO plan_step (plan_id, step, outcome, result, effect, fence)"
        " SELECT id, 'a', 'succeeded', '1', 'transaction', 1 FROM plan",
    )
    history.step(shape.models(partition=True, guard=True))
    march = project.python(MARCH).splitlines()
    for months in [], march:
        if months:
            project.sql(*months)
        (place,) = places(history)
        for table in place, "plan_step", "ONLY " + place:
            with pytest.raises(DBAPIError, match="it would be removed, and its run stays, done"):
                project.sql(f"DELETE FROM {table}")
            with pytest.raises(DBAPIError, match="it would be changed, and it is succeeded"):
                project.sql(f"UPDATE {table} SET result = '2'")
        assert NOTHING_NEW in project.alembic("check")
    assert project.sql("SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'durable%' AND tgenabled <> 'O'") == [(0,)]
    history.step(shape.models(partition=True), besides=[each for each in march if "TRIGGER" not in each])
    project.sql("UPDATE plan_step SET result = '2'")
    assert project.sql("SELECT count(*) FROM pg_trigger WHERE tgname LIKE 'durable%'") == [(0,)]


def test_a_status_of_a_guarded_table_is_renamed_with_its_rows_and_back(history: History) -> None:
    project, shape = history.project, history.shape
    history.begin()
    history.step(shape.models(guard=True))
    project.sql(
        "SET LOCAL sqla_durable.override = 'test'",
        "INSERT INTO plan (id, status, fence, attempts, lease_owner, lease_expires_at, started_at)"
        f" VALUES ({key('1')}, 'running', 1, 1, 'w', now(), now())",
        "INSERT INTO plan_step (plan_id, step, outcome, result, effect, fence)"
        " SELECT id, 'a', 'succeeded', '1', 'transaction', 1 FROM plan",
    )
    history.step(
        shape.models(guard=True, running=UNDER_WAY),
        upgrade=f"UPDATE plan SET status = {literal(UNDER_WAY)} WHERE status = 'running'",
        downgrade=f"UPDATE plan SET status = 'running' WHERE status = {literal(UNDER_WAY)}",
    )
    recorded = "SELECT count(*) FROM durable_override"
    before = project.sql(recorded)
    assert statuses(history) == {UNDER_WAY: 1}
    with pytest.raises(DBAPIError, match="its status would go"):
        project.sql("UPDATE plan SET status = 'pending', lease_expires_at = NULL")
    project.alembic("downgrade -1")
    assert statuses(history) == {"running": 1}
    with pytest.raises(DBAPIError, match="its status would go"):
        project.sql("UPDATE plan SET status = 'pending', lease_expires_at = NULL")
    assert project.sql(recorded) == before, "migrations need no override"


def test_a_model_that_is_no_run_any_more_loses_all_of_it_and_gets_it_back(history: History) -> None:
    project, shape = history.project, history.shape
    history.begin()
    history.step(shape.before())
    history.step(shape.models(held=True, guard=True, partition=True))
    project.sql(f"INSERT INTO plan (id, note) VALUES ({key('1')}, 'kept')")
    # It has no say in a parameter of a table that is not a run, and nobody suffers from it.
    history.step(shape.before(), besides=["ALTER TABLE plan SET (fillfactor = 80)"])
    assert project.sql("SELECT note FROM plan") == [("kept",)]
    project.alembic("downgrade -1")
    assert_same(project.dump(history.bin_dir), history.dumps[2])
    assert project.sql("SELECT note, status FROM plan") == [("kept", "pending")]
    with pytest.raises(DBAPIError, match="its status would go"):
        project.sql("UPDATE plan SET status = 'done', finished_at = now()")
    project.alembic("upgrade head")
    assert_same(project.dump(history.bin_dir), history.dumps[3])


@pytest.mark.parametrize("runs", [False, True], ids=["receipts", "runs and receipts"])
def test_what_a_table_has_of_its_own_stays_when_it_is_partitioned(history: History, *, runs: bool) -> None:
    project = history.project
    models = history.shape.models(guard=True) + MARK
    models = models.replace("    __partition__ = None\n", f"{INDEXED}    __partition__ = None\n")
    history.begin()
    history.step(models)
    project.sql(TRIGGER)
    history.dumps[1] = project.dump(history.bin_dir)
    project.sql(
        "SET LOCAL sqla_durable.override = 'test'",
        f"INSERT INTO plan (id, note) VALUES ({key('1')}, 'x')",
        "INSERT INTO plan_step (plan_id, step, outcome, result, effect, fence)"
        " SELECT id, 'a', 'succeeded', '1', 'transaction', 1 FROM plan",
        "INSERT INTO mark (plan_id, step) SELECT plan_id, step FROM plan_step",
    )
    models = models.replace("__partition__ = None", "__partition__ = Monthly()")
    if runs:
        models = models.replace("    __guard__ = True", "    __guard__ = True\n    __partition__ = Monthly()")
    history.step(models, besides=[TRIGGER])
    assert project.sql("SELECT count(*) FROM mark") == [(1,)]
    history.down(1)
    history.up()
    assert places(history) == {"plan_step_default": 1}


def test_a_table_whose_model_is_not_partitioned_any_more_is_left_with_a_warning(history: History) -> None:
    history.begin()
    history.step(history.shape.models(partition=True))
    history.project.write("app/models.py", history.shape.models())
    told = history.project.refused("check")
    assert "Table 'plan_step' is partitioned, and its model does not say so; nothing is done about that" in told
