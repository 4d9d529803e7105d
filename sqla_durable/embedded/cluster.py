"""The cluster in the folder, and PostgreSQL's programs that make it, start it and stop it.

Whoever makes, starts or stops it holds ``start.lock``. What fails or takes too long raises :class:`EmbeddedError`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from secrets import token_hex
from typing import Literal

from .account import Account
from .exc import EmbeddedError
from .folder import SOCKET_PORT
from .options import Options

StopMode = Literal["fast", "immediate"]

_LOG_LINES = 20


class Cluster:
    """A cluster, whether it runs or not.

    :param home: the server's folder.
    :param bin_dir: the folder of the programs.
    :param account: the account that runs them. None: this process's own.
    """

    def __init__(self, home: Path, bin_dir: Path, account: Account | None) -> None:
        self.home, self.bin_dir, self._account = home, bin_dir, account
        self.data = home / "pgdata"
        self.temporary = home / "temporary"  # marks a folder that goes with its last user
        self.log = self.data / "server.log"
        self._pid_file = self.data / "postmaster.pid"

    def run(self, program: str, *args: str | Path, seconds: float = 60, **env: str) -> str:
        """Run a program as the server's account; return what it printed."""
        code, output = self._try(program, *args, seconds=seconds, **env)
        if code != 0:
            raise EmbeddedError(f"{program} of {self.bin_dir} failed with code {code}:\n{output}")
        return output

    def create(self, version: str, seconds: float) -> None:
        """Make the cluster where there is none, and refuse one of another major version than the programs'."""
        if self.data.exists():
            found = (self.data / "PG_VERSION").read_text().strip()
            if found != version.partition(".")[0]:
                raise EmbeddedError(
                    f"{self.data} was made by PostgreSQL {found} and {self.bin_dir} is PostgreSQL {version}: "
                    f"pass the bin_dir= of a PostgreSQL {found}, name another folder, or use pg_upgrade"
                )
            return
        # Made beside its place: an initdb that was cut off would leave a folder that looks like a cluster.
        for cut_off in self.home.glob("initdb-*"):
            shutil.rmtree(cut_off, ignore_errors=True)
        fresh, password = Path(tempfile.mkdtemp(prefix="initdb-", dir=self.home)), self.home / "password"
        password.touch(0o600)
        password.write_text(token_hex(24))
        if self._account:
            for path in (fresh, password):
                shutil.chown(path, self._account.uid, self._account.gid)
        self.run(
            "initdb", "--pgdata", fresh, "--username=postgres", "--encoding=UTF8", "--locale=C",
            "--auth-local=trust", "--auth-host=scram-sha-256", f"--pwfile={password}",
            *(["--no-sync"] if self.temporary.exists() else []), seconds=seconds,
        )  # fmt: skip
        fresh.rename(self.data)

    def running(self) -> bool:
        """Tell whether the server lives, though it may not answer yet."""
        if not self._pid_file.exists() or self._stale():
            return False
        return self._try("pg_ctl", "status", "-D", self.data)[0] == 0

    def ensure_running(self, options: Options, deadline: float) -> None:
        """Return when the server answers, starting it if it does not run: a crashed one recovers here."""
        code, output = 0, "a server runs, but does not answer"
        while not (self.running() and self._answers(options)):
            seen = self.log.stat().st_size if self.log.exists() else 0
            if not self.running():
                if self._stale():
                    self._pid_file.unlink(missing_ok=True)
                    (self.data / f".s.PGSQL.{SOCKET_PORT}.lock").unlink(missing_ok=True)
                left = max(1, int(deadline - time.monotonic()))
                code, output = self._try(
                    "pg_ctl", "start", "-D", self.data, "-l", self.log, "-w", "-t", str(left),
                    "-o", options.command_line(), seconds=left + 5,
                )  # fmt: skip
            end = self._log_end(seen)
            # The backends of a killed server live on for a moment and keep its memory.
            if (code and "pre-existing shared memory block" not in end) or time.monotonic() >= deadline:
                raise EmbeddedError(f"PostgreSQL did not start: {output}\n{self.log} ends:\n{end}")
            time.sleep(0.02)

    def stop(self, mode: StopMode) -> None:
        """Stop the server if it runs, whoever uses it."""
        output = ""
        for attempt in (mode, "immediate"):  # a fast stop needs room on the disk for a last checkpoint
            if self.running():
                _, output = self._try("pg_ctl", "stop", "-D", self.data, "-m", attempt, "-w", "-t", "30")
        if self.running():
            raise EmbeddedError(f"the server of {self.data} does not stop: {output}")

    def _try(self, program: str, *args: str | Path, seconds: float = 60, **env: str) -> tuple[int, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        no_groups: list[str | int] = []
        # A file, not a pipe: where the server inherits its starter's output, a pipe would never end.
        with tempfile.TemporaryFile() as output:
            try:
                code = subprocess.run(  # noqa: S603
                    [shutil.which(program, path=self.bin_dir) or program, *args],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    cwd=self.home,  # the caller's own may be closed to the account
                    env={**clean, "LC_ALL": "C", **env},
                    user=self._account and self._account.uid,
                    group=self._account and self._account.gid,
                    extra_groups=self._account and no_groups,
                    timeout=seconds, check=False,
                ).returncode  # fmt: skip
            except subprocess.TimeoutExpired as error:
                raise EmbeddedError(f"{program} of {self.bin_dir} did not end within {seconds:.0f} s") from error
            output.seek(0)
            return code, output.read().decode(errors="replace").strip()

    def _answers(self, options: Options) -> bool:
        host, port = options.address(self.data)
        return self._try("pg_isready", "-h", host, "-p", port, "-t", "3")[0] == 0

    def _stale(self) -> bool:
        """Tell whether the process that the server's pid file names is dead or another program.

        Some first processes do not collect the dead, and numbers are used again. pg_ctl takes both for the living
        server: it would wait for the one for ever, and interrupt the other.
        """
        try:
            pid = int(self._pid_file.read_text().split("\n", 1)[0])
            command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")  # empty for the dead
        except (OSError, ValueError):
            return False
        return not Path(command.partition("\0")[0]).name.startswith("postgres")

    def _log_end(self, seen: int) -> str:
        new = self.log.read_bytes()[seen:] if self.log.exists() else b"(no log)"
        return "\n".join(new.decode(errors="replace").splitlines()[-_LOG_LINES:])
