"""One process's use of a server, and the small process that ends it where its user was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from .account import account_for
from .cluster import Cluster
from .exc import FolderRemovedError
from .folder import remove
from .locks import in_use, open_lock, release, starting, try_lock

# The package is loaded without the library, whose imports would take ten times as long and as much memory: hence its
# own imports are relative. Put first on the path, the library's "asyncio" would stand for Python's.
_SCRIPT = "import sys; sys.path.append(sys.argv[1]); from embedded.watchdog import watch; watch(*sys.argv[2:])"


class Hold:
    """The shared lock that counts this process as a user, and the watchdog that acts when the process is killed.

    :param guarded: start a watchdog, and let the last user stop the server. False: leave it running.
    """

    # Kept until closed: a dropped object would dismiss the watchdog, and nobody would stop the server after a kill.
    _open: ClassVar[set[Hold]] = set()

    def __init__(self, cluster: Cluster, *, guarded: bool) -> None:
        self.cluster, self.closed, self._pid = cluster, False, os.getpid()
        self._users = open_lock(cluster.home / "users.lock")
        try_lock(self._users, shared=True)
        self._watchdog = _start_watchdog(cluster) if guarded else None
        self._open.add(self)

    def close(self, seconds: float) -> None:
        """End the use, once; in a forked child do nothing: the use is its parent's.

        :param seconds: how long to wait for another process that starts or stops the server.
        :raises EmbeddedError: that took longer, or the server did not stop; the watchdog tries again.
        """
        if self.closed or self._pid != os.getpid():
            return
        self.closed = True
        release(self._users)
        self._open.discard(self)
        if self._watchdog and self._watchdog.stdin:
            with self._watchdog.stdin as pipe:
                settle(self.cluster, seconds)
                with suppress(BrokenPipeError):  # of a watchdog that somebody killed
                    pipe.write(b".")
            self._watchdog.wait()


def settle(cluster: Cluster, seconds: float) -> None:
    """Stop the server and remove a temporary folder, if nobody uses it.

    :param seconds: how long to wait for another process that starts or stops the server.
    :raises EmbeddedError: that took longer, or the server did not stop.
    """
    removable = False
    with suppress(FolderRemovedError), starting(cluster.home, time.monotonic() + seconds, create=False):
        if not in_use(cluster.home):
            removable = cluster.temporary.exists()
            cluster.stop("immediate" if removable else "fast")
            if removable and sys.platform != "win32":
                remove(cluster.home)
    if removable and sys.platform == "win32":  # where an open lock cannot be removed
        remove(cluster.home)


def watch(home: str, bin_dir: str) -> None:
    """Wait for the end of standard input; without a byte before it, the user is gone and its use to be settled."""
    if sys.stdin.buffer.read(1):
        return
    folder = Path(home)
    cluster = Cluster(folder, Path(bin_dir), account_for(folder / "pgdata", None))
    settle(cluster, seconds=600)
    if folder.exists():  # a pg_ctl whose starter was killed may bring the server up after the first look
        time.sleep(1)
        settle(cluster, seconds=600)


def _start_watchdog(cluster: Cluster) -> subprocess.Popen[bytes]:
    library = Path(__file__).resolve().parents[1]
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-I", "-S", "-c", _SCRIPT, library, cluster.home, cluster.bin_dir],
        stdin=subprocess.PIPE, bufsize=0, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        cwd=cluster.home.anchor,  # a folder of the caller could not be removed while it is the watchdog's
        start_new_session=True,  # else Ctrl-C would end it with the process that it guards
    )  # fmt: skip
