"""What becomes of runs without a living holder: reaped or expired in bulk or one by one, requeued, cancelled."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

from sqlalchemy import Column, ColumnElement, Text, Update, and_, case, cast, func, null
from sqlalchemy.dialects.postgresql import JSONB

from sqla_durable import clock, expiry
from sqla_durable.fence import remember
from sqla_durable.rows import AnySelect, at_most
from sqla_durable.run import RunRows


def lapsed(runs: RunRows[Any]) -> ColumnElement[bool]:
    """The run is running and its lease has run out on the database clock."""
    return and_(runs.in_status(runs.lifecycle.running), runs.lease_expires_at <= clock.now())


def heal(runs: RunRows[Any], *, skip_locked: bool) -> Update:
    """Reap the run with the given key if its lease has lapsed.

    :param skip_locked: whether to leave a locked row alone, as having a living holder. A claim waits instead: after the
     wait the condition is checked again, so that a holder whose step has renewed the lease keeps the run.
    """
    return _reap(runs, runs.lock(runs.matches(), lapsed(runs), skip_locked=skip_locked))


def reap(runs: RunRows[Any], limit: int, *conditions: ColumnElement[bool]) -> Update:
    """Reap up to ``limit`` lapsed runs, those started first.

    :param conditions: what else must hold for them.
    """
    locking = runs.lock(lapsed(runs), *conditions, skip_locked=True)
    # Not by key as well, which no index has: a sort would read all that were started at one instant.
    return _reap(runs, locking.order_by(runs.started_at).limit(at_most(limit)), "lapsed")


def overdue(runs: RunRows[Any]) -> ColumnElement[bool]:
    """The run is in a status that can expire, and its expiry has passed on the database clock."""
    return and_(expiry.can_expire(runs.status, runs.lifecycle), runs.column("expires_at") <= clock.now())


def expire(runs: RunRows[Any], limit: int) -> Update:
    """Expire up to ``limit`` runs, those whose expiry passed first."""
    locking = runs.lock(overdue(runs), skip_locked=True)
    return _expire(runs, locking.order_by(runs.column("expires_at")).limit(at_most(limit)), "overdue")


def expire_one(runs: RunRows[Any]) -> Update:
    """Expire the run with the given key if its expiry has passed, unless its row is locked."""
    return _expire(runs, runs.lock(runs.matches(), overdue(runs), skip_locked=True))


def requeue(runs: RunRows[Any], *, notify: bool = False) -> Update:
    """Give a terminal run another life: ready, attempts reset, fence kept, lease, error and times cleared.

    An expiry that has passed is cleared too, as the run would expire at once; one to come still stands.

    :param notify: whether workers that listen are told of it.
    """
    return _requeue(runs, runs.lock(runs.matches(), _may_be_requeued(runs)), notify=notify)


def requeue_all(
    runs: RunRows[Any], conditions: Iterable[ColumnElement[bool]], limit: int, *, notify: bool = False
) -> Update:
    """Do the same with up to ``limit`` runs that meet the conditions, those that finished first; locked ones are left.

    :param notify: as for :func:`requeue`.
    """
    locking = runs.lock(_may_be_requeued(runs), *conditions, skip_locked=True)
    return _requeue(runs, locking.order_by(runs.finished_at).limit(at_most(limit)), notify=notify)


def _may_be_requeued(runs: RunRows[Any]) -> ColumnElement[bool]:
    return runs.status.in_([runs.constant(status) for status in sorted(runs.lifecycle.requeue)])


def _requeue(runs: RunRows[Any], locking: AnySelect, *, notify: bool) -> Update:
    cleared = (
        runs.lease_owner,
        runs.lease_expires_at,
        runs.cancel_requested_at,
        runs.error,
        runs.started_at,
        runs.finished_at,
        *runs.of_one_life,
    )
    changes: dict[Column[Any], Any] = {
        runs.status: runs.constant(runs.lifecycle.ready),
        runs.attempts: 0,
        runs.available_at: clock.stamp(),
        **dict.fromkeys(cleared, null()),
        **runs.waits_no_more(),
    }
    if runs.until(runs.lifecycle.ready) is not None:
        expires_at = runs.column("expires_at")
        changes[expires_at] = case((expires_at > clock.stamp(), expires_at))
    returned = dict.fromkeys([*runs.key, *changes])
    return runs.update(locking, changes).returning(*returned, *(runs.notices if notify else ()))


def request_cancel(runs: RunRows[Any], *, quietly: bool = False) -> Update:
    """Ask for a live run to be cancelled; the first instant is kept, and a run without a holder lands at once.

    A run whose expiry has passed is not asked: it leaves its status for expired only.

    :param quietly: as for :meth:`.RunRows.update`.
    """
    return _request_cancel(runs, runs.lock(runs.matches(), runs.in_flight()), quietly=quietly)


def request_cancel_all(
    runs: RunRows[Any], conditions: Iterable[ColumnElement[bool]], limit: int, *, quietly: bool = False
) -> Update:
    """Do the same with up to ``limit`` runs that meet the conditions and were not asked before; locked ones are left.

    :param quietly: as for :func:`request_cancel`.
    """
    unasked = runs.in_flight(), runs.cancel_requested_at.is_(None)
    locking = runs.lock(*unasked, *conditions, skip_locked=True)
    return _request_cancel(runs, locking.order_by(*runs.key).limit(at_most(limit)), quietly=quietly)


def _request_cancel(runs: RunRows[Any], locking: AnySelect, *, quietly: bool) -> Update:
    lifecycle, machine = runs.lifecycle, runs.lifecycle.machine
    living = [status for status in machine.transitions if status not in machine.terminal]
    changes: dict[Column[Any], Any] = {
        runs.cancel_requested_at: func.coalesce(runs.cancel_requested_at, clock.stamp()),
    }
    cancelled = lifecycle.cancelled
    waiting = frozenset[StrEnum]() if cancelled is None else machine.sources(cancelled) - {lifecycle.running}
    if cancelled is not None and waiting:
        at_once = runs.status.in_([runs.constant(status) for status in sorted(waiting)])
        changes |= {
            runs.status: case((at_once, runs.constant(cancelled)), else_=runs.status),
            runs.lease_owner: case((at_once, null()), else_=runs.lease_owner),
            runs.finished_at: case((at_once, clock.stamp()), else_=runs.finished_at),
        }
        if runs.waits_for is not None:
            changes[runs.waits_for] = case((at_once, null()), else_=runs.waits_for)
    return runs.update(locking, changes, until=runs.until(*living), quietly=quietly).returning(*runs.key, *changes)


def _expire(runs: RunRows[Any], locking: AnySelect, name: str = "target") -> Update:
    expired: Any = runs.lifecycle.expired
    changes: dict[Column[Any], Any] = {
        runs.status: runs.constant(expired),
        runs.lease_owner: null(),  # of a holder that was reaped, and might have resumed
        runs.finished_at: clock.stamp(),
        **runs.waits_no_more(),
    }
    return runs.update(locking, changes, name).returning(*runs.key)


def _reap(runs: RunRows[Any], locking: AnySelect, name: str = "target") -> Update:
    error = _lapse_error(runs)
    kept, machine = runs.lifecycle.ready, runs.lifecycle.machine
    # From the lapse on, not from its discovery: a run that nobody looked at for an hour has waited long enough.
    due_again = runs.lease_expires_at + clock.backoff(runs.lifecycle.retry, runs.attempts)
    resumable = runs.resumable()
    owner: Any = runs.lease_owner if resumable is None else case((resumable, runs.lease_owner))
    changes: dict[Column[Any], Any] = {
        runs.status: _by_fate(runs, runs.constant),
        runs.lease_expires_at: null(),
        # The owner stays noted on a run that goes back to ready: until someone else claims it, its holder may resume.
        runs.lease_owner: _by_fate(runs, lambda to: owner if to == kept else null()),
        runs.available_at: _by_fate(runs, lambda to: due_again if to == kept else runs.available_at),
        runs.finished_at: _by_fate(runs, lambda to: clock.stamp() if to in machine.terminal else null()),
        runs.error: error,
        runs.failures: remember(runs, error, cast(null(), Text)),
    }
    return runs.update(locking, changes, name).returning(*runs.key, runs.status)


def _by_fate(runs: RunRows[Any], value: Callable[[StrEnum], Any]) -> ColumnElement[Any]:
    """Choose a value by where the lapsed run goes: cancelled if that was asked for, else spent, else on."""
    lifecycle = runs.lifecycle
    fates: list[tuple[ColumnElement[bool], StrEnum]] = []
    if lifecycle.cancelled is not None:
        fates.append((runs.cancel_requested_at.is_not(None), lifecycle.cancelled))
    if runs.used_up is not None and lifecycle.lapses_to not in lifecycle.machine.terminal:
        fates.append((runs.used_up, lifecycle.spent))
    otherwise = value(lifecycle.lapses_to)
    return case(*((condition, value(fate)) for condition, fate in fates), else_=otherwise) if fates else otherwise


def _lapse_error(runs: RunRows[Any]) -> ColumnElement[Any]:
    message = func.format(
        cast("the lease of %s lapsed at %s, in attempt %s", Text),
        runs.lease_owner,
        runs.lease_expires_at,
        runs.attempts,
    )
    fields = "type", cast("LeaseLapsed", Text), "message", message, "traceback", cast(null(), Text)
    return func.jsonb_build_object(*fields, type_=JSONB)
