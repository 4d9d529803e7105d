"""Vacuum: whether it is on, whether it keeps up, and what holds it back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import Connection, text

from sqla_durable.checkup.finding import Finding, warning

_FEWEST: Final = 1000
_BEHIND: Final = 2
_IDLE: Final = timedelta(minutes=5)
_LONG: Final = timedelta(hours=1)
_SETTINGS: Final = text(
    "SELECT name, setting FROM pg_settings WHERE name IN ('autovacuum', 'track_counts', 'autovacuum_vacuum_threshold',"
    " 'autovacuum_vacuum_scale_factor', 'autovacuum_vacuum_max_threshold')"
)
_TABLES: Final = text(
    "SELECT CAST(CAST(c.oid AS regclass) AS text) AS name, greatest(reltuples, 0) AS live,"
    " coalesce(pg_stat_get_dead_tuples(c.oid), 0) AS dead,"
    " (SELECT coalesce(jsonb_object_agg(split_part(o, '=', 1), split_part(o, '=', 2)), '{}')"
    "  FROM unnest(reloptions) o) AS options"
    " FROM pg_class c WHERE relkind = 'r' AND (c.oid = to_regclass(:table)"
    "  OR c.oid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = to_regclass(:table))) ORDER BY c.oid"
)
_TRANSACTIONS: Final = text(
    "SELECT pid, coalesce(nullif(application_name, ''), usename, '') AS name, starts_with(state, 'idle') AS idle,"
    " clock_timestamp() - xact_start AS age FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
    " AND ((starts_with(state, 'idle in transaction') AND clock_timestamp() - state_change > :idle)"
    "  OR (coalesce(backend_xmin, backend_xid) IS NOT NULL AND clock_timestamp() - xact_start > :long))"
    " ORDER BY xact_start"
)
_PREPARED: Final = text(
    "SELECT gid, clock_timestamp() - prepared AS age FROM pg_prepared_xacts"
    " WHERE database = current_database() AND clock_timestamp() - prepared > :long ORDER BY prepared"
)
_SLOTS: Final = text(
    "SELECT slot_name AS name FROM pg_replication_slots WHERE NOT active AND coalesce(xmin, catalog_xmin) IS NOT NULL"
    " AND (database IS NULL OR database = current_database()) ORDER BY slot_name"
)


def vacuum(connection: Connection, tables: Iterable[str]) -> Iterator[Finding]:
    """Look at vacuuming: without it a claim slows down with every run that was carried out.

    :param tables: the quoted names of the tables, with their schemas.
    """
    settings = {row.name: row.setting for row in connection.execute(_SETTINGS)}
    for name in ("autovacuum", "track_counts"):
        if settings[name] == "off":
            yield warning(
                "autovacuum-off",
                f"{name} = off",
                "Nothing is vacuumed by itself: claims slow down with every run that was carried out.",
                f"ALTER SYSTEM SET {name} = on; SELECT pg_reload_conf()",
            )
    for table in tables:
        for row in connection.execute(_TABLES, {"table": table}).all():
            yield from _table(row, settings)
    yield from _held_back(connection)


def _table(row: Any, settings: Mapping[str, str]) -> Iterator[Finding]:
    if row.options.get("autovacuum_enabled", "on").lower() in {"off", "false", "no", "0"}:
        yield warning(
            "autovacuum-off",
            row.name,
            "This table is not vacuumed by itself: claims slow down with every run that was carried out.",
            f"ALTER TABLE {row.name} RESET (autovacuum_enabled)",
        )
    given = {**settings, **row.options}
    threshold = float(given["autovacuum_vacuum_threshold"]) + float(given["autovacuum_vacuum_scale_factor"]) * row.live
    most = float(given.get("autovacuum_vacuum_max_threshold", "-1"))  # of PostgreSQL 18
    threshold = threshold if most < 0 else min(threshold, most)
    if row.dead > max(_FEWEST, _BEHIND * threshold):
        yield warning(
            "autovacuum-behind",
            row.name,
            f"It has {row.dead} dead rows, where autovacuum begins at {threshold:.0f}: it does not keep up, or is held "
            "back. Claims slow down with them.",
            f"VACUUM (ANALYZE) {row.name}; and have autovacuum do more: ALTER TABLE {row.name} SET "
            "(autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0)",
        )


def _held_back(connection: Connection) -> Iterator[Finding]:
    """What keeps dead rows from being removed, in any table of the database."""
    ages = {"idle": _IDLE, "long": _LONG}
    for row in connection.execute(_TRANSACTIONS, ages).all():
        doing = "is idle in a transaction" if row.idle else "is in a transaction"
        yield warning(
            "long-transaction",
            f"backend {row.pid} ({row.name})",
            f"It {doing} that began {_rounded(row.age)} ago: what it may still see or has locked is not vacuumed.",
            f"SELECT pg_terminate_backend({row.pid})",
        )
    for row in connection.execute(_PREPARED, {"long": _LONG}).all():
        yield warning(
            "prepared-transaction",
            row.gid,
            f"This prepared transaction is {_rounded(row.age)} old: it keeps its locks, and holds vacuum back.",
            f"ROLLBACK PREPARED '{row.gid}', or COMMIT PREPARED, as its coordinator says",
        )
    for row in connection.execute(_SLOTS).all():
        yield warning(
            "replication-slot",
            row.name,
            "Nobody reads this replication slot: it holds vacuum back, and keeps WAL until the disk is full.",
            f"SELECT pg_drop_replication_slot('{row.name}'), unless its reader comes back",
        )


def _rounded(age: timedelta) -> timedelta:
    return timedelta(seconds=round(age.total_seconds()))
