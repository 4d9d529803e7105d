"""Sending signals to runs, and waiting for the reply where one is wanted."""

from __future__ import annotations

import json
import time
from dataclasses import is_dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, Final, cast

from sqlalchemy import BigInteger, Connection, Text, func, select
from sqlalchemy import cast as sql_cast
from sqlalchemy.dialects.postgresql import insert

from sqla_durable import clock
from sqla_durable.caller import AnySession, unproxied
from sqla_durable.codec import codec_of
from sqla_durable.exc import NotAnswered, ResultError, RunNotFound, UpdateFailed, UpdateTimeout, UsageError
from sqla_durable.failure import Failure
from sqla_durable.receipt import json_bound, parsed
from sqla_durable.rows import AnyRow, AnySelect, Ident, arguments, bound
from sqla_durable.run import RunRows
from sqla_durable.signal import SignalRows, signal_name
from sqla_durable.sqlstate import translated
from sqla_durable.store import Store

_PLAIN: Final = (str, int, float, list, dict, tuple, set, frozenset)
_PAUSE = 0.02
_LONGEST_PAUSE = 0.5


def sends(runs: RunRows[Any], signals: SignalRows, *, notify: bool) -> AnySelect:
    """Insert a signal to a run that has not landed, and make the run due where it waits for that one.

    The lock is ``FOR KEY SHARE``, like that of the foreign key: it waits for no step, nor does a step wait for it. What
    it does keep away, until this transaction ends, is the lock under which a run is parked: see :mod:`.waiting`.
    Whether the run waits is read from the locked row and not in the condition of the ``UPDATE``, which would look for
    it in the snapshot. A run that was claimed since has its due time lowered for nothing.
    """
    held = (
        runs.lock(runs.matches())
        .with_for_update(read=True, key_share=True, of=runs.table)
        .add_columns(runs.in_flight().label("in_flight"), runs.column("waits_for").label("waits_for"))
        .cte("held")
        .prefix_with("MATERIALIZED")
    )
    name = bound("name", signals.name.type)
    values = {
        **{column: held.c[key] for column, key in zip(signals.run_key, runs.key_names, strict=True)},
        signals.name: name,
        signals.payload: json_bound("payload"),
        signals.created_at: clock.stamp(),
    }
    living = select(*values.values()).where(held.c.in_flight)
    sent = insert(signals.table).from_select(list(values), living, include_defaults=False).returning(signals.id)
    waiting = select(*(held.c[key] for key in runs.key_names)).where(held.c.in_flight, held.c.waits_for == name)
    due = {runs.available_at: func.least(runs.available_at, clock.stamp())}
    woken = runs.update(waiting, due).returning(*(runs.notices if notify else ()), *runs.key)
    id_ = select(sent.cte("sent").c[signals.id.key]).scalar_subquery().label("id")
    return select(held.c.in_flight, id_).add_cte(woken.cte("woken"))


def replies(runs: RunRows[Any], signals: SignalRows) -> AnySelect:
    """Read what has become of a signal and of its run."""
    return (
        select(
            runs.in_flight().label("in_flight"),
            runs.status.label("status"),
            signals.step.label("step"),
            signals.answered_at.label("answered_at"),
            sql_cast(signals.reply, Text).label("reply"),
            sql_cast(signals.error, Text).label("error"),
        )
        .outerjoin_from(runs.table, signals.table, signals.id == bound("id", BigInteger()))
        .where(runs.matches())
    )


