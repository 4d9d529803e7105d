"""Waiting until the run of a function has landed: by a notification where there is one, and by looking in any case."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cached_property
from typing import Any, Final, cast
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, Text, false, func, not_, or_, select, true
from sqlalchemy import cast as sql_cast
from sqlalchemy.exc import DBAPIError

from sqla_durable.exc import RetryableError, RunNotFound, RunNotLanded, UsageError
from sqla_durable.functions.handle import FunctionHandle
from sqla_durable.functions.hearing import Waiter, hearing
from sqla_durable.functions.model import FunctionRows
from sqla_durable.in_flight import same
from sqla_durable.rows import AnyRow, AnySelect
from sqla_durable.store import Store

_SHORTEST_PAUSE: Final = 0.01
_LONGEST_PAUSE: Final = 0.5
_LONGEST_HEARING: Final = 1.0
_REFUSALS: Final = 3
AnyHandle = FunctionHandle[Any] | UUID


class Waiting:
    """Reads how runs have ended, and waits until they have.

    A run that somebody waits for carries a mark, so that landing one costs nothing where nobody does.

    :param store: whose runs these are.
    :param rows: their rows.
    """

    def __init__(self, store: Store[Any], rows: FunctionRows[Any]) -> None:
        self._store = store
        self._rows = rows

    def ending(self, connection: Connection, handle: AnyHandle) -> AnyRow:
        """Read how a run stands, and what it has returned or raised, with one statement.

        :raises RunNotFound: where there is no such run.
        """
        if (ident := known_id(handle)) is not None:
            return found(connection.execute(self._plain, self._rows.parameters((ident,))).first(), handle)
        conditions = by_key(self._rows, handle)
        return found(connection.execute(select(*self._ending).where(*conditions)).first(), handle)

    def has_landed(self, row: AnyRow) -> bool:
        """Whether that is how it stays, unless somebody gives it another life."""
        return row.status in self._rows.lifecycle.machine.terminal

    def until_landed(
        self, handle: AnyHandle, timeout: timedelta | None, check: Callable[[AnyRow], object] = lambda _: None
    ) -> AnyRow:
        """Wait until a run has landed, and return how; one that has by now costs one statement.

        :param check: called before one that has not is waited for.
        :raises RunNotLanded: where it has not within the time.
        :raises RetryableError: where the database is away at the beginning, or when the time is up.
        """
        if timeout is not None and not isinstance(cast(object, timeout), timedelta):
            raise UsageError(f"timeout={timeout!r}: a duration is a timedelta, as in timedelta(seconds=30).")
        end = math.inf if timeout is None else time.monotonic() + timeout.total_seconds()
        row = self._store.single(lambda connection: self.ending(connection, handle))
        if self.has_landed(row):
            return row
        check(row)
        # Many a run is over by then, and needs neither a mark nor anybody who listens for it.
        self._store.sessions.sleep(max(0.0, min(_SHORTEST_PAUSE, end - time.monotonic())))
        with self._hearing(str(row.id)) as waiter:
            return self._look_on(_Look(self, row.id, handle), waiter, end, timeout)

    def _look_on(self, look: _Look, waiter: Waiter, end: float, timeout: timedelta | None) -> AnyRow:
        pause, longest = _SHORTEST_PAUSE, _LONGEST_PAUSE
        while True:
            outage: RetryableError | None = None
            try:
                row = look.once()
                if self.has_landed(row):
                    return row
                heard = row.marked and waiter.hears
                pause, longest = (_LONGEST_HEARING, _LONGEST_HEARING) if heard else (pause, _LONGEST_PAUSE)
                status = f"{named(look.handle)} is {row.status.value} still"
                late = f"{status} after {timeout}; it goes on, and describe() says how far it is."
            except RetryableError as error:
                # It lasts no longer than the database is away, as a run does; the caller has said for how long to wait.
                outage = error
                late = ""
            if (left := end - time.monotonic()) <= 0:
                raise outage or RunNotLanded(late)
            waiter.wait(min(pause, left))
            pause = min(pause * 2, longest)

    @property
    def tells(self) -> bool:
        """Whether a landing may send a notification."""
        return self._rows.lifecycle.notify and self._store.notifies

    def _hearing(self, name: str) -> AbstractContextManager[Waiter]:
        return hearing(self._store, name) if self.tells else nullcontext(Waiter(self._store.sessions))

    # statements

    def unmarked(self, ident: UUID, handle: AnyHandle) -> AnyRow:
        """Read how a run stands."""
        parameters = self._rows.parameters((ident,))
        return found(self._store.single(lambda connection: connection.execute(self._plain, parameters).first()), handle)

    def marked(self, ident: UUID, handle: AnyHandle) -> AnyRow:
        """Do the same, and mark the run as one that is waited for, unless its row is locked or that has been done."""
        parameters = self._rows.parameters((ident,))
        return found(self._store.single(lambda connection: connection.execute(self._mark, parameters).first()), handle)

    @cached_property
    def _ending(self) -> list[ColumnElement[Any]]:
        runs = self._rows
        texts = sql_cast(runs.result, Text).label("output"), sql_cast(runs.error, Text).label("error")
        return [runs.id.label("id"), runs.status.label("status"), runs.function.label("function"), *texts]

    @cached_property
    def _plain(self) -> AnySelect:
        return select(*self._ending, false().label("marked")).where(self._rows.matches())

    @cached_property
    def _mark(self) -> AnySelect:
        """A row that a step holds is left for the next look: nobody who waits may hold up one who works.

        A worker that claims passes by the row while this locks it, and so is told to look again.
        """
        runs = self._rows
        locking = runs.lock(runs.matches(), not_(runs.awaited), runs.in_flight(), skip_locked=True)
        marking = runs.update(locking, {runs.awaited: true()}).returning(runs.id, *runs.notices).cte("marking")
        marked = or_(runs.awaited, select(func.count() > 0).select_from(marking).scalar_subquery())
        return select(*self._ending, marked.label("marked")).where(runs.matches())


class _Look:
    """The looks of one waiter at one run."""

    def __init__(self, waiting: Waiting, ident: UUID, handle: AnyHandle) -> None:
        self._waiting = waiting
        self._ident = ident
        self._refused = 0 if waiting.tells else _REFUSALS
        self.handle = handle

    def once(self) -> AnyRow:
        """Look, with a mark if that may be made: not on a server that is read only, nor by a role that may only read.

        :raises RunNotFound: where the run is gone.
        """
        if self._refused == _REFUSALS:
            return self._waiting.unmarked(self._ident, self.handle)
        try:
            row = self._waiting.marked(self._ident, self.handle)
        except (RetryableError, DBAPIError):
            row = self._waiting.unmarked(self._ident, self.handle)
            self._refused += 1
            return row
        self._refused = 0
        return row


def known_id(handle: AnyHandle) -> UUID | None:
    """Return the primary key that a handle stands for, if it says."""
    if not isinstance(cast(object, handle), FunctionHandle | UUID):
        raise UsageError(f"{handle!r} stands for no run; pass a FunctionHandle, or the UUID that is its id.")
    return handle if isinstance(handle, UUID) else handle.id


def by_key(rows: FunctionRows[Any], handle: AnyHandle) -> list[ColumnElement[bool]]:
    """The conditions on the run that a handle without an id stands for."""
    key = rows.idempotency_key
    if isinstance(handle, UUID) or key is None or handle.key is None:
        raise UsageError(f"{handle!r} has neither an id nor a key.")
    return [rows.function == handle.function, same(rows.tenant, handle.tenant), key == handle.key]


def named(handle: object) -> str:
    """Return how errors call a run."""
    if isinstance(handle, FunctionHandle):
        which = f"with the key {handle.key!r}" if handle.key is not None else str(handle.id)
        return f"the run {which} of function {handle.function!r}"
    return f"the run {handle}"


def found(row: AnyRow | None, handle: object) -> AnyRow:
    """Return the row of a run.

    :raises RunNotFound: where there is none.
    """
    if row is None:
        raise RunNotFound(f"{named(handle)} does not exist.")
    return row
