"""An operation of a service: issued at most once, and then only polled, without a worker that waits for it.

Each arrow is a statement of its own, and no lock is held and no transaction is open during a call::

    (nothing) -- intent --> issued -- start() and its ids --> pending -- poll(ids) --> succeeded, failed
                                                              ^     |
                                                              +-----+  PENDING: parked until the next poll
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Generic, TypeVar, cast

from sqla_durable.causes import leaves
from sqla_durable.codec import Codec
from sqla_durable.exc import (
    DatabaseUnavailable,
    DurableError,
    NotIssued,
    OperationFailed,
    OperationUnknown,
    ReceiptMismatch,
    ResultError,
    RetryableError,
    TransactionConflict,
    UsageError,
)
from sqla_durable.failure import Failure
from sqla_durable.holder import Given, Holder
from sqla_durable.receipt import Effect, Receipt, StepOutcome, parsed
from sqla_durable.retry import LONGEST
from sqla_durable.rows import AnyRow
from sqla_durable.step import refuse_other_kind, replayed
from sqla_durable.stop import Stop, stop_of

IdsT = TypeVar("IdsT")
ResultT = TypeVar("ResultT")

_log = logging.getLogger("sqla_durable")
_SHOWN = 500


@dataclass(frozen=True, slots=True)
class Pending:
    """What ``poll`` returns while an operation has not ended; :data:`PENDING` where the usual time is to be waited.

    :param after: when to poll next, as an HTTP ``Retry-After`` names it; by default the operation's ``every``.
    :raises UsageError: where it is not a :class:`~datetime.timedelta`.
    """

    after: timedelta | None = None

    def __post_init__(self) -> None:
        if not isinstance(cast(object, self.after), timedelta | None):
            raise UsageError(f"Pending({self.after!r}): a duration is a timedelta, as in timedelta(seconds=30).")


PENDING: Final = Pending()
"""The operation has not ended: poll again after ``every``."""


class Operation(Generic[IdsT, ResultT]):
    """One operation of a run.

    :param holder: the run's holder.
    :param ids: how what ``start`` returns is stored.
    :param result: how what ``poll`` returns is stored.
    :param start: issues the operation.
    :param poll: asks for its result.
    :param every: how long to wait between polls.
    :param given: what it is issued with.
    :raises UsageError: where ``every`` is not a duration.
    """

    def __init__(
        self,
        holder: Holder[Any],
        ids: Codec[IdsT],
        result: Codec[ResultT],
        *,
        start: Callable[[], IdsT],
        poll: Callable[[IdsT], ResultT | Pending],
        every: timedelta,
        given: Given | None = None,
    ) -> None:
        wait = cast(object, every)
        if not isinstance(wait, timedelta) or not timedelta(0) <= every <= LONGEST:
            raise UsageError(f"operation(every={every!r}): a timedelta from 0 to {LONGEST.days} days.")
        self._holder = holder
        self._intents = holder.steps.intents
        self._ids = ids
        self._result = result
        self._start = start
        self._poll = poll
        self._every = every
        self._given = given

    def carry_out(self, key: str | int) -> ResultT:
        """See :meth:`.Run.operation`."""
        holder = self._holder
        holder.refuse_unreleasable()
        name = holder.take(key)
        with holder.raising(name):
            receipt = self._known(name)
            if receipt is not None and receipt.outcome.terminal:
                value, told = holder.replay(receipt, Effect.OPERATION, self._result, self._given), None
            else:
                receipt, ids = self._issued(name) if receipt is None else self._pending(receipt)
                receipt, value, told = self._polled(receipt, ids)
        holder.succeeded(receipt, told)
        return value

    # where it stands

    def _known(self, name: str) -> Receipt | None:
        known = self._holder.receipts.get(name)
        if known is None or known.outcome.terminal:
            return known
        try:
            self._holder.compare(known, Effect.OPERATION, self._given)
        except ReceiptMismatch as error:
            self._holder.mismatched(error)
        self._holder.refuse_lost()
        # An operator may have resolved an unknown outcome since this run was claimed.
        return self._look(name) if known.outcome is StepOutcome.ISSUED else known

    def _look(self, name: str) -> Receipt | None:
        """Read the receipt as it is now."""
        known = self._intents.read(self._holder.lease, name)
        if known is None:
            self._holder.receipts.pop(name, None)
        else:
            self._holder.receipts[name] = known
        return known

    def _pending(self, receipt: Receipt) -> tuple[Receipt, IdsT]:
        if receipt.outcome is StepOutcome.ISSUED:
            raise self._unknown(receipt.step, f"issued under fence {receipt.fence}, and no ids were recorded")
        try:
            return receipt, self._ids.decode(receipt.ids, receipt.step)
        except ReceiptMismatch as error:
            self._holder.mismatched(error)

    # issuing

    def _issued(self, name: str) -> tuple[Receipt, IdsT]:
        holder = self._holder
        holder.refuse_lost()
        issued = self._intents.issue(holder.lease, name, holder.fingerprint(self._given))
        if issued is None:
            known = self._look(name)
            if known is None:
                raise TransactionConflict(f"{self._named(name)}: somebody removed its receipt meanwhile; do it again.")
            refuse_other_kind(known, Effect.OPERATION)
            return self._pending(known)
        holder.receipts[name] = issued
        # A heartbeat that finds the lease lost must not break off what the ids would be lost with.
        holder.issuing = True
        try:
            return self._attached(issued, self._called(name))
        finally:
            holder.issuing = False

    def _called(self, name: str) -> IdsT:
        holder = self._holder
        try:
            with holder.within(name):
                return self._start()
        except Exception as error:
            if all(isinstance(leaf, NotIssued) for leaf in leaves(error)):
                self._intents.withdraw(holder.lease, name)
                holder.receipts.pop(name, None)
                raise
            raise self._unknown(name, f"start() raised {_said(error)}, before or after the service took it") from error

    def _attached(self, issued: Receipt, ids: IdsT) -> tuple[Receipt, IdsT]:
        """Record the ids; those that would not come back equal, too, since nobody else knows them."""
        holder, name = self._holder, issued.step
        refused: ResultError | None = None
        try:
            text, ids = self._ids.round_trip(ids, name)
        except ResultError as error:
            refused = error
            text = self._written(ids, name, error)
        attached, row = self._attach(issued, text)
        if attached is None:
            attached = self._look(name)
            if attached is None or attached.outcome is StepOutcome.ISSUED:
                raise self._contradicted(name, text)
            if attached.ids != parsed(text):
                raise self._unknown(name, f"start() returned {text:.{_SHOWN}}, but other ids were attached meanwhile")
        holder.receipts[name] = attached
        self._refuse_lost(row)
        if refused is not None:
            raise refused
        return attached, ids

    def _attach(self, issued: Receipt, text: str) -> tuple[Receipt | None, AnyRow | None]:
        lease = self._holder.lease
        try:
            return self._intents.attach(lease, issued, text)
        except DatabaseUnavailable as error:
            _log.error("the ids of operation %r of %r could not be recorded: %s", issued.step, lease, text)
            error.add_note(f"the ids of operation {issued.step!r} could not be recorded: {text}")
            raise
        except BaseException as interruption:
            if not isinstance(interruption, Exception):
                # It comes once, and attaching may be repeated.
                with suppress(Exception):
                    self._intents.attach(lease, issued, text)
            raise

    def _written(self, ids: IdsT, name: str, refused: ResultError) -> str:
        try:
            return self._ids.encode(ids, name)
        except ResultError as error:
            shown = f"start() returned {ids!r:.{_SHOWN}}, which cannot be stored"
            raise self._unknown(name, shown) from (error if error.args != refused.args else refused)

    def _refuse_lost(self, row: AnyRow | None) -> None:
        """Raise what became of the run while it was issued; the ids are safe by now."""
        holder = self._holder
        if row is None or not row.held:
            raise holder.store.single(lambda connection: holder.store.lost(connection, holder.lease))
        holder.note_stop(stop_of(holder.store.runs, row))
        holder.refuse_lost()

    # polling

    def _polled(self, receipt: Receipt, ids: IdsT) -> tuple[Receipt, ResultT, Stop | None]:
        holder, name = self._holder, receipt.step
        holder.refuse_lost()
        try:
            with holder.within(name):
                answer = self._poll(ids)
        except Exception as error:
            self._unanswered(receipt, error)
            raise
        if isinstance(answer, Pending):
            holder.park(self._every if answer.after is None else answer.after, f"operation {name!r}")
        text, value = self._result.round_trip(answer, name)
        settled, told = self._intents.settle(holder.lease, receipt, result=text)
        if settled is None:
            settled = self._settled_by_another(name)
            value = replayed(settled, Effect.OPERATION, self._result)
        return settled, value, told

    def _unanswered(self, receipt: Receipt, error: Exception) -> None:
        """Return where ``error`` is the answer, or nothing that another poll could mend; else park the run.

        An attempt is not counted: a service that cannot be asked, for however long, has not failed the operation.
        """
        holder, name, found = self._holder, receipt.step, leaves(error)
        if any(isinstance(leaf, OperationFailed) for leaf in found):
            settled, _ = self._intents.settle(holder.lease, receipt, failure=Failure.of(error))
            holder.receipts[name] = self._settled_by_another(name) if settled is None else settled
            return
        if any(isinstance(leaf, DurableError) and not isinstance(leaf, RetryableError) for leaf in found):
            return
        delay = holder.raised.decide(name, error).delay
        away = f"operation {name!r}, which could not be asked ({_said(error)})"
        holder.park(self._every if delay is None else delay, away, error)

    def _settled_by_another(self, name: str) -> Receipt:
        """Return the receipt of an operation that another holder of the same lease has seen end first."""
        known = self._look(name)
        if known is None:
            raise self._unknown(name, "its receipt was removed while it was polled")
        return known

    def _unknown(self, name: str, what: str) -> OperationUnknown:
        run = self._run
        return OperationUnknown(
            f"{self._named(name)}: {what}. Whether the service has it is not known, and it is never issued twice. "
            f"Look at the service. If it has it, say runs.attach_ids(session, {run}, {name!r}, ids); if it certainly "
            f"has not, say runs.never_issued(session, {run}, {name!r}); then requeue the run.",
            name,
        )

    def _contradicted(self, name: str, ids: str) -> OperationUnknown:
        return OperationUnknown(
            f"{self._named(name)}: somebody said that it was never issued, and then start() returned {ids:.{_SHOWN}}. "
            "A requeued run issues it anew, so end this one at the service first.",
            name,
        )

    def _named(self, name: str) -> str:
        return f"operation {name!r} of {self._holder.store.runs.entity.__name__} {self._run}"

    @property
    def _run(self) -> str:
        identity = self._holder.lease.identity
        return repr(identity[0] if len(identity) == 1 else identity)


def _said(error: Exception) -> str:
    said = f"{type(error).__qualname__}: {error}".removesuffix(": ")
    return f"{said:.{_SHOWN}}"
