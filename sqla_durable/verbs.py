"""The verbs on runs, once for both forms: what :class:`.Runs` and its asyncio twin call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from os import getpid
from socket import gethostname
from typing import Any, Generic, cast
from uuid import uuid4

from sqlalchemy import Connection, select
from sqlalchemy.orm import Session, with_polymorphic

from sqla_durable import claim, fence, listing, reap, receipt
from sqla_durable.caller import unproxied
from sqla_durable.codec import codec_of
from sqla_durable.exc import RunNotFound, StepReused, UsageError
from sqla_durable.execution import Ending, Outcome, carry_out
from sqla_durable.failure import Failure
from sqla_durable.ground import Sessions
from sqla_durable.heartbeat import Heartbeat
from sqla_durable.holder import Holder, stored_key
from sqla_durable.lease import Lease
from sqla_durable.listing import RunSummary
from sqla_durable.receipt import Receipt, receipt_of
from sqla_durable.rows import AnyRow, Ident, among, arguments
from sqla_durable.run import RunT
from sqla_durable.sqlstate import translated
from sqla_durable.step import Steps
from sqla_durable.store import Store


class Verbs(Generic[RunT]):
    """Everything that :class:`.Runs` can do, in terms of :class:`.Holder`.

    :param sessions: where sessions come from.
    :param run: the run class.
    :param receipt: its receipt class.
    :param owner: the holder's name; by default made of host, process and chance.
    """

    def __init__(self, sessions: Sessions, run: type[RunT], receipt: type[Any], owner: str | None) -> None:
        self.store: Store[RunT] = Store(sessions, run, receipt)
        self.runs = self.store.runs
        self.steps = Steps(self.store)
        self.heartbeat = Heartbeat(self.store)
        self._owner = owner
        self._chance = uuid4().hex[:8]

    @property
    def owner(self) -> str:
        """The name that leases of this process carry."""
        return self._owner or f"{gethostname()}:{getpid()}:{self._chance}"

    # claiming

    def claim(self, ident: object, *, run_now: bool) -> Holder[RunT] | None:
        """See :meth:`.Runs.claim`."""
        identity = self.runs.identity(ident)

        def work(session: Session, connection: Connection) -> Holder[RunT] | None:
            holder = self._claim(session, connection, identity, run_now=run_now)
            if holder is None:
                self._look(connection, identity)
            return holder

        return self.store.execute(work)

    def claim_due(self, limit: int) -> list[Holder[RunT]]:
        """See :meth:`.Runs.claim_due`."""
        _check_limit(limit)

        def work(session: Session, connection: Connection) -> list[Holder[RunT]]:
            connection.execute(self._reap, arguments(limit=limit))
            rows = connection.execute(self._claim_due, arguments(owner=self.owner, limit=limit)).all()
            return self._holders(session, connection, [self._lease(row) for row in rows])

        return self.store.execute(work)

    def hold(self, lease: Lease) -> Holder[RunT]:
        """See :meth:`.Runs.hold`."""
        self.store.check(lease)

        def work(session: Session, connection: Connection) -> Holder[RunT]:
            parameters = self.store.parameters(lease)
            self.store.held(connection, lease, lambda connection: self.store.renew.first(connection, parameters))
            return self._holders(session, connection, [lease], claimed=False)[0]

        return self.store.execute(work)

    def execute(
        self,
        target: object,
        handler: Callable[[Holder[RunT]], object],
        *,
        run_now: bool,
        on_lost: Callable[[], None] | None = None,
    ) -> Outcome:
        """See :meth:`.Runs.execute`; the target is a holder, or what :meth:`claim` takes."""
        if isinstance(target, Holder):
            holder = cast(Holder[RunT], target)
            holder.refuse_ended()

            def begin() -> None:
                holder.renew()
                handler(holder)

        else:
            taken = self._take(self.runs.identity(target), run_now=run_now)
            if isinstance(taken, Outcome):
                return taken
            holder = taken

            def begin() -> None:
                holder.refuse_lost()
                handler(holder)

        holder.left = False
        try:
            with self.heartbeat.keeping(holder, on_lost):
                return carry_out(holder, begin)
        finally:
            holder.left = True

    # reading and healing

    def get(self, ident: object, *, heal: bool) -> RunT | None:
        """See :meth:`.Runs.get`."""
        identity = self.runs.identity(ident)

        def work(session: Session, connection: Connection) -> RunT | None:
            if heal:
                connection.execute(self._heal, self.runs.parameters(identity))
            return next(iter(self._load(session, [identity]).values()), None)

        return self.store.execute(work)

    def receipts(self, ident: object) -> tuple[Receipt, ...]:
        """See :meth:`.Runs.receipts`."""
        identity = self.runs.identity(ident)
        return self.store.single(lambda connection: self._receipts(connection, identity))

    def find(self, *, limit: int, after: str | None, **conditions: Any) -> list[RunSummary]:
        """See :meth:`.Runs.find`."""
        _check_limit(limit)
        asked = listing.wanted(self.runs, **conditions)
        if after is not None:
            asked.append(listing.following(self.runs, self.store.name, after))
        statement = listing.page(self.runs, asked, limit)
        rows = self.store.single(lambda connection: connection.execute(statement).all())
        return [self._summary(row) for row in rows]

    def describe(self, ident: object) -> RunSummary | None:
        """See :meth:`.Runs.describe`."""
        parameters = self.runs.parameters(self.runs.identity(ident))
        statement = listing.one(self.runs)
        row = self.store.single(lambda connection: connection.execute(statement, parameters).one_or_none())
        return None if row is None else self._summary(row)

    def counts(self) -> dict[StrEnum, int]:
        """See :meth:`.Runs.counts`."""
        statement = listing.counts(self.runs)
        found = self.store.single(lambda connection: dict(tuple(row) for row in connection.execute(statement)))
        return {status: found.get(status, 0) for status in self.runs.lifecycle.machine.transitions}

    def heal(self, ident: object) -> bool:
        """See :meth:`.Runs.heal`."""
        parameters = self.runs.parameters(self.runs.identity(ident))
        return self.store.execute(lambda _, connection: connection.execute(self._heal, parameters).first() is not None)

    def reap(self, limit: int) -> int:
        """See :meth:`.Runs.reap`."""
        _check_limit(limit)
        parameters = arguments(limit=limit)
        return self.store.execute(lambda _, connection: len(connection.execute(self._reap, parameters).all()))

    def requeue(self, ident: object) -> bool:
        """See :meth:`.Runs.requeue`."""
        if not self.runs.lifecycle.requeue:
            raise UsageError(
                f"{self.runs.entity.__name__} names no status to requeue from; add Lifecycle(requeue={{...}})."
            )
        parameters = self.runs.parameters(self.runs.identity(ident))

        def work(_: Session, connection: Connection) -> bool:
            won = connection.execute(self._requeue, parameters).first() is not None
            if won:
                connection.execute(receipt.forget_failed(self.store.receipts), parameters)
            return won

        return self.store.execute(work)

    # in the caller's transaction

    def request_cancel(self, session: Session, ident: object) -> bool:
        """See :meth:`.Runs.request_cancel`."""
        if self.runs.lifecycle.cancelled is None:
            raise UsageError(f"{self.runs.entity.__name__} cannot be cancelled; name Lifecycle(cancelled=...).")
        identity = self.runs.identity(ident)
        session = unproxied(session)
        session.flush()
        with translated():
            connection = self.store.callers_connection(session)
            row: AnyRow = connection.execute(reap.request_cancel(self.runs), self.runs.parameters(identity)).first()
        if row is not None and (loaded := self.runs.loaded(session, row, identity)) is not None:
            self.runs.show(loaded, row._mapping)
        return row is not None

    def fence(self, session: Session, lease: Lease) -> None:
        """See :meth:`.Runs.fence`."""
        self.store.check(lease)
        parameters = {**self.runs.parameters(lease.identity), **arguments(fence=lease.fence)}
        with translated():
            self.store.held(
                self.store.callers_connection(unproxied(session)),
                lease,
                lambda connection: connection.execute(self._guard, parameters).one_or_none(),
            )

    def record(self, session: Session, lease: Lease, key: str | int, result: Any, type_: Any) -> None:
        """See :meth:`.Runs.record`."""
        self.store.check(lease)
        name = stored_key(key)
        text, _ = codec_of(type_).round_trip(result, name)
        session = unproxied(session)
        session.flush()
        with translated():
            if self.steps.record_in(self.store.callers_connection(session), lease, name, text) is None:
                run = f"{self.runs.entity.__name__} {lease.identity!r}"
                raise StepReused(f"step {name!r} of {run} has a receipt already.")

    # the parts

    def _take(self, identity: Ident, *, run_now: bool) -> Holder[RunT] | Outcome:
        def work(session: Session, connection: Connection) -> Holder[RunT] | Outcome:
            holder = self._claim(session, connection, identity, run_now=run_now)
            return self._answer(connection, identity) if holder is None else holder

        return self.store.execute(work)

    def _answer(self, connection: Connection, identity: Ident) -> Outcome:
        seen = self._look(connection, identity)
        if seen.status in self.runs.lifecycle.machine.terminal:
            failure = None if seen.error is None else Failure.from_json(seen.error)
            known = self._receipts(connection, identity)
            return Outcome(Ending.LANDED, seen.status, known, failure, replayed=True)
        held = seen.status == self.runs.lifecycle.running
        return Outcome(Ending.LOST_RACE if held else Ending.NOT_CLAIMABLE, seen.status)

    def _claim(
        self, session: Session, connection: Connection, identity: Ident, *, run_now: bool
    ) -> Holder[RunT] | None:
        key = self.runs.parameters(identity)
        connection.execute(self._heal_waiting, key)
        statement = self._claim_now if run_now else self._claim_if_due
        row = connection.execute(statement, {**key, **arguments(owner=self.owner)}).one_or_none()
        return None if row is None else self._holders(session, connection, [self._lease(row)])[0]

    def _look(self, connection: Connection, identity: Ident) -> AnyRow:
        row = connection.execute(self.store.look, self.runs.parameters(identity)).one_or_none()
        if row is None:
            raise RunNotFound(f"there is no {self.runs.entity.__name__} with the key {identity!r}.")
        return row

    def _summary(self, row: AnyRow) -> RunSummary:
        return listing.summary_of(row, self.store.name, len(self.runs.key))

    def _lease(self, row: AnyRow) -> Lease:
        *key, number, attempt = row
        return self.store.lease(tuple(key), number, attempt, self.owner)

    def _holders(
        self, session: Session, connection: Connection, leases: Sequence[Lease], *, claimed: bool = True
    ) -> list[Holder[RunT]]:
        loaded = self._load(session, [lease.identity for lease in leases])
        # A run that was claimed for the first time just now has no receipts to read.
        again = [lease.identity for lease in leases if not claimed or lease.fence > 1]
        known: dict[Ident, list[Receipt]] = {lease.identity: [] for lease in leases}
        for identity, recorded in self._receipts_of(connection, again):
            known[identity].append(recorded)
        holders: list[Holder[RunT]] = []
        for lease in leases:
            if lease.identity not in loaded:
                raise UsageError(
                    f"{self.runs.entity.__name__} {lease.identity!r} is hidden from the session, by loader criteria "
                    "for one; a run that is claimed must be visible. The claim was undone."
                )
            holders.append(Holder(self.steps, lease, loaded[lease.identity], known[lease.identity]))
        for holder in holders:
            holder.batch = tuple(holders)
        return holders

    def _load(self, session: Session, identities: Sequence[Ident]) -> dict[Ident, RunT]:
        if not identities:
            return {}
        mapper = self.runs.mapper
        # The rows are detached, where a subclass's own columns could not be loaded any more.
        whole = with_polymorphic(mapper, "*") if len(list(mapper.self_and_descendants)) > 1 else mapper
        found = session.scalars(select(whole).where(among(self.runs.key, identities))).unique().all()
        session.expunge_all()
        return {self.runs.identity(row): row for row in found}

    def _receipts(self, connection: Connection, identity: Ident) -> tuple[Receipt, ...]:
        # One run's, whatever the key in its rows: the caller's may be a value that the column's type converts.
        return tuple(known for _, known in self._receipts_of(connection, [identity]))

    def _receipts_of(self, connection: Connection, identities: Sequence[Ident]) -> Iterator[tuple[Ident, Receipt]]:
        width = len(self.runs.key)
        for row in connection.execute(receipt.of_runs(self.store.receipts, identities)) if identities else ():
            columns: Sequence[Any] = tuple(row)
            yield tuple(columns[:width]), receipt_of(columns[width:])

    # statements

    @cached_property
    def _claim_if_due(self) -> Any:
        return claim.claim_one(self.runs, run_now=False)

    @cached_property
    def _claim_now(self) -> Any:
        return claim.claim_one(self.runs, run_now=True)

    @cached_property
    def _claim_due(self) -> Any:
        return claim.claim_due(self.runs)

    @cached_property
    def _heal(self) -> Any:
        return reap.heal(self.runs, skip_locked=True)

    @cached_property
    def _heal_waiting(self) -> Any:
        return reap.heal(self.runs, skip_locked=False)

    @cached_property
    def _reap(self) -> Any:
        return reap.reap(self.runs)

    @cached_property
    def _requeue(self) -> Any:
        return reap.requeue(self.runs)

    @cached_property
    def _guard(self) -> Any:
        return fence.guard(self.runs)


def _check_limit(limit: int) -> None:
    if limit < 1:
        raise UsageError(f"limit={limit}: at least 1.")
