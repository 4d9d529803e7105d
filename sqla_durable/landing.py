"""Landing runs as done, in groups."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from sqlalchemy import Column, Connection
from sqlalchemy.exc import SQLAlchemyError

from sqla_durable import fence
from sqla_durable.exc import DatabaseUnavailable, DurableError
from sqla_durable.ground import Gate
from sqla_durable.lease import Lease
from sqla_durable.prepared import Loader, Prepared
from sqla_durable.rows import arguments
from sqla_durable.store import Store

Landed = Mapping[Column[Any], Any]


# A sleep of no time takes a twentieth of a millisecond where the system lets timers slack.
_give_way: Callable[[], None] = getattr(os, "sched_yield", partial(time.sleep, 0))


class _Landing:
    """One holder's wish to land its run."""

    __slots__ = ("answer", "gate", "leads", "lease", "output", "then", "told")

    def __init__(self, lease: Lease, output: str | None, then: Callable[[], Callable[[], None]] | None = None) -> None:
        self.lease = lease
        self.output = output
        self.then = then
        self.gate: Gate | None = None
        self.leads = False
        self.told = False
        self.answer: Landed | DatabaseUnavailable | None = None


class Landings:
    """Lands the runs that finish while a landing statement is under way together, with the next one.

    Whoever comes first leads: it writes its own landing and all that wait by then, and hands the lead to the first that
    came meanwhile, or keeps it where nobody waits in person. So nothing waits for a group to fill, and no thread or
    task is needed for it.

    :param store: whose runs these are.
    """

    def __init__(self, store: Store[Any]) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._waiting: list[_Landing] = []
        self._led = False

    def land(self, lease: Lease, output: str | None) -> Landed | None:
        """Land a run as done if its fence is still the holder's and nobody has asked for it to be cancelled.

        :param output: the result of the whole run, as JSON, where its rows have one.
        :return: what the run's columns are now; None where the row was not such a one, or is locked, or the database
         refused the group: then the run is landed by a statement of its own, which waits, and says why it may not be.
        :raises DatabaseUnavailable: where it is not known whether the run has landed.
        """
        mine = _Landing(lease, output)
        with self._lock:
            self._waiting.append(mine)
            if self._led:
                mine.gate = self._store.sessions.gate()
            else:
                mine.leads = self._led = True
        if mine.gate is not None:
            self._wait(mine, mine.gate)
        if mine.leads:
            self._lead()
        return self._answer(mine)

    def submit(
        self, lease: Lease, output: str | None, then: Callable[[Callable[[], Landed | None]], Callable[[], None]]
    ) -> None:
        """Do the same without waiting where another one leads.

        :param output: as for :meth:`land`.
        :param then: called in the thread of whoever leads, with a function that returns or raises what :meth:`land`
         would have. What it returns is called when all of the group have been told; equal ones once.
        """
        mine = _Landing(lease, output, lambda: then(lambda: self._answer(mine)))
        with self._lock:
            self._waiting.append(mine)
            leads, self._led = not self._led, True
        if leads:
            self._lead()

    def _answer(self, mine: _Landing) -> Landed | None:
        if isinstance(mine.answer, DatabaseUnavailable):
            raise DatabaseUnavailable(*mine.answer.args) from mine.answer
        return mine.answer if mine.told else self._found(mine.lease)

    def _found(self, lease: Lease) -> Landed | None:
        """Look whether the run has landed: whoever wrote the group was interrupted and has not learnt of it."""
        parameters = self._store.parameters(lease)
        rows = self._store.single(lambda connection: self._unknown.rows(connection, parameters))
        for row in rows:
            values = self._loader.load(row, self._unknown.types)
            if values[self._store.runs.status] == self._store.runs.lifecycle.done:
                return values
        return None

    def _wait(self, mine: _Landing, gate: Gate) -> None:
        try:
            gate.wait()
        except BaseException:
            # Interrupted: the lead that it was just handed must not end with it, or nobody would land any more.
            with self._lock:
                if mine in self._waiting:
                    self._waiting.remove(mine)
            if mine.leads:
                self._hand_over()
            raise

    def _lead(self) -> None:
        while True:
            self._let_others_join()
            with self._lock:
                group, self._waiting = self._waiting, []
            try:
                self._write(group)
            finally:
                self._hand_over()
                self._tell(group)
            with self._lock:
                if self._led or not self._waiting:
                    return
                self._led = True

    def _let_others_join(self) -> None:
        """Give way to other threads for as long as that brings a further one: it takes microseconds where none does."""
        joined = 0
        while len(self._waiting) > joined:
            joined = len(self._waiting)
            _give_way()

    def _tell(self, group: Sequence[_Landing]) -> None:
        for landing in group:
            if landing.gate is not None and not landing.leads:
                landing.gate.open()
        told = [landing.then() for landing in group if landing.then is not None and landing.answer is not None]
        for afterwards in dict.fromkeys(told):
            afterwards()
        # The others are landed by statements of their own, each of which may wait for a lock on its row: one after the
        # other, a lock on one row would hold up all of them.
        left = [landing.then for landing in group if landing.then is not None and landing.answer is None]
        for then in left[1:]:
            threading.Thread(target=_conclude, args=(then,), name="sqla_durable landing", daemon=True).start()
        for then in left[:1]:
            _conclude(then)

    def _hand_over(self) -> None:
        """Hand the lead to the first that waits in person, or let it go."""
        with self._lock:
            following = next((landing for landing in self._waiting if landing.gate is not None), None)
            self._led = following is not None
            if following is None:
                return
            following.leads = True
        if following.gate is not None:
            following.gate.open()

    def _write(self, group: Sequence[_Landing]) -> None:
        landed: Mapping[Any, Landed | DatabaseUnavailable]
        try:
            landed = self._store.single(lambda connection: self._land(connection, group))
        except DatabaseUnavailable as unavailable:
            landed = dict.fromkeys((landing.lease.identity for landing in group), unavailable)
        except (DurableError, SQLAlchemyError):
            landed = {}  # each is landed, or refused, on its own
        except Exception:  # noqa: BLE001 - a hook of the user's may raise anything, and after the landing, too
            return
        # Two holders of one run may be in one group, of which the one with the older fence has lost its lease.
        newest: dict[Any, int] = {}
        for landing in group:
            newest[landing.lease.identity] = max(landing.lease.fence, newest.get(landing.lease.identity, 0))
        for landing in group:
            if landing.lease.fence == newest[landing.lease.identity]:
                landing.answer = landed.get(landing.lease.identity)
            landing.told = True

    def _land(self, connection: Connection, group: Sequence[_Landing]) -> dict[Any, Landed]:
        each = [self._parameters(landing) for landing in group]
        if len(each) == 1:
            statement, parameters = self._one, each[0]
        else:
            statement = self._many
            parameters = {name: [parameters[name] for parameters in each] for name in each[0]}
        runs = self._store.runs
        loaded = [self._loader.load(row, statement.types) for row in statement.rows(connection, parameters)]
        return {tuple(values[column] for column in runs.key): values for values in loaded}

    def _parameters(self, landing: _Landing) -> dict[str, Any]:
        given = self._store.parameters(landing.lease, output=landing.output)
        runs = self._store.runs
        names = (*runs.key_names, "fence", *(() if runs.output is None else ("output",)))
        return {name: given[name] for name in arguments(**dict.fromkeys(names))}

    @cached_property
    def _one(self) -> Prepared:
        return self._store.prepare(fence.land_done(self._store.runs))

    @cached_property
    def _many(self) -> Prepared:
        return self._store.prepare(fence.land_all_done(self._store.runs))

    @cached_property
    def _unknown(self) -> Prepared:
        return self._store.prepare(fence.found(self._store.runs))

    @cached_property
    def _loader(self) -> Loader:
        return Loader(fence.landed(self._store.runs), self._store.engine.dialect)


def _conclude(then: Callable[[], Callable[[], None]]) -> None:
    then()()
