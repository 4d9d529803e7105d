"""``sqla-durable runs``: what it lists, in which form, and what it refuses."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, String, create_engine, text, update
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import ReceiptMixin, Run, RunMixin, Runs
from sqla_durable.cli.durations import duration, rounded
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, let_lapse
from tests.support_cli import FORMS, ROOT, answered, call, importable, lines, made, real, refused
from tests.support_models import JobStatus, jobs, lifecycle
from tests.test_models_keys import Base as Keys
from tests.test_models_keys import Coloured, ColouredStep, Pair, PairStep


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep, owner="me")


@pytest.fixture(params=FORMS)
def target(request: pytest.FixtureRequest, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> str:
    return f"{importable(monkeypatch, plans=made(request.param, engine))}:plans"


def fails(run: Run[Any]) -> None:
    raise ValueError("no \x1b[31mmoney\nleft")


def aged(factory: sessionmaker[Session], *ages: str) -> list[UUID]:
    idents = [approved_plan(factory) for _ in ages]
    with factory.begin() as session:
        session.execute(text("SET LOCAL sqla_durable.override = 'runs of some age'"))
        for ident, age in zip(idents, ages, strict=True):
            created = text(f"clock_timestamp() - interval '{age}'")
            session.execute(update(Plan).where(Plan.id == ident).values(created_at=created))
    return idents


# the table


def test_runs_are_listed_as_a_table(target: str, plans: Runs[Plan], session_factory: sessionmaker[Session]) -> None:
    waiting, held, failed = aged(session_factory, "62 minutes", "125 minutes", "8 days")
    run = plans.claim(held)
    plans.execute(failed, fails)
    let_lapse(session_factory, held)
    with session_factory.begin() as session:
        plans.request_cancel(session, held)
    header, *rows = (line.split("  ") for line in answered("runs", target).splitlines())
    assert [cell.strip() for cell in header if cell] == ["id", "status", "attempts", "age", "holder", "error"]
    assert [[cell.strip() for cell in row if cell.strip()] for row in rows] == [
        [str(waiting), "approved", "0", "1h 2m"],
        [str(held), "executing (lapsed, cancel requested)", "1", "2h 5m", "me"],
        [str(failed), "failed", "1", "8d", r"ValueError: no \x1b[31mmoney ..."],
    ]
    seen = plans.get(held, heal=False)
    assert run is not None
    assert seen is not None
    assert seen.status is PlanStatus.EXECUTING, "a list heals nothing"


def test_where_there_is_no_run_that_is_said_beside_the_answer(target: str) -> None:
    done = call("runs", target)
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "no runs\n")
    done = call("runs", target, "--error", "x")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "no such runs\n")
    assert answered("runs", target, "--json") == ""


# JSON


def test_json_is_a_line_for_each_run_with_names_that_stay(
    target: str, plans: Runs[Plan], session_factory: sessionmaker[Session]
) -> None:
    waiting, failed = aged(session_factory, "1 hour", "2 hours")
    plans.execute(failed, fails)
    first, second = lines("runs", target)
    assert list(first) == [
        *("ident", "key", "status", "attempts", "fence", "lease_owner", "lapsed", "created_at", "started_at"),
        *("finished_at", "available_at", "lease_expires_at", "cancel_requested_at", "age_seconds", "error", "cursor"),
    ]
    assert first["ident"] == first["key"]["id"] == str(waiting)
    assert (first["status"], first["attempts"], first["fence"]) == ("approved", 0, 0)
    assert (first["started_at"], first["lapsed"], first["error"], first["lease_owner"]) == (None, False, None, None)
    assert 3600 <= first["age_seconds"] < 3660
    row = plans.get(waiting)
    assert row is not None
    assert first["created_at"].endswith("+00:00")
    assert datetime.fromisoformat(first["created_at"]) == row.created_at
    assert second["error"] == {"type": "ValueError", "message": "no \x1b[31mmoney\nleft"}
    assert second["cursor"] == plans.find()[1].cursor


def test_times_are_in_utc_whatever_zone_the_connection_is_in(
    engine: Engine, session_factory: sessionmaker[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    approved_plan(session_factory)
    elsewhere = create_engine(engine.url, connect_args={"options": "-c timezone=Asia/Kolkata"})
    module = importable(monkeypatch, plans=made("sync", elsewhere), here=made("sync", engine))
    (there,), (here,) = lines("runs", f"{module}:plans"), lines("runs", f"{module}:here")
    assert there["created_at"] == here["created_at"]
    assert datetime.fromisoformat(there["created_at"]).tzinfo == UTC


# which runs


def test_every_option_narrows_the_list(target: str, plans: Runs[Plan], session_factory: sessionmaker[Session]) -> None:
    new, old, older = aged(session_factory, "10 minutes", "3 hours", "3 days")
    plans.execute(old, fails)
    plans.claim(older)
    with session_factory.begin() as session:
        plans.request_cancel(session, older)

    def found(*options: str) -> list[str]:
        return [each["ident"] for each in lines("runs", target, *options)]

    assert found() == [str(new), str(old), str(older)]
    assert found("--status", "failed") == [str(old)]
    assert found("--status", "failed", "--status", "approved") == [str(new), str(old)]
    assert found("--older-than", "1h") == [str(old), str(older)]
    assert found("--newer-than", "90m") == [str(new)]
    assert found("--older-than", "1h", "--newer-than", "1d12h") == [str(old)]
    assert found("--error", "MONEY") == [str(old)]
    assert found("--owner", "me") == [str(older)]
    assert found("--cancel-requested") == [str(older)]
    assert found("--no-cancel-requested") == [str(new), str(old)]


def test_pages_follow_each_other(target: str, session_factory: sessionmaker[Session]) -> None:
    idents = [str(ident) for ident in aged(session_factory, "1 s", "2 s", "3 s")]
    done = call("runs", target, "--limit", 2)
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["id", *idents[:2]]
    said, _, cursor = done.stderr.partition(": --after ")
    assert said == "There are more"
    assert answered("runs", target, "--limit", 2, "--after", cursor.strip()).splitlines()[1].startswith(idents[2])
    first, second = lines("runs", target, "--limit", 2)
    assert [each["ident"] for each in lines("runs", target, "--after", second["cursor"])] == idents[2:]
    assert call("runs", target, "--limit", 3).stderr == ""
    assert first["cursor"] != second["cursor"]


def test_runs_are_counted(target: str, plans: Runs[Plan], session_factory: sessionmaker[Session]) -> None:
    plans.execute(approved_plan(session_factory), fails)
    counted = dict(line.split() for line in answered("runs", target, "--counts").splitlines())
    assert counted.pop("status") == "runs"
    assert counted == {**dict.fromkeys(map(str, PlanStatus), "0"), "failed": "1"}
    assert lines("runs", target, "--counts") == [{**dict.fromkeys(map(str, PlanStatus), 0), "failed": 1}]


# what is refused


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--status", "lost"], 2, "'lost' is not a status of Plan; it has 'pending', 'approved', "),
        (["--counts", "--error", "x"], 2, "--counts counts every run; leave the other conditions out."),
        (["--counts", "--status", "failed"], 2, "--counts counts every run"),
        (["--after", "x"], 1, "'x' is not a cursor of plan; pass the cursor of the last run"),
        (["--older-than", "40000d"], 1, "older_than=40000 days, 0:00:00: a duration from 0 to 36500 days."),
        (["--error", "\udcff"], 2, r"'\udcff' is not text in the encoding of this system."),
        (["--status", "\udcff"], 2, r"'\udcff' is not text in the encoding of this system."),
    ],
)
def test_what_cannot_be_meant_is_said_in_one_line(target: str, options: list[str], status: int, said: str) -> None:
    exit_code, line = refused("runs", target, *options)
    assert exit_code == status
    assert said in line


@pytest.mark.parametrize("given", ["", "5", "h", "5 h", "-5m", "1.5", "5w", "٣s", "1e400d", f"{'9' * 400}d"])
def test_what_is_no_duration_is_refused(given: str, target: str) -> None:
    done = call("runs", target, f"--older-than={given}")
    assert done.exit_code == 2
    assert "--older-than" in done.stderr
    with pytest.raises(ValueError, match=r"not a duration|too long"):
        duration(given)


@pytest.mark.parametrize("limit", ["0", "-1", "x"])
def test_a_limit_that_is_none_is_refused(target: str, limit: str) -> None:
    assert call("runs", target, "--limit", limit).exit_code == 2


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("90s", timedelta(seconds=90)),
        ("15m", timedelta(minutes=15)),
        ("2h", timedelta(hours=2)),
        ("7d", timedelta(days=7)),
        ("0s", timedelta(0)),
        ("1h30m", timedelta(minutes=90)),
        ("1.5h", timedelta(minutes=90)),
        ("1d1h1m1s", timedelta(days=1, hours=1, minutes=1, seconds=1)),
    ],
)
def test_a_duration_is_read(given: str, meant: timedelta) -> None:
    assert duration(given) == meant


@pytest.mark.parametrize(
    ("length", "written"),
    [
        (timedelta(0), "0s"),
        (timedelta(milliseconds=105), "0.105s"),
        (timedelta(seconds=4.24), "4.2s"),
        (timedelta(seconds=59), "59s"),
        (timedelta(seconds=60), "1m"),
        (timedelta(minutes=2, seconds=5), "2m 5s"),
        (timedelta(hours=3), "3h"),
        (timedelta(hours=3, seconds=5), "3h"),
        (timedelta(days=1, hours=2, minutes=3), "1d 2h"),
        (timedelta(days=400), "400d"),
        (timedelta(seconds=-61), "-1m 1s"),
    ],
)
def test_a_duration_is_written_by_its_two_largest_units(length: timedelta, written: str) -> None:
    assert rounded(length) == written


# models


class Wide(DeclarativeBase):
    pass


class Named(RunMixin, Wide):
    __tablename__ = "named"
    __lifecycle__ = lifecycle()
    name: Mapped[str] = mapped_column(String, primary_key=True)
    status: Mapped[JobStatus] = jobs.column()


class NamedStep(ReceiptMixin[Named], Wide):
    __tablename__ = "named_step"


LONG = "x" * 400
NAMES = ["東京-оплата", LONG, "[bold]a b[/bold]", "a\tb\x07", "-1", "ends with \\"]


@pytest.fixture
def named(empty_url: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    engine = create_engine(empty_url)
    Wide.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add_all(Named(name=name) for name in NAMES)
    yield f"{importable(monkeypatch, runs=made('sync', engine, Named, NamedStep))}:runs"
    engine.dispose()


def test_a_name_in_any_script_is_shown_whole_and_in_columns(named: str) -> None:
    from rich.cells import cell_len

    header, *rows = answered("runs", named).splitlines()
    shown = {*NAMES, r"a\tb\x07"} - {"a\tb\x07"}
    starts = {cell_len(row[: row.index("not yet")]) for row in rows}
    assert {row[: row.index("not yet")].rstrip() for row in rows} == shown
    assert starts == {header.index("status")}
    assert {each["ident"] for each in lines("runs", named)} == set(NAMES)


def test_parts_of_a_key_are_joined_so_that_they_can_be_given_back(
    empty_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = create_engine(empty_url)
    Keys.metadata.create_all(engine)
    tenant = UUID(int=7)
    with Session(engine) as session, session.begin():
        session.add(Pair(tenant=tenant, name='a, "b"'))
        session.add(Coloured(id=5))
    module = importable(
        monkeypatch,
        pairs=made("sync", engine, Pair, PairStep),
        coloured=made("sync", engine, Coloured, ColouredStep),
    )
    (pair,) = lines("runs", f"{module}:pairs")
    assert pair["key"] == {"tenant": str(tenant), "name": 'a, "b"'}
    assert pair["ident"] == f'{tenant},"a, ""b"""'
    assert answered("runs", f"{module}:pairs").splitlines()[0].startswith("tenant,name  ")
    assert answered("show", f"{module}:pairs", pair["ident"]).startswith(f"Pair {pair['ident']} is not yet.")
    (coloured,) = lines("runs", f"{module}:coloured")
    assert (coloured["ident"], coloured["key"]) == ("l,5", {"size": "l", "id": 5})
    engine.dispose()


