"""Programs of :mod:`tests.programs` as real processes: talked to in lines of JSON, really killed and really frozen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import sqla_durable
from tests.support import DEADLINE, Background

_PATHS = [Path(__file__).parents[1], Path(sqla_durable.__file__).parents[1]]


class Program:
    """A running ``python -m tests.programs.<name>``, killed at the latest when the ``with`` block ends."""

    def __init__(self, name: str, *arguments: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, _PATHS))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", f"tests.programs.{name}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdout.close()
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def send(self, value: object) -> None:
        """Write one line to the program."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(value) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        """Wait for the program's next line."""
        assert self.process.stdout is not None
        line = Background(self.process.stdout.readline).result()
        assert line, f"the program ended with {self.process.wait(DEADLINE)} instead of saying something"
        return json.loads(line)

    def ask(self, value: object) -> Any:
        """Write a line and wait for the answer."""
        self.send(value)
        return self.receive()

    def freeze(self) -> None:
        """Stop every thread of the program where it stands, and return once the kernel has done so."""
        self.process.send_signal(signal.SIGSTOP)
        self.wait_until_frozen()

    def wait_until_frozen(self) -> None:
        """Return once the kernel has stopped the program, by whatever signal."""
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        """Let a frozen program go on as if no time had passed."""
        self.process.send_signal(signal.SIGCONT)

    def interrupt(self) -> None:
        """Do what Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """End the program at once; a frozen one, too."""
        self.process.kill()
        self.process.wait(DEADLINE)

    def wait(self) -> int:
        """Wait for the program's own end, and return its exit code, or less than 0 for the signal that ended it."""
        return self.process.wait(DEADLINE)


def say(value: object) -> None:
    """In a program: write one line to the test."""
    # The end of the line with the rest: print() writes it on its own, and threads come in between.
    print(json.dumps(value) + "\n", end="", flush=True)


def hear() -> Any:
    """In a program: wait for the test's next line."""
    return json.loads(sys.stdin.readline())
