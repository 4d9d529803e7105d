"""The wheel as a user installs it: typed, complete, and checked strictly by both type checkers without a plugin."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONSUMER = """
from enum import StrEnum

from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import Lifecycle, ReceiptMixin, Run, RunMixin, Runs, StatusMachine


class Status(StrEnum):
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


statuses = StatusMachine(
    Status,
    initial=Status.READY,
    transitions={Status.READY: {Status.RUNNING}, Status.RUNNING: {Status.DONE, Status.FAILED, Status.READY}},
)


class Base(DeclarativeBase): ...


class Job(RunMixin, Base):
    __tablename__ = "job"
    __lifecycle__ = Lifecycle(
        statuses, ready=Status.READY, running=Status.RUNNING, done=Status.DONE, failed=Status.FAILED
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[Status] = statuses.column()


class JobStep(ReceiptMixin[Job], Base):
    __tablename__ = "job_step"


def body(session: Session, number: int) -> int:
    return number


def handler(run: Run[Job]) -> None:
    number: int = run.step("only", body, run.row.attempts)
    print(number)


Runs(sessionmaker(create_engine("postgresql+psycopg://")), Job, JobStep).execute(1, handler)
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel, which sees this environment's other packages."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder, ROOT]
    subprocess.run(build, check=True, capture_output=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    (folder / "consumer.py").write_text(CONSUMER)
    return folder


def test_the_wheel_holds_the_package_its_marker_its_template_and_the_demos_plan(environment: Path) -> None:
    (site,) = (environment / "venv").glob("lib/python*/site-packages")
    assert (site / "sqla_durable" / "py.typed").exists()
    assert (site / "sqla_durable" / "_alembic_template" / "env.py").exists()
    assert (site / "sqla_durable" / "demo" / "plan.json").exists()
    assert {path.name for path in site.iterdir() if path.is_dir()} - {"__pycache__"} == {
        "sqla_durable",
        next(site.glob("sqla_durable-*.dist-info")).name,
    }


def test_mypy_strict_accepts_a_user_of_the_wheel(environment: Path) -> None:
    python = environment / "venv" / "bin" / "python"
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--python-executable", python, "consumer.py"]
    done = subprocess.run(command, cwd=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "Success: no issues found in 1 source file\n")


def test_pyright_strict_accepts_a_user_of_the_wheel(environment: Path) -> None:
    python = environment / "venv" / "bin" / "python"
    (environment / "pyrightconfig.json").write_text('{"include": ["consumer.py"], "typeCheckingMode": "strict"}')
    command = [sys.executable, "-m", "pyright", "--pythonpath", python]
    done = subprocess.run(command, cwd=environment, capture_output=True, text=True, check=False)
    assert "0 errors" in done.stdout, done.stdout
