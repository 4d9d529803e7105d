"""What a holder may write, each conditional on its fence: one statement each.

A statement here is executed with the run's key and ``fence``; those that resume also with ``owner``. A holder's write
that matches no row may still belong to a run that was reaped to ready and not claimed again: :func:`resume` takes it
back, and the write is made once more. If that matches no row either, the lease is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from sqlalchemy import (
    ARRAY,
    CTE,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    DateTime,
    Interval,
    String,
    Text,
    Update,
    and_,
    case,
    cast,
    func,
    literal_column,
    null,
    or_,
    select,
)
from sqlalchemy import column as named
from sqlalchemy.dialects.postgresql import JSONB

from sqla_durable import clock
from sqla_durable.deadline import OUT_OF_TIME, judged
from sqla_durable.exc import UsageError
from sqla_durable.retry import Retry
from sqla_durable.rows import AnySelect, bound
from sqla_durable.run import RunRows
from sqla_durable.stop import judged_once

HISTORY = 20
UNTIL = "durable_until"
# Not infinity, which psycopg cannot load; and no time zone makes it later than what Python's datetime can hold.
FAR_FUTURE = literal_column("timestamptz '9999-01-01 00:00:00+00'", DateTime(timezone=True))


def holding(runs: RunRows[Any]) -> ColumnElement[bool]:
    """The run is running under the holder's fence. The lease's expiry has no say: lapsed is not lost."""
    return and_(_fence(runs), runs.in_status(runs.lifecycle.running))


def let_lapse(runs: RunRows[Any]) -> ColumnElement[bool]:
    """The run was reaped to ready and not claimed again: its owner is still noted, and its fence has not moved on."""
    owner = bound("owner", String())
    return and_(_fence(runs), runs.in_status(runs.lifecycle.ready), runs.lease_owner == owner)


def guard(runs: RunRows[Any]) -> AnySelect:
    """Lock the run if the holder's fence is still the run's."""
    return runs.lock(runs.matches(), holding(runs))


def held(runs: RunRows[Any], *more: ColumnElement[Any]) -> CTE:
    """Lock the run if the holder's fence is still the run's, with what it tells of :mod:`.stop`.

    :param more: other columns to have of it.
    """
    columns = runs.fence.label("fence"), *more, runs.cancel_requested_at.label("cancel_requested_at")
    return judged_once(runs, runs.lock(runs.matches(), holding(runs)).add_columns(*columns))


def resume(runs: RunRows[Any]) -> Update:
    """Take a reaped, unclaimed run back: running again, same fence, fresh lease, no attempt counted."""
    changes = {runs.status: runs.constant(runs.lifecycle.running), **_fresh_lease(runs)}
    return runs.update(runs.lock(runs.matches(), let_lapse(runs)), changes).returning(runs.fence)


def renew(runs: RunRows[Any]) -> Update:
    """Renew the lease of a run whose row this transaction has locked, at the end of a step."""
    return runs.update(runs.lock(runs.matches(), holding(runs)), _fresh_lease(runs)).returning(runs.fence)


def beat(runs: RunRows[Any]) -> AnySelect:
    """Renew the lease unless the row is locked, and say what the row looks like: a heartbeat.

    A locked row is skipped: the lock is a step of this very holder, and so proof of life, or short. Waiting for it
    would hold a connection for as long as the step takes.
    """
    free = runs.lock(runs.matches(), or_(holding(runs), let_lapse(runs)), skip_locked=True)
    changes = {runs.status: runs.constant(runs.lifecycle.running), **_fresh_lease(runs)}
    renewed = runs.update(free, changes).returning(runs.fence).cte("renewed")
    held = or_(holding(runs), let_lapse(runs))
    seen = runs.cancel_requested_at.label("cancel_requested_at"), held.label("held")
    left = [] if runs.deadline is None else [(runs.deadline - clock.stamp()).label("time_left")]
    return select(*seen, select(func.count()).select_from(renewed).scalar_subquery().label("renewed"), *left).where(
        runs.matches()
    )


def look(runs: RunRows[Any]) -> AnySelect:
    """Read who holds the run now, to tell a holder how it lost it."""
    return select(
        runs.status.label("status"),
        runs.fence.label("fence"),
        runs.lease_owner.label("lease_owner"),
        runs.cancel_requested_at.label("cancel_requested_at"),
        runs.error.label("error"),
        *(late.label(OUT_OF_TIME) for late in runs.out_of_time()),
    ).where(runs.matches())


def land(runs: RunRows[Any], to: StrEnum, values: Mapping[Column[Any], Any], *, failed: bool) -> Update:
    """Move the run to a terminal status.

    :param to: the status. A run with a pending cancel request lands in no other than the cancelled one, and of one
     whose deadline has passed see :func:`time_out`.
    :param values: the user's own columns to set along with it.
    :param failed: whether an ``error`` is recorded.
    """
    result = _output(runs, bound("output", Text())) if to == runs.lifecycle.done else {}
    changes = {**values, **result, **_landing(runs, to), **(_error(runs) if failed else {})}
    if to == runs.lifecycle.cancelled:
        return runs.update(runs.lock(runs.matches(), holding(runs)), changes).returning(*changes)
    locking = runs.lock(runs.matches(), holding(runs), *_uncancelled(runs))
    return runs.update(_in_time(runs, locking), changes | _by_then(runs)).returning(*changes)


def time_out(runs: RunRows[Any], *, skip_locked: bool = False) -> Update:
    """Move a run whose deadline has passed to the timed out status, with an error that says so.

    :param skip_locked: whether to leave a locked row alone, for a heartbeat: see :func:`beat`.
    """
    timed_out, over = _timing_out(runs)
    changes = {**_landing(runs, timed_out), **_overrun(runs)}
    locking = runs.lock(runs.matches(), holding(runs), *_uncancelled(runs), skip_locked=skip_locked)
    return runs.update(judged(locking, over, late=True), changes).returning(*changes)


def land_done(runs: RunRows[Any]) -> Update:
    """Move a run whose work is finished to done, unless its row is locked, as others wait for their turn to land.

    The result has the columns of :func:`landed`.
    """
    locking = runs.lock(runs.matches(), *_may_be_done(runs), skip_locked=True)
    changes = _done(runs) | _by_then(runs) | _output(runs, bound("output", Text()))
    return runs.update(_in_time(runs, locking), changes).returning(*landed(runs))


def found(runs: RunRows[Any]) -> AnySelect:
    """Read what a landing that nobody was told of has made of the run, with the columns of :func:`landed`.

    It waits for that landing where it is still under way, and so leaves the status for the caller to look at: a
    condition on it would be evaluated before the wait.
    """
    reading = select(*landed(runs)).where(runs.matches(), _fence(runs))
    return reading.with_for_update(key_share=True, of=runs.table)


def land_all_done(runs: RunRows[Any]) -> Update:
    """Do the same with a group of runs, each conditional on its own fence; executed with arrays.

    Rows are locked in the order of their keys, and locked ones are skipped: a holder that waits for one row must not
    make those of the other rows wait with it.
    """
    types = {**dict(zip(runs.key_names, (column.type for column in runs.key), strict=True)), "fence": BigInteger()}
    if runs.output is not None:
        types["output"] = Text()
    arrays = func.unnest(*(bound(name, ARRAY(type_)) for name, type_ in types.items()))
    columns = [named(name, type_) for name, type_ in types.items()]
    asked = arrays.table_valued(*columns).render_derived(name="asked")
    same = [column == asked.c[name] for name, column in zip(runs.key_names, runs.key, strict=True)]
    locking = runs.lock(*same, runs.fence == asked.c.fence, *_may_be_done(runs)[1:], skip_locked=True)
    if runs.output is not None:
        locking = locking.add_columns(asked.c.output.label("asked_output"))
    changes = _done(runs) | _by_then(runs) | _output(runs, named("asked_output", Text()))
    return runs.update(_in_time(runs, locking.order_by(*runs.key)), changes).returning(*landed(runs))


def landed(runs: RunRows[Any]) -> list[Column[Any]]:
    """The columns that a landing as done returns: the key, and what it changes."""
    return [*runs.key, *_done(runs)]


def release(runs: RunRows[Any], retry: Retry, *, failed: bool, delayed: bool = False, notify: bool = False) -> Update:
    """Hand the run back: ready again, owner cleared, so that every copy of the lease is spent.

    A run with a pending cancel request lands cancelled instead, one whose deadline has passed lands timed out, and one
    that failed with its attempts used up lands too: none of them is started again.

    :param retry: says the backoff.
    :param failed: whether an ``error`` is recorded, and the run waits for its backoff.
    :param delayed: whether it waits for ``delay`` instead of its backoff.
    :param notify: whether workers that listen are told of a run that is ready again.
    """
    changes = _no_lease(runs)
    spent: list[tuple[ColumnElement[bool], StrEnum]] = []
    if failed:
        wait = _delay() if delayed else clock.backoff(retry, runs.attempts)
        changes |= {runs.available_at: clock.stamp() + wait, **_error(runs)}
        if runs.used_up is not None:
            spent.append((runs.used_up, runs.lifecycle.spent))
    return _hand_back(runs, changes, spent, notify=notify)


def park(runs: RunRows[Any], *, failed: bool, progress: bool = True) -> Update:
    """Hand the run back to wait for something outside: ready, due after ``delay``, and no attempt is counted.

    A run with a pending cancel request lands cancelled instead, and one whose deadline has passed timed out.

    :param failed: whether an ``error`` is recorded; else the last one is cleared.
    :param progress: whether the run has made progress, so that attempts start from nothing again: waiting, however
     long, uses none up. Else it is this attempt that is not counted.
    """
    changes = {
        **_no_lease(runs),
        runs.available_at: clock.stamp() + _delay(),
        runs.attempts: 0 if progress else func.greatest(runs.attempts - 1, 0),
        **(_error(runs) if failed else {runs.error: None}),
    }
    return _hand_back(runs, changes, [])


def wait(runs: RunRows[Any], locking: AnySelect, *, for_signal: bool) -> Update:
    """Hand the run back to wait, as :func:`park` does: until an instant, or until a signal makes it due.

    :param locking: selects what the holder has locked, as :meth:`.Rows.lock` does, with the instant as :data:`UNTIL`,
     which may be NULL, and what :func:`held` tells of its deadline.
    :param for_signal: whether it waits for the signal of the given ``name``.
    """
    until = func.least(func.coalesce(named(UNTIL, DateTime(timezone=True)), FAR_FUTURE), FAR_FUTURE)
    changes: dict[Column[Any], Any] = {**_no_lease(runs), runs.available_at: until, runs.attempts: 0, runs.error: None}
    if for_signal and runs.waits_for is not None:
        changes[runs.waits_for] = bound("name", String())
    return _hand_back(runs, changes, [], locking=locking)


def remember(runs: RunRows[Any], error: ColumnElement[Any], step: ColumnElement[Any]) -> ColumnElement[Any]:
    """Return the run's failure history with ``error`` added, without its traceback, and the oldest dropped.

    :param step: the key of the step in which it happened, or null.
    """
    when = func.jsonb_build_object("attempt", runs.attempts, "at", clock.stamp(), "step", step, type_=JSONB)
    entry = when.op("||", return_type=JSONB())(error.op("-", return_type=JSONB())(cast("traceback", Text)))
    full = func.jsonb_array_length(runs.failures) >= HISTORY
    kept = case((full, runs.failures.op("-", return_type=JSONB())(literal_column("0"))), else_=runs.failures)
    return kept.op("||", return_type=JSONB())(func.jsonb_build_array(entry, type_=JSONB))


def _hand_back(
    runs: RunRows[Any],
    changes: dict[Column[Any], Any],
    landings: list[tuple[ColumnElement[bool], StrEnum]],
    *,
    locking: AnySelect | None = None,
    notify: bool = False,
) -> Update:
    """Move the run back to ready, unless it has to stop or another of the conditions lands it."""
    lifecycle = runs.lifecycle
    ready = runs.constant(lifecycle.ready)
    late = literal_column(f"target.{OUT_OF_TIME}", Boolean())
    if locking is None:
        locking = _judged(runs, runs.lock(runs.matches(), holding(runs)))
    if runs.deadline is not None:
        landings = [(late, _timing_out(runs)[0]), *landings]
    if lifecycle.cancelled is not None:
        landings = [(runs.cancel_requested_at.is_not(None), lifecycle.cancelled), *landings]
    if landings:
        cases = [(condition, runs.constant(to)) for condition, to in landings]
        changes |= {
            runs.status: case(*cases, else_=ready),
            runs.finished_at: case((or_(*(condition for condition, _ in landings)), clock.stamp())),
        }
    else:
        changes |= {runs.status: ready}
    if runs.deadline is not None:
        times_out = and_(late, *_uncancelled(runs))
        changes |= {
            column: case((times_out, value), else_=changes.get(column, column))
            for column, value in _overrun(runs).items()
        }
    return runs.update(locking, changes).returning(*changes, *(runs.notices if notify else ()))


def _timing_out(runs: RunRows[Any]) -> tuple[StrEnum, ColumnElement[Any]]:
    timed_out, over = runs.lifecycle.timed_out, runs.deadline
    if timed_out is None or over is None:
        raise UsageError(f"{runs.entity.__name__} has no deadlines; add DeadlineMixin and Lifecycle(timed_out=...).")
    return timed_out, over


def _overrun(runs: RunRows[Any]) -> dict[Column[Any], Any]:
    """The error of a run that is past its deadline: as it would be recorded of an exception, without a traceback."""
    said = "ran past its deadline: started at %s, with a max_duration of %s, its time was over at %s"
    message = func.format(cast(said, Text), runs.started_at, runs.max_duration, runs.deadline)
    fields = "type", cast("TimedOut", Text), "message", message, "traceback", cast(null(), Text)
    error = func.jsonb_build_object(*fields, type_=JSONB)
    return {runs.error: error, runs.failures: remember(runs, error, cast(null(), Text))}


def _judged(runs: RunRows[Any], locking: AnySelect) -> AnySelect:
    """What ``locking`` locks, with whether its deadline has passed by then."""
    return locking if runs.deadline is None else judged(locking, runs.deadline)


def _in_time(runs: RunRows[Any], locking: AnySelect) -> AnySelect:
    """What ``locking`` locks, without a run whose deadline has passed by then."""
    return locking if runs.deadline is None else judged(locking, runs.deadline, late=False)


def _by_then(runs: RunRows[Any]) -> dict[Column[Any], Any]:
    """The end of a run that was in time: not after its deadline, though the clock has gone on since it was judged."""
    return {} if runs.deadline is None else {runs.finished_at: func.least(clock.stamp(), runs.deadline)}


def _delay() -> ColumnElement[Any]:
    return bound("delay", Interval())


def _fence(runs: RunRows[Any]) -> ColumnElement[bool]:
    return runs.fence == bound("fence", BigInteger())


def _uncancelled(runs: RunRows[Any]) -> list[ColumnElement[bool]]:
    return [] if runs.lifecycle.cancelled is None else [runs.cancel_requested_at.is_(None)]


def _may_be_done(runs: RunRows[Any]) -> list[ColumnElement[bool]]:
    return [_fence(runs), runs.in_status(runs.lifecycle.running), *_uncancelled(runs)]


def _done(runs: RunRows[Any]) -> dict[Column[Any], Any]:
    return _landing(runs, runs.lifecycle.done)


def _output(runs: RunRows[Any], text: ColumnElement[Any]) -> dict[Column[Any], Any]:
    """The result of the whole run, in rows that have one."""
    return {} if runs.output is None else {runs.output: cast(text, JSONB)}


def _landing(runs: RunRows[Any], to: StrEnum) -> dict[Column[Any], Any]:
    return {runs.status: runs.constant(to), runs.finished_at: clock.stamp(), **_no_lease(runs), runs.error: None}


def _fresh_lease(runs: RunRows[Any]) -> dict[Column[Any], Any]:
    return {runs.lease_expires_at: clock.stamp() + clock.interval(runs.lifecycle.lease)}


def _no_lease(runs: RunRows[Any]) -> dict[Column[Any], Any]:
    return {runs.lease_owner: None, runs.lease_expires_at: None}


def _error(runs: RunRows[Any]) -> dict[Column[Any], Any]:
    error = cast(bound("error", Text()), JSONB)
    return {runs.error: error, runs.failures: remember(runs, error, cast(bound("step", Text()), Text))}
