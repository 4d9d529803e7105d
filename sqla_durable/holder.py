"""The holder of one run in one process: the steps it has come to, and their receipts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NoReturn, TypeVar

from sqla_durable.changes import Changes, pause
from sqla_durable.codec import Codec
from sqla_durable.exc import (
    DurableError,
    NestedStep,
    ReceiptMismatch,
    SignalTimeout,
    StepFailed,
    StepReused,
    StepUnreached,
    UsageError,
)
from sqla_durable.failure import Failure
from sqla_durable.fingerprint import of_call
from sqla_durable.idempotency import idempotency_key
from sqla_durable.landing import Landings
from sqla_durable.lease import Lease
from sqla_durable.receipt import Effect, Receipt
from sqla_durable.run import RunT
from sqla_durable.step import Recorded, Steps, refuse_other_input, refuse_other_kind, replayed
from sqla_durable.step_key import stored_key
from sqla_durable.stop import Stop
from sqla_durable.tenure import Tenure

ValueT = TypeVar("ValueT")
Given = tuple[Callable[..., object], tuple[object, ...], Mapping[str, object]]
"""What a step is called with: its function and the arguments, without a session or key of ours."""
_inside: ContextVar[_Body | None] = ContextVar("sqla_durable_step", default=None)


@dataclass(eq=False, slots=True)
class _Body:
    """A step's body while it runs; a task that it leaves behind keeps a copy of the context, and so of this."""

    holder: Holder[Any]
    step: str
    running: bool = True


