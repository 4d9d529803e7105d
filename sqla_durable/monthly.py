"""Monthly partitions: which column says the month of a row, and the SQL that makes the partition of a month.

A table's partition key must be part of its primary key, and each statement should name it, or PostgreSQL looks into
every partition. Both hold for the key of a run, also in the tables of what belongs to it; so a key that begins with
its instant serves, and no table needs a column for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Any, Final, Literal
from uuid import UUID, uuid4
from weakref import WeakKeyDictionary

from sqlalchemy import Column, Date, DateTime, Table, Uuid, event

from sqla_durable.exc import ConfigurationError
from sqla_durable.plain_sql import ddl, qualified, quoted, shortened
from sqla_durable.rows import Rows

_RANDOM: Final = "gen_random_uuid", "uuid_generate_v4", "uuidv4"
COPIED: Final = "DEFAULTS", "CONSTRAINTS", "GENERATED", "STORAGE", "COMPRESSION"

Kind = Literal["uuid", "timestamptz", "date"]


@dataclass(frozen=True, slots=True)
class Monthly:
    """One partition for each month in which runs were made (UTC), as in ``__partition__ = Monthly()``.

    It goes on a receipt class, or on a run class. The month is that of a column of the run's primary key: a version 7
    UUID (:func:`.uuid7`), a ``DateTime(timezone=True)`` or a ``Date``.

    :param column: the attribute of the run class, where several of its key could be meant.
    """

    column: str | None = None


@dataclass(frozen=True, slots=True)
class Partitioned:
    """How a table is partitioned.

    :param table: the table.
    :param column: the column that says the month.
    :param kind: what is in it.
    :param fillfactor: that of each partition; the partitioned table itself has no pages.
    :param guard: a deferred foreign key of each partition to itself: its name, its columns, and those referred to.
    """

    table: Table
    column: Column[Any]
    kind: Kind
    fillfactor: int | None = None
    guard: tuple[str, Sequence[Column[Any]], Sequence[Column[Any]]] | None = None

    def create_default(self, schema: str | None) -> list[str]:
        """The SQL of the partition for rows of every month that has none: without one, such a row is refused."""
        name = qualified(schema, self.default_name)
        storage = self._storage()
        return [f"CREATE TABLE {name} PARTITION OF {self.parent(schema)} DEFAULT{storage}", *self._guarding(name)]

    def create_month(self, month: date, schema: str | None, watching: Sequence[str] = ()) -> list[str]:
        """The SQL of the partition of a month; a row that is in the default one already moves, if it may.

        ``CREATE TABLE ... PARTITION OF`` would lock out every reader of the table, where ``ATTACH`` locks out nobody.

        :param month: its first day.
        :param watching: the triggers that would take the move for a deletion.
        """
        name, default = qualified(schema, self.month_name(month)), qualified(schema, self.default_name)
        low, high = self.bounds(month)
        like = " ".join(f"INCLUDING {each}" for each in COPIED)
        statements = [f"CREATE TABLE {name} (LIKE {self.parent(schema)} {like}){self._storage()}"]
        if self.guard is not None:
            within = f"{self.column_name} >= {low} AND {self.column_name} < {high}"
            columns = ", ".join(quoted(each.name) for each in self.table.columns if each.computed is None)
            moved = f"WITH moved AS (DELETE FROM {default} WHERE {within} RETURNING *)"  # noqa: S608 - names are quoted
            statements += [
                f"LOCK TABLE {default} IN ACCESS EXCLUSIVE MODE",
                # Or the table could not be altered before what the DELETE defers has been checked.
                f"SET CONSTRAINTS {qualified(schema, self.guard[0])} IMMEDIATE",
                *(f"ALTER TABLE {default} DISABLE TRIGGER {quoted(trigger)}" for trigger in watching),
                f"{moved} INSERT INTO {name} ({columns}) SELECT {columns} FROM moved",  # noqa: S608 - as above
                *(f"ALTER TABLE {default} ENABLE TRIGGER {quoted(trigger)}" for trigger in watching),
            ]
        attach = f"ALTER TABLE {self.parent(schema)} ATTACH PARTITION {name} FOR VALUES FROM ({low}) TO ({high})"
        return [*statements, attach, *self._guarding(name)]

    def bounds(self, month: date) -> tuple[str, str]:
        """The least value of a month, and that of the next one, as SQL."""
        return self._least(month), self._least(following(month))

    def parent(self, schema: str | None) -> str:
        """The name of the table, in SQL."""
        return qualified(schema, self.table.name)

    @property
    def column_name(self) -> str:
        """The name of the column, in SQL."""
        return quoted(self.column.name)

    @property
    def default_name(self) -> str:
        """The name of the partition of every month that has none of its own."""
        return shortened(self.table.name, "_default")

    def month_name(self, month: date) -> str:
        """The name of the partition of a month."""
        return shortened(self.table.name, f"_{month:%Y_%m}")

    def _least(self, month: date) -> str:
        if self.kind == "uuid":
            milliseconds = int(datetime(month.year, month.month, 1, tzinfo=UTC).timestamp()) * 1000
            return f"'{UUID(int=milliseconds << 80)}'"
        return f"'{month:%Y-%m-%d}'" if self.kind == "date" else f"'{month:%Y-%m-%d} 00:00:00 UTC'"

    def _storage(self) -> str:
        return "" if self.fillfactor is None else f" WITH (fillfactor = {self.fillfactor})"

    def _guarding(self, partition: str) -> list[str]:
        if self.guard is None:
            return []
        name, columns, referred = self.guard
        here, there = (", ".join(quoted(column.name) for column in each) for each in (columns, referred))
        key = f"FOREIGN KEY ({here}) REFERENCES {partition} ({there}) DEFERRABLE INITIALLY DEFERRED"
        return [f"ALTER TABLE {partition} ADD CONSTRAINT {quoted(name)} {key}"]


# Not in the table's info, which Alembic writes into migrations as it is.
_partitioned: WeakKeyDictionary[Table, Partitioned] = WeakKeyDictionary()


def configure(
    rows: Rows[Any],
    runs: Rows[Any],
    run_key: Sequence[Column[Any]],
    *,
    fillfactor: int | None = None,
    guard: tuple[Sequence[Column[Any]], Sequence[Column[Any]]] | None = None,
) -> None:
    """Partition the table of a class whose ``__partition__`` says so.

    :param runs: the rows of the run class.
    :param run_key: the columns of the table that the run's key is in.
    :param fillfactor: that of each partition.
    :param guard: the columns of a foreign key that each partition has to itself, and those referred to.
    :raises ConfigurationError: where no column of the run's key says the month.
    """
    cls, table = rows.entity, rows.table
    partition: object = getattr(cls, "__partition__", None)
    if partition is None:
        return
    if not isinstance(partition, Monthly):
        raise ConfigurationError(f"{cls.__name__}.__partition__ is {partition!r}; write __partition__ = Monthly().")
    if table.dialect_options["postgresql"].get("partition_by") is not None:
        raise ConfigurationError(f"{cls.__name__} has a postgresql_partition_by beside its __partition__; remove it.")
    at, kind = _position(cls, runs, partition)
    column = run_key[at]
    # A fixed name: it is in no metadata, so that no naming convention applies, and Alembic does not look for it.
    named = None if guard is None else (shortened(f"fk_{table.name}", "_unsealed"), *guard)
    partitioned = Partitioned(table, column, kind, fillfactor, named)
    table.dialect_kwargs["postgresql_partition_by"] = f"RANGE ({partitioned.column_name})".replace("%", "%%")
    _partitioned[table] = partitioned

    def create(target: Table, connection: Any, **_: Any) -> None:
        for statement in partitioned.create_default(connection.schema_for_object(target)):
            connection.execute(ddl(statement))

    event.listen(table, "after_create", create)


def partitioned(table: Table) -> Partitioned | None:
    """Return how a table is partitioned, if it is."""
    return _partitioned.get(table)


def following(month: date) -> date:
    """Return the first day of the next month."""
    return date(month.year + month.month // 12, month.month % 12 + 1, 1)


def _position(cls: type[Any], runs: Rows[Any], partition: Monthly) -> tuple[int, Kind]:
    """Return which column of the run's key says the month, and what is in it."""
    able: dict[str, tuple[int, Kind]] = {}
    for at, column in enumerate(runs.key):
        if (kind := _kind(column)) is not None:
            able[runs.attribute(column)] = at, kind
    run, key = runs.entity.__name__, ", ".join(runs.attribute(column) for column in runs.key)
    if partition.column is not None:
        able = {name: found for name, found in able.items() if name == partition.column}
    if not able:
        lacking = "no column says" if partition.column is None else f"{partition.column} does not say"
        raise ConfigurationError(
            f"{cls.__name__} cannot be partitioned by {partition!r}: the primary key of {run} is ({key}), in which "
            f"{lacking} when the run was made. Give it a version 7 UUID (a Uuid column with default=uuid7), or a "
            "DateTime(timezone=True) or Date column."
        )
    if len(able) > 1:
        raise ConfigurationError(
            f"{cls.__name__}: {', '.join(able)} of {run} could all say its month; name one, as in "
            f'Monthly("{next(iter(able))}").'
        )
    return next(iter(able.values()))


def _kind(column: Column[Any]) -> Kind | None:
    if isinstance(column.type, Uuid) and column.type.native_uuid:
        return None if _is_random(column) else "uuid"
    if isinstance(column.type, DateTime):
        return "timestamptz" if column.type.timezone else None
    return "date" if isinstance(column.type, Date) else None


def _is_random(column: Column[Any]) -> bool:
    """Whether a UUID is of version 4, as far as its default tells."""
    default: Any = getattr(column.default, "arg", None)
    on_server: Any = getattr(column.server_default, "arg", "")
    return getattr(default, "__wrapped__", default) is uuid4 or any(name in str(on_server) for name in _RANDOM)
