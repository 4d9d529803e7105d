"""Claiming runs: the statements of :mod:`.claim` and :mod:`.reap` executed, and the holders that they make."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property, partial
from os import getpid
from socket import gethostname
from typing import Any, Generic, TypeVar
from uuid import uuid4

from sqlalchemy import Column, Connection
from sqlalchemy.orm import Session

from sqla_durable import claim, reap
from sqla_durable.exc import ConfigurationError, RetryableError, UsageError
from sqla_durable.holder import Holder
from sqla_durable.landing import Landings
from sqla_durable.lease import Lease
from sqla_durable.loading import Loading
from sqla_durable.prepared import Loader, Prepared
from sqla_durable.reading import Reading
from sqla_durable.receipt import Receipt
from sqla_durable.rows import AnyRow, AnySelect, Ident, arguments
from sqla_durable.run import RunT
from sqla_durable.step import Steps
from sqla_durable.store import Store

OtherT = TypeVar("OtherT")
_LIMITS = 64
_Values = Mapping[Column[Any], Any]
ClaimedRow = tuple[_Values, Callable[[], _Values]]
"""The library's own columns of a row that was claimed, and what loads them all."""
Claimed = tuple[int, list[ClaimedRow]]
"""How many runs were reaped, and the rows of those that were claimed."""


