"""The command that checks a database: what it is given, what it writes, and its exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, MetaData, create_engine, text
from sqlalchemy.orm import sessionmaker

from sqla_durable import DatabaseUnavailable, Functions, check
from sqla_durable.checkup import CODES
from tests.support import Base, Plan
from tests.support_check import Job, JobStep
from tests.support_cli import FORMS, answered, call, importable, made, real, refused

REFERENCE = Path(__file__).parents[1] / "docs" / "reference" / "checking.md"
UNSAFE = ["--ignore", "fsync"]
"""The server of the tests is faster without it."""


@pytest.fixture(params=["Base", "MetaData", "Plan", "module", *FORMS])
def target(request: pytest.FixtureRequest, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each kind of thing that may be checked; those without an engine by the URL of the environment."""
    objects: dict[str, Any] = {"Base": Base, "MetaData": Base.metadata, "Plan": Plan}
    if request.param in FORMS:
        return importable(monkeypatch, plans=made(request.param, engine)) + ":plans"
    monkeypatch.setenv("DATABASE_URL", engine.url.render_as_string(hide_password=False))
    name = importable(monkeypatch, **objects)
    return name if request.param == "module" else f"{name}:{request.param}"


def test_a_clean_database_has_no_findings(target: str) -> None:
    assert answered("check", target, "--strict", *UNSAFE) == "No findings.\n"
    assert answered("check", target, "--json", *UNSAFE) == ""


@pytest.mark.unguarded
def test_an_error_is_exit_status_1(target: str, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE plan_step DROP COLUMN ids CASCADE"))
    done = call("check", target, "--ignore", "missing-constraint", *UNSAFE)
    assert done.exit_code == 1
    head, line = done.stdout.splitlines()
    assert head.split() == ["finding", "severity", "what", "meaning", "remedy"]
    assert re.split(r" {2,}", line)[:3] == ["missing-column", "error", "plan_step.ids"]
    assert line.endswith("ALTER TABLE plan_step ADD COLUMN ids JSONB")
    done = call("check", target, "--json", "--ignore", "missing-constraint", *UNSAFE)
    assert (done.exit_code, [json.loads(each)["code"] for each in done.stdout.splitlines()]) == (1, ["missing-column"])
    assert json.loads(done.stdout).keys() == {"severity", "code", "subject", "meaning", "remedy"}


def test_a_warning_is_exit_status_1_where_it_is_asked_for(target: str, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE plan RESET (fillfactor)"))
    assert call("check", target, *UNSAFE).exit_code == 0
    done = call("check", target, "--strict", *UNSAFE)
    assert done.exit_code == 1
    assert "storage-parameter  warning" in done.stdout
    assert answered("check", target, "--strict", *UNSAFE, "--ignore", "storage-parameter") == "No findings.\n"


def test_functions_may_be_checked(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = Functions(sessionmaker(engine), Job, JobStep)
    done = call("check", importable(monkeypatch, functions=functions) + ":functions", "--json")
    found = [json.loads(each) for each in done.stdout.splitlines()]
    assert [each["subject"] for each in found if each["code"] == "missing-table"] == ["job", "job_step"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["{}:Base", "--ignore", "nothing"], "'nothing' is no kind of finding; there are missing-table, "),
        (["{}:empty"], "has no table of a run, receipt or status"),
        (["{}:number"], "expected a declarative Base, a MetaData"),
        (["{}_of_another"], "there is no module"),
        (["{}:Base"], "has no engine; give --url, or set DATABASE_URL"),
        (["{}:Base", "--url", "sqlite://"], "--url names sqlite"),
        (["{}:plans", "--url", "postgresql://"], "which has an engine"),
    ],
)
def test_a_call_that_cannot_be_meant_is_exit_status_2(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, arguments: list[str], why: str
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    module = importable(monkeypatch, Base=Base, empty=MetaData(), number=7, plans=made("sync", engine))
    if "empty" in arguments[0]:
        arguments = [*arguments, "--url", engine.url.render_as_string(hide_password=False)]
    exit_code, line = refused("check", *(each.format(module) for each in arguments))
    assert exit_code == 2
    assert why in line


def test_a_database_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    exit_code, line = refused("check", importable(monkeypatch, Base=Base), "--url", "postgresql://localhost:1/none")
    assert exit_code == 1
    assert "cannot reach the database" in line


def test_it_is_a_command_of_its_own(engine: Engine, tmp_path: Path) -> None:
    url = engine.url.render_as_string(hide_password=False)
    done = real("check", "tests.support", *UNSAFE, cwd=tmp_path, DATABASE_URL=url)
    assert (done.returncode, done.stdout, done.stderr) == (0, "No findings.\n", "")


def test_the_reference_has_every_kind_of_finding_and_no_other() -> None:
    listed = re.findall(r"^\| `([\w-]+)` \| (error|warning|error, warning) \|", REFERENCE.read_text(), re.MULTILINE)
    assert [code for code, _ in listed] == list(CODES)


def test_a_check_of_a_database_that_cannot_be_reached_raises_an_error_of_ours() -> None:
    lost = create_engine("postgresql+psycopg://localhost:1/none")
    with pytest.raises(DatabaseUnavailable):
        check(lost, Base)
