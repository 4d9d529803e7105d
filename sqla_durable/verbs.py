"""The verbs on runs, once for both forms: what :class:`.Runs` and its asyncio twin call."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cached_property, partial
from os import getpid
from socket import gethostname
from typing import Any, Generic, cast
from uuid import uuid4

from sqlalchemy import Column, Connection, select
from sqlalchemy.orm import Session, with_polymorphic

from sqla_durable import claim, fence, intent, listing, reap, receipt
from sqla_durable.caller import unproxied
from sqla_durable.codec import codec_of
from sqla_durable.exc import RetryableError, RunInFlight, RunNotFound, StepReused, UsageError
from sqla_durable.execution import Ending, Outcome, carry_out, finished
from sqla_durable.failure import Failure
from sqla_durable.ground import Sessions
from sqla_durable.heartbeat import Heartbeat
from sqla_durable.holder import Holder, stored_key
from sqla_durable.in_flight import occupied, refusing_occupied, rival
from sqla_durable.landing import Landings
from sqla_durable.lease import Lease
from sqla_durable.listing import RunSummary
from sqla_durable.loading import Loading
from sqla_durable.prepared import Loader, Prepared
from sqla_durable.receipt import Receipt, receipt_of
from sqla_durable.rows import AnyRow, Ident, among, arguments
from sqla_durable.run import RunT
from sqla_durable.sqlstate import translated
from sqla_durable.start import Start
from sqla_durable.step import Steps
from sqla_durable.store import Store

_LIMITS = 64
_Values = Mapping[Column[Any], Any]
_Row = tuple[_Values, Callable[[], _Values]]
_Claimed = tuple[int, list[_Row]]


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
        self.landings = Landings(self.store)
        self.heartbeat = Heartbeat(self.store)
        self._claims: dict[int, Prepared] = {}
        self._owner = owner
        self._host = gethostname()
        self._chance = uuid4().hex[:8]

    @property
    def owner(self) -> str:
        """The name that leases of this process carry."""
        return self._owner or f"{self._host}:{getpid()}:{self._chance}"

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
        if not self._loading.plain:
            return self.store.execute(partial(self._claim_in_transaction, limit))
        sent = time.monotonic()
        claimed = self._claim_rows(
            limit, lambda limit: self.store.single(lambda connection: self._claim_once(connection, limit), fit=True)
        )
        leases = [self._lease_of(values) for values, _ in claimed]
        again = [lease.identity for lease in leases if _has_receipts(lease)]
        known = self.store.single(lambda connection: self._known(connection, again)) if again else {}
        holders = _batch(
            self._holder(
                lease,
                partial(self._loading.instance, load),
                known,
                values[self.runs.cancel_requested_at],
                values[self.runs.created_at],
            )
            for lease, (values, load) in zip(leases, claimed, strict=True)
        )
        for holder in holders:
            holder.claimed_at = sent
        return holders

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
        run_now: bool = False,
        at_once: bool = False,
        on_lost: Callable[[], None] | None = None,
    ) -> Outcome:
        """See :meth:`.Runs.execute`; the target is a holder, or what :meth:`claim` takes.

        :param at_once: as for :meth:`begin`.
        """
        if isinstance(target, Holder):
            holder = cast(Holder[RunT], target)
            outcome = self.begin(holder, handler, at_once=at_once, on_lost=on_lost)
        else:
            taken = self._take(self.runs.identity(target), run_now=run_now)
            if isinstance(taken, Outcome):
                return taken
            holder = taken
            outcome = self._begin(holder, holder.refuse_lost, handler, on_lost)
        return self.conclude(holder) if outcome is None else outcome

    def begin(
        self,
        holder: Holder[RunT],
        handler: Callable[[Holder[RunT]], object],
        *,
        at_once: bool = False,
        on_lost: Callable[[], None] | None = None,
    ) -> Outcome | None:
        """Carry a claimed run out as far as its landing as done; None where that is yet to be made, and concluded.

        :param at_once: whether it was claimed for this very call, and is fenced again only where that is no longer a
         matter of the same moment.
        """
        holder.refuse_ended()
        fresh = at_once and holder.was_just_claimed()
        return self._begin(holder, holder.refuse_lost if fresh else holder.renew, handler, on_lost)

    def conclude(self, holder: Holder[RunT], unknown: RetryableError | None = None) -> Outcome:
        """Land a run that :meth:`begin` has left to be landed, unless it has been; its lease is kept no longer.

        :param unknown: as for :func:`.finished`.
        """
        try:
            return finished(holder, unknown)
        finally:
            self._leave(holder)

    def _begin(
        self,
        holder: Holder[RunT],
        check: Callable[[], None],
        handler: Callable[[Holder[RunT]], object],
        on_lost: Callable[[], None] | None,
    ) -> Outcome | None:
        def begin() -> None:
            check()
            handler(holder)

        holder.left = False
        self.heartbeat.keep(holder, on_lost)
        outcome: Outcome | None = None
        kept = False
        try:
            outcome = carry_out(holder, begin)
            kept = outcome is None
        finally:
            if not kept:
                self._leave(holder)
        return outcome

    def _leave(self, holder: Holder[RunT]) -> None:
        self.heartbeat.leave(holder)
        holder.left = True

    # reading and healing

    def get(self, ident: object, *, heal: bool) -> RunT | None:
        """See :meth:`.Runs.get`."""
        identity = self.runs.identity(ident)

        def work(session: Session, connection: Connection) -> RunT | None:
            if heal:
                self._mend(connection, self.runs.parameters(identity))
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
        return self.store.execute(lambda _, connection: self._mend(connection, parameters))

    def reap(self, limit: int) -> int:
        """See :meth:`.Runs.reap`."""
        _check_limit(limit)
        return self.store.execute(lambda _, connection: self._sweep(connection, limit))

    def requeue(self, ident: object) -> bool:
        """See :meth:`.Runs.requeue`."""
        if not self.runs.lifecycle.requeue:
            raise UsageError(
                f"{self.runs.entity.__name__} names no status to requeue from; add Lifecycle(requeue={{...}})."
            )
        identity = self.runs.identity(ident)
        parameters = self.runs.parameters(identity)

        def work(_: Session, connection: Connection) -> bool:
            with refusing_occupied(self.runs):
                won = connection.execute(self._requeue, parameters).first() is not None
            if won:
                connection.execute(receipt.forget_failed(self.store.receipts), parameters)
            return won

        try:
            return self.store.execute(work)
        except RunInFlight as error:
            holder = self.store.execute(lambda _, connection: rival(self.runs, connection, identity))
            raise occupied(self.runs, holder) from error

    # in the caller's transaction

    def start(self, session: Session, key: str | None, values: Mapping[str, Any]) -> RunT:
        """See :meth:`.Runs.start`."""
        session = unproxied(session)
        session.flush()
        with translated():
            return Start(self.runs, session, self.store.callers_connection(session), key, values).run()

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

    def attach_ids(self, session: Session, ident: object, key: str | int, ids: Any, type_: Any) -> bool:
        """See :meth:`.Runs.attach_ids`."""
        name = stored_key(key)
        text, _ = codec_of(type_).round_trip(ids, name)
        return self._say(session, ident, self._attach_ids, step=name, ids=text)

    def never_issued(self, session: Session, ident: object, key: str | int) -> bool:
        """See :meth:`.Runs.never_issued`."""
        return self._say(session, ident, self._never_issued, step=stored_key(key))

    # the parts

    def _sweep(self, connection: Connection, limit: int) -> int:
        swept = len(connection.execute(reap.reap(self.runs, limit)).all())
        if self.runs.lifecycle.expired is not None:
            swept += len(connection.execute(reap.expire(self.runs, limit)).all())
        return swept

    def _mend(self, connection: Connection, parameters: dict[str, Any]) -> bool:
        healed = connection.execute(self._heal, parameters).first() is not None
        return self._expire_if_overdue(connection, parameters) or healed

    def _expire_if_overdue(self, connection: Connection, parameters: dict[str, Any]) -> bool:
        if self.runs.lifecycle.expired is None:
            return False
        return connection.execute(self._expire_one, parameters).first() is not None

    def _say(self, session: Session, ident: object, statement: Any, **values: Any) -> bool:
        """Execute a statement about one receipt in the caller's transaction; return whether it matched."""
        parameters = {**self.runs.parameters(self.runs.identity(ident)), **arguments(**values)}
        session = unproxied(session)
        session.flush()
        with translated():
            return self.store.callers_connection(session).execute(statement, parameters).first() is not None

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
        if row is None:
            self._expire_if_overdue(connection, key)
            return None
        return self._holders(session, connection, [self._lease(row)])[0]

    def _look(self, connection: Connection, identity: Ident) -> AnyRow:
        row = connection.execute(self.store.look, self.runs.parameters(identity)).one_or_none()
        if row is None:
            raise RunNotFound(f"there is no {self.runs.entity.__name__} with the key {identity!r}.")
        return row

    def _claim_in_transaction(self, limit: int, session: Session, connection: Connection) -> list[Holder[RunT]]:
        claimed = self._claim_rows(limit, lambda limit: self._claim_once(connection, limit))
        return self._holders(session, connection, [self._lease_of(values) for values, _ in claimed])

    def _claim_rows(self, limit: int, claim_once: Callable[[int], _Claimed]) -> list[_Row]:
        """Claim what is due, and what was reaped on the way and is due again."""
        claimed: list[_Row] = []
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

    def _claim_once(self, connection: Connection, limit: int) -> _Claimed:
        """Return how many runs were reaped, and the rows of those that were claimed.

        Of a row only the library's own columns are loaded at once: a value of the user's that its type refuses is for
        that one run's handler to meet, and not for all that were claimed with it.
        """
        statement = self._claim_due(limit)
        rows = statement.rows(connection, arguments(owner=self.owner))
        found = rows if rows[0][self._fence_at] is not None else ()
        types = statement.types[1:]
        return rows[0][0], [(self._own(row[1:], types), partial(self._loader.load, row[1:], types)) for row in found]

    def _own(self, row: Sequence[Any], types: Sequence[Any]) -> _Values:
        at, loader = self._own_loader
        return loader.load([row[position] for position in at], [types[position] for position in at])

    def _summary(self, row: AnyRow) -> RunSummary:
        return listing.summary_of(row, self.store.name, len(self.runs.key))

    def _lease(self, row: AnyRow) -> Lease:
        *key, number, attempt = row
        return self.store.lease(tuple(key), number, attempt, self.owner)

    def _lease_of(self, values: _Values) -> Lease:
        identity = tuple(values[column] for column in self.runs.key)
        return self.store.lease(identity, values[self.runs.fence], values[self.runs.attempts], self.owner)

    def _holders(
        self, session: Session, connection: Connection, leases: Sequence[Lease], *, claimed: bool = True
    ) -> list[Holder[RunT]]:
        loaded = self._load(session, [lease.identity for lease in leases])
        known = self._known(connection, [lease.identity for lease in leases if not claimed or _has_receipts(lease)])
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
    ) -> Holder[RunT]:
        receipts = known.get(lease.identity, ())
        asked = cancel_requested_at is not None
        return Holder(self.steps, self.landings, lease, make, receipts, cancel_requested=asked, created_at=created_at)

    def _known(self, connection: Connection, identities: Sequence[Ident]) -> dict[Ident, list[Receipt]]:
        known: defaultdict[Ident, list[Receipt]] = defaultdict(list)
        for identity, recorded in self._receipts_of(connection, identities):
            known[identity].append(recorded)
        return known

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

    def _claim_due(self, limit: int) -> Prepared:
        """See :func:`.claim.claim_due`; compiled once for each limit, and no more often than a worker has slots."""
        if limit not in self._claims:
            if len(self._claims) == _LIMITS:
                self._claims.clear()
            self._claims[limit] = self.store.prepare(claim.claim_due(self.runs, limit))
        return self._claims[limit]

    @cached_property
    def _loader(self) -> Loader:
        return Loader(list(self.runs.table.columns), self.store.engine.dialect)

    @cached_property
    def _own_loader(self) -> tuple[list[int], Loader]:
        runs = self.runs
        columns = [*runs.key, runs.fence, runs.attempts, runs.cancel_requested_at, runs.created_at]
        every = list(runs.table.columns)
        return [every.index(column) for column in columns], Loader(columns, self.store.engine.dialect)

    @cached_property
    def _fence_at(self) -> int:
        return 1 + list(self.runs.table.columns).index(self.runs.fence)

    @cached_property
    def _loading(self) -> Loading[RunT]:
        return Loading(self.runs, self.store.sessions.plain())

    @cached_property
    def _heal(self) -> Any:
        return reap.heal(self.runs, skip_locked=True)

    @cached_property
    def _heal_waiting(self) -> Any:
        return reap.heal(self.runs, skip_locked=False)

    @cached_property
    def _expire_one(self) -> Any:
        return reap.expire_one(self.runs)

    @cached_property
    def _requeue(self) -> Any:
        return reap.requeue(self.runs, notify=self.store.notifies)

    @cached_property
    def _attach_ids(self) -> Any:
        return intent.attaches_by_hand(self.store.receipts)

    @cached_property
    def _never_issued(self) -> Any:
        return intent.never_issued(self.runs, self.store.receipts)

    @cached_property
    def _guard(self) -> Any:
        return fence.guard(self.runs)


def _has_receipts(lease: Lease) -> bool:
    """Whether a run that was just claimed may have receipts to read; one claimed for the first time has none."""
    return lease.fence > 1


def _batch(holders: Iterable[Holder[RunT]]) -> list[Holder[RunT]]:
    """Have the leases of all these runs kept alive while one of them is carried out."""
    batch = tuple(holders)
    for holder in batch:
        holder.batch = batch
    return list(batch)


def _check_limit(limit: int) -> None:
    if limit < 1:
        raise UsageError(f"limit={limit}: at least 1.")
