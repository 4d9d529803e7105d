"""Partitions in operation: created ahead, and dropped when everything in them is over.

Each function is given the caller's session and works in its transaction. What changes a table waits for locks, and
everything else waits behind it; so it gives up after a while, with nothing done.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from sqlalchemy import Column, ColumnElement, func, literal_column, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session, class_mapper, scoped_session

from sqla_durable import clock
from sqla_durable.caller import require_postgresql, unproxied
from sqla_durable.exc import TransactionConflict, UsageError
from sqla_durable.guard import deletion_triggers
from sqla_durable.mapping import root_table
from sqla_durable.monthly import Kind, Partitioned, following, partitioned
from sqla_durable.owned import OwnedRows
from sqla_durable.plain_sql import ddl, qualified
from sqla_durable.run import RunRows
from sqla_durable.sqlstate import FOREIGN_KEY_VIOLATION, RESTRICT_VIOLATION, sqlstate_of, translated

LOCK_TIMEOUT: Final = timedelta(seconds=5)
_LOCK_NOT_AVAILABLE: Final = "55P03"

_LISTED: Final = r"""
SELECT name, is_default, {since} AS since, {until} AS until, low, high
  FROM (SELECT child.relname AS name, bound = 'DEFAULT' AS is_default,
               substring(bound FROM $$FROM \('([^']*)'\)$$) AS low, substring(bound FROM $$TO \('([^']*)'\)$$) AS high
          FROM pg_catalog.pg_inherits
          JOIN pg_catalog.pg_class AS child ON child.oid = inhrelid
         CROSS JOIN LATERAL pg_catalog.pg_get_expr(child.relpartbound, child.oid) AS bound
         WHERE inhparent = CAST(:parent AS regclass)) AS partition
 ORDER BY NOT is_default, since NULLS FIRST, until NULLS FIRST, name
"""
# Bounds are text, which PostgreSQL prints by the settings that it also reads it by.
_READ: Final[Mapping[Kind, str]] = {
    "uuid": "to_timestamp(CAST(CAST('x' || left(replace({0}, '-', ''), 12) AS bit(48)) AS bigint) / 1000.0)",
    "timestamptz": "CAST({0} AS timestamptz)",
    "date": "CAST(CAST({0} AS date) AS timestamp) AT TIME ZONE 'UTC'",
}
_ROW_BY_ROW: Final = "enable_hashjoin", "enable_mergejoin", "enable_seqscan"


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition of a table.

    :param name: its name as a table, without the schema.
    :param since: the instant from which on runs were made that it holds; None where there is none.
    :param until: the instant before which they were made; None where there is none.
    :param is_default: whether it holds every run whose month has no partition.
    """

    name: str
    since: datetime | None
    until: datetime | None
    is_default: bool = False


@dataclass(frozen=True, slots=True)
class PartitionsCreated:
    """What :func:`create_partitions` did.

    :param created: the partitions that it created, in order of their months.
    :param occupied: the first days of the months that could have none, since runs of theirs are in the default one.
    """

    created: tuple[Partition, ...]
    occupied: tuple[date, ...]


@dataclass(frozen=True, slots=True)
class PartitionKept:
    """A partition that is old enough to be dropped, and why it was not.

    :param partition: the partition.
    :param live: how many runs of its months are not terminal.
    :param requeueable: how many could be requeued, and would then do again what its receipts say is done.
    :param referenced_by: the table whose rows refer to its runs, if that is the reason.
    """

    partition: Partition
    live: int = 0
    requeueable: int = 0
    referenced_by: str | None = None


@dataclass(frozen=True, slots=True)
class PartitionsDropped:
    """What :func:`drop_partitions` did.

    :param dropped: the partitions that it dropped, the oldest first.
    :param kept: those that are old enough and stay.
    """

    dropped: tuple[Partition, ...]
    kept: tuple[PartitionKept, ...]


