"""Durable step execution on your own SQLAlchemy models, in your own PostgreSQL.

The asyncio twin of :class:`Runs` is :class:`sqla_durable.asyncio.AsyncRuns`; it is imported on request only, as it
needs greenlet.
"""

from sqla_durable.attempts import AttemptsMixin
from sqla_durable.changes import OnMismatch
from sqla_durable.checkup import Finding, Severity, check
from sqla_durable.deadline import DeadlineMixin
from sqla_durable.dispatch import HasWorks, Work
from sqla_durable.exc import (
    Cancelled,
    ConfigurationError,
    DatabaseUnavailable,
    DurableError,
    FrozenPayload,
    GuardViolation,
    HolderError,
    InputError,
    InputMismatch,
    KeyConflict,
    LostLease,
    NestedStep,
    NotAnswered,
    NotIssued,
    OperationFailed,
    OperationUnknown,
    ReceiptMismatch,
    ResultError,
    ResultMismatch,
    RetryableError,
    RunCancelled,
    RunFailed,
    RunInFlight,
    RunInputMismatch,
    RunNotFound,
    RunNotLanded,
    RunReferenced,
    RunTimedOut,
    SchemaMismatch,
    SignalMismatch,
    SignalTimeout,
    StepFailed,
    StepReused,
    StepTimeout,
    StepUnreached,
    Suspended,
    TimedOut,
    TransactionConflict,
    TransactionEnded,
    UndeclaredTransition,
    UpdateFailed,
    UpdateTimeout,
    UsageError,
)
from sqla_durable.execution import Ending, Outcome
from sqla_durable.expiry import ExpiryMixin
from sqla_durable.failure import Failure
from sqla_durable.functions import (
    FunctionConditions,
    FunctionHandle,
    FunctionMixin,
    FunctionRun,
    Functions,
    FunctionStatus,
    FunctionSummary,
    Rate,
    function_lifecycle,
    function_statuses,
)
from sqla_durable.gather import Call, call, keyed_call
from sqla_durable.guard import Guard, guard_of
from sqla_durable.ids import uuid7
from sqla_durable.key import KeyMixin
from sqla_durable.lease import Lease, LeaseMixin
from sqla_durable.lifecycle import Lifecycle
from sqla_durable.listing import RunConditions, RunSummary
from sqla_durable.monthly import Monthly
from sqla_durable.operation import PENDING, Pending
from sqla_durable.partitions import (
    Partition,
    PartitionKept,
    PartitionsCreated,
    PartitionsDropped,
    create_partitions,
    drop_partitions,
    partition_sql,
    partitions_of,
)
from sqla_durable.priority import PriorityMixin
from sqla_durable.receipt import Effect, Receipt, ReceiptMixin, StepOutcome
from sqla_durable.retry import Retry
from sqla_durable.run import RunMixin
from sqla_durable.runs import Run, Runs
from sqla_durable.signal import SignalMixin
from sqla_durable.sqlstate import guard_violation
from sqla_durable.status import StatusMachine
from sqla_durable.waits_for import WaitMixin
from sqla_durable.worker import Worker

__all__ = [
    "PENDING",
    "AttemptsMixin",
    "Call",
    "Cancelled",
    "ConfigurationError",
    "DatabaseUnavailable",
    "DeadlineMixin",
    "DurableError",
    "Effect",
    "Ending",
    "ExpiryMixin",
    "Failure",
    "Finding",
    "FrozenPayload",
    "FunctionConditions",
    "FunctionHandle",
    "FunctionMixin",
    "FunctionRun",
    "FunctionStatus",
    "FunctionSummary",
    "Functions",
    "Guard",
    "GuardViolation",
    "HasWorks",
    "HolderError",
    "InputError",
    "InputMismatch",
    "KeyConflict",
    "KeyMixin",
    "Lease",
    "LeaseMixin",
    "Lifecycle",
    "LostLease",
    "Monthly",
    "NestedStep",
    "NotAnswered",
    "NotIssued",
    "OnMismatch",
    "OperationFailed",
    "OperationUnknown",
    "Outcome",
    "Partition",
    "PartitionKept",
    "PartitionsCreated",
    "PartitionsDropped",
    "Pending",
    "PriorityMixin",
    "Rate",
    "Receipt",
    "ReceiptMismatch",
    "ReceiptMixin",
    "ResultError",
    "ResultMismatch",
    "Retry",
    "RetryableError",
    "Run",
    "RunCancelled",
    "RunConditions",
    "RunFailed",
    "RunInFlight",
    "RunInputMismatch",
    "RunMixin",
    "RunNotFound",
    "RunNotLanded",
    "RunReferenced",
    "RunSummary",
    "RunTimedOut",
    "Runs",
    "SchemaMismatch",
    "Severity",
    "SignalMismatch",
    "SignalMixin",
    "SignalTimeout",
    "StatusMachine",
    "StepFailed",
    "StepOutcome",
    "StepReused",
    "StepTimeout",
    "StepUnreached",
    "Suspended",
    "TimedOut",
    "TransactionConflict",
    "TransactionEnded",
    "UndeclaredTransition",
    "UpdateFailed",
    "UpdateTimeout",
    "UsageError",
    "WaitMixin",
    "Work",
    "Worker",
    "call",
    "check",
    "create_partitions",
    "drop_partitions",
    "function_lifecycle",
    "function_statuses",
    "guard_of",
    "guard_violation",
    "keyed_call",
    "partition_sql",
    "partitions_of",
    "uuid7",
]
