"""The claim: the conditional transition into the running status that issues a new fence and a lease."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Column, ColumnElement, String, Update, func, or_, select, true, union_all

from sqla_durable import clock
from sqla_durable.priority import HIGHEST, LOWEST
from sqla_durable.reap import expire, reap
from sqla_durable.rows import AnySelect, at_most, bound, constant
from sqla_durable.run import RunRows


def claim_one(runs: RunRows[Any], *, run_now: bool) -> Update:
    """Claim the run with the given key, if it is ready and due, after waiting for a lock on its row.

    Executed with the run's key and ``owner``. A short unrelated lock is not a refusal, so this form waits; the other
    holder of a lock on a ready run is another claim, which then leaves no row to match.

    :param run_now: claim a run that is not due, too.
    """
    locking = runs.lock(runs.matches(), *claimable(runs, run_now=run_now))
    until = runs.until(runs.lifecycle.ready)
    return runs.update(locking, stamps(runs), until=until).returning(*runs.key, runs.fence, runs.attempts)


def claim_due(runs: RunRows[Any], limit: int) -> AnySelect:
    """Reap what has lapsed or expired, then claim up to ``limit`` due runs in one statement, due for longest first.

    Where runs have a priority, those of a higher one come first.

    Executed with ``owner``. Locked rows are skipped, so that claimers do not queue up behind each other.
    A run that is reaped here is claimed by the next execution at the earliest, as this one does not see it ready yet.

    :return: a statement whose rows are the number of runs reaped and the columns of a claimed run, in the order in
     which they were due; a single one without a run where there was none to claim.
    """
    return claim_locked(runs, limit, _first_due(runs, limit))


def claim_locked(
    runs: RunRows[Any], limit: int, locking: AnySelect, more: Mapping[Column[Any], Any] | None = None
) -> AnySelect:
    """Do the same with the runs that ``locking``, made by :meth:`.Rows.lock`, selects.

    :param more: what else is stamped; it may name columns that ``locking`` returns.
    """
    reaped = reap(runs, limit).cte("reaped")
    expired = [] if runs.lifecycle.expired is None else [expire(runs, limit).cte("expired")]
    changes = {**stamps(runs), **(more or {})}
    claimed = runs.update(locking, changes).returning(*runs.table.columns).cte("claimed")
    count = select(func.count().label("reaped")).select_from(reaped).subquery("counted")
    # UPDATE ... RETURNING does not keep the order of the rows that were locked.
    order: list[ColumnElement[Any]] = [claimed.c[column.key] for column in (runs.available_at, *runs.key)]
    if runs.priority is not None:
        order.insert(0, claimed.c[runs.priority.key].desc())
    found = select(count.c.reaped, *claimed.c).select_from(count.outerjoin(claimed, true()))
    return found.add_cte(*expired).order_by(*order)


def _first_due(runs: RunRows[Any], limit: int) -> AnySelect:
    if runs.priority is None:
        return _due_for_longest(runs, limit)
    # One scan of the index for each priority, of which those after the last one needed are not begun. Ordered by both
    # columns a single scan would pass by all runs of a higher priority that are not due yet.
    levels = [runs.priority == constant(runs.priority, level) for level in range(HIGHEST, LOWEST - 1, -1)]
    each = [select(_due_for_longest(runs, limit, level).subquery()) for level in levels]
    return union_all(*each).limit(at_most(limit))


def _due_for_longest(runs: RunRows[Any], limit: int, *conditions: ColumnElement[bool]) -> AnySelect:
    locking = runs.lock(*claimable(runs), *conditions, skip_locked=True)
    # Not by key as well, which no index has: a sort would read all that became due at one instant.
    return locking.order_by(runs.available_at).limit(at_most(limit))


def claimable(runs: RunRows[Any], *, run_now: bool = False) -> list[ColumnElement[bool]]:
    """The conditions that a run may be claimed."""
    return [*ready_and_due(runs, run_now=run_now), *runs.offered()]


def ready_and_due(runs: RunRows[Any], *, run_now: bool = False) -> list[ColumnElement[bool]]:
    """The conditions that a run may be claimed by somebody."""
    due = [] if run_now else [runs.available_at <= clock.now()]
    until = runs.until(runs.lifecycle.ready)
    unexpired = [] if until is None else [or_(until.is_(None), until > clock.now())]
    return [runs.in_status(runs.lifecycle.ready), *due, *unexpired]


def stamps(runs: RunRows[Any]) -> dict[Column[Any], Any]:
    """Return what a claim writes."""
    return {
        runs.status: runs.constant(runs.lifecycle.running),
        runs.fence: runs.fence + 1,
        runs.attempts: runs.attempts + 1,
        runs.lease_owner: bound("owner", String()),
        runs.lease_expires_at: clock.stamp() + clock.interval(runs.lifecycle.lease),
        runs.started_at: clock.stamp(),
        **_no_longer_waits(runs),
    }


def _no_longer_waits(runs: RunRows[Any]) -> dict[Column[Any], Any]:
    """A run that waited is due from now on: released, it must not wait on where no signal would wake it."""
    if runs.waits_for is None:
        return {}
    return {**runs.waits_no_more(), runs.available_at: func.least(runs.available_at, clock.stamp())}
