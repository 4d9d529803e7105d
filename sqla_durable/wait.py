"""A run that waits: for a signal, which it takes or answers, or for an instant.

While there is nothing to go on with, the run is handed back and its handler unwound; it waits in its row, and in no
process. The next execution calls the handler anew, and comes back here.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar, cast

from sqlalchemy import Connection

from sqla_durable import clock
from sqla_durable.codec import Codec, codec_of
from sqla_durable.exc import ReceiptMismatch, SignalMismatch, UsageError
from sqla_durable.failure import Failure
from sqla_durable.holder import Given, Holder
from sqla_durable.policy import clamped
from sqla_durable.receipt import Effect, Receipt, StepOutcome, parsed
from sqla_durable.retry import LONGEST
from sqla_durable.signal import signal_name
from sqla_durable.step import Beside, Recorded, replayed
from sqla_durable.step_key import stored_key
from sqla_durable.storable import why

PayloadT = TypeVar("PayloadT")
ResultT = TypeVar("ResultT")


def _nothing() -> None:
    """Stands where a step has a function, whose arguments are compared."""


class _Awaited(Generic[PayloadT]):
    """A signal that a run waits for.

    :param holder: the run's holder.
    :param name: the signal's name.
    :param payload: how its payload is stored.
    :param key: the step's key; by default the name.
    :param timeout: for how long to wait, from the first attempt on.
    :raises UsageError: for a name or timeout that cannot be right.
    :raises ConfigurationError: where the run has no table for signals, or cannot be handed back.
    """

    verb: ClassVar[str]

    def __init__(
        self,
        holder: Holder[Any],
        name: str,
        payload: Codec[PayloadT],
        *,
        key: str | int | None,
        timeout: timedelta | None,
    ) -> None:
        given = cast(object, timeout)
        if given is not None and (not isinstance(given, timedelta) or not timedelta(0) <= given <= LONGEST):
            raise UsageError(f"timeout={timeout!r}: None, or a timedelta from 0 to {LONGEST.days} days.")
        self.holder = holder
        self.name = signal_name(name)
        self.key = name if key is None else key
        self.waits = holder.steps.waits
        self._payload = payload
        self._timeout = timeout
        _ = holder.store.signals  # refused here, and not after a first statement
        holder.refuse_unreleasable()

    @property
    def given(self) -> Given | None:
        """What a replay compares: the verb, whose results are of two kinds, and the signal's name.

        Under a former key nothing is compared, as the signal may have been renamed with the step.
        """
        key, changes = stored_key(self.key), self.holder.changes
        if changes is not None and changes.recorded_as(key, self.holder.receipts) != key:
            return None
        return _nothing, (self.verb, self.name), {}

    def decode(self, signal: int, payload: object) -> PayloadT:
        """Return a signal's payload.

        :param signal: the signal's id.
        :raises SignalMismatch: where it is of another type.
        """
        try:
            return self._payload.decode(payload, self.name)
        except ReceiptMismatch as error:
            reason = why(error.__cause__, "payload") if isinstance(error.__cause__, Exception) else str(error)
            store = self.holder.store
            raise SignalMismatch(
                f"signal {self.name!r} of {store.runs.entity.__name__} {self.holder.lease.identity!r}: its payload "
                f"does not decode as {self._payload.annotation}: {reason}. The signal was not consumed: have the run "
                f"wait for a type that can read it, or delete it: {store.signals.deletion(store.schema_of, signal)}. "
                "Then requeue the run."
            ) from error

    def park(self, key: str, given: str | None) -> None:
        """Hand the run back, unless there is a signal after all.

        :param given: the fingerprint of what is waited for.
        :raises Suspended: where it was handed back.
        :raises SignalTimeout: where the time to wait is over.
        """
        holder = self.holder
        parked = partial(self.waits.park, holder.lease, key, self.name, self._timeout, given)
        late = holder.park_by(parked, f"signal {self.name!r}")
        if late is not None:
            holder.failed(late)
            replayed(late, Effect.SIGNAL, codec_of(Any))


class Wait(_Awaited[PayloadT]):
    """A signal that the run takes as it is."""

    verb = "wait"

    def carry_out(self) -> PayloadT:
        """See :meth:`.Run.wait`."""
        return self.holder.step(self.key, Effect.SIGNAL, self._payload, self._live, self.given)

    def _live(self, key: str, given: str | None) -> Recorded[PayloadT]:
        lease = self.holder.lease
        while True:
            seen = self.waits.look(lease, key, self.name)
            if seen is None:
                self.park(key, given)
            elif isinstance(seen, StepOutcome):
                known = self.holder.steps.read(lease, key)
                return Recorded(known, replayed(known, Effect.SIGNAL, self._payload))
            else:
                # Before it is taken: a process may die between the two, and would have consumed what nobody can read.
                value = self.decode(seen.id, parsed(seen.payload))
                if (taken := self.waits.take(lease, key, seen, given)) is not None:
                    return Recorded(taken, value)


class _NoSignal(Exception):
    """There is no signal to answer."""


class _Answering(Beside):
    """What is read and written of the signal in the transaction that answers it."""

    effect = Effect.SIGNAL

    def __init__(self, answer: Answer[Any, Any], key: str) -> None:
        self._answer = answer
        self._key = key
        self.signal: int | None = None
        self.payload: Any = None

    def opened(self, connection: Connection) -> None:
        found = self._answer.waits.read(connection, self._answer.holder.lease, self._answer.name)
        if found is None:
            raise _NoSignal
        self.signal = None
        self.payload = self._answer.decode(found[0], found[1])
        self.signal = found[0]

    def sealed(self, connection: Connection, result: str) -> None:
        if self.signal is not None:
            self._answer.waits.answer(connection, self._answer.holder.lease, self._key, self.signal, result)


class Answer(_Awaited[PayloadT], Generic[PayloadT, ResultT]):
    """A signal that the run answers.

    :param body: called with the step's session and the payload.
    :param result: how what it returns is stored.
    """

    verb = "answer"

    def __init__(
        self,
        holder: Holder[Any],
        name: str,
        payload: Codec[PayloadT],
        result: Codec[ResultT],
        body: Callable[[Any, PayloadT], ResultT],
        *,
        key: str | int | None,
        timeout: timedelta | None,
    ) -> None:
        super().__init__(holder, name, payload, key=key, timeout=timeout)
        self._result = result
        self._body = body
        self._answered: int | None = None
        self._fingerprint: str | None = None

    def carry_out(self) -> ResultT:
        """See :meth:`.Run.answer`."""
        return self.holder.step(self.key, Effect.SIGNAL, self._result, self._live, self.given, self._record_failure)

    def _live(self, key: str, given: str | None) -> Recorded[ResultT]:
        holder = self.holder
        self._fingerprint = given
        while True:
            answering = _Answering(self, key)
            try:
                with holder.within(key):
                    return holder.steps.transactional(
                        holder.lease,
                        key,
                        lambda session: self._body(session, answering.payload),  # noqa: B023 - called at once
                        self._result,
                        given,
                        answering,
                    )
            except _NoSignal:
                pass
            finally:
                self._answered = answering.signal
            self.park(key, given)

    def _record_failure(self, key: str, failure: Failure) -> Receipt:
        lease = self.holder.lease
        failed = None
        if self._answered is not None:
            failed = self.waits.fail(lease, key, self._answered, failure, self._fingerprint)
        return self.holder.steps.read(lease, key) if failed is None else failed


class Sleep:
    """An instant that a run waits for.

    :param holder: the run's holder.
    :param duration: for how long, from the first attempt on; or until when.
    :raises UsageError: where it is neither a duration nor an instant.
    :raises ConfigurationError: where the run cannot be handed back.
    """

    def __init__(self, holder: Holder[Any], duration: timedelta | datetime) -> None:
        given = cast(object, duration)
        if not isinstance(given, timedelta | datetime) or (isinstance(given, datetime) and given.utcoffset() is None):
            raise UsageError(f"sleep(..., {duration!r}): a timedelta, or a datetime with a time zone.")
        holder.refuse_unreleasable()
        self._holder = holder
        self._duration = clamped(duration) if isinstance(duration, timedelta) else clock.within(duration)

    def carry_out(self, key: str | int) -> None:
        """See :meth:`.Run.sleep`."""
        codec: Codec[None] = codec_of(type(None))
        self._holder.step(key, Effect.SLEEP, codec, self._live, (_nothing, ("sleep",), {}))

    def _live(self, key: str, given: str | None) -> Recorded[None]:
        holder = self._holder
        asleep = partial(holder.steps.waits.sleep, holder.lease, key, self._duration, given)
        over = holder.park_by(asleep, f"the end of sleep {key!r}")
        return Recorded(holder.steps.read(holder.lease, key) if over is None else over, None)