class Holder(Tenure[RunT]):
    """What :class:`.Run` and its asyncio twin are in front of.

    :param steps: the steps of the store that the run is in.
    :param landings: its landings.
    :param lease: what the claim handed out.
    :param make: returns the user's object as it was when claimed, detached; called on the first use.
    :param receipts: the receipts known at that time.
    :param cancel_requested: whether the run had been asked to be cancelled by then.
    :param created_at: when it was inserted, as the database has it.
    :param max_duration: how long its execution may last; what is left of it may be less, which the database says.
    """

    def __init__(
        self,
        steps: Steps,
        landings: Landings,
        lease: Lease,
        make: Callable[[], RunT],
        receipts: Iterable[Receipt],
        *,
        cancel_requested: bool,
        created_at: object,
        max_duration: timedelta | None = None,
    ) -> None:
        super().__init__(
            steps.store, landings, lease, make, cancel_requested=cancel_requested, max_duration=max_duration
        )
        self.steps = steps
        self._created_at = created_at
        self.receipts = {receipt.step: receipt for receipt in receipts}
        self.batch: tuple[Holder[RunT], ...] = (self,)
        self.left = False
        self.limited = False
        """Whether it was claimed under a limit, so that its end may let another run be claimed."""
        self.issuing = False
        self.changes: Changes | None = None
        """What is done where code and receipts are at odds; None where neither is looked at for it."""
        self._mismatch: ReceiptMismatch | None = None
        self._stumbled = False
        self._reached: set[str] = set()
        self._used: set[str] = set()
        self._seen: set[str] = set()

    def renew(self) -> None:
        """See :meth:`.Run.renew`; within a step's body there is nothing to do, as the row is locked."""
        if self._body() is None:
            super().renew()
        else:
            self.refuse_lost()

    def known(self) -> tuple[Receipt, ...]:
        """Return the receipts known to this holder in the order they were recorded."""
        return tuple(sorted(self.receipts.values(), key=lambda receipt: (receipt.recorded_at, receipt.step)))

    # steps

    def transactional(
        self, key: str | int, codec: Codec[ValueT], body: Callable[[Any], ValueT], given: Given | None = None
    ) -> ValueT:
        """See :meth:`.Run.step`."""

        def live(name: str, fingerprint: str | None) -> Recorded[ValueT]:
            with self.within(name):
                return self.steps.transactional(self.lease, name, body, codec, fingerprint)

        return self.step(key, Effect.TRANSACTIONAL, codec, live, given)

    def external(
        self, key: str | int, codec: Codec[ValueT], call: Callable[[], ValueT], given: Given | None = None
    ) -> ValueT:
        """See :meth:`.Run.external`."""
        return self._outside(key, Effect.EXTERNAL, codec, lambda _: call(), given)

    def keyed(
        self, key: str | int, codec: Codec[ValueT], call: Callable[[str], ValueT], given: Given | None = None
    ) -> ValueT:
        """See :meth:`.Run.keyed`."""
        return self._outside(key, Effect.KEYED, codec, lambda _: call(self.idempotency_key(key)), given)

    def idempotency_key(self, key: str | int) -> str:
        """See :meth:`.Run.idempotency_key`."""
        if not isinstance(self._created_at, datetime):
            raise UsageError(
                f"{self.store.runs.entity.__name__}.created_at is {self._created_at!r} on the claimed run, and an "
                "idempotency key is made of it; map it as a DateTime that is not deferred."
            )
        identity = self.store.key_values(self.lease.identity)
        name = stored_key(key)
        # A call under way when its step was renamed is made again with the key that it had then.
        first = name if self.changes is None else self.changes.first_key(name)
        return idempotency_key(self.store.name, identity, self._created_at, first)

    def _outside(
        self,
        key: str | int,
        effect: Effect,
        codec: Codec[ValueT],
        call: Callable[[str], ValueT],
        given: Given | None,
    ) -> ValueT:
        def live(name: str, fingerprint: str | None) -> Recorded[ValueT]:
            with self.within(name):
                value = call(name)
            return self._record(name, effect, codec, value, fingerprint)

        return self.step(key, effect, codec, live, given)

    def _record(
        self, name: str, effect: Effect, codec: Codec[ValueT], value: ValueT, given: str | None
    ) -> Recorded[ValueT]:
        text, result = codec.round_trip(value, name)
        recorded = self.steps.record(self.lease, name, effect, result=text, given=given)
        if recorded.before:
            result = replayed(recorded.receipt, effect, codec)
        return Recorded(recorded.receipt, result, recorded.stop)

    def step(
        self,
        key: str | int,
        effect: Effect,
        codec: Codec[ValueT],
        live: Callable[[str, str | None], Recorded[ValueT]],
        given: Given | None = None,
        record_failure: Callable[[str, Failure], Receipt] | None = None,
    ) -> ValueT:
        """Answer a step from its receipt, or carry it out.

        :param live: carries it out and records it, with the fingerprint of its input.
        :param given: what it is called with, where that is to be compared with what it was called with before.
        :param record_failure: records what ``live`` has raised, where that is final; by default as any step's.
        """
        name = self.take(key)
        with self.raising(name):
            known = self.answer(name)
            if known is not None and known.outcome.terminal:
                value = self.replay(known, effect, codec, given)
                self._used.add(name)
                return value
            if known is not None:
                self._refuse_other(known, effect, given)
            self.refuse_lost()
            fingerprint = self.fingerprint(given)  # the body may change what it is given
            if fingerprint is None and known is not None:
                fingerprint = known.input_fingerprint
            recorded = self._tried(name, effect, lambda: live(name, fingerprint), fingerprint, record_failure)
        self.succeeded(recorded.receipt, recorded.stop)
        return recorded.value

    def _tried(
        self,
        name: str,
        effect: Effect,
        live: Callable[[], Recorded[ValueT]],
        given: str | None,
        record_failure: Callable[[str, Failure], Receipt] | None = None,
    ) -> Recorded[ValueT]:
        """Return what a step has recorded, or record its failure, if that is final."""
        try:
            return live()
        except DurableError:
            raise
        except Exception as error:
            if not self.raised.decide(name, error).retryable:
                record = record_failure or partial(self._failure_of_step, effect, given)
                self._record_failure(name, record, error)
            raise

    def settle(
        self,
        name: str,
        effect: Effect,
        codec: Codec[ValueT],
        called: Callable[[], ValueT],
        given: str | None,
    ) -> ValueT:
        """Record a call that has been made beside others; its key is not used up before all of them have succeeded.

        :param called: returns or raises what the call has.
        :param given: the fingerprint of what it was called with.
        """
        with self.raising(name):
            recorded = self._tried(name, effect, lambda: self._record(name, effect, codec, called(), given), given)
        self.receipts[name] = recorded.receipt
        self._seen.discard(name)
        self.note_stop(recorded.stop)
        return recorded.value

    def use_up(self, names: Iterable[str]) -> None:
        """Note that these steps have succeeded together."""
        self._used.update(names)

    def _record_failure(self, name: str, record: Callable[[str, Failure], Receipt], error: Exception) -> None:
        try:
            receipt = record(name, Failure.of(error))
        except DurableError as ours:
            raise ours from error
        self.failed(receipt)

    def _failure_of_step(self, effect: Effect, given: str | None, name: str, failure: Failure) -> Receipt:
        return self.steps.record(self.lease, name, effect, failure=failure, given=given).receipt

    def _refuse_other(self, known: Receipt, effect: Effect, given: Given | None) -> None:
        try:
            self.compare(known, effect, given)
        except ReceiptMismatch as error:
            self.mismatched(error)

    def failed(self, receipt: Receipt) -> None:
        """Note that a step has failed for good; in place it may be tried again."""
        self.receipts[receipt.step] = receipt
        self._seen.add(receipt.step)

    def succeeded(self, receipt: Receipt, told: Stop | None) -> None:
        """Note that a step has succeeded, so that its key is used up; and what the run has to stop for, if it has."""
        self.receipts[receipt.step] = receipt
        self._used.add(receipt.step)
        self.note_stop(told)

    def refuse_nested(self, key: str | int) -> None:
        """Refuse a step that was started inside the body of another step of this run."""
        if (outer := self._body()) is not None:
            raise NestedStep(
                f"step {key!r} was started inside the body of step {outer.step!r}; its effect would commit with "
                "another receipt. Call it after that step, or do its work in the same body."
            )

    def take(self, key: str | int) -> str:
        """Return a step's key as it is stored, having refused one that was used before in this execution.

        A step that has been renamed goes on under the key under which it has a receipt.
        """
        name = stored_key(key)
        self.refuse_nested(key)
        if self.changes is not None and self.changes.former:
            if (present := self.changes.renamed(name)) is not None:
                raise StepReused(
                    f"step {name!r} is declared as the former key of step {present!r}, whose receipt it would share; "
                    "give the one that is left a key of its own, or take it out of aliases."
                )
            name = self.changes.recorded_as(name, self.receipts)
        self._reached.add(name)
        if name in self._used:
            raise StepReused(
                f"step {name!r} was used twice in this execution; each step needs a key of its own that is the same "
                "in every attempt, such as a position in the run's data."
            )
        return name

    @contextmanager
    def within(self, name: str) -> Generator[None, None, None]:
        """Refuse other steps while the body of this one runs."""
        body = _Body(self, name)
        token = _inside.set(body)
        try:
            yield
        finally:
            body.running = False
            _inside.reset(token)

    def _body(self) -> _Body | None:
        body = _inside.get()
        return body if body is not None and body.holder is self and body.running else None

    # changed code

    def fingerprint(self, given: Given | None) -> str | None:
        """Return the fingerprint of what a step is called with, where it is to be recorded.

        Not of a step that follows one which has raised in this execution: a failure is not final, and where it does not
        come again the body takes another way, though its code is what it was.
        """
        return None if self.changes is None or given is None or self._stumbled else of_call(*given)

    def answer(self, name: str) -> Receipt | None:
        """Return the receipt that a step is answered from, if it has one.

        A failed receipt is replayed once: a handler that retries in place gets as far as it did before.
        """
        return None if name in self._seen else self.receipts.get(name)

    def replay(self, known: Receipt, effect: Effect, codec: Codec[ValueT], given: Given | None) -> ValueT:
        """Return the result that a receipt holds.

        :raises StepFailed: where the step had failed.
        :raises ReceiptMismatch: where the receipt is of another kind of step, was recorded for another input, or does
         not decode.
        :raises Suspended: where the run is left to a process with other code in such a case.
        """
        try:
            self.compare(known, effect, given)
            return replayed(known, effect, codec)
        except (StepFailed, SignalTimeout):
            self._seen.add(known.step)
            raise
        except ReceiptMismatch as error:
            self.mismatched(error)

    def compare(self, known: Receipt, effect: Effect, given: Given | None) -> None:
        """Refuse a receipt of another kind of step, or one that was recorded for another input."""
        refuse_other_kind(known, effect)
        if known.input_fingerprint is None or self.changes is None or self.changes.keeps or given is None:
            return
        refuse_other_input(known, of_call(*given))

    def refuse_unreached(self) -> None:
        """Refuse to land a run whose body has returned without reaching a step that has a receipt.

        :raises StepUnreached: where it has not; also where a receipt was at odds with the code, and the body went on.
        """
        if self.lost is not None or self.changes is None:
            return
        if self._mismatch is not None:
            raise self._mismatch
        unreached = [
            receipt.step
            for receipt in self.known()
            if receipt.input_fingerprint is not None and receipt.step not in self._reached
        ]
        if unreached and not self.changes.keeps:
            steps = ", ".join(map(repr, unreached))
            self.mismatched(
                StepUnreached(
                    f"step {steps} has a receipt and was not reached in this execution, so what it did is not what the "
                    "code does now. Reach it again; where it was renamed, say so with aliases; where it was taken out "
                    "on purpose, declare the function with on_mismatch."
                )
            )

    def mismatched(self, error: ReceiptMismatch) -> NoReturn:
        """Raise that code and receipts are at odds, or hand the run back to a process with other code."""
        if self.changes is not None and self.changes.parks:
            self.park(pause(), "a process whose code fits its receipts", error, progress=False)
        self._mismatch = error
        raise error

    @contextmanager
    def raising(self, name: str) -> Generator[None, None, None]:
        """Note what a step raises: as this step's, and what ends this holder's right to write."""
        try:
            yield
        except Exception as error:
            self._stumbled = True
            self.raised.decide(name, error)
            if isinstance(error, DurableError):
                self.note(error)
            raise
