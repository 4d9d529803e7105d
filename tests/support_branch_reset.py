"""The example of branch resets in real processes: its service, its worker, and sockets that stand in for a dead one."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import httpx
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Receipt, Runs
from sqla_durable.testing import lapse
from tests.support import DEADLINE, eventually
from tests.support_processes import _PATHS as PATHS

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
NAME = "branch_reset"


class Process:
    """Python in the folder of the examples, killed at the latest when the ``with`` block ends."""

    def __init__(self, *arguments: object, log: Path, **environment: str) -> None:
        self._command = [sys.executable, *map(str, arguments)]
        self._environment = environ(**environment)
        self._log = log

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command, cwd=EXAMPLES, env=self._environment, stdout=log, stderr=subprocess.STDOUT
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.wait(DEADLINE)

    def stop(self) -> int:
        """Tell the process to stop, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE)

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self._log.read_text()


def environ(**more: str) -> dict[str, str]:
    """The environment of a process that runs the example."""
    paths = os.pathsep.join(map(str, PATHS))
    return {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "NO_PROXY": "127.0.0.1", **more}


class Service:
    """The toy service: a real process, with a file and a port that outlive it."""

    def __init__(self, folder: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        arguments = "-m", "uvicorn", f"{NAME}.service:app", "--port", self.port, "--no-access-log"
        self._process = Process(*arguments, log=folder / "service.log", HOSTING_STATE=str(folder / "state.json"))
        self._client = httpx.Client(base_url=self.url, timeout=DEADLINE, trust_env=False)
        self.running = False

    def start(self) -> None:
        """Start it, or start it again, and wait until it answers."""
        self._process.__enter__()
        self.running = True
        eventually(self._answers, "an answer of the service")

    def kill(self) -> None:
        """End it at once, in the middle of whatever it is at."""
        if self.running:
            self._process.kill()
        self.running = False

    def close(self) -> None:
        self.kill()
        self._client.close()

    def conduct(self, project: str, **values: object) -> None:
        """Say how it is to behave towards a project from now on."""
        self._client.put(f"/conduct/{project}", json=values).raise_for_status()

    def counts(self, project: str) -> dict[str, int]:
        """How often resets of a project were issued, and asked about."""
        counted: dict[str, int] = self._client.get(f"/counts/{project}").raise_for_status().json()
        return counted

    def operations(self, project: str) -> list[dict[str, Any]]:
        """Its resets of a project."""
        listed: list[dict[str, Any]] = self._client.get(f"/projects/{project}/operations").raise_for_status().json()
        return listed

    def _answers(self) -> bool:
        assert self._process.process.poll() is None, self._process.log
        try:
            return self._client.get("/counts/nobody").is_success
        except httpx.TransportError:
            return False


class App:
    """The example's application: its tables in an empty database, its functions in this process, its worker in others.

    :param url: the database.
    :param engine: an engine on it.
    :param hosting_url: where the hosting API is.
    """

    def __init__(self, url: str, engine: Engine, hosting_url: str, folder: Path, modules: Mapping[str, ModuleType]):
        self.engine = engine
        self.hosting_url = hosting_url
        self._url = url
        self.folder = folder
        self.modules = modules
        self._models: Any = modules["models"]
        self._models.Base.metadata.create_all(engine)
        self.factory = sessionmaker(engine)
        self.runs: Runs[Any] = Runs(self.factory, self._models.Reset, self._models.ResetStep)

    def call(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Await something of the example's, and close its connections, which belong to one loop."""

        async def main() -> Any:
            try:
                return await make()
            finally:
                await self.modules["database"].engine.dispose()

        return asyncio.run(main())

    def request(self, project: str, branch: str = "main", key: str | None = None) -> int:
        """Ask for a reset; return its primary key."""
        request_reset = self.modules["request"].request_reset
        ident: int = self.call(lambda: request_reset(project, branch, key or f"{project} {branch}")).id
        return ident

    def requeue(self, ident: int) -> bool:
        return bool(self.call(lambda: self.modules["database"].resets.requeue(ident)))

    @contextmanager
    def worker(self, concurrency: int = 10, url: str | None = None) -> Iterator[Process]:
        """A worker."""
        environment = {"DATABASE_URL": self._url, "HOSTING_URL": url or self.hosting_url}
        work = f"import asyncio; from {NAME}.worker import worker; asyncio.run(worker({concurrency}).run())"
        with Process("-c", work, log=self.folder / "worker.log", **environment) as process:
            yield process

    def shell(self, command: str, **environment: str) -> str:
        """What a command of the page writes."""
        done = subprocess.run(
            command,
            shell=True,
            cwd=EXAMPLES,
            env={**environ(**environment), "PATH": f"{self._commands()}{os.pathsep}{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stderr == "", done.stderr
        return done.stdout

    def _commands(self) -> Path:
        for name, module in {"python": "", "sqla-durable": "-m sqla_durable.cli"}.items():
            file = self.folder / "bin" / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
            file.chmod(0o755)
        return self.folder / "bin"

    # looking

    def reset(self, ident: int) -> Any:
        """The run as it is committed."""
        return self.runs.get(ident, heal=False)

    def status(self, ident: int) -> str:
        return str(self.reset(ident).status.value)

    def receipt(self, ident: int) -> Receipt | None:
        """The receipt of the operation."""
        return next((each for each in self.runs.receipts(ident) if each.step == "reset"), None)

    def branch(self, project: str, name: str = "main") -> Any:
        """What the application's own table says of a branch."""
        with Session(self.engine) as session:
            return session.get_one(self._models.Branch, (project, name))

    def wait_for(self, ident: int, *statuses: str) -> None:
        """Wait until a run is in one of these statuses."""
        try:
            eventually(lambda: self.status(ident) in statuses, f"a reset that is {' or '.join(statuses)}")
        except AssertionError as error:
            error.add_note(
                f"it is {self.status(ident)}, with {self.reset(ident).error} and {self.runs.receipts(ident)}"
            )
            raise

    def wait_for_outcome(self, ident: int, outcome: str) -> None:
        """Wait until the receipt of the operation says so."""

        def said() -> bool:
            receipt = self.receipt(ident)
            return receipt is not None and receipt.outcome.value == outcome

        eventually(said, f"an operation that is {outcome}")

    def let_lapse(self, ident: int) -> None:
        """The dead worker's lease has run out."""
        eventually(self._is_rid_of_the_dead, "the end of the dead worker's backends")
        with self.factory.begin() as session:
            lapse(session, self._models.Reset, ident)

    def _is_rid_of_the_dead(self) -> bool:
        query = text(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            " AND state <> 'idle'"
        )
        with self.engine.connect() as connection:
            return connection.scalar(query) == 0


# where a request goes that nobody takes


@contextmanager
def full() -> Iterator[str]:
    """A port at which no connection comes about, and none is refused."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        while True:
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(listening.getsockname())
            if not select.select([], [client], [], 0.2)[1]:
                break
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


class Deaf:
    """A port at which requests are heard and nothing is done about them."""

    def __enter__(self) -> Self:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(DEADLINE)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._connections: list[socket.socket] = []
        return self

    def __exit__(self, *_: object) -> None:
        for each in [self._listening, *self._connections]:
            each.close()

    def hear(self) -> str:
        """Wait for a request; return its first line."""
        connection, _ = self._listening.accept()
        self._connections.append(connection)
        return connection.recv(1000).decode().splitlines()[0]
