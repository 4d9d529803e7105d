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
