"""The claim: the conditional transition into the running status that issues a new fence and a lease."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column, ColumnElement, String, Update, or_, select

from sqla_durable import clock
from sqla_durable.rows import AnySelect, bound, limit
from sqla_durable.run import RunRows


def claim_one(runs: RunRows[Any], *, run_now: bool) -> Update:
    """Claim the run with the given key, if it is ready and due, after waiting for a lock on its row.

    Executed with the run's key and ``owner``. A short unrelated lock is not a refusal, so this form waits; the other
    holder of a lock on a ready run is another claim, which then leaves no row to match.

    :param run_now: claim a run that is not due, too.
    """
    locking = runs.lock(runs.matches(), *claimable(runs, run_now=run_now))
    until = runs.until(runs.lifecycle.ready)
    return runs.update(locking, _claimed(runs), until=until).returning(*runs.key, runs.fence, runs.attempts)


def claim_due(runs: RunRows[Any]) -> AnySelect:
    """Claim up to ``limit`` due runs, those due for longest first, and return them in that order.

    Executed with ``owner`` and ``limit``. Locked rows are skipped, so that claimers do not queue up behind each other.
    """
    locking = runs.lock(*claimable(runs), skip_locked=True)
    locking = locking.order_by(runs.available_at, *runs.key).limit(limit())
    claimed = (
        runs.update(locking, _claimed(runs))
        .returning(*runs.key, runs.fence, runs.attempts, runs.available_at)
        .cte("claimed")
    )
    # UPDATE ... RETURNING does not keep the order of the rows that were locked.
    keys = [claimed.c[column.key] for column in runs.key]
    return select(*keys, claimed.c[runs.fence.key], claimed.c[runs.attempts.key]).order_by(
        claimed.c[runs.available_at.key], *keys
    )


def claimable(runs: RunRows[Any], *, run_now: bool = False) -> list[ColumnElement[bool]]:
    """The conditions that a run may be claimed."""
    due = [] if run_now else [runs.available_at <= clock.now()]
    until = runs.until(runs.lifecycle.ready)
    unexpired = [] if until is None else [or_(until.is_(None), until > clock.now())]
    return [runs.in_status(runs.lifecycle.ready), *due, *unexpired]


def _claimed(runs: RunRows[Any]) -> dict[Column[Any], Any]:
    return {
        runs.status: runs.constant(runs.lifecycle.running),
        runs.fence: runs.fence + 1,
        runs.attempts: runs.attempts + 1,
        runs.lease_owner: bound("owner", String()),
        runs.lease_expires_at: clock.stamp() + clock.interval(runs.lifecycle.lease),
        runs.started_at: clock.stamp(),
    }
