"""What became of a step's transaction: whether it still stands after the body, and what an exception means for it."""

from __future__ import annotations

from psycopg.pq import TransactionStatus
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.orm import SessionTransaction

from sqla_durable.exc import DurableError, SchemaMismatch, TransactionEnded
from sqla_durable.session import StepSession, ended
from sqla_durable.sqlstate import (
    FAILED_TRANSACTION,
    FOREIGN_KEY_VIOLATION,
    NO_SUCH_SAVEPOINT,
    READ_ONLY,
    database_errors,
    sqlstate_of,
    translate,
)


class StepTransaction:
    """The transaction that a step began, and the constraint that refuses to commit it unsealed.

    :param session: the step's session.
    :param transaction: its transaction.
    :param connection: its connection.
    :param guard: the name of that constraint.
    """

    def __init__(
        self, session: StepSession, transaction: SessionTransaction, connection: Connection, guard: str
    ) -> None:
        self._session = session
        self._transaction = transaction
        self._connection = connection
        self._guard = guard
        self.begun = False
        """Whether the body has been called, so that a statement may be one of its own."""

    def refuse_ended(self) -> None:
        """Raise :class:`.TransactionEnded` unless the transaction stands, now that the body has returned."""
        if self._session.ended is not None:
            raise ended(self._session.ended)
        if self._gone:
            raise ended("through its connection or transaction object")
        if not self._session.is_active:
            raise _swallowed()

    def unsealed(self, error: DBAPIError) -> DurableError:
        """Return the error of ours for one that sealing the receipt raised, on a connection the body has changed."""
        code = sqlstate_of(error)
        if code == FAILED_TRANSACTION:
            return _swallowed()
        # What the body has SET, search_path for one, may have it look elsewhere for the receipts.
        if code != READ_ONLY and (ours := translate(error)) is not None and not isinstance(ours, SchemaMismatch):
            return ours
        return TransactionEnded(
            f"the receipt could not be written on the body's connection, so nothing of the step is committed: "
            f"{error.orig}. Undo what the body has SET (search_path, role, read only) before it returns."
        )

    def verdict(self, error: Exception, *, returned: bool) -> DurableError | None:
        """Return the error of ours that stands for ``error``, or None where it is the body's own failure.

        :param returned: whether the body had returned, so that ``error`` cannot be its failure.
        """
        if isinstance(error, DurableError):
            return None
        if self._session.ended is not None:
            return ended(self._session.ended)
        if (found := self._found(error, returned=returned)) is not None:
            return found
        if self._gone or (returned and isinstance(error, InvalidRequestError)):
            return ended("through its connection or transaction object")
        return None

    def _found(self, error: Exception, *, returned: bool) -> DurableError | None:
        """Look for the database's own word on it among the errors that led to ``error``."""
        healthy = self._healthy
        for cause in database_errors(error):
            code = sqlstate_of(cause)
            if code == NO_SUCH_SAVEPOINT or (code == FOREIGN_KEY_VIOLATION and _constraint(cause) == self._guard):
                return ended("a COMMIT or ROLLBACK of its own, or SET CONSTRAINTS ALL instead of one by name")
            # An error that the body has handled in a savepoint is not why it raises another one.
            passed = cause is error or not healthy
            ours = translate(cause) if passed else None
            if ours is not None and not (self.begun and isinstance(ours, SchemaMismatch)):
                return ours
            if returned and code == FAILED_TRANSACTION:
                return _swallowed()
        return None

    @property
    def _gone(self) -> bool:
        connection = self._connection
        return self._session.get_transaction() is not self._transaction or connection.closed or connection.invalidated

    @property
    def _healthy(self) -> bool:
        if self._connection.closed or self._connection.invalidated:
            return False
        driver = self._connection.connection.driver_connection
        return driver is not None and driver.info.transaction_status == TransactionStatus.INTRANS


def _constraint(error: BaseException) -> str | None:
    name: str | None = getattr(getattr(getattr(error, "orig", error), "diag", None), "constraint_name", None)
    return name


def _swallowed() -> TransactionEnded:
    return TransactionEnded(
        "the body swallowed a database error, after which PostgreSQL commits nothing of the transaction. Wrap what may "
        "fail in session.begin_nested(), or let the error pass."
    )
