"""Says which extra to install where one is missing."""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def needing(extra: str, *, instead: str | None = None) -> Generator[None]:
    """Import what an extra of this distribution brings.

    :param extra: the extra's name, as in ``sqla_durable[demo]``.
    :param instead: what to install where the extra brings much else.
    :raises SystemExit: where an import inside fails; the message says how to install it.
    """
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package == __package__:
            raise
        # Not only missing ones: psycopg without its extra is there, and finds no libpq.
        what = f"{package} is not installed" if isinstance(error, ModuleNotFoundError) else str(error)
        sys.exit(f'{what}; run: pip install "{instead or f"sqla_durable[{extra}]"}"')
