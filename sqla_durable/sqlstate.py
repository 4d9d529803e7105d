"""What a database error means for a run: the one place where an SQLSTATE becomes an error of ours.

The codes are those of `PostgreSQL Error Codes <https://www.postgresql.org/docs/current/errcodes-appendix.html>`_.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, TypeVar

from psycopg import Error
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from sqla_durable.causes import chain
from sqla_durable.exc import (
    DatabaseUnavailable,
    DurableError,
    GuardViolation,
    SchemaMismatch,
    StepTimeout,
    TransactionConflict,
)

ValueT = TypeVar("ValueT")

CONFLICT_RETRIES: Final = 10
_PAUSE = 0.02
_LONGEST_PAUSE = 0.5
SERIALIZATION_FAILURE = "40001"
DEADLOCK = "40P01"
FAILED_TRANSACTION = "25P02"
RESTRICT_VIOLATION = "23001"
FOREIGN_KEY_VIOLATION = "23503"
UNIQUE_VIOLATION = "23505"
NO_SUCH_SAVEPOINT = "3B001"
READ_ONLY = "25006"
UNDEFINED_TABLE = "42P01"
UNDEFINED_COLUMN = "42703"
GUARD_CLASS = "SD"
_CREATE = (
    "create the tables first, by your migrations or Base.metadata.create_all(engine), or check that the URL names the "
    "right database"
)

_CHECK_VIOLATION = "23514"
_FEATURE_NOT_SUPPORTED = "0A000"
_CONFLICTS = {SERIALIZATION_FAILURE, DEADLOCK}
_TIMEOUTS = {
    "25P03": "idle_in_transaction_session_timeout",
    "25P04": "transaction_timeout",
    "55P03": "lock_timeout",
    "57014": "statement_timeout, or the statement was cancelled",
}
_UNAVAILABLE = {READ_ONLY, "53300", "57P01", "57P02", "57P03", "57P05"}


def sqlstate_of(error: BaseException) -> str | None:
    """Return the five-character code the server sent with an error of SQLAlchemy's or the driver's, if any."""
    code = getattr(getattr(error, "orig", error), "sqlstate", None)
    return code if isinstance(code, str) else None


def violated(error: BaseException) -> str | None:
    """Return the name of the unique constraint or index that a statement violated, if it was that."""
    name = getattr(getattr(getattr(error, "orig", error), "diag", None), "constraint_name", None)
    return name if isinstance(name, str) and sqlstate_of(error) == UNIQUE_VIOLATION else None


def is_outdated(error: BaseException | None) -> bool:
    """Whether a migration has changed what a statement returns that was prepared before it.

    It is known by the function of the server that raises it: no language changes that, as it does the message.
    """
    function = getattr(getattr(getattr(error, "orig", error), "diag", None), "source_function", None)
    return error is not None and sqlstate_of(error) == _FEATURE_NOT_SUPPORTED and function == "RevalidateCachedQuery"


def is_misrouted(error: BaseException) -> bool:
    """Whether a row was on its way into the default partition as that of its month was created; next time it is not.

    It is known by the function of the server that raises it, as above.
    """
    function = getattr(getattr(getattr(error, "orig", error), "diag", None), "source_function", None)
    return sqlstate_of(error) == _CHECK_VIOLATION and function == "ExecPartitionCheckEmitError"


def database_errors(error: BaseException) -> Iterator[BaseException]:
    """Return the errors of the database that led to ``error``, the nearest first."""
    return (link for link in chain(error) if isinstance(link, DBAPIError | Error))


def guard_violation(error: BaseException) -> GuardViolation | None:
    """Return the error of ours for a write that a guard has refused; None for any other error.

    It is for statements of your own: where the library's are refused, and in the body of a step, it is raised.

    :param error: an error of SQLAlchemy's or of the driver's.
    """
    code = sqlstate_of(error)
    if code is None or not code.startswith(GUARD_CLASS):
        return None
    diagnosis: Any = getattr(getattr(error, "orig", error), "diag", None)
    said = f"{diagnosis.message_primary} (SQLSTATE {code}). {diagnosis.message_hint or ''}".rstrip()
    return GuardViolation(said, code, diagnosis.table_name)


def schema_mismatch(error: BaseException) -> SchemaMismatch | None:
    """Return the error of ours for a statement that names a table or column which the database does not have.

    None for any other error, and for one within a function or trigger, which is of the user's making.

    :param error: an error of SQLAlchemy's or of the driver's, raised by a statement of the library's.
    """
    diagnosis: Any = getattr(getattr(error, "orig", error), "diag", None)
    if sqlstate_of(error) not in {UNDEFINED_TABLE, UNDEFINED_COLUMN} or diagnosis is None or diagnosis.context:
        return None
    remedy = "run your migrations" if diagnosis.sqlstate == UNDEFINED_COLUMN else _CREATE
    return SchemaMismatch(
        f"{diagnosis.message_primary}; {remedy}. The command sqla-durable check says all that differs from the models."
    )


def translate(error: BaseException) -> DurableError | None:
    """Return the error of ours that a database error stands for, or None where it is the statement's own fault."""
    code = sqlstate_of(error)
    shown = getattr(error, "orig", error)
    if (told := guard_violation(error) or schema_mismatch(error)) is not None:
        return told
    if code in _CONFLICTS:
        return TransactionConflict(
            f"the transaction conflicts with another one (SQLSTATE {code}); retry the whole transaction: {shown}"
        )
    if is_outdated(error) or is_misrouted(error):
        outdated = "a migration changed what a prepared statement returns"
        misrouted = "the partition of this row's month was created just now"
        return TransactionConflict(f"{outdated if is_outdated(error) else misrouted}; do it again: {shown}")
    if code in _TIMEOUTS:
        return StepTimeout(
            f"PostgreSQL cut the transaction off ({_TIMEOUTS[code]}, SQLSTATE {code}); nothing of it was "
            "committed. Keep a step's body short, or move long work into an external step."
        )
    lost = isinstance(error, PoolTimeout) or getattr(error, "connection_invalidated", False)
    # Without a statement the error is of connecting, for which the driver knows no code.
    lost = lost or (isinstance(error, OperationalError) and error.statement is None)
    if lost or code in _UNAVAILABLE or (code or "").startswith("08"):
        return DatabaseUnavailable(f"the database is not available for writing at present: {shown}")
    return None


def retry_outages(write: Callable[[], ValueT], sleep: Callable[[float], None], patience: timedelta) -> ValueT:
    """Make a write that may be repeated again where the database was not available.

    An external step may take long enough for every pooled connection to die, or end while the server restarts; its
    result must not be lost to that.

    :param sleep: waits for so many seconds.
    :param patience: for how long, at the least, to try it again.
    """
    end = time.monotonic() + patience.total_seconds()
    pause = 0.0
    while time.monotonic() < end:
        try:
            return write()
        except DatabaseUnavailable:
            sleep(pause)
            pause = min(2 * pause + _PAUSE, _LONGEST_PAUSE)
    return write()


@contextmanager
def translated() -> Generator[None, None, None]:
    """Raise errors of ours in place of the database errors that stand for them."""
    try:
        yield
    except (DBAPIError, PoolTimeout) as error:
        if (ours := translate(error)) is not None:
            raise ours from error
        raise


def retry_conflicts(transaction: Callable[[], ValueT]) -> ValueT:
    """Call ``transaction``, a whole one, again where it conflicts with another; a bounded number of times.

    There is no pause in between: a conflict means that the other transaction has ended.
    """
    for _ in range(CONFLICT_RETRIES):
        try:
            return transaction()
        except TransactionConflict:
            continue
    return transaction()