class Claims(Generic[RunT]):
    """Claims the runs of one store, one by its key or those that are due.

    :param store: whose runs these are.
    :param reading: reads them.
    :param owner: the holder's name; by default made of host, process and chance.
    """

    def __init__(self, store: Store[RunT], reading: Reading[RunT], owner: str | None) -> None:
        self.store = store
        self.runs = store.runs
        self.steps = Steps(store)
        self.landings = Landings(store)
        self._reading = reading
        self._prepared: dict[int, Prepared] = {}
        self._owner = owner
        self._host = gethostname()
        self._chance = uuid4().hex[:8]
        self.soon: float | None = None
        """In how many seconds a due run may be claimed that could not be yet, as the last claim has seen it."""

    @property
    def owner(self) -> str:
        """The name that leases of this process carry."""
        return self._owner or f"{self._host}:{getpid()}:{self._chance}"

    @property
    def isolation(self) -> str | None:
        """The isolation level that a claim by key needs; None for the engine's."""
        return None

    def check(self) -> None:
        """Refuse runs that something else claims.

        :raises ConfigurationError: naming it.
        """
        if self.runs.claimed_by is not None:
            raise ConfigurationError(
                f"{self.runs.entity.__name__} holds the runs of functions, and Runs knows neither those nor their "
                f"limits; carry them out by {self.runs.claimed_by}. Runs may read, reap, requeue and cancel them."
            )

    def terms(self) -> dict[str, Any]:
        """What a claim is executed with, besides a key."""
        return arguments(owner=self.owner)

    def one(
        self, identity: Ident, otherwise: Callable[[Connection], OtherT], *, run_now: bool
    ) -> Holder[RunT] | OtherT:
        """Claim one run, having healed it; see :meth:`.Runs.claim`.

        :param otherwise: called in the same transaction where the run cannot be claimed.
        """
        self.check()

        def work(session: Session, connection: Connection) -> Holder[RunT] | OtherT:
            key = self.runs.parameters(identity)
            connection.execute(self._heal, key)
            row = self._claim_one(connection, key, run_now=run_now)
            if row is not None:
                return self._holders(session, connection, [self._lease(row)])[0]
            if self.runs.lifecycle.expired is not None:
                connection.execute(self._expire, key)
            return otherwise(connection)

        return self.store.execute(work, isolation=self.isolation)

    def due(self, limit: int) -> list[Holder[RunT]]:
        """Claim up to ``limit`` due runs; see :meth:`.Runs.claim_due`."""
        self.check()
        if not self._loading.plain:
            return self.store.execute(partial(self._claim_in_transaction, limit))
        sent = time.monotonic()
        claimed = self._claim_rows(
            limit, lambda limit: self.store.single(lambda connection: self._claim_once(connection, limit), fit=True)
        )
        return self._plain_holders(claimed, sent)

    def held(self, lease: Lease) -> Holder[RunT]:
        """Return the holder of a lease that was issued elsewhere, having renewed it; see :meth:`.Runs.hold`."""
        self.store.check(lease)

        def work(session: Session, connection: Connection) -> Holder[RunT]:
            parameters = self.store.parameters(lease)
            self.store.held(connection, lease, lambda connection: self.store.renew.first(connection, parameters))
            return self._holders(session, connection, [lease], claimed=False)[0]

        return self.store.execute(work)

    # the parts

    def _claim_one(self, connection: Connection, key: dict[str, Any], *, run_now: bool) -> AnyRow | None:
        statement = self._claim_now if run_now else self._claim_if_due
        return connection.execute(statement, {**key, **self.terms()}).one_or_none()

    def _claim_in_transaction(self, limit: int, session: Session, connection: Connection) -> list[Holder[RunT]]:
        claimed = self._claim_rows(limit, lambda limit: self._claim_once(connection, limit))
        return self._holders(session, connection, [self._lease_of(values) for values, _ in claimed])

    def _claim_rows(self, limit: int, claim_once: Callable[[int], Claimed]) -> list[ClaimedRow]:
        """Claim what is due, and what was reaped on the way and is due again."""
        claimed: list[ClaimedRow] = []
        while True:
            try:
                reaped, more = claim_once(limit - len(claimed))
            except RetryableError:
                if not claimed:
                    raise
                return claimed  # as they are committed
            claimed += more
            if not reaped or len(claimed) == limit:
                return claimed

    def _claim_once(self, connection: Connection, limit: int) -> Claimed:
        """Return how many runs were reaped, and the rows of those that were claimed.

        Of a row only the library's own columns are loaded at once: a value of the user's that its type refuses is for
        that one run's handler to meet, and not for all that were claimed with it.
        """
        return self._claimed(self._claim_due(limit), connection, self.terms())

    def _claimed(self, statement: Prepared, connection: Connection, terms: dict[str, Any]) -> Claimed:
        rows = statement.rows(connection, terms)
        found = rows if rows[0][self._fence_at] is not None else ()
        types = statement.types[1:]
        return rows[0][0], [(self._own(row[1:], types), partial(self._loader.load, row[1:], types)) for row in found]

    def _own(self, row: Sequence[Any], types: Sequence[Any]) -> _Values:
        at, loader = self._own_loader
        return loader.load([row[position] for position in at], [types[position] for position in at])

    def _plain_holders(self, claimed: Sequence[ClaimedRow], sent: float) -> list[Holder[RunT]]:
        """Return the holders of claims that have committed, of rows that are all there is to an object.

        :param sent: when the claim was sent, of :func:`time.monotonic`.
        """
        leases = [self._lease_of(values) for values, _ in claimed]
        again = [lease.identity for lease in leases if _has_receipts(lease)]
        known = self.store.single(lambda connection: self._reading.known(connection, again)) if again else {}
        holders = _batch(
            self._holder(
                lease,
                partial(self._loading.instance, load),
                known,
                values[self.runs.cancel_requested_at],
                values[self.runs.created_at],
                None if self.runs.max_duration is None else values[self.runs.max_duration],
            )
            for lease, (values, load) in zip(leases, claimed, strict=True)
        )
        for holder in holders:
            holder.claimed_at = sent
        return holders

    def _holders(
        self, session: Session, connection: Connection, leases: Sequence[Lease], *, claimed: bool = True
    ) -> list[Holder[RunT]]:
        loaded = self._reading.load(session, [lease.identity for lease in leases])
        again = [lease.identity for lease in leases if not claimed or _has_receipts(lease)]
        known = self._reading.known(connection, again)
        for lease in leases:
            if lease.identity not in loaded:
                raise UsageError(
                    f"{self.runs.entity.__name__} {lease.identity!r} is hidden from the session, by loader criteria "
                    "for one; a run that is claimed must be visible. The claim was undone."
                )
        return _batch(
            self._holder(
                lease,
                partial(loaded.__getitem__, lease.identity),
                known,
                row.cancel_requested_at,
                vars(row).get("created_at"),
                self._time_left(row, claimed=claimed),
            )
            for lease, row in ((lease, loaded[lease.identity]) for lease in leases)
        )

    def _holder(
        self,
        lease: Lease,
        make: Callable[[], RunT],
        known: Mapping[Ident, list[Receipt]],
        cancel_requested_at: object,
        created_at: object,
        max_duration: timedelta | None,
    ) -> Holder[RunT]:
        return Holder(
            self.steps,
            self.landings,
            lease,
            make,
            known.get(lease.identity, ()),
            cancel_requested=cancel_requested_at is not None,
            created_at=created_at,
            max_duration=max_duration,
        )

    def _time_left(self, row: RunT, *, claimed: bool) -> timedelta | None:
        """How much time a run has, as far as can be said here; none where only the database can say."""
        if self.runs.max_duration is None:
            return None
        unknown = timedelta(0)
        return vars(row).get(self.runs.attribute(self.runs.max_duration), unknown) if claimed else unknown

    def _lease(self, row: AnyRow) -> Lease:
        *key, number, attempt = row
        return self.store.lease(tuple(key), number, attempt, self.owner)

    def _lease_of(self, values: _Values) -> Lease:
        identity = tuple(values[column] for column in self.runs.key)
        return self.store.lease(identity, values[self.runs.fence], values[self.runs.attempts], self.owner)

    # statements

    @cached_property
    def _claim_if_due(self) -> Any:
        return claim.claim_one(self.runs, run_now=False)

    @cached_property
    def _claim_now(self) -> Any:
        return claim.claim_one(self.runs, run_now=True)

    def _claim_due(self, limit: int) -> Prepared:
        """See :func:`.claim.claim_due`; compiled once for each limit, and no more often than a worker has slots."""
        return self._prepare(self._prepared, limit, partial(claim.claim_due, self.runs))

    def _prepare(self, known: dict[int, Prepared], limit: int, make: Callable[[int], AnySelect]) -> Prepared:
        if limit not in known:
            if len(known) == _LIMITS:
                known.clear()
            known[limit] = self.store.prepare(make(limit))
        return known[limit]

    @cached_property
    def _heal(self) -> Any:
        return reap.heal(self.runs, skip_locked=False)

    @cached_property
    def _expire(self) -> Any:
        return reap.expire_one(self.runs)

    @cached_property
    def _loader(self) -> Loader:
        return Loader(list(self.runs.table.columns), self.store.engine.dialect)

    @cached_property
    def _own_loader(self) -> tuple[list[int], Loader]:
        runs = self.runs
        columns = [*runs.key, runs.fence, runs.attempts, runs.cancel_requested_at, runs.created_at]
        if runs.max_duration is not None:
            columns.append(runs.max_duration)
        every = list(runs.table.columns)
        return [every.index(column) for column in columns], Loader(columns, self.store.engine.dialect)

    @cached_property
    def _fence_at(self) -> int:
        return 1 + list(self.runs.table.columns).index(self.runs.fence)

    @cached_property
    def _loading(self) -> Loading[RunT]:
        return Loading(self.runs, self.store.sessions.plain())


def _has_receipts(lease: Lease) -> bool:
    """Whether a run that was just claimed may have receipts to read; one claimed for the first time has none."""
    return lease.fence > 1


def _batch(holders: Iterable[Holder[RunT]]) -> list[Holder[RunT]]:
    """Have the leases of all these runs kept alive while one of them is carried out."""
    batch = tuple(holders)
    for holder in batch:
        holder.batch = batch
    return list(batch)
