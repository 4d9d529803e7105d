"""The errors of sqla_durable, a tree to be seen at a glance.

::

    DurableError
     +-- ConfigurationError      a declaration that cannot work; raised while a class or helper is defined
     +-- UsageError              a call that cannot be right; nothing of it is committed
     |    +-- UndeclaredTransition   an edge the status machine does not have
     |    +-- FrozenPayload          a change of what is frozen, in a run that is no draft any more
     |    +-- RunNotFound            no such run, or not one of this class
     |    +-- KeyConflict            an idempotency key that belongs to a run with another payload
     |    +-- RunInFlight            another run of the group is in flight
     |    +-- RunReferenced          rows of another table keep runs from being purged
     |    +-- StepReused             a step key used twice in one execution
     |    +-- NestedStep             a step inside a step's body
     |    +-- TransactionEnded       a body ended its step's transaction, or swallowed a database error
     |    +-- ResultError            a result that does not survive being stored
     |    +-- ReceiptMismatch        what was recorded of a run is not what its code asks for: another kind of step
     |    |    +-- ResultMismatch         the recorded result does not decode any more
     |    |    +-- InputMismatch          the step was called with another input when it was recorded
     |    |    +-- StepUnreached          the body returned without reaching a step that has a receipt
     |    |    +-- RunInputMismatch       the input of the whole run does not decode any more
     |    +-- InputError             an input that the function it is meant for does not take
     |    +-- SignalMismatch         a signal's payload does not decode as what the run waits for
     +-- HolderError             this holder may not go on with its run
     |    +-- LostLease              the fence moved on: the holder may write nothing any more
     |    +-- Cancelled              someone asked for this run to be cancelled
     |    +-- TimedOut               the run ran past its deadline
     |    +-- Suspended              the run waits for something outside, and was handed back until then
     +-- GuardViolation          a write that the guard of its table refuses
     +-- SchemaMismatch          the database lacks a table or column of the models
     +-- StepFailed              a replayed step's recorded failure
     +-- RunFailed               a run whose result is asked for has failed
     |    +-- RunCancelled           it was cancelled
     |    +-- RunTimedOut            it ran past its deadline
     +-- RunNotLanded            a run whose result is asked for has not ended yet
     +-- SignalTimeout           no signal came in time; a TimeoutError, too
     +-- UpdateFailed            what the run called to answer an update has failed
     +-- UpdateTimeout           no answer to an update came in time; a TimeoutError, too
     +-- NotAnswered             an update that nobody will answer any more
     +-- OperationFailed         raised by a poll: the operation itself has failed
     +-- OperationUnknown        an operation may have been issued; what became of it was not recorded
     +-- RetryableError          nothing was decided; the same call may be made again
          +-- NotIssued              raised by a start: the service certainly does not have the operation
          +-- DatabaseUnavailable    the connection broke, or the server takes no writes at present
          +-- StepTimeout            PostgreSQL cut off a step that idled, ran or waited for too long
          +-- TransactionConflict    a serialisation failure or a deadlock (SQLSTATE 40001, 40P01)

A *lost race*, a conditional transition that matched no row, is a return value and not in this tree.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enum import StrEnum

    from sqla_durable.failure import Failure
    from sqla_durable.lease import Lease


class DurableError(Exception):
    """The base of every error that sqla_durable raises."""


class ConfigurationError(DurableError):
    """A declaration that cannot work, found while the class or helper is defined."""


class UsageError(DurableError):
    """A call that cannot be right; nothing of it has been committed."""


class UndeclaredTransition(UsageError):
    """A transition along an edge that the status machine does not declare, refused before any SQL."""


class FrozenPayload(UsageError):
    """An attribute that ``Lifecycle(frozen=...)`` names would change in a run that is no draft any more."""


class RunNotFound(UsageError):
    """No run with that identity exists, or it is not one of the bound class."""


class KeyConflict(UsageError):
    """An idempotency key belongs to a run that was started with another payload.

    ``key`` is that key, and ``identity`` the primary key of that run, or None where the session does not see it.
    """

    def __init__(self, message: str, key: str, identity: tuple[Any, ...] | None) -> None:
        super().__init__(message, key, identity)
        self.key = key
        self.identity = identity

    def __str__(self) -> str:
        return str(self.args[0])


class RunInFlight(UsageError):
    """Another run of the same group is in flight; ``identity`` is its primary key, or None if it has ended since."""

    def __init__(self, message: str, identity: tuple[Any, ...] | None) -> None:
        super().__init__(message, identity)
        self.identity = identity

    def __str__(self) -> str:
        return str(self.args[0])


class RunReferenced(UsageError):
    """Rows of another table refer to runs that were to be purged, by a foreign key that does not let them go.

    ``table`` and ``constraint`` say which, and ``purged`` how many runs were gone by then.
    """

    def __init__(self, message: str, table: str, constraint: str, purged: int) -> None:
        super().__init__(message, table, constraint, purged)
        self.table = table
        self.constraint = constraint
        self.purged = purged

    def __str__(self) -> str:
        return str(self.args[0])


class StepReused(UsageError):
    """A step key was used twice in one execution."""


class NestedStep(UsageError):
    """A step was started inside the body of another step of the same run."""


class TransactionEnded(UsageError):
    """A body ended its step's transaction, or swallowed a database error inside it; all was rolled back."""


class ResultError(UsageError):
    """A step's result would not come back equal in value and type, or PostgreSQL could not store it."""


