"""The server and the way to it: its version, what it does with a commit, its clock, its timeouts, and a pooler."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import Connection, text

from sqla_durable.checkup.finding import Code, Finding, error, warning
from sqla_durable.checkup.target import Expected
from sqla_durable.ground import OLDEST_SERVER
from sqla_durable.run import RunMixin

_SETTINGS: Final = text("SELECT name, setting FROM pg_settings WHERE name = ANY(:names)")
_NAMES: Final = (
    *("synchronous_commit", "fsync", "full_page_writes", "session_replication_role", "transaction_read_only"),
    *("statement_timeout", "lock_timeout", "transaction_timeout"),
    *("idle_in_transaction_session_timeout", "idle_session_timeout"),
)
_CLOCK: Final = text("SELECT extract(epoch FROM clock_timestamp())")
_READ_ONLY: Final = text("SELECT pg_is_in_recovery()")
_APART: Final = timedelta(seconds=5)
_SHORTEST_STATEMENT: Final = timedelta(seconds=1)
_SHORTEST_WAIT: Final = timedelta(seconds=1)
_SHORTEST_IDLE: Final = timedelta(seconds=60)


def is_old(connection: Connection) -> bool:
    """Whether the server is older than this library supports."""
    return (connection.dialect.server_version_info or OLDEST_SERVER) < OLDEST_SERVER


def too_old(connection: Connection) -> Finding:
    """Return what is found of such a server, of which nothing else is asked."""
    found = ".".join(map(str, connection.dialect.server_version_info or ()))
    return error(
        "old-server",
        f"PostgreSQL {found}",
        f"The library needs PostgreSQL {OLDEST_SERVER[0]} or later, and refuses this one; nothing else was looked at.",
        "pg_upgrade the server",
    )


def takes_writes(connection: Connection) -> bool:
    """Whether it does: without them nothing of the library works, and tables cannot be compared."""
    read_only = _settings(connection)["transaction_read_only"] == "on"
    return not read_only and not connection.execute(_READ_ONLY).scalar_one()


def read_only() -> Finding:
    """Return what is found of a server that takes none."""
    return error(
        "read-only",
        "the server",
        "It takes no writes here: it is a standby, or default_transaction_read_only is on. Tables were not compared.",
        "Use the URL of the primary, or ALTER ROLE ... SET default_transaction_read_only = off",
    )


def server(connection: Connection, expected: Iterable[Expected]) -> Iterator[Finding]:
    """Look at the settings that this connection has, and at the clock."""
    settings = _settings(connection)
    yield from _durability(settings)
    yield from _timeouts(settings, expected)
    yield from _clock(connection)


def pooler(connection: Connection, pids: Iterable[int]) -> Iterator[Finding]:
    """Tell of a pooler between this process and the server.

    :param pids: which backends did transactions of this one connection.
    """
    driver: Any = connection.connection.driver_connection
    there = {*pids, connection.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()}
    if there == {driver.info.backend_pid}:
        return
    mode = (
        "It gave transactions of one connection to several backends"
        if len(there) > 1
        else "Whether it pools transactions cannot be told from here"
    )
    prepares = driver.prepare_threshold is not None
    yield warning(
        "pooler",
        "a pooler before the server",
        f"{mode}. Notifications are not passed on, so workers only poll"
        + ("; and statements that are prepared may be unknown to the next backend." if prepares else "."),
        'create_engine(url, connect_args={"prepare_threshold": None}), unless the pooler keeps prepared statements'
        if prepares
        else "Connect workers to the server itself, or let them poll: Worker(..., listen=False)",
    )


def _settings(connection: Connection) -> Mapping[str, str]:
    return {row.name: row.setting for row in connection.execute(_SETTINGS, {"names": list(_NAMES)})}


def _durability(settings: Mapping[str, str]) -> Iterator[Finding]:
    if settings["synchronous_commit"] == "off":
        yield error(
            "synchronous-commit",
            "synchronous_commit = off",
            "A crash of the server loses receipts that were reported as committed: what they stand for is done again.",
            "ALTER SYSTEM SET synchronous_commit = on; SELECT pg_reload_conf()",
        )
    at_a_crash: list[tuple[Code, str, str]] = [
        ("fsync", "fsync", "a crash of the machine may leave the database broken"),
        ("full-page-writes", "full_page_writes", "a crash of the machine may leave pages half written"),
    ]
    for code, name, so in at_a_crash:
        if settings[name] == "off":
            yield warning(
                code,
                f"{name} = off",
                f"With it {so}, and receipts with it.",
                f"ALTER SYSTEM SET {name} = on; SELECT pg_reload_conf()",
            )
    if (role := settings["session_replication_role"]) != "origin":
        yield error(
            "replication-role",
            f"session_replication_role = {role}",
            "Foreign keys and guards are not enforced for this user: a receipt that is not sealed could be committed.",
            "ALTER ROLE ... RESET session_replication_role",
        )


def _timeouts(settings: Mapping[str, str], expected: Iterable[Expected]) -> Iterator[Finding]:
    for name, shortest, so in (
        ("statement_timeout", _SHORTEST_STATEMENT, "statements of bodies, and claims on a busy server, are cut off"),
        ("lock_timeout", _SHORTEST_WAIT, "what waits for a step of the same run to end gives up"),
        ("idle_session_timeout", _SHORTEST_IDLE, "connections that listen, or wait in a pool, are cut off"),
    ):
        yield from _short(settings, name, shortest, f"With it {so}.")
    limits = {
        cls: limit
        for each in expected
        for cls in each.entities
        if issubclass(cls, RunMixin) and (limit := cls.__lifecycle__.idle_limit) is not None
    }
    if limits:
        cls, longest = max(limits.items(), key=lambda item: item[1])
        for name in ("idle_in_transaction_session_timeout", "transaction_timeout"):
            so = f"It cuts steps off before Lifecycle(step_timeout=...) of {cls.__name__}, {longest}, does."
            yield from _short(settings, name, longest, so)


def _short(settings: Mapping[str, str], name: str, shortest: timedelta, so: str) -> Iterator[Finding]:
    value = timedelta(milliseconds=int(settings.get(name, "0")))  # transaction_timeout is of PostgreSQL 17
    if timedelta(0) < value < shortest:
        yield warning(
            "short-timeout",
            f"{name} = {value}",
            so,
            f"ALTER ROLE ... SET {name} = '{shortest.total_seconds():g}s'",
        )


def _clock(connection: Connection) -> Iterator[Finding]:
    before = time.time()
    there = float(connection.execute(_CLOCK).scalar_one())
    apart = max(there - time.time(), before - there)
    if apart > _APART.total_seconds():
        side = "ahead of" if there > before else "behind"
        yield warning(
            "clock",
            "the server's clock",
            f"It is {timedelta(seconds=round(apart))} {side} that of this machine. It decides nothing, as only the "
            "server's counts; but times in logs will not match, and a server that is set right moves every lease.",
            "timedatectl set-ntp true, on whichever is wrong",
        )