def partition_sql(entity: type[Any], first: date, months: int = 1) -> list[str]:
    """Return the SQL that creates partitions, for a migration or for somebody else to execute in one transaction.

    Receipts of those months that are in the default partition move along.

    :param entity: a receipt class or run class with ``__partition__``.
    :param first: a day of the first month.
    :param months: how many months.
    :raises UsageError: where the class is not partitioned.
    """
    parts = _partitioned(entity)
    schema, watching = parts.table.schema, deletion_triggers(parts.table)
    return [each for month in _months(first, months) for each in parts.create_month(month, schema, watching)]


def partitions_of(session: Session | scoped_session[Any], entity: type[Any]) -> list[Partition]:
    """Return the partitions that a table has: the default one, then the oldest first.

    :param session: the caller's session.
    :param entity: a receipt class or run class with ``__partition__``.
    :raises UsageError: where the class is not partitioned.
    """
    return [each.partition for each in _Open(session, entity).listed()]


def create_partitions(
    session: Session | scoped_session[Any],
    entity: type[Any],
    months: int = 3,
    *,
    lock_timeout: timedelta = LOCK_TIMEOUT,
) -> PartitionsCreated:
    """Create the partitions of this month and of some to come; those that are there already stay as they are.

    The months are counted on the database's clock. Receipts of such a month that are in the default partition move;
    runs cannot, since what refers to them would be lost.

    :param session: the caller's session, in whose transaction it is done.
    :param entity: a receipt class or run class with ``__partition__``.
    :param months: how many months ahead, besides the present one.
    :param lock_timeout: for how long to wait for each lock; it holds for the rest of the transaction.
    :raises UsageError: where the class is not partitioned.
    :raises TransactionConflict: where a lock was not to be had in that time; roll back and do it again later.
    """
    table = _Open(session, entity)
    with table.changing(lock_timeout):
        # Two of these wait for each other, and nothing else waits for them.
        table.send(f"LOCK TABLE {table.name} IN SHARE UPDATE EXCLUSIVE MODE")
        there = table.listed()
        missing = [month for month in _months(table.today(), months + 1) if not any(each.has(month) for each in there)]
        occupied = table.occupied(missing)
        missing = [month for month in missing if month not in occupied]
        watching = deletion_triggers(table.parts.table)
        for month in missing:
            table.send(*table.parts.create_month(month, table.schema, watching))
        created = [each.partition for each in table.listed() if any(each.has(month) for month in missing)]
    return PartitionsCreated(tuple(created), tuple(occupied))


def drop_partitions(
    session: Session | scoped_session[Any],
    entity: type[Any],
    older_than: timedelta,
    *,
    lock_timeout: timedelta = LOCK_TIMEOUT,
) -> PartitionsDropped:
    """Drop the partitions of months that ended long enough ago, and in which nothing is left to do.

    A month is kept in which a run is not terminal, or could be requeued and would do its steps a second time. Dropping
    receipts leaves their runs as they are. Where the run table is partitioned too, the month of both is dropped, and
    only a run that is not terminal keeps it.

    :param session: the caller's session, in whose transaction it is done.
    :param entity: a receipt class with ``__partition__``, or a run class whose receipts are not partitioned.
    :param older_than: how long ago the month must have ended, on the database's clock.
    :param lock_timeout: for how long to wait for each lock; it holds for the rest of the transaction.
    :raises UsageError: where the class is not partitioned, or ``older_than`` is negative.
    :raises TransactionConflict: where a lock was not to be had in that time; roll back and do it again later.
    """
    if older_than < timedelta(0):
        raise UsageError(f"older_than={older_than!r}: how long ago a month ended is not negative.")
    table = _Open(session, entity)
    dropped: list[Partition] = []
    kept: list[PartitionKept] = []
    with table.changing(lock_timeout):
        for each in table.ended(older_than):
            reason = _drop(table, each)
            if reason is None:
                dropped.append(each.partition)
            else:
                kept.append(reason)
    return PartitionsDropped(tuple(dropped), tuple(kept))


