"""One process that carries the plan out, as its killer sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self
from uuid import UUID

from sqlalchemy import URL

from sqla_durable.demo.exc import DemoError

_LAST_WORDS = 2000
_SIGKILL = 9
_BETWEEN_LOOKS = 0.0002


class Process:
    """A running :mod:`sqla_durable.demo.carry_out`; leaving the context kills it if it still runs.

    :param url: the demo's database.
    :param plan: the plan's primary key.
    :param folder: where labels are printed to, and errors are written to.
    :param number: 1 for the first process, for telling the connections of one from those of the next.
    """

    def __init__(self, url: URL, plan: UUID, folder: Path, number: int) -> None:
        self.number = number
        self.name = f"sqla_durable demo {number}"
        self._errors = folder / f"process-{number}.err"
        named = url.update_query_dict({"application_name": self.name})
        environment = {
            **os.environ,
            "DATABASE_URL": named.render_as_string(hide_password=False),
            "LABEL_PRINTER": str(printer_in(folder)),
        }
        with self._errors.open("wb") as errors:
            self._popen = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "sqla_durable.demo.carry_out", str(plan)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                start_new_session=True,  # Ctrl-C in the terminal is for the killer, which then kills.
            )
        self.pid = self._popen.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    @property
    def ended(self) -> bool:
        """Whether the process has ended: by itself, or killed by whomever.

        :raises DemoError: where it did not end well.
        """
        code = self._popen.poll()
        if code is not None and code not in {0, -_SIGKILL}:
            words = self._errors.read_text(errors="replace")[-_LAST_WORDS:]
            raise DemoError(f"process {self.pid} ended by itself with code {code}:\n{words}")
        return code is not None

    def freeze(self) -> None:
        """Stop every thread of the process where it is, so that this place can be looked at before the kill."""
        if sys.platform != "win32":
            self._popen.send_signal(signal.SIGSTOP)
            # Until it has stopped, or ended; which of them is left for poll() to find.
            look = os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG
            while os.waitid(os.P_PID, self.pid, look) is None:
                time.sleep(_BETWEEN_LOOKS)

    def thaw(self) -> None:
        """Let the process go on."""
        if sys.platform != "win32":
            self._popen.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """Kill the process with SIGKILL, which it cannot notice."""
        self._popen.kill()
        self._popen.wait()


def printer_in(folder: Path) -> Path:
    """Return the file that stands for the label printer."""
    return folder / "printed-labels.txt"
