"""Primary keys that sort by time: version 7 UUIDs."""

from __future__ import annotations

import os
import time
from typing import Final
from uuid import UUID

_VERSION: Final = 0x7 << 76
_VARIANT: Final = 0b10 << 62
_STEPS: Final = 1 << 12


def uuid7() -> UUID:
    """Return a new version 7 UUID (`RFC 9562 <https://www.rfc-editor.org/rfc/rfc9562#name-uuid-version-7>`_).

    Its first 48 bits are the milliseconds since 1970 on this machine's clock, and the 12 after the version a fraction
    of one. So keys that are made one after another lie beside each other in an index, and in the partition of their
    month. Nothing is decided by that clock: one that is wrong chooses another partition.
    """
    # No state, so that threads and forked processes need none in common.
    milliseconds, rest = divmod(time.time_ns(), 1_000_000)
    fraction = rest * _STEPS // 1_000_000
    chance = int.from_bytes(os.urandom(8), "big") >> 2
    return UUID(int=(milliseconds & 0xFFFF_FFFF_FFFF) << 80 | _VERSION | fraction << 64 | _VARIANT | chance)
