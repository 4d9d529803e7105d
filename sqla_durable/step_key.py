"""How the key of a step is stored."""

from __future__ import annotations

from typing import cast

from sqla_durable.exc import UsageError
from sqla_durable.receipt import KEY_LENGTH


def stored_key(key: str | int) -> str:
    """Return a step's key as it is stored.

    :raises UsageError: for a key that is not a str or int, is too long, or could be mistaken for another.
    """
    if isinstance(key, bool) or not isinstance(cast(object, key), str | int):
        raise UsageError(f"step key {key!r} is a {type(key).__name__}; a key is a str or an int.")
    # Of the plain type, as a member of an enumeration has a str() of its own.
    name = str.__str__(key) if isinstance(key, str) else int.__repr__(key)
    if isinstance(key, str) and (key.isdecimal() or (key[:1] == "-" and key[1:].isdecimal())):
        raise UsageError(f"step key {key!r} is digits only, which is how an int is stored; use the int {key}.")
    if not 0 < len(name) <= KEY_LENGTH or not name.isprintable():
        raise UsageError(f"step key {name!r}: from 1 to {KEY_LENGTH} printable characters.")
    return name
