"""For tests of code that uses this library: moves a run's times, so that nothing needs to sleep or to fake a clock."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeGuard

from sqlalchemy import func, select, update
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Session

from sqla_durable import clock
from sqla_durable.exc import RunNotFound, UsageError
from sqla_durable.functions.handle import FunctionHandle
from sqla_durable.functions.model import FunctionMixin, FunctionRows
from sqla_durable.functions.waiting import by_key, found, known_id
from sqla_durable.machine import names_of
from sqla_durable.receipt import ReceiptMixin, ReceiptRows, StepOutcome, step_key
from sqla_durable.rows import Rows, arguments
from sqla_durable.run import RunMixin, RunRows
from sqla_durable.step_key import stored_key

_SECOND = timedelta(seconds=1)


def lapse(session: Session, run: type[RunMixin], ident: object) -> None:
    """Let the lease of a running run have run out one second ago.

    :param session: the caller's session; nothing is committed here.
    :param run: the run class.
    :param ident: the primary key, the loaded object, or the handle of a function's run.
    :raises RunNotFound: where no such run is running.
    """
    rows: RunRows[Any] = RunRows(run)
    _move(session, rows, ident, rows.lease_expires_at, rows.lifecycle.running)


def make_due(session: Session, run: type[RunMixin], ident: object) -> None:
    """Let a ready run that waits for its backoff, or for the next poll of an operation, be due since one second ago.

    :param session: the caller's session; nothing is committed here.
    :param run: the run class.
    :param ident: the primary key, the loaded object, or the handle of a function's run.
    :raises RunNotFound: where no such run is ready.
    """
    rows: RunRows[Any] = RunRows(run)
    _move(session, rows, ident, rows.available_at, rows.lifecycle.ready)


def expire(session: Session, run: type[RunMixin], ident: object) -> None:
    """Let the expiry of a run have passed one second ago; what finds it so has it expire.

    :param session: the caller's session; nothing is committed here.
    :param run: the run class.
    :param ident: the primary key, the loaded object, or the handle of a function's run.
    :raises RunNotFound: where no such run is in a status that can expire.
    """
    rows: RunRows[Any] = RunRows(run)
    if rows.lifecycle.expired is None:
        raise UsageError(f"{run.__name__} does not expire; add ExpiryMixin and Lifecycle(expired=...).")
    _move(session, rows, ident, rows.column("expires_at"), *rows.lifecycle.expirable)


def overrun(session: Session, run: type[RunMixin], ident: object) -> None:
    """Let the deadline of a running run have passed one second ago; its holder learns of it as it next writes or beats.

    :param session: the caller's session; nothing is committed here.
    :param run: the run class.
    :param ident: the primary key, the loaded object, or the handle of a function's run.
    :raises RunNotFound: where no such run is running.
    """
    rows: RunRows[Any] = RunRows(run)
    if rows.max_duration is None:
        raise UsageError(f"{run.__name__} has no deadlines; add DeadlineMixin and Lifecycle(timed_out=...).")
    _move(session, rows, ident, rows.started_at, rows.lifecycle.running, before=rows.max_duration)


def let_pass(session: Session, receipt: type[ReceiptMixin[Any]], ident: object, key: str | int) -> None:
    """Let the sleep of a run, or the timeout of a wait, have passed one second ago, and the run be due.

    :param session: the caller's session; nothing is committed here.
    :param receipt: the receipt class.
    :param ident: the primary key of the run, the loaded object, or the handle of a function's run.
    :param key: the step's key.
    :raises RunNotFound: where no such run is ready, or none that waits in that step until an instant.
    """
    make_due(session, receipt.__run__, ident)
    rows = ReceiptRows(receipt)
    waits = rows.is_waiting, rows.in_outcome(StepOutcome.PENDING), rows.until.is_not(None)
    past = func.jsonb_build_object("until", clock.stamp() - clock.interval(_SECOND), type_=JSONB)
    statement = (
        update(rows.table)
        .where(*rows.of_run(), rows.step == step_key(), *waits)
        .values({**rows.untouched(), rows.ids: past})
        .returning(rows.step)
    )
    identity = _identity(session, rows.runs, ident)
    parameters = {**rows.runs.parameters(identity), **arguments(step=stored_key(key))}
    if session.connection(bind_arguments={"mapper": rows.mapper}).execute(statement, parameters).first() is None:
        raise RunNotFound(
            f"no {rows.runs.entity.__name__} with the key {identity!r} waits in step {key!r} until an instant."
        )


def _identity(session: Session, rows: Rows[Any], ident: object) -> tuple[Any, ...]:
    """Return the primary key of a run; that of a handle without one is looked up by its key."""
    if not _is_handle(ident):
        return rows.identity(ident)
    if not issubclass(rows.entity, FunctionMixin):
        raise UsageError(f"{rows.entity.__name__} is not the run class of functions, whose run {ident!r} stands for.")
    if (known := known_id(ident)) is None:
        runs: FunctionRows[Any] = FunctionRows(rows.entity)
        statement = select(runs.id).where(*by_key(runs, ident))
        known = found(session.connection(bind_arguments={"mapper": rows.mapper}).execute(statement).first(), ident)[0]
    return (known,)


def _is_handle(ident: object) -> TypeGuard[FunctionHandle[Any]]:
    return isinstance(ident, FunctionHandle)


def _move(session: Session, rows: RunRows[Any], ident: object, column: Any, *statuses: Any, before: Any = None) -> None:
    identity = _identity(session, rows, ident)
    past: Any = clock.stamp() - clock.interval(_SECOND)
    moved = {column: past if before is None else past - before}
    statement = rows.update(rows.lock(rows.matches(), rows.status.in_(statuses)), moved).returning(column)
    connection = session.connection(bind_arguments={"mapper": rows.mapper})
    if connection.execute(statement, rows.parameters(identity)).first() is None:
        raise RunNotFound(f"no {rows.entity.__name__} with the key {identity!r} is {names_of(statuses)}.")
