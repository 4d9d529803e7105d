"""A pooler before PostgreSQL that gives each transaction another backend, as PgBouncer does in transaction mode."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
from collections import deque
from contextlib import suppress

from sqlalchemy import URL

from tests.support_wire import connect_to

Message = tuple[bytes, bytes]
PID = itertools.count(900_000_000)
CANCEL_REQUEST = 80877102


def read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def receive(connection: socket.socket) -> Message:
    """Read one message: its type, and all of it as it is on the wire."""
    head = read(connection, 5)
    return head[:1], head + read(connection, int.from_bytes(head[1:], "big") - 4)


class Pooler:
    """Speaks as much of the protocol as a driver without prepared statements and pipelines needs.

    A client is told a made-up backend. Notifications are not passed on, and a cancel request is sent on to the backend
    that the client has at that time.
    """

    def __init__(self, upstream: URL) -> None:
        self._upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._free: deque[socket.socket] = deque()
        self._all: list[socket.socket] = [self._listener]
        self._keys: dict[socket.socket, bytes] = {}
        self._at_work: dict[bytes, socket.socket] = {}
        self._lock = threading.Lock()
        query = {name: value for name, value in upstream.query.items() if name not in {"host", "port"}}
        query |= {"sslmode": "disable", "gssencmode": "disable"}
        self.url = upstream.set(host="127.0.0.1", port=self._listener.getsockname()[1], query=query)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with self._lock:
            for each in self._all:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with self._lock:
                    self._all.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        backend: socket.socket | None = None
        with suppress(OSError, EOFError):
            startup = self._startup(client)
            if startup is None:
                return
            key = next(PID).to_bytes(4, "big") + b"made"
            self._greet(client, startup, key)
            while True:
                kind, message = receive(client)
                if kind == b"X":
                    break
                if backend is None:
                    backend = self._take(startup, key)
                backend.sendall(message)
                if kind in b"QS" and self._answer(client, backend) == b"I":
                    self._give_back(backend, key)
                    backend = None
        if backend is not None:
            backend.close()  # in the middle of a transaction, which is rolled back
        client.close()

    def _startup(self, client: socket.socket) -> bytes | None:
        length = read(client, 4)
        startup = length + read(client, int.from_bytes(length, "big") - 4)
        if int.from_bytes(startup[4:8], "big") != CANCEL_REQUEST:
            return startup
        with self._lock:
            backend = self._at_work.get(startup[8:16])
            real = self._keys.get(backend) if backend else None
        if real is not None:
            with connect_to(self._upstream) as canceller:
                canceller.sendall(struct.pack("!ii", 16, CANCEL_REQUEST) + real)
                canceller.recv(1)
        client.close()
        return None

    def _greet(self, client: socket.socket, startup: bytes, key: bytes) -> None:
        backend, greeting = self._connect(startup)
        for kind, message in greeting:
            client.sendall(b"K" + (4 + len(key)).to_bytes(4, "big") + key if kind == b"K" else message)
        with self._lock:
            self._free.append(backend)

    def _connect(self, startup: bytes) -> tuple[socket.socket, list[Message]]:
        backend = connect_to(self._upstream)
        backend.sendall(startup)
        greeting: list[Message] = []
        while not greeting or greeting[-1][0] != b"Z":
            greeting.append(receive(backend))
            assert greeting[-1][0] != b"E", greeting[-1][1]
        with self._lock:
            self._all.append(backend)
            self._keys[backend] = next(message for kind, message in greeting if kind == b"K")[5:]
        return backend, greeting

    def _take(self, startup: bytes, key: bytes) -> socket.socket:
        with self._lock:
            backend = self._free.popleft() if len(self._free) > 1 else None
        if backend is None:
            backend, _ = self._connect(startup)
        with self._lock:
            self._at_work[key] = backend
        return backend

    def _give_back(self, backend: socket.socket, key: bytes) -> None:
        with self._lock:
            del self._at_work[key]
            self._free.append(backend)  # at the end, so that the next transaction gets another one

    def _answer(self, client: socket.socket, backend: socket.socket) -> bytes:
        """Pass an answer on, and return what state the transaction is in after it."""
        while True:
            kind, message = receive(backend)
            if kind != b"A":
                client.sendall(message)
            if kind == b"Z":
                return message[5:6]
