"""One run class and its receipts on their ground: leases, and the writes that a lease allows."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Generic, TypeVar, cast

from psycopg import Binary
from sqlalchemy import Connection, Table, false, select

from sqla_durable import fence
from sqla_durable.exc import Cancelled, ConfigurationError, LostLease, TimedOut, UsageError
from sqla_durable.ground import Ground, Sessions
from sqla_durable.lease import Lease
from sqla_durable.prepared import Prepared
from sqla_durable.receipt import ReceiptMixin, ReceiptRows
from sqla_durable.rows import AnyRow, AnySelect, Ident, arguments
from sqla_durable.run import RunMixin, RunRows, RunT
from sqla_durable.signal import SignalMixin, SignalRows
from sqla_durable.sqlstate import retry_outages
from sqla_durable.stop import Stop, reasons
from sqla_durable.waits_for import WaitMixin

ValueT = TypeVar("ValueT")
RESUMPTIONS = 3
_PATIENCE = timedelta(seconds=5)


class Store(Ground, Generic[RunT]):
    """The ground that :class:`.Runs` and its asyncio twin stand on.

    :param sessions: where sessions come from.
    :param run: the run class.
    :param receipt: its receipt class.
    :param signals: its signal class, if it has one.
    :raises ConfigurationError: where they do not belong together.
    """

    def __init__(
        self,
        sessions: Sessions,
        run: type[RunT],
        receipt: type[Any],
        signals: type[Any] | None = None,
    ) -> None:
        mapped = cast(object, run)
        if not (isinstance(mapped, type) and issubclass(mapped, RunMixin) and "__mapper__" in vars(mapped)):
            raise ConfigurationError(f"{mapped!r} is not a mapped class with RunMixin.")
        if not _belongs(receipt, ReceiptMixin, run):
            raise ConfigurationError(
                f"{receipt!r} does not hold the receipts of {run.__name__}; declare it as "
                f"class {run.__name__}Step(ReceiptMixin[{run.__name__}], Base)."
            )
        self.runs: RunRows[RunT] = run.__rows__()
        self.runs.tells = lambda: self.notifies
        self.receipts = ReceiptRows(receipt)
        if signals is not None and not _belongs(signals, SignalMixin, run):
            raise ConfigurationError(
                f"{signals!r} does not hold the signals of {run.__name__}; declare it as "
                f"class {run.__name__}Signal(SignalMixin[{run.__name__}], Base)."
            )
        self._signals = None if signals is None else SignalRows(signals)
        mappers = [rows.mapper for rows in (self.runs, self.receipts, self._signals) if rows is not None]
        super().__init__(sessions, *mappers)

    @property
    def signals(self) -> SignalRows:
        """The rows of the signal class.

        :raises ConfigurationError: where there is none.
        """
        if self._signals is None:
            run = self.runs.entity.__name__
            mixin = "" if issubclass(self.runs.entity, WaitMixin) else f"add WaitMixin to {run}, "
            raise ConfigurationError(
                f"{run} has no table for signals: {mixin}declare class {run}Signal(SignalMixin[{run}], Base), and pass "
                f"it as signals={run}Signal."
            )
        return self._signals

    def refuse_lacking(self) -> None:
        """Refuse a database that lacks a column of these tables, by a statement on each that reads no row.

        :raises SchemaMismatch: where it does.
        """
        for rows in (self.runs, self.receipts, self._signals):
            if rows is not None:
                self.single(partial(Connection.execute, statement=select(*rows.table.columns).where(false())))

    def lease(self, identity: Ident, fence: int, attempt: int, owner: str) -> Lease:
        """Return the lease that a claim issued."""
        return Lease(self.name, identity, fence, attempt, owner)

    @cached_property
    def name(self) -> str:
        """The table's name with the schema it is in for this engine, so that no lease passes from tenant to tenant."""
        schema = self.schema_of(self.runs.table)
        return self.runs.table.name if schema is None else f"{schema}.{self.runs.table.name}"

    def schema_of(self, table: Table) -> str | None:
        """Return the schema that a table is in for this engine."""
        schema: str | None = self.schema_translate_map.get(table.schema, table.schema)
        return schema

    def check(self, lease: Lease) -> None:
        """Refuse a lease on a run of another table."""
        if lease.run != self.name:
            raise UsageError(f"{lease!r} is a lease on {lease.run}, not on {self.name}.")

    def parameters(self, lease: Lease, **more: Any) -> dict[str, Any]:
        """Return what a prepared statement of :mod:`.fence` is executed with."""
        key = self._key_parameters(lease.identity)
        return {**key, **arguments(fence=lease.fence, owner=lease.owner, **more)}

    def key_values(self, identity: Ident) -> tuple[Any, ...]:
        """Return the values of a run's primary key as the driver is given them."""
        values = self._key_parameters(identity).values()
        return tuple(value.obj if isinstance(value, Binary) else value for value in values)

    @cached_property
    def _key_parameters(self) -> Callable[[Ident], dict[str, Any]]:
        return self.runs.driver_parameters(self.engine.dialect)

    def write(self, lease: Lease, write: Callable[[Connection], AnyRow | None]) -> AnyRow:
        """Make one fenced write in its own transaction.

        :raises LostLease: where the lease is lost.
        :raises Cancelled: where the write is refused because of a cancel request.
        :raises TimedOut: where it is refused because the run's deadline has passed.
        """
        row = self.single(write)
        return self.execute(lambda _, connection: self.held(connection, lease, write)) if row is None else row

    def patiently(self, write: Callable[[], ValueT]) -> ValueT:
        """Make a write of what has happened outside again while the database is away; see :func:`.retry_outages`."""
        return retry_outages(write, self.sessions.sleep, min(_PATIENCE, self.runs.lifecycle.lease))

    def held(self, connection: Connection, lease: Lease, write: Callable[[Connection], AnyRow | None]) -> AnyRow:
        """Make one fenced write in this transaction, taking the run back first where it was reaped but not claimed."""
        for _ in range(RESUMPTIONS):
            if (row := write(connection)) is not None:
                return row
            # Whatever this returns, the write is made again: another of this holder's writes may have resumed the run
            # while this one waited for it, and a reaper may come in between.
            self.resume.first(connection, self.parameters(lease))
        if (row := write(connection)) is not None:
            return row
        raise self.lost(connection, lease)

    def lost(self, connection: Connection, lease: Lease) -> LostLease | Cancelled | TimedOut:
        """Return the error for a write that matched no row, saying who holds the run now."""
        row = connection.execute(self.look, self.runs.parameters(lease.identity)).one_or_none()
        name = f"{self.runs.entity.__name__} {lease.identity!r}"
        if row is None:
            return LostLease(f"{name} is gone; fence {lease.fence} may write nothing any more.", lease)
        if row.fence == lease.fence and (told := self._refusal(row, lease)) is not None:
            return self.stopped(lease, told)
        holder = f", held by {row.lease_owner}" if row.lease_owner else ""
        return LostLease(
            f"{name} is {row.status.value} under fence {row.fence}{holder}; the holder with fence {lease.fence} may "
            "write nothing any more.",
            lease,
        )

    def _refusal(self, row: AnyRow, lease: Lease) -> Stop | None:
        """Return why a write of this very holder was refused, if that is why."""
        runs = self.runs
        if runs.deadline is not None and row.status == runs.lifecycle.timed_out:
            return Stop.TIMED_OUT  # landed by the holder's heartbeat
        if row.lease_owner != lease.owner:
            return None
        requested, late = row.cancel_requested_at is not None, runs.deadline is not None and row.out_of_time
        # The deadline of a run that is still held may have been moved since the write was refused for it.
        late = late or (runs.deadline is not None and row.status == runs.lifecycle.running)
        return reasons(runs, requested=requested, late=late)

    def stopped(self, lease: Lease, told: Stop) -> Cancelled | TimedOut:
        """Return the error for a run that has to stop."""
        name = f"{self.runs.entity.__name__} {lease.identity!r}"
        if told is Stop.TIMED_OUT:
            return TimedOut(f"{name} ran past its deadline; it can only land as timed out now.", lease)
        return Cancelled(f"{name} was asked to be cancelled; it can only land as cancelled now.", lease)

    @cached_property
    def resume(self) -> Prepared:
        """See :func:`.fence.resume`."""
        return self.prepare(fence.resume(self.runs), "fence")

    @cached_property
    def renew(self) -> Prepared:
        """See :func:`.fence.renew`."""
        return self.prepare(fence.renew(self.runs), "fence")

    @cached_property
    def beat(self) -> Prepared:
        """See :func:`.fence.beat`."""
        left = () if self.runs.deadline is None else ("time_left",)
        return self.prepare(fence.beat(self.runs), "cancel_requested_at", "held", "renewed", *left)

    @cached_property
    def look(self) -> AnySelect:
        """See :func:`.fence.look`."""
        return fence.look(self.runs)


def _belongs(entity: object, mixin: type[Any], run: type[Any]) -> bool:
    """Whether a class is made of ``mixin[run]``, or of a class that ``run`` inherits from."""
    if not isinstance(entity, type) or not issubclass(entity, mixin):
        return False
    of: type[Any] | None = getattr(entity, "__run__", None)
    return of is not None and issubclass(run, of)