# real processes


SOURCE = """
import os
from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker
from sqla_durable import Runs
from tests.test_cli_runs import Named, NamedStep

runs = Runs(sessionmaker(create_engine(os.environ["NAMED_URL"])), Named, NamedStep)
"""


def test_a_pipe_gets_whole_lines(tmp_path: Path, named: str, empty_url: str) -> None:
    (tmp_path / "app.py").write_text(SOURCE)
    done = real("runs", "app:runs", cwd=tmp_path, NAMED_URL=empty_url, COLUMNS="40", PYTHONUTF8="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 1 + len(NAMES)
    assert f"\n{LONG}  not yet  0" in done.stdout
    done = real("runs", "app:runs", "--json", cwd=tmp_path, NAMED_URL=empty_url, PYTHONUTF8="1")
    assert {json.loads(line)["ident"] for line in done.stdout.splitlines()} == set(NAMES)


def test_a_reader_that_goes_away_is_no_error_to_speak_of(tmp_path: Path, named: str, empty_url: str) -> None:
    (tmp_path / "app.py").write_text(SOURCE)
    command = f'"{sys.executable}" -m sqla_durable.cli runs app:runs --json | head -c 1'
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NAMED_URL": empty_url}
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == ("{", "")


def on_a_terminal(cwd: Path, columns: int, *arguments: str, **environment: str) -> str:
    """What a command writes to a terminal of that width."""
    reader, writer = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "sqla_durable.cli", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": str(columns), "TERM": "xterm", **environment},
        stdout=writer,
        stderr=writer,
    ) as process:
        os.close(writer)
        shown = b""
        with suppress(OSError):  # Linux says so when the other end is closed
            while more := os.read(reader, 65536):
                shown += more
    os.close(reader)
    assert process.returncode == 0, shown
    return shown.decode()


