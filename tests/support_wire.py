"""A proxy in front of PostgreSQL that counts round trips where they happen: on the wire."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sqlalchemy import URL

READY_FOR_QUERY = b"Z"


def connect_to(url: URL) -> socket.socket:
    """Open a connection to the server of a URL, by whichever kind of socket it names."""

    def first(name: str, otherwise: object) -> str:
        value = url.query.get(name, otherwise)
        return str(value[0] if isinstance(value, tuple) else value)

    host, port = first("host", url.host), first("port", url.port or 5432)
    if not host.startswith("/"):
        return socket.create_connection((host, int(port)))
    server = socket.socket(socket.AF_UNIX)
    server.connect(f"{host}/.s.PGSQL.{port}")
    return server


class Count:
    """How many round trips there were while it was taken."""

    def __init__(self) -> None:
        self.round_trips = 0


class Wire:
    """Passes everything on, and counts each ``ReadyForQuery``: the server's word that a client's wait is over.

    The message format is that of the `Frontend/Backend Protocol
    <https://www.postgresql.org/docs/current/protocol-message-formats.html>`_.
    """

    def __init__(self, upstream: URL) -> None:
        self._upstream = upstream
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self._lock = threading.Lock()
        self._counts: list[Count] = []
        port = self._listener.getsockname()[1]
        query = {**upstream.query, "sslmode": "disable", "gssencmode": "disable"}
        for name in ("host", "port"):
            query.pop(name, None)
        self.url = upstream.set(host="127.0.0.1", port=port, query=query)
        threading.Thread(target=self._accept, daemon=True).start()

    @contextmanager
    def counting(self) -> Iterator[Count]:
        """Count the round trips of every connection meanwhile."""
        count = Count()
        with self._lock:
            self._counts.append(count)
        yield count
        with self._lock:
            self._counts.remove(count)

    def close(self) -> None:
        with self._lock:
            for each in self._sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = connect_to(self._upstream)
                with self._lock:
                    self._sockets += [client, server]
                for source, target, counted in ((client, server, False), (server, client, True)):
                    threading.Thread(target=self._pump, args=(source, target, counted), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, counted: bool) -> None:
        unread = b""
        with suppress(OSError):
            while data := source.recv(65536):
                if counted:
                    unread = self._count(unread + data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def _count(self, data: bytes) -> bytes:
        while len(data) >= 5 and len(data) > (length := int.from_bytes(data[1:5], "big")):
            if data[:1] == READY_FOR_QUERY:
                with self._lock:
                    for count in self._counts:
                        count.round_trips += 1
            data = data[1 + length :]
        return data
