"""Runs as they are, for people to look at: listed, counted and described. Nothing here heals or writes."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, TypedDict, TypeVar, cast

from sqlalchemy import (
    Column,
    ColumnElement,
    DateTime,
    Text,
    false,
    func,
    literal,
    literal_column,
    null,
    or_,
    select,
    tuple_,
    type_coerce,
)
from sqlalchemy import cast as sql_cast
from sqlalchemy.dialects.postgresql import JSONB

from sqla_durable import clock
from sqla_durable.exc import UsageError
from sqla_durable.failure import Failure
from sqla_durable.retry import LONGEST
from sqla_durable.rows import AnyRow, AnySelect, Ident, at_most
from sqla_durable.run import RunRows


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What a run looked like at one instant, in plain values.

    :param identity: the run's primary key.
    :param status: its status.
    :param attempts: how often it was started in this life.
    :param fence: the fence of its last claim.
    :param lease_owner: the holder's name; kept after a lapse, until somebody else claims the run.
    :param created_at: when its row was inserted.
    :param started_at: when it was claimed last.
    :param finished_at: when it landed.
    :param available_at: when it is due, if it is ready.
    :param lease_expires_at: when its lease lapses; None unless it is running.
    :param cancel_requested_at: when somebody first asked for it to be cancelled.
    :param key: the idempotency key that it was started with, where its class has :class:`.KeyMixin`.
    :param waits_for: the name of the signal that it waits for, where its class has :class:`.WaitMixin`.
    :param failure: its last error; without the traceback where many runs were read.
    :param lapsed: whether its lease has run out, on the database clock, and nobody has reaped it yet.
    :param age: for how long the row has existed, on the database clock.
    :param cursor: stands for its place in the list, for ``find(after=...)``.
    """

    identity: Ident
    status: StrEnum
    attempts: int
    fence: int
    lease_owner: str | None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    available_at: datetime
    lease_expires_at: datetime | None
    cancel_requested_at: datetime | None
    key: str | None
    waits_for: str | None
    failure: Failure | None
    lapsed: bool
    age: timedelta
    cursor: str


class RunConditions(TypedDict, total=False):
    """The conditions of :meth:`.Runs.find`, of which those that are given must all be met."""

    status: StrEnum | Collection[StrEnum] | None
    older_than: timedelta | None
    newer_than: timedelta | None
    error: str | None
    owner: str | None
    cancel_requested: bool | None
    key: str | None


def page(
    runs: RunRows[Any],
    conditions: Collection[ColumnElement[bool]],
    limit: int,
    extras: Sequence[ColumnElement[Any]] = (),
) -> AnySelect:
    """Read up to ``limit`` runs, the newest first; of those inserted at the same instant, the greatest key first.

    :param extras: what is read besides.
    """
    newest_first = [column.desc() for column in _place(runs)]
    return (
        _summaries(runs, extras, traceback=False)
        .where(*conditions, *runs.of_class())
        .order_by(*newest_first)
        .limit(at_most(limit))
    )


def one(runs: RunRows[Any], extras: Sequence[ColumnElement[Any]] = ()) -> AnySelect:
    """Read the run with the given key.

    :param extras: what is read besides.
    """
    return _summaries(runs, extras, traceback=True).where(runs.matches())


def counts(
    runs: RunRows[Any], conditions: Collection[ColumnElement[bool]] = (), by: Sequence[Column[Any]] = ()
) -> AnySelect:
    """Count the runs of each status that there are any of.

    :param by: columns whose values are told apart as well, and come first.
    """
    return (
        select(*by, runs.status, func.count())
        .where(*conditions, *runs.of_class())
        .group_by(*by, runs.status)
        .order_by(*by)
    )


def wanted(
    runs: RunRows[Any],
    *,
    status: StrEnum | Collection[StrEnum] | None = None,
    older_than: timedelta | None = None,
    newer_than: timedelta | None = None,
    error: str | None = None,
    owner: str | None = None,
    cancel_requested: bool | None = None,
    key: str | None = None,
) -> list[ColumnElement[bool]]:
    """Return the conditions that a caller of ``find`` asks for.

    :raises UsageError: for a key of runs that have none, and as :func:`statuses` and :func:`ago`.
    """
    conditions: list[ColumnElement[bool]] = []
    if status is not None:
        conditions.append(runs.status.in_([runs.constant(each) for each in statuses(runs, status)]))
    if older_than is not None:
        conditions.append(_created(runs) <= ago("older_than", older_than))
    if newer_than is not None:
        conditions.append(_created(runs) > ago("newer_than", newer_than))
    if error is not None:
        recorded = [sql_cast(runs.error, JSONB)[name].astext for name in ("type", "message")]
        conditions.append(or_(*(text.icontains(error, autoescape=True) for text in recorded)))
    if owner is not None:
        conditions.append(runs.lease_owner == owner)
    if cancel_requested is not None:
        requested = runs.cancel_requested_at
        conditions.append(requested.is_not(None) if cancel_requested else requested.is_(None))
    if key is not None:
        if runs.idempotency_key is None:
            name = runs.entity.__name__
            raise UsageError(f"{name} has no idempotency keys; declare it as class {name}(KeyMixin, RunMixin, ...).")
        conditions.append(runs.idempotency_key == key)
    return conditions


