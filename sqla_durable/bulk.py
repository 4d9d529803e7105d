"""What an operator does to many runs at a time: requeued, cancelled or purged by what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, or_, select
from sqlalchemy.orm import Session

from sqla_durable import clock, purge, reap, receipt
from sqla_durable.caller import AnySession, unproxied
from sqla_durable.exc import UsageError
from sqla_durable.in_flight import refusing_occupied
from sqla_durable.listing import ago, statuses
from sqla_durable.machine import names_of
from sqla_durable.rows import AnyRow
from sqla_durable.sqlstate import translated
from sqla_durable.store import Store

_BATCH: Final = 500
Wanted = Callable[..., list[ColumnElement[bool]]]


class Bulk:
    """Does to many runs what :class:`.Verbs` do to one.

    :param store: whose runs these are.
    :param wanted: returns the SQL of the conditions that a caller gives.
    """

    def __init__(self, store: Store[Any], wanted: Wanted) -> None:
        self._store = store
        self._runs = store.runs
        self._wanted = wanted

    def requeue(self, limit: int | None, conditions: Mapping[str, Any], *, everything: bool) -> int:
        """See :meth:`.Runs.requeue_all`."""
        if not self._runs.lifecycle.requeue:
            raise UsageError(
                f"{self._runs.entity.__name__} names no status to requeue from; add Lifecycle(requeue={{...}})."
            )
        asked = self._conditions("requeue_all", conditions, everything=everything)
        # Not those that have finished since, or one that fails at once would be requeued again and again.
        finished_at, began = self._runs.finished_at, self._store.single(lambda one: one.scalar(select(clock.now())))
        asked.append(or_(finished_at.is_(None), finished_at <= began))

        def batch(size: int) -> int:
            statement = reap.requeue_all(self._runs, asked, size, notify=self._store.notifies)

            def work(_: Session, connection: Connection) -> int:
                with refusing_occupied(self._runs):
                    identities = [tuple(row)[: len(self._runs.key)] for row in connection.execute(statement)]
                if identities:
                    connection.execute(receipt.forget_failed_of(self._store.receipts, identities))
                return len(identities)

            return self._store.execute(work)

        return _in_batches(batch, limit, _BATCH)

    def cancel(self, session: AnySession, limit: int | None, conditions: Mapping[str, Any], *, everything: bool) -> int:
        """See :meth:`.Runs.cancel_all`."""
        if self._runs.lifecycle.cancelled is None:
            raise UsageError(f"{self._runs.entity.__name__} cannot be cancelled; name Lifecycle(cancelled=...).")
        asked = self._conditions("cancel_all", conditions, everything=everything)
        session = unproxied(session)
        session.flush()

        def batch(size: int) -> int:
            statement = reap.request_cancel_all(self._runs, asked, size, quietly=session.twophase)
            rows = self._store.callers_connection(session).execute(statement).all()
            for row in rows:
                self._show(session, row)
            return len(rows)

        with translated():
            return _in_batches(batch, limit, _BATCH)

    def purge(
        self,
        older_than: timedelta,
        status: StrEnum | Collection[StrEnum] | None,
        batch_size: int,
        limit: int | None,
    ) -> int:
        """See :meth:`.Runs.purge`."""
        terminal = self._runs.lifecycle.machine.terminal
        chosen = sorted(terminal) if status is None else statuses(self._runs, status)
        if live := [each for each in chosen if each not in terminal]:
            raise UsageError(f"{names_of(live)} is not terminal; only runs that have ended are purged.")
        until = ago("older_than", older_than)
        gone = 0

        def batch(size: int) -> int:
            nonlocal gone
            statement = purge.purge(self._runs, chosen, until, size)
            with purge.refusing_referenced(self._runs, gone):
                deleted: int = self._store.single(lambda connection: connection.execute(statement).scalar_one())
            gone += deleted
            return deleted

        return _in_batches(batch, limit, batch_size) if chosen else 0

    def _conditions(self, verb: str, conditions: Mapping[str, Any], *, everything: bool) -> list[ColumnElement[bool]]:
        given = [name for name, value in conditions.items() if value is not None]
        if everything and given:
            raise UsageError(f"{verb}(everything=True) leaves nothing out, but {given[0]} was given, too.")
        if not everything and not given:
            raise UsageError(f"{verb}() was given no condition; say which runs are meant, or everything=True.")
        return self._wanted(**conditions)

    def _show(self, session: Session, row: AnyRow) -> None:
        identity = tuple(row)[: len(self._runs.key)]
        if (loaded := self._runs.loaded(session, row, identity)) is not None:
            self._runs.show(loaded, row._mapping)


def _in_batches(batch: Callable[[int], int], limit: int | None, size: int) -> int:
    """Call ``batch`` with how many it may take, until it finds none; return how many that were."""
    if size < 1 or (limit is not None and limit < 1):
        raise UsageError(f"batch={size}, limit={limit}: at least 1.")
    done = 0
    while limit is None or done < limit:
        found = batch(size if limit is None else min(size, limit - done))
        if not found:
            break
        done += found
    return done
