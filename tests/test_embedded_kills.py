"""An embedded server when processes are really killed: its user, its starter at any moment, and the server itself."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from threading import Timer

import pytest

from sqla_durable.embedded import start
from tests import support_embedded
from tests.support_embedded import (
    ROOT,
    USER,
    answers,
    ask,
    connect,
    eventually,
    kill_group,
    made,
    postmaster_pid,
    processes_of,
    python,
    user_of,
)

pytestmark = pytest.mark.slow

base, home, bin_dir = support_embedded.base, support_embedded.home, support_embedded.bin_dir


def test_the_server_and_temporary_folder_of_a_killed_process_go(base: Path) -> None:
    process, url, home = user_of()
    assert answers(url)
    kill_group(process)
    assert eventually(lambda: not answers(url))
    assert eventually(lambda: not home.exists())
    assert eventually(lambda: processes_of(base) == [])


def test_the_server_of_a_killed_process_stops_and_its_persistent_folder_stays(home: Path) -> None:
    process, url, _ = user_of(home)
    with connect(url) as session:
        session.execute("CREATE TABLE t AS SELECT 7 AS n")
    kill_group(process)
    assert eventually(lambda: not (home / "pgdata" / "postmaster.pid").exists())
    with start(home) as server:
        assert ask(server.url, "SELECT n FROM t") == 7


def test_a_process_killed_at_any_moment_of_its_start_leaves_nothing(base: Path) -> None:
    for delay in (0.02, 0.1, 0.2, 0.3, 0.4, 0.5):
        process = python("print(1, flush=True); embedded.start(); input()")
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)  # not a wait for a state: the moment of the kill is the input here
        kill_group(process)
    assert eventually(lambda: processes_of(base) == [])
    # What was made before its watchdog was, is an empty folder at most.
    assert [path for path in base.rglob("*") if path.is_file()] == []


def test_a_start_cut_off_in_initdb_does_not_spoil_a_persistent_folder(base: Path) -> None:
    home = base / "new"
    process = python(USER, home)
    assert eventually(lambda: any(home.glob("initdb-*/PG_VERSION")))
    kill_group(process)
    with start(home) as server:
        assert answers(server.url)
        assert list(home.glob("initdb-*")) == []


def test_after_a_kill_of_the_server_the_next_start_recovers_what_was_committed(
    base: Path, bin_dir: Path | None
) -> None:
    home = made(base / "crashed", bin_dir)
    with start(home, bin_dir=bin_dir) as server:
        lost = connect(server.url)
        lost.execute("CREATE TABLE t (n int)")
        lost.execute("INSERT INTO t VALUES (7)")
        lost.execute("BEGIN")
        lost.execute("INSERT INTO t VALUES (8)")
        dead, backend = postmaster_pid(home), lost.info.backend_pid
        # A session that lives on for a while keeps the dead server's memory: the start has to wait for it.
        os.kill(backend, signal.SIGSTOP)
        Timer(0.5, os.kill, (backend, signal.SIGCONT)).start()
        os.kill(dead, signal.SIGKILL)
        with start(home, bin_dir=bin_dir) as again:
            assert postmaster_pid(home) != dead
            assert again.url == server.url
            assert ask(again.url, "SELECT string_agg(n::text, ',') FROM t") == "7"
        assert "automatic recovery in progress" in server.log_file.read_text()
        assert answers(server.url)
        assert "pre-existing shared memory block" in server.log_file.read_text()
        lost.close()


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
def test_a_process_that_was_given_the_number_of_a_killed_server_is_not_taken_for_it(home: Path) -> None:
    with start(home) as server:
        killed = postmaster_pid(home)
        os.kill(killed, signal.SIGKILL)
        assert eventually(lambda: not answers(server.url))
        left = home / "pgdata" / "postmaster.pid"
        with subprocess.Popen(["sleep", "60"], user=left.stat().st_uid if ROOT else None) as other:
            left.write_text(left.read_text().replace(str(killed), str(other.pid), 1))
            server.restart()
            assert answers(server.url)
            assert other.poll() is None
            other.kill()


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc")
def test_a_killed_server_that_no_process_collects_is_not_taken_for_a_living_one(home: Path) -> None:
    script = """
import ctypes, os, signal, time
from datetime import timedelta
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: the server becomes a child that is never waited for
home = Path(sys.argv[1])
server = embedded.start(home)
pid = int((home / "pgdata" / "postmaster.pid").read_text().split()[0])
os.kill(pid, signal.SIGKILL)
while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
    time.sleep(0.01)
with embedded.start(home, timeout=timedelta(seconds=10)) as again:
    again.create_database("a")
server.close()
print("recovered")
"""
    output, _ = python(script, home).communicate(timeout=60)
    assert output == "recovered\n"
