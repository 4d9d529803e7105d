"""The account that runs the server: PostgreSQL refuses to run as root, and any other account runs it itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

from .exc import EmbeddedError


class Account(NamedTuple):
    uid: int
    gid: int
    name: str


def is_root() -> bool:
    return sys.platform != "win32" and os.geteuid() == 0


if sys.platform == "win32":

    def account_for(data: Path, user: str | None) -> Account | None:  # noqa: ARG001
        return None

else:
    import pwd

    def account_for(data: Path, user: str | None) -> Account | None:
        """Return the account that runs the server of the cluster in ``data``, or None for this process's own.

        :param user: when root: the account to use. None: the owner of the cluster, else ``postgres``, else ``nobody``.
        :raises EmbeddedError: the cluster belongs to another account, or there is no such account.
        """
        owner = data.stat() if data.exists() else None
        belongs = f"{data} belongs to the account number {owner.st_uid}: " if owner else ""
        if not is_root():
            if owner and owner.st_uid != os.geteuid():
                raise EmbeddedError(f"{belongs}run as that account or as root")
            return None
        if owner and user is None:  # made by it, whatever accounts were added since
            return Account(owner.st_uid, owner.st_gid, f"number {owner.st_uid}")
        candidates = [user] if user else ["postgres", "nobody"]
        for found in filter(None, map(_named, candidates)):
            if found.uid != 0 and (owner is None or owner.st_uid == found.uid):
                return found
        raise EmbeddedError(
            f"PostgreSQL does not run as root, and {', '.join(candidates)} cannot run it: {belongs}"
            "pass user= with the name of an existing account without privileges"
        )

    def _named(name: str) -> Account | None:
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            return None
        return Account(found.pw_uid, found.pw_gid, name)


def blocked_at(path: Path, account: Account | None) -> Path | None:
    """Return the first folder on the way to ``path`` that the account may not pass through, by its mode."""
    for folder in reversed(path.parents):
        if account and folder.exists():
            found = folder.stat()
            shift = 6 if found.st_uid == account.uid else 3 if found.st_gid == account.gid else 0
            if not found.st_mode >> shift & 1:
                return folder
    return None
