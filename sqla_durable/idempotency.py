"""The key that makes a repeated call harmless: one and the same for a step, whichever process makes it, and when."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from typing import Any, Final
from uuid import UUID, uuid5

from sqla_durable.exc import UsageError

NAMESPACE: Final = UUID("6b1f8a52-3c0e-4d7b-9a64-1d2f70c5e8b3")
"""Never to be changed: with another one, calls under way would be repeated under another key."""


def idempotency_key(run: str, identity: Sequence[object], created_at: datetime, step: str) -> str:
    """Return the idempotency key of a step.

    :param run: the name of the run's table, with its schema.
    :param identity: the run's primary key, as the driver is given it.
    :param created_at: when the run was inserted. Databases with the same tables, one for each tenant, have runs with
     the same primary keys; these differ in the instant.
    :param step: the step's key, as stored.
    :raises UsageError: for a primary key of a type that has no text of its own.
    """
    parts = [run, *(canonical(value) for value in identity), canonical(created_at), step]
    # As JSON, in which no two lists have one text.
    return str(uuid5(NAMESPACE, json.dumps(parts, separators=(",", ":"))))


def canonical(value: object) -> str:
    """Return the text of a part of a primary key, which depends neither on a session's settings nor on a machine.

    :raises UsageError: for a value of another type than those of :data:`_TEXTS`.
    """
    for kind, text in _TEXTS.items():
        if isinstance(value, kind):
            return text(value)
    raise UsageError(
        f"{value!r}, a {type(value).__qualname__}, is part of the run's primary key, and has no text that is the same "
        "everywhere; make an idempotency key of your own and hand it to an external step."
    )


def _decimal(value: Decimal) -> str:
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _instant(value: datetime) -> str:
    # Loaded in the session's time zone, whichever that is.
    return (value if value.tzinfo is None else value.astimezone(UTC)).isoformat(timespec="microseconds")


_TEXTS: dict[type, Callable[[Any], str]] = {
    bool: lambda value: "true" if value else "false",  # before int, as datetime is before date
    int: int.__repr__,
    str: str.__str__,
    UUID: str,
    Decimal: _decimal,
    float: float.__repr__,
    **dict.fromkeys([bytes, bytearray, memoryview], lambda value: bytes(value).hex()),
    datetime: _instant,
    date: date.isoformat,
    time: lambda value: value.isoformat(timespec="microseconds"),
    timedelta: lambda value: str(value // timedelta(microseconds=1)),
    **dict.fromkeys([IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network], str),
}