class Sending:
    """Sends signals to the runs of one store.

    :param store: whose runs these are.
    """

    def __init__(self, store: Store[Any]) -> None:
        self._store = store

    def signal(self, session: AnySession, ident: object, name: str, payload: object, type_: Any) -> bool:
        """See :meth:`.Runs.signal`."""
        identity, parameters = self._parameters(ident, name, payload, type_)
        session = unproxied(session)
        session.flush()
        with translated():
            connection = self._store.callers_connection(session)
            # A transaction that has notified cannot be prepared.
            statement = self._silently if session.twophase else self._sends
            return self._send(connection, statement, identity, parameters) is not None

    def update(
        self,
        ident: object,
        name: str,
        payload: object,
        type_: Any,
        returns: Any,
        timeout: timedelta,
        called: str | None = None,
    ) -> Any:
        """See :meth:`.Runs.update`.

        :param called: how errors call the run.
        """
        if not isinstance(cast(object, timeout), timedelta):
            raise UsageError(f"update(timeout={timeout!r}): a duration is a timedelta, as in timedelta(seconds=30).")
        codec = codec_of(returns, "the reply")
        identity, parameters = self._parameters(ident, name, payload, type_)
        run = called or self._named(identity)
        statement = self._sends if self._store.notifies else self._silently
        signal = self._store.execute(lambda _, connection: self._send(connection, statement, identity, parameters))
        if signal is None:
            raise NotAnswered(f"update {name!r}: {run} has ended already; nothing was sent.")
        return codec.decode(self._reply(identity, name, signal, timeout, run), name)

    # the parts

    def _parameters(self, ident: object, name: str, payload: object, type_: Any) -> tuple[Ident, dict[str, Any]]:
        _ = self._store.signals
        name = signal_name(name)
        identity = self._store.runs.identity(ident)
        try:
            text, _ = codec_of(_type_of(payload, type_), "the payload").round_trip(payload, name)
        except ResultError as error:
            said = str(error).removeprefix(f"step {name!r}: ")
            raise ResultError(f"the payload of signal {name!r}: {said}") from error
        return identity, {**self._store.runs.parameters(identity), **arguments(name=name, payload=text)}

    def _send(self, connection: Connection, statement: Any, identity: Ident, parameters: dict[str, Any]) -> int | None:
        row: AnyRow = connection.execute(statement, parameters).one_or_none()
        if row is None:
            raise RunNotFound(f"there is no {self._named(identity)}.")
        signal: int | None = row.id
        return signal

    def _reply(self, identity: Ident, name: str, signal: int, timeout: timedelta, run: str) -> Any:
        end = time.monotonic() + timeout.total_seconds()
        parameters = {**self._store.runs.parameters(identity), **arguments(id=signal)}
        pause = _PAUSE
        while True:
            row = self._store.single(lambda connection: connection.execute(self._replies, parameters).one_or_none())
            if row is None:
                raise NotAnswered(f"update {name!r}: {run} is gone.")
            if row.error is not None:
                raise UpdateFailed(name, Failure.from_json(json.loads(row.error)))
            if row.answered_at is not None:
                return parsed(row.reply)
            self._refuse_unanswered(row, name, run)
            left = end - time.monotonic()
            if left <= 0:
                raise UpdateTimeout(
                    f"update {name!r}: {run} is {row.status.value}, and has not answered within {timeout}. It stays "
                    f"sent, and may still be answered, where the run calls answer({name!r}, ...)."
                )
            self._store.sessions.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _refuse_unanswered(self, row: AnyRow, name: str, run: str) -> None:
        if row.step is not None:
            raise NotAnswered(
                f"update {name!r}: step {row.step!r} of {run} has taken it with wait(), which does "
                "not reply; have the run call answer()."
            )
        if not row.in_flight:
            raise NotAnswered(f"update {name!r}: {run} is {row.status.value}, and has not answered.")

    def _named(self, identity: Ident) -> str:
        return f"{self._store.runs.entity.__name__} with the key {identity!r}"

    # statements

    @cached_property
    def _sends(self) -> AnySelect:
        return sends(self._store.runs, self._store.signals, notify=True)

    @cached_property
    def _silently(self) -> AnySelect:
        return sends(self._store.runs, self._store.signals, notify=False)

    @cached_property
    def _replies(self) -> AnySelect:
        return replies(self._store.runs, self._store.signals)


def _type_of(payload: object, type_: Any) -> Any:
    """Return how a payload is stored: as is said, or else as the model, dataclass or single value that it is."""
    return type(payload) if type_ is Any and (is_dataclass(payload) or not _is_plain(payload)) else type_


def _is_plain(payload: object) -> bool:
    return payload is None or isinstance(payload, _PLAIN)