def test_a_terminal_is_written_to_in_its_width(tmp_path: Path, named: str, empty_url: str) -> None:
    (tmp_path / "app.py").write_text(SOURCE)
    engine = create_engine(empty_url)
    with Session(engine) as session, session.begin():
        session.execute(text("DELETE FROM named WHERE length(name) > 100"))
        session.execute(
            text("""UPDATE named SET error = jsonb_build_object('type', 'E', 'message', repeat('m ', 90))""")
        )
    engine.dispose()
    shown = on_a_terminal(tmp_path, 60, "runs", "app:runs", NAMED_URL=empty_url)
    assert "\x1b[1m" in shown, "the header is bold"
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown).splitlines()
    assert len(plain) > 2 * len(NAMES), "errors are wrapped"
    assert {len(line.rstrip()) <= 60 for line in plain} == {True}
    assert sum(line.startswith("[bold]a b[/bold]  ") for line in plain) == 1


def test_a_terminal_too_narrow_for_a_key_gets_it_whole(tmp_path: Path, named: str, empty_url: str) -> None:
    (tmp_path / "app.py").write_text(SOURCE)
    shown = on_a_terminal(tmp_path, 60, "runs", "app:runs", NAMED_URL=empty_url)
    assert f"{LONG}  not yet  0" in shown
