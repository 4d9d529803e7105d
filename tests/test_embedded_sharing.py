"""One embedded server used by several processes: the first one in starts it, the last one out stops it."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest

from sqla_durable.embedded import EmbeddedError, start
from sqla_durable.embedded.locks import starting
from tests import support_embedded
from tests.support_embedded import (
    USER,
    answers,
    eventually,
    kill_group,
    leave,
    postmaster_pid,
    processes_of,
    python,
    user_of,
)

base, home, temporary = support_embedded.base, support_embedded.home, support_embedded.temporary


def watchdogs_of(home: Path) -> int:
    return sum("embedded.watchdog" in line for line in processes_of(home))


def test_processes_that_start_at_the_same_time_share_one_server_and_the_last_one_out_stops_it(
    base: Path,
) -> None:
    home = base / "new"
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
    temporary: Path,
) -> None:
    owner, url, home = user_of(temporary)
    other, same_url, _ = user_of(home)
    assert same_url == url
    kill_group(owner)
    # The owner's watchdog has decided when it is gone: only the other's is left.
    assert eventually(lambda: watchdogs_of(home) == 1)
    assert answers(url)
    leave(other)
    assert not home.exists()


def test_whoever_joins_with_another_port_or_other_settings_is_told(home: Path) -> None:
    with start(home, settings={"work_mem": "5MB"}) as server:
        with pytest.raises(EmbeddedError, match="in use with the settings"):
            start(home, settings={"work_mem": "6MB"})
        with pytest.raises(EmbeddedError, match="in use with port=None"):
            start(home, port=0)
        with start(home) as joined:
            assert joined.url == server.url
        assert answers(server.url)


def test_a_kept_server_outlives_its_process_and_is_found_again(home: Path) -> None:
    with start(home, keep_running=True) as server:
        pid = postmaster_pid(home)
    assert answers(server.url)
    with start(home) as again:
        assert postmaster_pid(home) == pid
        assert again.url == server.url
    assert not answers(server.url)
    with pytest.raises(ValueError, match="keep_running"):
        start(keep_running=True)


def test_a_forked_child_that_closes_or_ends_does_not_stop_its_parents_server(home: Path) -> None:
    with start(home) as server:
        child = os.fork()
        if child == 0:
            server.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert answers(server.url)
        with start(home):  # leaves again: the parent is still counted as a user
            pass
        assert answers(server.url)


def test_a_forked_child_that_lives_on_does_not_keep_its_parents_server(home: Path) -> None:
    with start(home) as server:
        child = os.fork()
        if child == 0:
            signal.pause()
    try:
        assert not answers(server.url)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_dropped_object_neither_stops_the_server_nor_dismisses_its_watchdog(home: Path) -> None:
    script = """
import gc
server = embedded.start(Path(sys.argv[1]))
server.itself = server  # what is found in a circle is finalized with all that it holds
url = server.url
del server
gc.collect()
print(url, flush=True)
input()
"""
    process = python(script, home)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    assert not eventually(lambda: watchdogs_of(home) == 0, seconds=1.5)
    assert answers(url)
    kill_group(process)
    assert eventually(lambda: not answers(url))


def test_who_waits_too_long_for_another_starter_is_told(base: Path) -> None:
    home = base / "busy"
    with (
        starting(home, time.monotonic() + 5, create=True),
        pytest.raises(EmbeddedError, match="another process has been starting or stopping"),
    ):
        start(home, timeout=timedelta(seconds=0.2))
