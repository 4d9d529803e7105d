"""A project through its revisions, up and down and up again: with rows in the tables, and always as by create_all."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support_alembic import Project
from tests.support_history import RUNNING, UNDER_WAY, History, Shape, another_database, execute, literal, quoted

PLAIN = Shape()


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
LONG = Shape(plan="p" * 61 + "\u00e9", step="q" * 63, line="r" * 63, status="s" * 63, note="n" * 62 + "m", refers="f" * 63)


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
        " SELECT id, 'step ' || n, 'succeeded', '1', 'transaction', 1 FROM plan, generate_series(1, 3) n WHERE fence = 1",
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
    project.python(MONTHS)
    assert places(history) == {"plan_step_2026_03": 6}
    history.step(shape.models(held=True, running=UNDER_WAY, partition=True), months=MONTHS)
    receipts = project.sql("SELECT * FROM plan_step ORDER BY plan_id, step")

    project.alembic("downgrade r05", "downgrade r04")
    assert project.sql("SELECT * FROM plan_step ORDER BY plan_id, step") == receipts
    assert places(history) == {"plan_step": 6}
    project.alembic("downgrade r03", "downgrade r02")
    assert statuses(history) == {"running": 1, "done": 1, "held": 2, "pending": 5}
    told = project.refused("downgrade r01")
    assert "2 rows are in a status that this migration removes: plan.status IN ('held')" in told
    assert "UPDATE plan SET status = '...' WHERE status IN ('held')" in told
    assert history.at() == 2
