"""The verbs on runs, once for both forms: what :class:`.Runs` and its asyncio twin call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import cached_property, partial
from typing import Any, Generic, cast

from sqlalchemy import ColumnElement, Connection
from sqlalchemy.orm import Session

from sqla_durable import fence, intent, listing, reap, receipt
from sqla_durable.bulk import Bulk
from sqla_durable.caller import AnySession, unproxied
from sqla_durable.claims import Claims
from sqla_durable.codec import codec_of
from sqla_durable.exc import RetryableError, RunInFlight, StepReused, UsageError
from sqla_durable.execution import Ending, Outcome, carry_out, finished
from sqla_durable.failure import Failure
from sqla_durable.heartbeat import Heartbeat
from sqla_durable.holder import Holder
from sqla_durable.in_flight import occupied, refusing_occupied, rival
from sqla_durable.lease import Lease
from sqla_durable.listing import RunSummary
from sqla_durable.reading import Reading
from sqla_durable.receipt import Receipt
from sqla_durable.rows import AnyRow, Ident, arguments
from sqla_durable.run import RunT
from sqla_durable.sending import Sending
from sqla_durable.sqlstate import translated
from sqla_durable.start import Start
from sqla_durable.step_key import stored_key
from sqla_durable.store import Store


class Verbs(Generic[RunT]):
    """Everything that :class:`.Runs` can do, in terms of :class:`.Holder`.

    :param store: whose runs these are.
    :param owner: the holder's name; by default made of host, process and chance.
    """

    summary: type[RunSummary] = RunSummary
    """What a summary is; with a field more for each of :meth:`extras`."""

    def __init__(self, store: Store[RunT], owner: str | None) -> None:
        self.store = store
        self.runs = store.runs
        self.sending = Sending(store)
        self.reading = Reading(self.store)
        self.claims = self.claims_of(owner)
        self.heartbeat = Heartbeat(self.store)
        self.bulk = Bulk(self.store, self.wanted)

    def claims_of(self, owner: str | None) -> Claims[RunT]:
        """Make what claims its runs."""
        return Claims(self.store, self.reading, owner)

    def named(self, holder: Holder[RunT]) -> str:
        """Return how the log calls a run."""
        identity = holder.lease.identity
        return f"{self.runs.entity.__name__} {identity[0] if len(identity) == 1 else identity}"

    def knows(self) -> Sequence[str]:
        """Return the names of the functions that can be carried out; none where there is no such thing."""
        return ()

    def starts(self) -> Sequence[str]:
        """Return the names of the functions that can be started; what is not known as well is carried out elsewhere."""
        return ()

    def limit_of_tenants(self) -> int | None:
        """Return how many runs of the table one tenant may have live, which all who claim from it must agree on."""
        return None

    def extras(self) -> Sequence[ColumnElement[Any]]:
        """What is read for a summary beside what every run has."""
        return ()

    # claiming and carrying out

    def claim(self, ident: object, *, run_now: bool) -> Holder[RunT] | None:
        """See :meth:`.Runs.claim`."""
        identity = self.runs.identity(ident)

        def refused(connection: Connection) -> None:
            self.reading.look(connection, identity)

        return self.claims.one(identity, refused, run_now=run_now)

    def claim_due(self, limit: int) -> list[Holder[RunT]]:
        """See :meth:`.Runs.claim_due`."""
        _check_limit(limit)
        return self.claims.due(limit)

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
            identity = self.runs.identity(target)
            taken = self.claims.one(identity, partial(self._answer, identity), run_now=run_now)
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
        if holder.lost is None:  # one that its heartbeat has landed meanwhile is told so as any other
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

    def _answer(self, identity: Ident, connection: Connection) -> Outcome:
        """What is to be said of a run that could not be claimed."""
        seen = self.reading.look(connection, identity)
        if seen.status in self.runs.lifecycle.machine.terminal:
            failure = None if seen.error is None else Failure.from_json(seen.error)
            known = self.reading.receipts(connection, identity)
            return Outcome(Ending.LANDED, seen.status, known, failure, replayed=True)
        held = seen.status == self.runs.lifecycle.running
        return Outcome(Ending.LOST_RACE if held else Ending.NOT_CLAIMABLE, seen.status)

    # reading and healing

    def get(self, ident: object, *, heal: bool) -> RunT | None:
        """See :meth:`.Runs.get`."""
        identity = self.runs.identity(ident)

        def work(session: Session, connection: Connection) -> RunT | None:
            if heal:
                self._mend(connection, self.runs.parameters(identity))
            return next(iter(self.reading.load(session, [identity]).values()), None)

        return self.store.execute(work)

    def receipts(self, ident: object) -> tuple[Receipt, ...]:
        """See :meth:`.Runs.receipts`."""
        identity = self.runs.identity(ident)
        return self.store.single(lambda connection: self.reading.receipts(connection, identity))

    def find(self, *, limit: int, after: str | None, **conditions: Any) -> list[Any]:
        """See :meth:`.Runs.find`."""
        _check_limit(limit)
        asked = self.wanted(**conditions)
        if after is not None:
            asked.append(listing.following(self.runs, self.store.name, after))
        statement = listing.page(self.runs, asked, limit, self.extras())
        rows = self.store.single(lambda connection: connection.execute(statement).all())
        return [self._summary(row) for row in rows]

    def wanted(self, **conditions: Any) -> list[ColumnElement[bool]]:
        """Return the conditions that a caller of ``find`` asks for."""
        return listing.wanted(self.runs, **conditions)

    def describe(self, ident: object) -> Any:
        """See :meth:`.Runs.describe`."""
        identity = self.runs.identity(ident)
        return self.store.single(lambda connection: self.described(connection, identity))

    def described(self, connection: Connection, identity: Ident) -> Any:
        """Return the summary of one run, or None."""
        statement = listing.one(self.runs, self.extras())
        row = connection.execute(statement, self.runs.parameters(identity)).one_or_none()
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

    def start(self, session: AnySession, key: str | None, values: Mapping[str, Any]) -> RunT:
        """See :meth:`.Runs.start`."""
        session = unproxied(session)
        session.flush()
        with translated():
            return Start(self.runs, session, self.store.callers_connection(session), key, values).run()

    def request_cancel(self, session: AnySession, ident: object) -> bool:
        """See :meth:`.Runs.request_cancel`."""
        if self.runs.lifecycle.cancelled is None:
            raise UsageError(f"{self.runs.entity.__name__} cannot be cancelled; name Lifecycle(cancelled=...).")
        identity = self.runs.identity(ident)
        session = unproxied(session)
        session.flush()
        with translated():
            connection = self.store.callers_connection(session)
            asking = reap.request_cancel(self.runs, quietly=session.twophase)
            row: AnyRow = connection.execute(asking, self.runs.parameters(identity)).first()
        if row is not None and (loaded := self.runs.loaded(session, row, identity)) is not None:
            self.runs.show(loaded, row._mapping)
        return row is not None

    def fence(self, session: AnySession, lease: Lease) -> None:
        """See :meth:`.Runs.fence`."""
        self.store.check(lease)
        parameters = {**self.runs.parameters(lease.identity), **arguments(fence=lease.fence)}
        with translated():
            self.store.held(
                self.store.callers_connection(unproxied(session)),
                lease,
                lambda connection: connection.execute(self._guard, parameters).one_or_none(),
            )

    def record(self, session: AnySession, lease: Lease, key: str | int, result: Any, type_: Any) -> None:
        """See :meth:`.Runs.record`."""
        self.store.check(lease)
        name = stored_key(key)
        text, _ = codec_of(type_).round_trip(result, name)
        session = unproxied(session)
        session.flush()
        with translated():
            if self.claims.steps.record_in(self.store.callers_connection(session), lease, name, text) is None:
                run = f"{self.runs.entity.__name__} {lease.identity!r}"
                raise StepReused(f"step {name!r} of {run} has a receipt already.")

    def attach_ids(self, session: AnySession, ident: object, key: str | int, ids: Any, type_: Any) -> bool:
        """See :meth:`.Runs.attach_ids`."""
        name = stored_key(key)
        text, _ = codec_of(type_).round_trip(ids, name)
        return self._say(session, ident, self._attach_ids, step=name, ids=text)

    def never_issued(self, session: AnySession, ident: object, key: str | int) -> bool:
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

    def _say(self, session: AnySession, ident: object, statement: Any, **values: Any) -> bool:
        """Execute a statement about one receipt in the caller's transaction; return whether it matched."""
        parameters = {**self.runs.parameters(self.runs.identity(ident)), **arguments(**values)}
        session = unproxied(session)
        session.flush()
        with translated():
            return self.store.callers_connection(session).execute(statement, parameters).first() is not None

    def _summary(self, row: AnyRow) -> RunSummary:
        return listing.summary_of(row, self.store.name, len(self.runs.key), self.summary)

    # statements

    @cached_property
    def _heal(self) -> Any:
        return reap.heal(self.runs, skip_locked=True)

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


def _check_limit(limit: int) -> None:
    if limit < 1:
        raise UsageError(f"limit={limit}: at least 1.")