def _drop(table: _Open, each: _Listed) -> PartitionKept | None:
    """Drop a partition, with that of its runs; or return what keeps it."""
    # Before the lock too: what is kept anyway should have nobody wait.
    reason = table.unfinished(each)
    if reason is None:
        table.send(f"LOCK TABLE {table.name} IN ACCESS EXCLUSIVE MODE")
        reason = table.unfinished(each)
    if reason is not None:
        return reason
    try:
        with table.connection.begin_nested():
            table.drop(each)
    except IntegrityError as error:
        if sqlstate_of(error) not in {FOREIGN_KEY_VIOLATION, RESTRICT_VIOLATION}:
            raise
        diagnosis: Any = getattr(error.orig, "diag", None)
        return PartitionKept(each.partition, referenced_by=str(diagnosis.table_name))
    return None


@dataclass(frozen=True, slots=True)
class _Listed:
    """A partition with its bounds, as PostgreSQL prints them."""

    partition: Partition
    low: str | None
    high: str | None

    def has(self, month: date) -> bool:
        """Whether a part of a month is in it, by its bounds."""
        since, until = (datetime(day.year, day.month, 1, tzinfo=UTC) for day in (month, following(month)))
        mine = self.partition
        begins, ends = mine.since is None or mine.since < until, mine.until is None or mine.until > since
        return not mine.is_default and begins and ends

    def holds(self, column: Column[Any]) -> list[ColumnElement[bool]]:
        """The conditions that a value is within its bounds."""
        low, high = (None if end is None else literal_column(f"'{end}'", column.type) for end in (self.low, self.high))
        return [*([] if low is None else [column >= low]), *([] if high is None else [column < high])]


