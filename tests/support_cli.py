"""The command line, called in this process or as a real one, on targets that a test makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker
from typer.testing import CliRunner

from sqla_durable import Runs
from sqla_durable.asyncio import AsyncRuns
from sqla_durable.cli import make_app
from tests.support import Plan, PlanStep

ROOT = Path(__file__).parents[1]
FORMS = ["sync", "asyncio"]


def call(*arguments: object) -> Any:
    """Run a command in this process; anything that it does not report itself is raised."""
    environment = {"NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "300"}
    return CliRunner().invoke(make_app(), [str(each) for each in arguments], env=environment, catch_exceptions=False)


def answered(*arguments: object) -> str:
    """What a command that went well wrote."""
    done = call(*arguments)
    assert (done.exit_code, done.stderr) == (0, "")
    return str(done.stdout)


def lines(*arguments: object) -> list[Any]:
    """The JSON of each line that a command that went well wrote."""
    command, *others = arguments
    return [json.loads(line) for line in answered(command, "--json", *others).splitlines()]


def refused(*arguments: object) -> tuple[int, str]:
    """The exit status of a command that wrote nothing, and the one line that says why."""
    done = call(*arguments)
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"sqla-durable {arguments[0]}: ")
    return done.exit_code, line


def real(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a process of its own, in a folder that need not be on its path."""
    return subprocess.run(
        [sys.executable, "-c", "from sqla_durable.cli import main; main()", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def importable(monkeypatch: pytest.MonkeyPatch, **objects: object) -> str:
    """The name of a module that has these objects."""
    module = ModuleType("app_of_the_test")
    vars(module).update(objects)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


def made(form: str, engine: Engine, entity: Any = Plan, receipt: Any = PlanStep) -> Any:
    """A :class:`.Runs` or an :class:`.AsyncRuns`."""
    if form == "sync":
        return Runs(sessionmaker(engine), entity, receipt, owner="me")
    return AsyncRuns(async_sessionmaker(create_async_engine(engine.url)), entity, receipt, owner="me")
