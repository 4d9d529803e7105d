"""``sqla-durable worker``: runs what it is given until that has drained, and logs on standard error."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

import sqla_durable.asyncio
from sqla_durable import Runs
from tests.support_cli import ROOT, call, importable, made, real, refused

SOURCE = '''
import asyncio
import logging
import signal
import threading

from sqla_durable import DatabaseUnavailable

log = logging.getLogger("app")


class Worker:
    """Says that it runs, and drains when it is told to."""

    def run(self):
        told = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: told.set())
        log.debug("details")
        log.info("running")
        print("ready", flush=True)
        told.wait(30)
        log.info("drained")
        return 7


class AsyncWorker:
    async def run(self):
        told = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
        log.debug("details")
        log.info("running")
        print("ready", flush=True)
        async with asyncio.timeout(30):
            await told.wait()
        log.info("drained")


class Broken:
    def run(self):
        raise DatabaseUnavailable("the database\\nis away")


worker, async_worker, broken = Worker(), AsyncWorker(), Broken()


def make():
    log.info("made")
    return worker
'''


def work(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run a worker, tell it to stop, and return its exit status and its log."""
    (folder / "app.py").write_text(SOURCE)
    command = [sys.executable, "-m", "sqla_durable.cli", "worker", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=60)
        finally:
            process.kill()
    return process.returncode, log


@pytest.mark.parametrize("target", ["app:worker", "app:async_worker", "app:make"])
def test_a_worker_runs_until_it_has_drained(tmp_path: Path, target: str) -> None:
    status, log = work(tmp_path, target)
    assert status == 0
    said = [re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (\w+ app: .*)", line) for line in log.splitlines()]
    expected = ["INFO app: running", "INFO app: drained"]
    assert [line and line[1] for line in said] == (["INFO app: made"] if target == "app:make" else []) + expected


def test_the_level_of_the_log_is_an_option(tmp_path: Path) -> None:
    _, log = work(tmp_path, "app:worker", "--log-level", "debug")
    assert "DEBUG app: details" in log
    _, log = work(tmp_path, "app:worker", "--log-level", "WARNING")
    assert log == ""


def test_a_module_that_configures_the_log_has_the_last_word(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import logging\nlogging.basicConfig(format='own %(message)s', force=True)\nfrom app import worker"
    )
    _, log = work(tmp_path, "own:worker")
    assert log == "own running\nown drained\n"


def test_a_level_that_there_is_not_is_refused() -> None:
    done = call("worker", "app:worker", "--log-level", "LOUD")
    assert done.exit_code == 2
    assert "--log-level" in done.stderr


def test_an_error_of_ours_that_ends_it_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(SOURCE)
    done = real("worker", "app:broken", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "sqla-durable worker: the database is away\n")


@pytest.mark.parametrize("given", [Runs, object(), "text", lambda: 7])
def test_what_is_no_worker_is_refused(monkeypatch: pytest.MonkeyPatch, given: object) -> None:
    exit_code, line = refused("worker", f"{importable(monkeypatch, given=given)}:given")
    assert exit_code == 2
    assert line.endswith(
        "; expected a Worker, an AsyncWorker, what one is made with, or a callable that returns one of these."
    )


class Declared:
    def __init__(self, *works: Any) -> None:
        self._works = works

    def works(self) -> Any:
        return self._works


def test_what_a_worker_is_made_with_is_given_to_the_worker_that_can_carry_it_out(
    monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    work = made("sync", engine).handled_by(print)
    async_work = made("asyncio", engine).handled_by(lambda run: run.renew())
    ran: list[tuple[str, Any]] = []

    def run(worker: Any) -> None:
        ran.append((type(worker).__name__, worker._works))

    monkeypatch.setattr(sqla_durable.Worker, "run", run)
    monkeypatch.setattr(sqla_durable.asyncio.AsyncWorker, "run", run)
    for given in (work, Declared(work), lambda: Declared(work), async_work, Declared(work, async_work)):
        assert call("worker", f"{importable(monkeypatch, given=given)}:given").exit_code == 0
    alone = ("Worker", [work])
    assert ran == [alone, alone, alone, ("AsyncWorker", [async_work]), ("AsyncWorker", [work, async_work])]


def test_works_that_no_worker_carries_out_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    exit_code, line = refused("worker", f"{importable(monkeypatch, given=Declared('text'))}:given")
    assert exit_code == 1
    assert "'text' is not what Worker carries out" in line


def test_a_callable_that_returns_nothing_is_told_from_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importable(monkeypatch, main=lambda: None)
    exit_code, line = refused("worker", f"{module}:main")
    assert exit_code == 2
    assert f"calling {module}:main returned None. If that does all of the work itself, start it with Python" in line


@pytest.mark.parametrize(
    ("form", "kind"), [("sync", "sqla_durable.Worker"), ("asyncio", "sqla_durable.asyncio.AsyncWorker")]
)
def test_a_worker_without_its_tables_says_what_to_do_in_one_line(
    tmp_path: Path, empty_url: str, form: str, kind: str
) -> None:
    (tmp_path / "app.py").write_text(
        "import sqla_durable.asyncio\n"
        "from sqlalchemy import create_engine\n"
        "from tests.support_cli import made\n"
        f"runs = made({form!r}, create_engine({empty_url!r}))\n"
        f"worker = {kind}(runs.handled_by(print))\n"
    )
    done = real("worker", "app:worker", cwd=tmp_path)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith('sqla-durable worker: relation "plan" does not exist; create the tables first')
    assert "Traceback" not in done.stderr
