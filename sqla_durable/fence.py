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
    BigInteger,
    Column,
    ColumnElement,
    String,
    Text,
    Update,
    and_,
    case,
    cast,
    func,
    literal_column,
    or_,
    select,
)
from sqlalchemy.dialects.postgresql import JSONB

from sqla_durable import clock
from sqla_durable.rows import AnySelect, bound
from sqla_durable.run import RunRows

HISTORY = 20


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
    return select(*seen, select(func.count()).select_from(renewed).scalar_subquery().label("renewed")).where(
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
    ).where(runs.matches())


def land(runs: RunRows[Any], to: StrEnum, values: Mapping[Column[Any], Any], *, failed: bool) -> Update:
    """Move the run to a terminal status.

    :param to: the status. A run with a pending cancel request lands in no other than the cancelled one.
    :param values: the user's own columns to set along with it.
    :param failed: whether an ``error`` is recorded.
    """
    cancelled = runs.lifecycle.cancelled
    uncancelled = [] if cancelled in {None, to} else [runs.cancel_requested_at.is_(None)]
    changes = {
        **values,
        runs.status: runs.constant(to),
        runs.finished_at: clock.stamp(),
        **_no_lease(runs),
        **(_error(runs) if failed else {runs.error: None}),
    }
    return runs.update(runs.lock(runs.matches(), holding(runs), *uncancelled), changes).returning(*changes)


def release(runs: RunRows[Any], *, failed: bool, notify: bool = False) -> Update:
    """Hand the run back: ready again, owner cleared, so that every copy of the lease is spent.

    A run with a pending cancel request lands cancelled instead, and one that failed with its attempts used up lands
    too: neither is started again.

    :param failed: whether an ``error`` is recorded, and the run waits for its backoff.
    :param notify: whether workers that listen are told of a run that is ready again.
    """
    lifecycle, retry = runs.lifecycle, runs.lifecycle.retry
    landings: list[tuple[ColumnElement[bool], StrEnum]] = []
    if lifecycle.cancelled is not None:
        landings.append((runs.cancel_requested_at.is_not(None), lifecycle.cancelled))
    changes = _no_lease(runs)
    if failed:
        changes |= {runs.available_at: clock.stamp() + clock.backoff(retry, runs.attempts), **_error(runs)}
        if retry.max_attempts is not None:
            landings.append((runs.attempts >= retry.max_attempts, lifecycle.spent))
    ready = runs.constant(lifecycle.ready)
    if landings:
        cases = [(condition, runs.constant(to)) for condition, to in landings]
        changes |= {
            runs.status: case(*cases, else_=ready),
            runs.finished_at: case((or_(*(condition for condition, _ in landings)), clock.stamp())),
        }
    else:
        changes |= {runs.status: ready}
    released = runs.update(runs.lock(runs.matches(), holding(runs)), changes)
    return released.returning(*changes, *(runs.notices if notify else ()))


def remember(runs: RunRows[Any], error: ColumnElement[Any]) -> ColumnElement[Any]:
    """Return the run's failure history with ``error`` added, without its traceback, and the oldest dropped."""
    when = func.jsonb_build_object("attempt", runs.attempts, "at", clock.stamp(), type_=JSONB)
    entry = when.op("||", return_type=JSONB())(error.op("-", return_type=JSONB())(cast("traceback", Text)))
    full = func.jsonb_array_length(runs.failures) >= HISTORY
    kept = case((full, runs.failures.op("-", return_type=JSONB())(literal_column("0"))), else_=runs.failures)
    return kept.op("||", return_type=JSONB())(func.jsonb_build_array(entry, type_=JSONB))


def _fence(runs: RunRows[Any]) -> ColumnElement[bool]:
    return runs.fence == bound("fence", BigInteger())


def _fresh_lease(runs: RunRows[Any]) -> dict[Column[Any], Any]:
    return {runs.lease_expires_at: clock.stamp() + clock.interval(runs.lifecycle.lease)}


def _no_lease(runs: RunRows[Any]) -> dict[Column[Any], Any]:
    return {runs.lease_owner: None, runs.lease_expires_at: None}


def _error(runs: RunRows[Any]) -> dict[Column[Any], Any]:
    error = cast(bound("error", Text()), JSONB)
    return {runs.error: error, runs.failures: remember(runs, error)}
