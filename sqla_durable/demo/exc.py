"""What ends the demo early."""

from __future__ import annotations


class DemoError(Exception):
    """The demo cannot go on; the message says why and what to do."""
