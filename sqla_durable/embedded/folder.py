"""The server's folder: ``pgdata`` (the cluster, its log, its socket), ``password``, ``server.json`` and the locks."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path

from .account import Account, blocked_at, is_root
from .exc import EmbeddedError

SOCKET_PORT = 5432  # only names the socket file: nothing listens on it
SOCKET_PATH_LIMIT = 103 if sys.platform == "darwin" else 107  # bytes: sun_path less its closing zero


def check_home(home: Path, account: Account | None, *, socket_used: bool) -> None:
    """Refuse, before anything is made, a folder that the account cannot reach or whose path cannot be used."""
    blocked = blocked_at(home, account)
    if blocked and account:
        raise EmbeddedError(
            f"the account {account.name}, which runs the server for root, may not pass through {blocked}: "
            f"name another data_dir (or TMPDIR), or chmod o+x {shlex.quote(str(blocked))}"
        )
    if sys.platform != "win32" and re.search(r'["$`\\\n]', str(home)):
        raise EmbeddedError(f"pg_ctl passes {str(home)!r} through a shell: name a folder without such characters")
    if socket_used and _socket_length(home) > SOCKET_PATH_LIMIT:
        raise EmbeddedError(
            f"the socket in {home} would have a path of {_socket_length(home)} bytes, and the system takes "
            f"{SOCKET_PATH_LIMIT}: name a folder with a shorter path, or pass port=0 to use a port"
        )


def own_folder(home: Path) -> None:
    """Make the folder, or take one that is empty or from an earlier start; refuse one with other things in it."""
    home.mkdir(parents=True, exist_ok=True)
    names = {entry.name for entry in home.iterdir()}
    if names and "start.lock" not in names:
        raise EmbeddedError(
            f"{home} is not empty and not from an earlier start, which keeps its cluster in 'pgdata': "
            "name a new or an empty folder"
        )
    # 0711: the server's account passes through the folder but can neither list nor replace what is in it.
    # Owned by that account, it could put a link where root writes next.
    home.chmod(0o711 if is_root() else 0o700)


def temporary_home(*, socket_used: bool) -> Path:
    """Make a folder under :func:`tempfile.gettempdir`, or under ``/tmp`` where that is too long for a socket."""
    base, prefix = Path(tempfile.gettempdir()).resolve(), "sqla-pg-"
    if socket_used and _socket_length(base / f"{prefix}12345678") > SOCKET_PATH_LIMIT:
        base = Path("/tmp").resolve()  # noqa: S108 - mkdtemp makes the folder ours
    return Path(tempfile.mkdtemp(prefix=prefix, dir=base))


def remove(home: Path) -> None:
    # Renamed first: a process that starts there meanwhile makes a folder anew, and not in what is going.
    going = home.with_name(f"{home.name}-removed")
    home.rename(going)
    deadline = time.monotonic() + 5
    while going.exists() and time.monotonic() < deadline:  # an initdb whose starter was killed still writes
        shutil.rmtree(going, ignore_errors=True)


def _socket_length(home: Path) -> int:
    return len(os.fsencode(home / "pgdata" / f".s.PGSQL.{SOCKET_PORT}"))