def following(runs: RunRows[Any], name: str, cursor: str) -> ColumnElement[bool]:
    """The condition that a run comes after the one that ``cursor`` stands for.

    :param name: the table that the cursor must be of.
    :raises UsageError: where it is of another one, or none at all.
    """
    place = _place(runs)
    try:
        table, *texts = cast("list[object]", json.loads(urlsafe_b64decode(f"{cursor}==".encode())))
    except (ValueError, TypeError):
        table, texts = None, []
    if table != name or len(texts) != len(place) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{cursor!r} is not a cursor of {name}; pass the cursor of the last run that find() returned.")
    values = [sql_cast(literal(text, Text()), column.type) for text, column in zip(texts, place, strict=True)]
    return tuple_(*place) < tuple_(*values)


SummaryT = TypeVar("SummaryT", bound=RunSummary)


def summary_of(row: AnyRow, name: str, width: int, kind: type[SummaryT]) -> SummaryT:
    """Return the value for a row of :func:`page` or :func:`one`.

    :param name: the table, for the cursor.
    :param width: of how many columns the key consists.
    :param kind: what it is to be; the fields that it has beside those of a :class:`RunSummary` are what was read
     besides.
    """
    columns: tuple[Any, ...] = tuple(row)
    identity, texts, values = columns[:width], columns[width : 2 * width + 1], columns[2 * width + 1 :]
    first, *between, last = (field.name for field in fields(RunSummary))
    besides = [field.name for field in fields(kind)][len(between) + 2 :]
    named: dict[str, Any] = dict(zip([*between, *besides], values, strict=True))
    named |= {first: identity, last: _cursor(name, texts)}
    if named["failure"] is not None:
        named["failure"] = Failure.from_json(json.loads(named["failure"]))
    return kind(**named)


def _cursor(name: str, texts: Sequence[str]) -> str:
    # Without the padding: it reads as one word, and needs no quotes in a URL.
    return urlsafe_b64encode(json.dumps([name, *texts], separators=(",", ":")).encode()).decode().rstrip("=")


def _summaries(runs: RunRows[Any], extras: Sequence[ColumnElement[Any]], *, traceback: bool) -> AnySelect:
    created = _created(runs)
    error = sql_cast(runs.error, JSONB)
    return select(
        *runs.key,
        # A cursor holds PostgreSQL's own text of each value, which needs no Python type to come back as it was.
        *(sql_cast(column, Text) for column in _place(runs)),
        # From here on in the order of the fields of RunSummary.
        runs.status,
        runs.attempts,
        runs.fence,
        runs.lease_owner,
        created,
        runs.started_at,
        runs.finished_at,
        runs.available_at,
        runs.lease_expires_at,
        runs.cancel_requested_at,
        *(sql_cast(null(), Text) if column is None else column for column in (runs.idempotency_key, runs.waits_for)),
        # As text, since the user's engine may decode JSON its own way.
        sql_cast(error if traceback else error.op("-", return_type=JSONB())(sql_cast("traceback", Text)), Text),
        func.coalesce(runs.lease_expires_at <= clock.now(), false()),
        clock.now() - created,
        *extras,
    )


def _created(runs: RunRows[Any]) -> ColumnElement[datetime]:
    # The one column of RunMixin that a class may have kept a type of its own for: a decorated one, for example.
    return type_coerce(runs.column("created_at"), DateTime(timezone=True))


def _place(runs: RunRows[Any]) -> list[ColumnElement[Any]]:
    column = runs.column("created_at")
    # NULL is neither before nor after any cursor.
    known = func.coalesce(column, literal_column("'-infinity'")) if column.nullable else column
    return [type_coerce(known, column.type), *runs.key]


def statuses(runs: RunRows[Any], status: StrEnum | Collection[StrEnum]) -> list[StrEnum]:
    """Return the statuses that a caller names.

    :raises UsageError: for one of another machine.
    """
    machine = runs.lifecycle.machine
    given: Collection[object] = [status] if isinstance(status, str) else status
    for each in given:
        if not isinstance(each, machine.statuses):
            name = machine.statuses.__name__
            # A plain text could be that of a status of another machine, and no checker would tell.
            meant = [
                f", {name}.{status.name}" for status in machine.transitions if type(each) is str and status == each
            ]
            raise UsageError(f"{each!r} is not a status of {machine!r}; pass a member of {name}{''.join(meant)}.")
    return [each for each in machine.transitions if each in given]


def ago(name: str, duration: timedelta) -> ColumnElement[datetime]:
    """The instant so long before the database's present.

    :raises UsageError: for a duration out of range.
    """
    if not timedelta(0) <= duration <= LONGEST:
        raise UsageError(f"{name}={duration}: a duration from 0 to {LONGEST.days} days.")
    return clock.now() - clock.interval(duration)
