"""What the pages on the command line show is what the commands write, and every option is on its page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from sqla_durable.cli import make_app
from tests.test_docs import DOCS, EXAMPLES, ROOT, blocks

HOWTO = DOCS / "howto" / "command-line.md"
REFERENCE = DOCS / "reference" / "command-line.md"


@pytest.fixture
def shell(empty_url: str, tmp_path: Path) -> dict[str, str]:
    """The environment of somebody who has the command installed, and has done what the page says."""
    command = tmp_path / "sqla-durable"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m sqla_durable.cli "$@"\n')
    command.chmod(0o755)
    environment = {
        **os.environ,
        "DATABASE_URL": empty_url,
        "PYTHONPATH": str(ROOT),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    }
    prepare = "".join(block.text for block in blocks(HOWTO, "python")[:2])
    subprocess.run([sys.executable, "-c", prepare], cwd=EXAMPLES, env=environment, check=True, capture_output=True)
    return environment


def lasting(shown: str) -> list[str]:
    """The lines of an output without what is different each time."""
    shown = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}\+\d\d:\d\d", "TIME", shown)
    shown = re.sub(r"(?<![\w.])\+?\d+(\.\d+)?[smh]( \d+[smh])?(?= ago|\s|$)", "DURATION", shown, flags=re.MULTILINE)
    shown = re.sub(r"[\w.-]+:\d+:[0-9a-f]{8}", "HOLDER", shown)
    shown = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID", shown)
    return [re.sub(r" {2,}", "  ", line) for line in shown.splitlines()]


def test_the_output_of_each_command_is_what_the_page_shows(shell: dict[str, str]) -> None:
    shown = "\n".join(block.text for block in blocks(HOWTO, "console"))
    commands = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", shown, re.MULTILINE)
    ours = [(command, output) for command, output in commands if command.startswith("sqla-durable ")]
    assert len(ours) == 12
    for command, output in ours:
        done = subprocess.run(
            command, shell=True, cwd=EXAMPLES, env=shell, capture_output=True, text=True, timeout=60, check=False
        )
        assert lasting(done.stdout) == lasting(output.rstrip("\n")), command
        assert done.stderr == ""


def test_the_difference_between_two_outputs_is_seen() -> None:
    assert lasting("4  approved  0  8s\n") == lasting("4   approved  0  2m 9s")
    assert lasting("4  approved  0  8s\n") != lasting("4  approved  1  8s")


def sections() -> dict[str, str]:
    """The text on each command."""
    found = re.split(r"^## `sqla-durable (\w+).*$", REFERENCE.read_text(), flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(make_app())
    return dict(group.commands)


def test_the_reference_has_every_command() -> None:
    assert set(sections()) == set(commands())


@pytest.mark.parametrize("name", commands())
def test_the_reference_has_every_option_and_no_other(name: str) -> None:
    parameters = commands()[name].params
    options = {opt for each in parameters for opt in (*each.opts, *each.secondary_opts) if opt.startswith("--")}
    rows = re.findall(r"^\| (`--.*?) \|", sections()[name], re.MULTILINE)
    assert {opt for row in rows for opt in re.findall(r"--[\w-]+", row)} == options - {"--help"}


def written(argument: Any) -> str:
    """An argument as the usage has it."""
    name = argument.metavar if argument.required else f"[{argument.metavar}]"
    return f"{name}..." if argument.nargs == -1 else str(name)


@pytest.mark.parametrize("name", commands())
def test_a_title_in_the_reference_has_the_arguments(name: str) -> None:
    arguments = [written(each) for each in commands()[name].params if not each.opts[0].startswith("--")]
    assert f"\n## `{' '.join(['sqla-durable', name, *arguments])}`\n" in REFERENCE.read_text()


@pytest.mark.parametrize("name", commands())
def test_a_default_in_the_reference_is_that_of_the_command(name: str) -> None:
    for each in commands()[name].params:
        row = next((row for row in sections()[name].splitlines() if row.startswith(f"| `{each.opts[0]} ")), "")
        if isinstance(each.default, int) and not isinstance(each.default, bool):
            assert f"; {each.default} |" in row