class _Open:
    """A partitioned table, in the caller's transaction."""

    def __init__(self, session: Session | scoped_session[Any], entity: type[Any]) -> None:
        self.parts = _partitioned(entity)
        mapper = class_mapper(entity, configure=False)
        self._session = unproxied(session)
        self.connection = self._session.connection(bind_arguments={"mapper": mapper})
        require_postgresql(self.connection)
        self.schema = self.connection.schema_for_object(self.parts.table)
        self.name = self.parts.parent(self.schema)
        self.holds_runs = not hasattr(entity, "__run__")
        run: type[Any] = entity if self.holds_runs else entity.__run__
        self._runs: RunRows[Any] = RunRows(class_mapper(run, configure=False).base_mapper.class_)
        self._key = self.parts.column if self.holds_runs else self._key_of_run(entity)
        is_partitioned = not self.holds_runs and partitioned(self._runs.table) is not None
        self.beside = _Open(session, self._runs.entity) if is_partitioned else None
        """The run table, if it is partitioned beside its receipts."""

    def _key_of_run(self, entity: type[Any]) -> Column[Any]:
        owned = OwnedRows(entity)
        return owned.runs.key[owned.run_key.index(self.parts.column)]

    @contextmanager
    def changing(self, lock_timeout: timedelta) -> Generator[None, None, None]:
        """Wait for locks no longer than so, and raise errors of ours."""
        milliseconds = max(1, round(lock_timeout.total_seconds() * 1000))
        with translated(), self._told_of_locks(lock_timeout):
            self._refuse_snapshot()
            self.connection.execute(select(func.set_config("lock_timeout", f"{milliseconds}ms", True)))  # noqa: FBT003 - SQL
            yield

    def _refuse_snapshot(self) -> None:
        level = str(self.connection.execute(text("SHOW transaction_isolation")).scalar_one())
        if level != "read committed":
            raise UsageError(
                f"the transaction is {level.upper()}, so it does not see what others wrote to {self.name} before it "
                "had its lock; use a session whose engine has isolation_level='READ COMMITTED'."
            )

    @contextmanager
    def _told_of_locks(self, lock_timeout: timedelta) -> Generator[None, None, None]:
        try:
            yield
        except DBAPIError as error:
            if sqlstate_of(error) != _LOCK_NOT_AVAILABLE:
                raise
            raise TransactionConflict(
                f"no lock on {self.name} was to be had within {lock_timeout}: a transaction that uses it, or the run "
                "table, is long. Nothing was changed; roll back, and do it again later."
            ) from error

    def send(self, *statements: str) -> None:
        """Execute statements as they are."""
        for statement in statements:
            self.connection.execute(ddl(statement))

    def today(self) -> date:
        """The day on the database's clock (UTC)."""
        now: datetime = self.connection.execute(select(clock.now())).scalar_one()
        return now.astimezone(UTC).date()

    def listed(self) -> list[_Listed]:
        """The partitions: the default one, then the oldest first."""
        read = _READ[self.parts.kind]
        listing = text(_LISTED.format(since=read.format("low"), until=read.format("high")))
        rows = self.connection.execute(listing, {"parent": self.name}).all()
        return [
            _Listed(Partition(row.name, row.since, row.until, bool(row.is_default)), row.low, row.high) for row in rows
        ]

    def ended(self, ago: timedelta) -> list[_Listed]:
        """The partitions whose months ended so long ago, the oldest first."""
        at: datetime = self.connection.execute(select(clock.now() - clock.interval(ago))).scalar_one()
        return [each for each in self.listed() if each.partition.until is not None and each.partition.until <= at]

    def occupied(self, months: Sequence[date]) -> list[date]:
        """The months whose rows in the default partition keep them from a partition of their own: runs cannot move."""
        if not self.holds_runs or not months:
            return []
        default = qualified(self.schema, self.parts.default_name)
        self.send(f"LOCK TABLE {default} IN ACCESS EXCLUSIVE MODE")
        return [month for month in months if self._any_in(default, month)]

    def _any_in(self, table: str, month: date) -> bool:
        column, (low, high) = self.parts.column_name, self.parts.bounds(month)
        within = f"{column} >= {low} AND {column} < {high}"
        asked: ColumnElement[bool] = literal_column(f"EXISTS (SELECT FROM {table} WHERE {within})")
        return bool(self.connection.execute(select(asked)).scalar_one())

    def unfinished(self, each: _Listed) -> PartitionKept | None:
        """What keeps a partition: runs that are not terminal, or will do again what their lost receipts say is done."""
        runs = self._runs
        again = runs.status.in_([runs.constant(status) for status in runs.lifecycle.requeue])
        counted = select(func.count().filter(runs.in_flight()), func.count().filter(again)).select_from(runs.table)
        live, requeueable = self.connection.execute(counted.where(*each.holds(self._key))).one()
        go_along = self.holds_runs or self.beside is not None
        kept = live or (requeueable and not go_along)
        return PartitionKept(each.partition, live, requeueable) if kept else None

    def drop(self, each: _Listed) -> None:
        """Drop a partition, and then that of the same runs where their table has one."""
        if self.holds_runs:
            self._detach(each)
        self.send(f"DROP TABLE {self.qualified(each)}")
        for other in [] if self.beside is None else self.beside.listed():
            if self.beside is not None and (other.low, other.high) == (each.low, each.high):
                self.beside.drop(other)

    def _detach(self, each: _Listed) -> None:
        """Take a partition of runs out of the table: none can be dropped while a foreign key refers to the table."""
        # PostgreSQL looks for rows that refer to it. It would read all of theirs, where hardly any can be left.
        before = {name: self._set(name, "off") for name in _ROW_BY_ROW}
        self.send(f"ALTER TABLE {self.name} DETACH PARTITION {self.qualified(each)}")
        for name, value in before.items():
            self._set(name, value)

    def _set(self, name: str, value: str) -> str:
        current = str(self.connection.execute(select(func.current_setting(name))).scalar_one())
        self.connection.execute(select(func.set_config(name, value, True)))  # noqa: FBT003 - SQL - in this transaction only
        return current

    def qualified(self, each: _Listed) -> str:
        """The name of a partition, in SQL."""
        return qualified(self.schema, each.partition.name)


def _partitioned(entity: type[Any]) -> Partitioned:
    parts = partitioned(root_table(class_mapper(entity, configure=False)))
    if parts is None:
        raise UsageError(f"{entity.__name__} is not partitioned; write __partition__ = Monthly() in it.")
    return parts


def _months(first: date, count: int) -> list[date]:
    if count < 1:
        raise UsageError(f"{count} months: at least the present one.")
    months = [first.replace(day=1)]
    while len(months) < count:
        months.append(following(months[-1]))
    return months
