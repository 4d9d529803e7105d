"""What a server is started with: agreed on by its first user, and kept in ``server.json`` for the others."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from .exc import EmbeddedError
from .folder import SOCKET_PORT

OWN_SETTINGS = frozenset({"data_directory", "listen_addresses", "port", "unix_socket_directories"})
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Options:
    """What a server is started with; ``port`` is None for a server on a socket only."""

    port: int | None
    settings: dict[str, str]

    def address(self, data: Path) -> tuple[str, str]:
        """Return the host and the port by which clients find the server of the cluster in ``data``."""
        return (_LOOPBACK, str(self.port)) if self.port else (str(data), str(SOCKET_PORT))

    def command_line(self) -> str:
        """Return the server's arguments as ``pg_ctl`` takes them: one string, which it passes to a shell."""
        own = {
            "listen_addresses": _LOOPBACK if self.port else "",
            "port": str(self.port or SOCKET_PORT),
            # "." is the cluster: a folder's own name would be read as a list and cut at its commas.
            "unix_socket_directories": "" if self.port else ".",
        }
        words = [word for name, value in (own | self.settings).items() for word in ("-c", f"{name}={value}")]
        return subprocess.list2cmdline(words) if sys.platform == "win32" else shlex.join(words)


def agree(home: Path, port: int | None, settings: Mapping[str, str] | None, *, shared: bool) -> Options:
    """Return what the server is, or will be, started with; ``shared``: others may hold its URL, which stays.

    :raises EmbeddedError: the port is taken, or the server has another port or other settings.
    """
    file = home / "server.json"
    if not shared:
        options = Options(port if port is None else _free_port(port), dict(settings or {}))
        file.write_text(json.dumps(asdict(options)))
        return options
    options = Options(**json.loads(file.read_text()))
    if port is not None and (options.port is None or port not in {0, options.port}):
        raise EmbeddedError(f"the server of {home} is in use with port={options.port}, not {port}")
    if settings is not None and dict(settings) != options.settings:
        raise EmbeddedError(f"the server of {home} is in use with the settings {options.settings}")
    return options


def _free_port(port: int) -> int:
    """Return the port itself, or any free one for 0."""
    with socket.socket() as probe:
        if sys.platform != "win32":  # as the server does: connections that wait to be forgotten do not count
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_LOOPBACK, port))
        except OSError as error:
            raise EmbeddedError(
                f"port {port} of {_LOOPBACK} is taken: pass another port=, or 0 for any free one"
            ) from error
        return int(probe.getsockname()[1])
