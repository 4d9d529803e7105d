"""The other sides of the outbox example: a mail server and a chat service on loopback, and its worker as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email import message_from_bytes
from email.policy import default
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from aiosmtpd.smtp import SMTP
from sqlalchemy import Engine, text

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"
CUT = "cut"
"""What a mail server answers that drops the connection instead."""


@dataclass(frozen=True)
class Mail:
    """A mail as it was accepted."""

    recipient: str
    content: bytes

    @property
    def message_id(self) -> str:
        return str(message_from_bytes(self.content, policy=default)["Message-ID"])


def nothing(*_: object) -> None:
    """Answer as ever."""


class MailServer:
    """A real SMTP server. Its hooks are called in threads of their own, so they may take their time."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.reset()

    def reset(self) -> None:
        self.accepted: list[Mail] = []
        self.on_recipient: Callable[[str], str | None] = nothing
        """Called before a mail is accepted, with whom it is for; what it returns is the answer."""
        self.on_accepted: Callable[[Mail], str | None] = nothing
        """Called when a mail has been accepted, before the server says so."""
        self.farewell = "221 Bye"

    def counts(self) -> Counter[str]:
        """How often each recipient was sent a mail."""
        return Counter(mail.recipient for mail in self.accepted)

    def __enter__(self) -> Self:
        self._thread.start()
        make = partial(SMTP, self, loop=self.loop, hostname="localhost")
        starting = asyncio.run_coroutine_threadsafe(self.loop.create_server(make, "127.0.0.1", 0), self.loop)
        self._server = starting.result(10)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()

    async def _close(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.loop.shutdown_default_executor()

    async def handle_RCPT(self, server: Any, session: Any, envelope: Any, address: str, options: Any) -> str:
        answer = await self.loop.run_in_executor(None, self.on_recipient, address)
        if answer is not None:
            return answer
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        (recipient,) = envelope.rcpt_tos
        mail = Mail(recipient, envelope.content)
        self.accepted.append(mail)
        answer = await self.loop.run_in_executor(None, self.on_accepted, mail)
        if answer == CUT:
            server.transport.abort()
        return answer or "250 OK"

    async def handle_QUIT(self, server: Any, session: Any, envelope: Any) -> str:
        return self.farewell


@dataclass(frozen=True)
class Post:
    """A request as it came in."""

    room: str
    key: str
    text: str


class ChatService:
    """A real HTTP service that has one message for all requests with one ``Idempotency-Key``."""

    def __init__(self) -> None:
        chat = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                post = Post(self.path.removeprefix("/rooms/"), self.headers["Idempotency-Key"], body["text"])
                chat.posts.append(post)
                status, headers = chat.on_post(post)
                if status < 300:
                    chat.messages.setdefault(post.key, post)
                if status == 0:
                    return  # cut
                self.send_response(status)
                for name, value in {**headers, "Content-Length": "0"}.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.reset()

    def reset(self) -> None:
        self.posts: list[Post] = []
        self.messages: dict[str, Post] = {}
        self.on_post: Callable[[Post], tuple[int, dict[str, str]]] = lambda _: (201, {})
        """The status and headers of the answer; 0 takes the message and cuts the connection."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def open_transactions(engine: Engine) -> list[Any]:
    """What every other session of the database has open: a transaction, or a lock on a row or table."""
    query = text(
        "SELECT state, query FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND backend_type = 'client backend' AND xact_start IS NOT NULL"
        " UNION ALL SELECT mode, relation::text FROM pg_locks JOIN pg_database d ON d.oid = database"
        " WHERE d.datname = current_database() AND pid <> pg_backend_pid() AND locktype IN ('relation', 'tuple')"
    )
    with engine.connect() as connection:
        return list(connection.execute(query))


class Process:
    """A command of a reader's, in the folder of the examples; killed at the latest when the ``with`` block ends."""

    def __init__(self, *command: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=EXAMPLES,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), str(ROOT)]), **environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def freeze(self) -> None:
        """Stop every thread of the process where it stands, and return once the kernel has done so."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)


COMMAND_LINE = "-c", "from sqla_durable.cli import main; main()"


@contextmanager
def worker(**environment: str) -> Iterator[Process]:
    """The worker of the example, as the page starts it."""
    process = Process(*COMMAND_LINE, "worker", "outbox.worker:worker", **environment)
    try:
        yield process
    finally:
        process.kill()


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=EXAMPLES,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES), str(ROOT)]), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
