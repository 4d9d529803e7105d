"""The session of a step's body: an ordinary session of the user's own class that cannot end the step's transaction."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn, Self, TypeVar, cast

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session, SessionTransaction

from sqla_durable.exc import ConfigurationError, TransactionEnded

ReceiptT = TypeVar("ReceiptT")
_log = logging.getLogger("sqla_durable")


class StepSession(Session):
    """What :func:`step_session_class` mixes into the user's session class.

    The session owns the step's transaction, so that its events fire when they say they do: ``after_commit`` after the
    real commit. A session joined to an outer transaction would fire it before.
    """

    facade: Any
    """What the body is given: the session itself, or the asyncio session in front of it."""
    ended: str | None = None
    """How the body tried to end the transaction."""
    committed = False
    _step_engine: Engine | None = None

    def as_step(self, facade: Any) -> Self:
        """Prepare the session for a step whose body is given ``facade``.

        It never expires on commit: it is closed right after, and an object that the body has added to it, such as the
        run's own row, could not be read any more.
        """
        self.facade = facade
        self.expire_on_commit = False
        return self

    def begin_step(self) -> SessionTransaction:
        """Begin the step's transaction."""
        return super().begin()

    def bind_step(self, connection: Connection) -> None:
        """Bind every later statement of this session to the engine of ``connection``."""
        self._step_engine = connection.engine

    def commit_step(self, seal: Callable[[], ReceiptT]) -> ReceiptT:
        """Seal the receipt and commit; an error that a user's ``after_commit`` raises is logged, as the commit stands.

        A user's ``before_commit`` may still write, or break the transaction, which would make the ``COMMIT`` a silent
        ``ROLLBACK``. So the receipt is sealed after it.
        """
        sealed: list[ReceiptT] = []
        dispatch: Any = self.dispatch
        if dispatch.before_commit:

            def last(session: Session) -> None:
                # A savepoint that the body has left open has a before_commit of its own.
                if not session.in_nested_transaction():
                    session.flush()
                    sealed.append(seal())

            event.listen(self, "before_commit", last)
        else:
            sealed.append(seal())
        try:
            super().commit()
        except Exception:
            if not self.committed:
                raise
            _log.exception("an after_commit listener raised; the step and its receipt are committed")
        return sealed[0]

    def close_step(self) -> None:
        """Roll back what is not committed and give the connection back, or drop it where it is broken."""
        try:
            super().close()
        except DBAPIError:
            super().invalidate()

    def drop_step(self) -> None:
        """Close every connection for good: a server that takes no writes looks healthy to the pool."""
        super().invalidate()

    def get_bind(self, *args: Any, **kwargs: Any) -> Engine | Connection:
        """Return the bind as the user's session class chooses it, if it is the step's own."""
        bind = super().get_bind(*args, **kwargs)
        if self._step_engine not in {None, bind.engine} and not self.twophase:
            raise ConfigurationError(
                f"a step's session reached a second engine ({bind.engine!r}), which cannot commit together with the "
                f"receipt in {self._step_engine!r}. Bind the tables to one engine, use twophase=True, or write there "
                "in an external step."
            )
        return bind

    def begin(self, nested: bool = False) -> SessionTransaction:  # noqa: FBT001, FBT002 - the signature of Session
        """Begin a savepoint; refuse anything else, as the step has begun already."""
        return super().begin(nested=True) if nested else self._refuse("begin()")

    def commit(self) -> NoReturn:
        """Refuse: the step commits, together with its receipt."""
        self._refuse("commit()")

    def rollback(self) -> NoReturn:
        """Refuse: raise an exception to roll the step back, or use ``begin_nested()`` for a part of it."""
        self._refuse("rollback()")

    def close(self) -> None:
        """Refuse: the step closes its session."""
        self._refuse("close()")

    def reset(self) -> None:
        """Refuse: the step closes its session."""
        self._refuse("reset()")

    def invalidate(self) -> None:
        """Refuse: the step closes its session."""
        self._refuse("invalidate()")

    def prepare(self) -> None:
        """Refuse: the step commits, together with its receipt."""
        self._refuse("prepare()")

    def _refuse(self, how: str) -> NoReturn:
        self.ended = self.ended or how
        raise ended(how)


def ended(how: str) -> TransactionEnded:
    """Return the error for a body that ended its step's transaction."""
    return TransactionEnded(
        f"the body ended its step's transaction ({how}), so nothing of the step is committed. A step commits when its "
        "body returns and rolls back when it raises; wrap what may fail in session.begin_nested()."
    )


def step_session_class(base: type[Session]) -> type[StepSession]:
    """Return ``base`` as a class of step sessions.

    :param base: the class the user's sessionmaker makes sessions of; its listeners apply to the subclass too.
    """
    made = cast("type[StepSession]", type(f"Step{base.__name__}", (StepSession, base), {}))

    def note(session: Session) -> None:
        # Releasing a savepoint is an after_commit, too.
        if not session.in_nested_transaction():
            cast("StepSession", session).committed = True

    # First, so that the commit is noted before a listener of the user's raises.
    event.listen(made, "after_commit", note, insert=True)
    return made