class ReceiptMismatch(UsageError):
    """What was recorded of a run is not what its code asks for: as it stands, a receipt of another kind of step."""


class ResultMismatch(ReceiptMismatch):
    """A recorded result no longer decodes as what the function returns."""


class InputMismatch(ReceiptMismatch):
    """A step of a function was called with another input when it was recorded."""


class StepUnreached(ReceiptMismatch):
    """The body of a function returned without having reached a step that has a receipt."""


class RunInputMismatch(ReceiptMismatch):
    """The input that a run was started with no longer decodes as what its function takes."""


class InputError(UsageError):
    """An input that the function it is meant for does not take, or that PostgreSQL could not store; no run exists."""


class SignalMismatch(UsageError):
    """A signal's payload does not decode as what the run waits for; the signal is not consumed."""


class HolderError(DurableError):
    """This holder may not go on with its run; ``lease`` says which."""

    def __init__(self, message: str, lease: Lease) -> None:
        super().__init__(message, lease)
        self.lease = lease

    def __str__(self) -> str:
        return str(self.args[0])


class LostLease(HolderError):
    """The fence moved on, or the run ended: this holder may write nothing any more."""


class Cancelled(HolderError):
    """Someone asked for this run to be cancelled; it can only land as cancelled now."""


class TimedOut(HolderError):
    """The run ran past its deadline; it can only land as timed out now."""


class Suspended(HolderError):
    """The run waits for something outside: it was handed back, ready again and due later, and this handle is spent.

    Raised to unwind the handler, which must let it pass; the next execution calls the handler anew.
    """


class GuardViolation(DurableError):
    """A write that the guard of its table refuses; the transaction is rolled back.

    ``sqlstate`` says which rule it breaks, and ``table`` of which table.
    """

    def __init__(self, message: str, sqlstate: str, table: str | None) -> None:
        super().__init__(message, sqlstate, table)
        self.sqlstate = sqlstate
        self.table = table

    def __str__(self) -> str:
        return str(self.args[0])


class SchemaMismatch(DurableError):
    """A statement of the library names a table or column that the database does not have; nothing was decided.

    The server's message says which. A worker that meets it stops, and the run that it carried out goes back to ready.
    """


class StepFailed(DurableError):
    """A replayed step had failed for good; ``failure`` is what was recorded then."""

    def __init__(self, step: str, failure: Failure) -> None:
        super().__init__(step, failure)
        self.step = step
        self.failure = failure

    def __str__(self) -> str:
        return f"step {self.step!r} failed with {self.failure.type}: {self.failure.message}"


class RunFailed(DurableError):
    """The run whose result was asked for has failed; ``failure`` is what was recorded, and ``status`` where it is."""

    def __init__(self, message: str, status: StrEnum, failure: Failure | None) -> None:
        super().__init__(message, status, failure)
        self.status = status
        self.failure = failure

    def __str__(self) -> str:
        return str(self.args[0])


class RunCancelled(RunFailed):
    """The run whose result was asked for was cancelled."""


class RunTimedOut(RunFailed):
    """The run whose result was asked for ran past its deadline."""


class RunNotLanded(DurableError, TimeoutError):
    """The run whose result was asked for has not ended within the time given; it goes on."""


class SignalTimeout(DurableError, TimeoutError):
    """No signal came within the timeout of a wait; ``step`` is its key. A replay raises the same."""

    def __init__(self, message: str, step: str) -> None:
        super().__init__(message, step)
        self.step = step

    def __str__(self) -> str:
        return str(self.args[0])


class UpdateFailed(DurableError):
    """What the run called to answer an update has failed for good; ``failure`` is what was recorded."""

    def __init__(self, name: str, failure: Failure) -> None:
        super().__init__(name, failure)
        self.name = name
        self.failure = failure

    def __str__(self) -> str:
        return f"update {self.name!r} failed with {self.failure.type}: {self.failure.message}"


class UpdateTimeout(DurableError, TimeoutError):
    """No answer to an update came in time. The update stays sent, and may still be answered."""


class NotAnswered(DurableError):
    """An update that nobody will answer: the run has ended, or has taken it as a signal that it only waited for."""


class OperationFailed(DurableError):
    """Raise this in the ``poll`` of an operation: the service says that the operation itself has failed, for good."""


class OperationUnknown(DurableError):
    """An operation may have been issued, and what became of it was not recorded; it is never issued a second time.

    An operator who has looked at the service resolves it: :meth:`.Runs.attach_ids` where the service has the operation,
    :meth:`.Runs.never_issued` where it certainly has not, and then :meth:`.Runs.requeue`.
    """

    def __init__(self, message: str, step: str) -> None:
        super().__init__(message, step)
        self.step = step

    def __str__(self) -> str:
        return str(self.args[0])


class RetryableError(DurableError):
    """Nothing was decided: the same call may be made again."""


class NotIssued(RetryableError):
    """Raise this in the ``start`` of an operation: the service certainly does not have it, and may be asked anew."""


class DatabaseUnavailable(RetryableError):
    """The connection broke, or the server takes no writes at present.

    Where it broke during a ``COMMIT`` the outcome is unknown: the next attempt finds the receipt, or does the step.
    """


class StepTimeout(RetryableError):
    """PostgreSQL cut off a step whose transaction idled, ran or waited for longer than a timeout allows."""


class TransactionConflict(RetryableError):
    """A serialisation failure or a deadlock; retry the whole transaction."""
