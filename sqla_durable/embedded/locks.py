"""The folder's two locks: ``start.lock`` of whoever starts or stops the server, ``users.lock`` shared by its users.

:func:`os.open` makes descriptors that no program inherits. A server that inherited one would hold its own
``users.lock``, and so would never be found unused.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from .exc import EmbeddedError, FolderRemovedError
from .folder import own_folder

if sys.platform == "win32":
    import msvcrt

    def try_lock(fd: int, *, shared: bool) -> bool:
        # msvcrt has no shared locks: a user locks one byte of many, and the exclusive lock takes them all.
        for place in range(1024 if shared else 1):
            os.lseek(fd, place, os.SEEK_SET)
            try:
                msvcrt.locking(fd, msvcrt.LK_NBLCK, 1 if shared else 1024)
            except OSError:
                continue
            return True
        return False

    def release(fd: int) -> None:
        os.close(fd)

else:
    import fcntl

    def try_lock(fd: int, *, shared: bool) -> bool:
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(fd: int) -> None:
        # Closing alone would leave the lock with a forked child, which shares the descriptor.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


@contextmanager
def starting(home: Path, deadline: float, *, create: bool) -> Generator[None]:
    """Hold ``start.lock``: whoever starts or stops the server of this folder is alone in doing so.

    :param deadline: of :func:`time.monotonic`.
    :param create: make the folder where there is none.
    :raises FolderRemovedError: there is none, and it is not to be made.
    :raises EmbeddedError: another process held the lock until the deadline, or the folder has other things in it.
    """
    path = home / "start.lock"
    while True:
        if create:
            own_folder(home)
        try:
            fd = open_lock(path)
        except FileNotFoundError:
            raise FolderRemovedError(f"{home} was removed") from None
        try:
            while not try_lock(fd, shared=False):
                if time.monotonic() >= deadline:
                    raise EmbeddedError(f"another process has been starting or stopping {home} for too long")
                time.sleep(0.02)
            # The lock of a file that was removed while this process waited guards nothing: look again.
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                yield
                return
        finally:
            release(fd)


def in_use(home: Path) -> bool:
    """Tell whether any process uses the server; the caller holds ``start.lock``."""
    fd = open_lock(home / "users.lock")
    try:
        return not try_lock(fd, shared=False)
    finally:
        release(fd)
