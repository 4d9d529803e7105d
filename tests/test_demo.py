"""The demo as it is run: processes really killed, and every effect counted; and the counting itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from sqlalchemy import create_engine, make_url, text

import sqla_durable
from sqla_durable.demo.exc import DemoError
from sqla_durable.demo.kills import instants
from sqla_durable.demo.plan import Label, Payment, StockMove, read_plan

pytestmark = pytest.mark.slow

PACKAGES = Path(sqla_durable.__file__).parents[1]
PATIENCE = 60.0
MOVE = {"kind": "stock_move", "article": "tea", "source": "Hamburg", "target": "Berlin", "quantity": 3}
PAYMENT = {"kind": "payment", "payer": "shop", "payee": "haulier", "amount": "12.50"}
LABEL = {"kind": "label", "parcel": "parcel 1", "address": "Berlin"}
OPENING = {"stock": {"tea": {"Hamburg": 5}}, "balances": {"shop": "100.00"}}


class Demo:
    """A running ``sqla-durable demo`` and its output; killed at the latest when the ``with`` block ends."""

    def __init__(self, *arguments: str, url: str | None, **environment: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if name != "DATABASE_URL"}
        given = {} if url is None else {"DATABASE_URL": url}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "sqla_durable.cli", "demo", *arguments],
            env={**inherited, **given, "PYTHONPATH": str(PACKAGES), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert self.process.stdout is not None
        self._lines: Iterator[str] = self.process.stdout
        self.output = ""

    def until(self, pattern: str) -> re.Match[str]:
        """Read on until a line has the pattern."""

        for line in self._lines:
            self.output += line
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"no {pattern!r} in:\n{self.output}")

    def end(self) -> int:
        """Read to the end; return the exit code."""
        for line in self._lines:
            self.output += line
        return self.process.wait()


@contextmanager
def demo(*arguments: str, url: str | None, **environment: str) -> Iterator[Demo]:
    running = Demo(*arguments, url=url, **environment)
    watchdog = threading.Timer(PATIENCE, running.process.kill)
    watchdog.start()
    try:
        yield running
    finally:
        watchdog.cancel()
        running.process.kill()
        running.process.communicate()


def written(folder: Path, *actions: object, **more: object) -> str:
    """The name of a plan file."""
    file = folder / "my-plan.json"
    file.write_text(json.dumps({**OPENING, "actions": actions, **more}))
    return str(file)


def alive(pid: str) -> bool:
    return Path(f"/proc/{pid}").exists()


def databases(server_url: str) -> list[str]:
    engine = create_engine(make_url(server_url).set(drivername="postgresql+psycopg"))
    with engine.connect() as connection:
        names = list(connection.scalars(text("SELECT datname FROM pg_database")))
    engine.dispose()
    return names


# the demo


def test_killed_again_and_again_the_packaged_plan_has_every_effect_once(server_url: str) -> None:
    with demo("--kills", "3", "--seed", "11", url=server_url, PYTHONIOENCODING="ascii") as running:
        assert running.end() == 0, running.output
    output = running.output
    assert len(re.findall(r"process \d+ killed ", output)) == 3
    claims = [tuple(map(int, found)) for found in re.findall(r"process \d+ \D+: fence (\d+), attempt (\d+)", output)]
    assert len(claims) >= 3, "each kill before the landing is followed by a takeover"
    assert claims == [(fence, fence) for fence in range(1, len(claims) + 1)]
    counted = [re.split(r"\W+", line)[1:4] for line in output.splitlines() if "each exactly once" in line]
    assert counted == [["stock", "movements", "21"], ["payments", "13", "13"], ["receipts", "40", "40"]]
    verdict = "Every effect in the database is there exactly once, and every external one at least once: 3 kills"
    assert verdict in output
    name = re.search(r"sqla_durable_demo_\w+", output)
    assert name is not None
    assert name[0] not in databases(server_url)


def test_a_plan_of_ones_own_is_carried_out_in_a_postgresql_that_goes_with_the_demo(tmp_path: Path) -> None:
    with demo("--plan", written(tmp_path, MOVE, LABEL, PAYMENT), "--kills", "0", url=None) as running:
        folder = running.until(r"PostgreSQL \S+ runs in (\S+),")[1]
        assert Path(folder).exists()
        assert running.end() == 0, running.output
    assert "A plan of 3 steps is approved: 1 stock move, 1 label, 1 payment." in running.output
    assert "3 × tea, Hamburg → Berlin" in running.output
    verdict = "Every effect in the database is there exactly once, and every external one at least once: 1 attempt"
    assert verdict in running.output
    assert not Path(folder).exists()


def test_a_plan_that_fails_keeps_what_was_done_and_ends_the_demo_with_1(server_url: str, tmp_path: Path) -> None:
    plan = written(tmp_path, PAYMENT, MOVE, MOVE, PAYMENT)
    with demo("--plan", plan, "--kills", "0", url=server_url) as running:
        assert running.end() == 1, running.output
    assert "the plan ended as failed: ValueError: Hamburg has 2 × tea, not 3" in running.output
    assert "Not as planned" in running.output
    assert "is in the ledger" not in running.output, "the effects are those of the steps that succeeded"


def test_an_effect_that_is_gone_ends_the_demo_with_1(server_url: str) -> None:
    with demo("--kills", "2", "--seed", "2", url=server_url) as running:
        name = running.until("database (sqla_durable_demo_\\w+)")[1]
        running.until("24 × tea tin")
        engine = create_engine(make_url(server_url).set(drivername="postgresql+psycopg", database=name))
        with engine.begin() as connection:
            assert connection.execute(text("DELETE FROM stock_entry WHERE position = 0")).rowcount == 1
        engine.dispose()
        assert running.end() == 1, running.output
    assert "stock movements: step 0 is in the ledger not at all, and should be once: 24 × tea tin" in running.output
    assert "Not as planned" in running.output


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_the_demo_kills_its_process_and_drops_its_database(
    server_url: str, sent: signal.Signals, code: int
) -> None:
    with demo("--kills", "1", "--seed", "1", url=server_url) as running:
        name = running.until("database (sqla_durable_demo_\\w+)")[1]
        pid = running.until(r"process (\d+) claims the plan")[1]
        assert alive(pid)
        running.process.send_signal(sent)
        assert running.end() == code, running.output
    assert not alive(pid), "killed by the demo, not ended by the loss of its database"
    assert name not in databases(server_url)
    assert "Traceback" not in running.output


def test_a_process_that_someone_else_kills_is_followed_by_the_next(server_url: str) -> None:
    with demo("--kills", "0", url=server_url) as running:
        pid = running.until(r"process (\d+) claims the plan")[1]
        os.kill(int(pid), signal.SIGKILL)
        assert running.end() == 0, running.output
    assert "takes over: fence 2, attempt 2" in running.output


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (LABEL, "Every external effect is there at least once: "),
        (MOVE, "Every effect in the database is there exactly once: "),
    ],
    ids=["external", "in the database"],
)
def test_the_verdict_promises_no_more_than_the_kinds_of_effects_allow(
    server_url: str, tmp_path: Path, action: object, said: str
) -> None:
    with demo("--plan", written(tmp_path, action), "--kills", "0", url=server_url) as running:
        assert running.end() == 0, running.output
    assert said in running.output


def test_a_process_that_is_killed_after_the_landing_is_shown_to_have_found_it(server_url: str, tmp_path: Path) -> None:
    with demo("--plan", written(tmp_path, MOVE), "--kills", "5", "--seed", "1", url=server_url) as running:
        assert running.end() == 0, running.output
    killed = re.findall(r"process (\d+) killed ", running.output)
    told = re.findall(r"process (\d+) (?:claims the plan|takes over|finds that the plan has landed)", running.output)
    assert len(killed) == 5
    assert set(killed) <= set(told)


# when to kill


def test_the_same_seed_chooses_the_same_instants() -> None:
    assert instants(8, 40, Random(7)) == instants(8, 40, Random(7)) != instants(8, 40, Random(8))


@pytest.mark.parametrize("kills", [0, 1, 2, 5, 30])
@pytest.mark.parametrize("steps", [1, 2, 40])
def test_there_are_as_many_instants_as_asked_for_and_each_is_within_the_plan(kills: int, steps: int) -> None:
    chosen = instants(kills, steps, Random(0))
    assert len(chosen) == kills
    assert all(0 <= instant.steps <= steps and instant.delay >= 0 for instant in chosen)
    assert chosen == sorted(chosen, key=lambda instant: instant.steps)


# the plan file


def test_the_packaged_plan_has_about_forty_actions_of_every_kind() -> None:
    plan = read_plan(None)
    assert len(plan.actions) == 40
    assert {type(action) for action in plan.actions} == {StockMove, Payment, Label}


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ({**MOVE, "quantity": 0}, "action 2 (the first is 0), field 'quantity': Input should be greater than 0"),
        ({**MOVE, "quantity": "3"}, "field 'quantity': Input should be a valid integer (it is '3')"),
        ({**MOVE, "target": "Hamburg"}, "action 2 (the first is 0): source and target are the same site"),
        ({**PAYMENT, "amount": "1.005"}, "field 'amount': Decimal input should have no more than 2 decimal places"),
        ({**PAYMENT, "amount": "NaN"}, "field 'amount': Input should be a finite number"),
        ({**PAYMENT, "payee": "shop"}, "payer and payee are the same account"),
        ({**LABEL, "address": "Ber\0lin"}, "field 'address': String should match pattern"),
        ({**LABEL, "colour": "red"}, "field 'colour': Extra inputs are not permitted"),
        ({"kind": "label", "parcel": "1"}, "field 'address': Field required"),
        ({"kind": "refund"}, "field 'kind': Input tag 'refund'"),
        ({}, "action 2 (the first is 0), field 'kind'"),
        (7, "action 2 (the first is 0): Input should be an object"),
    ],
)
def test_a_bad_action_is_named_by_its_position_and_its_field(tmp_path: Path, action: Any, said: str) -> None:
    file = Path(written(tmp_path, MOVE, LABEL, action))
    with pytest.raises(DemoError, match=re.escape(said)) as refused:
        read_plan(file)
    assert str(refused.value).startswith(f"{file}: action 2 (the first is 0)")
    assert len(str(refused.value).splitlines()) == 1


def test_every_fault_of_a_file_is_named(tmp_path: Path) -> None:
    file = Path(written(tmp_path, {**MOVE, "quantity": 0}, {**PAYMENT, "amount": "x"}, balances={"shop": -1}))
    with pytest.raises(DemoError) as refused:
        read_plan(file)
    lines = str(refused.value).splitlines()
    assert [line.removeprefix(f"{file}: ").split(":")[0] for line in lines] == [
        "field 'balances.shop'",
        "action 0 (the first is 0), field 'quantity'",
        "action 1 (the first is 0), field 'amount'",
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "Invalid JSON"), ("[]", "Input should be an object"), ("{}", "field 'actions': Field required"),
     ('{"actions": []}', "field 'actions': List should have at least 1 item")],
)  # fmt: skip
def test_a_file_that_is_not_a_plan_is_refused(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(content)
    with pytest.raises(DemoError, match=re.escape(said)):
        read_plan(file)


def test_the_command_refuses_a_bad_file_before_it_starts_anything(tmp_path: Path) -> None:
    with demo("--plan", written(tmp_path, {**MOVE, "quantity": 0}), url=None) as running:
        assert running.end() == 2
    assert "sqla-durable demo: " in running.output
    assert "my-plan.json: action 0 (the first is 0), field 'quantity'" in running.output
    assert "PostgreSQL" not in running.output
    assert "Traceback" not in running.output


def test_a_file_that_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"none\.json: No such file"):
        read_plan(tmp_path / "none.json")
