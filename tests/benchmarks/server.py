"""The server to measure on: the one that ``DATABASE_URL`` names, or an embedded one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from sqlalchemy import URL, make_url

from sqla_durable import embedded


@contextmanager
def database(settings: Mapping[str, str] | None = None) -> Iterator[URL]:
    """A database of the benchmark's own; the settings are those of an embedded server."""
    if given := os.environ.get("DATABASE_URL"):
        yield make_url(given)
        return
    with embedded.start(settings=settings or {}) as server:
        yield make_url(server.url)
