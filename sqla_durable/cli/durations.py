"""Durations as words: ``90s``, ``15m``, ``1h30m``, ``7d``."""

from __future__ import annotations

import re
from datetime import timedelta

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_PART = r"(\d+(?:\.\d+)?)([smhd])"


def duration(text: str) -> timedelta:
    """Read a duration.

    :raises ValueError: where it is none.
    """
    if not re.fullmatch(f"(?:{_PART})+", text, re.ASCII):
        raise ValueError(f"{text!r} is not a duration; write 90s, 15m, 2h or 7d.")
    try:
        return timedelta(seconds=sum(float(number) * _SECONDS[unit] for number, unit in re.findall(_PART, text)))
    except OverflowError as error:
        raise ValueError(f"{text!r} is too long.") from error


def rounded(length: timedelta) -> str:
    """Write a duration by its two largest units, as in ``2h 5m``; one under a minute as in ``4.2s`` or ``0.105s``."""
    seconds = length.total_seconds()
    if seconds < 0:
        return f"-{rounded(-length)}"
    if seconds < _SECONDS["m"]:
        return f"{seconds:.{3 if seconds < 1 else 1}f}".rstrip("0").rstrip(".") + "s"
    rest, parts = int(seconds), list[str]()
    for unit, size in _SECONDS.items():
        count, rest = divmod(rest, size)
        if count or parts:
            parts.append(f"{count}{unit}")
    return " ".join(part for part in parts[:2] if not part.startswith("0"))
