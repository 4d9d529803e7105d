"""Claiming under limits: the statements, for whoever holds the lock on the limits of the table.

What is live is counted by the statement that claims. It begins once the lock was granted, and with a snapshot of its
own, so under READ COMMITTED: the snapshot of the statement that waits for the lock is from before the wait.

The lock belongs to the transaction, which makes it good behind PgBouncer. Claims under limits take turns by it; they
wait for no row while they hold it, and so cannot deadlock with one that has a row locked and waits for the lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import (
    ARRAY,
    CTE,
    BigInteger,
    Column,
    ColumnElement,
    DateTime,
    Float,
    Integer,
    Interval,
    SmallInteger,
    String,
    Update,
    and_,
    case,
    cast,
    extract,
    func,
    literal_column,
    null,
    or_,
    select,
    true,
    tuple_,
    union_all,
)
from sqlalchemy import column as named
from sqlalchemy.dialects.postgresql import REGCLASS
from sqlalchemy.dialects.postgresql.base import PGDialect

from sqla_durable import clock
from sqla_durable.claim import claim_locked, claimable, ready_and_due, stamps
from sqla_durable.functions.limits import Limits
from sqla_durable.functions.model import FunctionRows
from sqla_durable.priority import HIGHEST, LOWEST
from sqla_durable.reap import reap
from sqla_durable.rows import AnySelect, arguments, at_most, bound
from sqla_durable.step import idle_limit

_Rows = FunctionRows[Any]
_PATIENCE: Final = timedelta(seconds=10)
_LOCKS: Final = 1_146_441_836
_LIMITS: Final[dict[str, Any]] = {
    "name": String(),
    "concurrency": Integer(),
    "per_tenant": Integer(),
    "pace": BigInteger(),
    "tokens": Integer(),
}

_NO_SHARE: Final = [cast(null(), Integer).label(name) for name in ("own", "every")]


def terms(limits: Mapping[str, Limits], per_tenant: int | None) -> dict[str, Any]:
    """Return what the statements here are executed with, besides a key and an owner.

    :param limits: those of each function to be claimed.
    :param per_tenant: how many runs of one tenant may be live, of whatever function.
    """
    rates = [each.rate for each in limits.values()]
    return arguments(
        functions=list(limits),
        name=list(limits),
        concurrency=[each.concurrency for each in limits.values()],
        per_tenant=[each.concurrency_per_tenant for each in limits.values()],
        pace=[None if rate is None else rate.pace for rate in rates],
        tokens=[None if rate is None else rate.tokens for rate in rates],
        tenant_limit=per_tenant,
    )


def turn(runs: _Rows, schema: str | None) -> AnySelect:
    """Wait for the turn of this transaction to claim under limits; a process that hangs in its turn loses it.

    :param schema: the one that the table is in, if it names any.
    """
    # Not the engine's, which doubles a percent sign for the driver, as is done again to a literal.
    make: Any = PGDialect
    quote: Any = make(paramstyle="named").identifier_preparer.quote
    name = quote(runs.table.name) if schema is None else f"{quote(schema)}.{quote(runs.table.name)}"
    # By its oid: another process may spell the name of the same table in another way.
    table = cast(cast(literal_column(_text(name)), REGCLASS), Integer)
    limit = idle_limit(min(_PATIENCE, runs.lifecycle.lease))
    return select(limit, func.pg_advisory_xact_lock(literal_column(str(_LOCKS)), table))


def lock_one(runs: _Rows, *, run_now: bool) -> AnySelect:
    """Lock the run with the given key, if it might be claimed, after waiting for a lock on its row.

    :return: a statement whose row is its function and its tenant, after the key.
    """
    return runs.lock(runs.matches(), *claimable(runs, run_now=run_now)).add_columns(runs.function, runs.tenant)


def reap_rivals(runs: _Rows, limit: int) -> Update:
    """Reap up to ``limit`` lapsed runs that may hold the place of another: those of its ``function`` or ``tenant``."""
    functions, tenants = runs.function == bound("function", String()), runs.tenant == bound("tenant", String())
    return reap(runs, limit, or_(functions, tenants))


def claim_one(runs: _Rows, *, run_now: bool) -> Update:
    """Claim the run with the given key, which this transaction has locked, if the limits allow it."""
    live, open_ = _scopes(runs)
    left = [or_(places.is_(None), places > 0) for places in _tenants_places(runs.tenant, open_, live)]
    conditions = runs.matches(), *claimable(runs, run_now=run_now), runs.function == open_.c.name, *left
    locking = runs.lock(*conditions).add_columns(_token(open_).label("pace_to"))
    changes = {**stamps(runs), **_pacing(runs)}
    claimed = runs.update(locking, changes, until=runs.until(runs.lifecycle.ready))
    return claimed.returning(*runs.key, runs.fence, runs.attempts)


def claim_due(runs: _Rows, limit: int) -> AnySelect:
    """Reap what has lapsed, and claim up to ``limit`` due runs that the limits allow. See :func:`.claim.claim_due`.

    Runs that were reaped here count as live still.
    """
    chosen = _chosen(runs, limit)
    same = [column == chosen.c[name] for column, name in zip(runs.key, runs.key_names, strict=True)]
    # As one condition, which only a scan by the key answers to.
    still = and_(*claimable(runs)).is_(true())
    locking = runs.lock(*same, still, skip_locked=True).add_columns(chosen.c.pace_to)
    return claim_locked(runs, limit, locking, _pacing(runs))


# what is live, and what may be claimed besides


def _scopes(runs: _Rows) -> tuple[CTE, CTE]:
    """Return how many runs are live of each function and tenant, and the functions that may have one more."""
    live, reckoned = _reckoned(runs)
    full = or_(reckoned.c.places <= 0, _token(reckoned) > _horizon(reckoned))
    return live, select(reckoned).where(full.is_not(true())).cte("open")


def next_token(runs: _Rows) -> AnySelect:
    """Read in how many seconds there is a token for a due run that waits for nothing else, if there is such a run."""
    _, reckoned = _reckoned(runs)
    places = reckoned.c.places
    held_back = or_(places.is_(None), places > 0), _token(reckoned) > _horizon(reckoned)
    functions = select(reckoned, *_NO_SHARE).where(*held_back).subquery("functions")
    due = _first(runs, 1, functions, {runs.function: functions.c.name}).subquery("due")
    soonest: ColumnElement[Any] = func.min(_token(due) - _horizon(due))
    left: ColumnElement[Any] = cast(extract("epoch", soonest), Float)
    return select(left)


def _reckoned(runs: _Rows) -> tuple[CTE, Any]:
    columns = [named(name, type_) for name, type_ in _LIMITS.items()]
    arrays = func.unnest(*(bound(name, ARRAY(type_)) for name, type_ in _LIMITS.items()))
    limits = arrays.table_valued(*columns).render_derived(name="limits").c
    counted = select(runs.function.label("name"), runs.tenant.label("tenant"), func.count().label("runs"))
    live = counted.where(runs.in_status(runs.lifecycle.running)).group_by(runs.function, runs.tenant).cte("live")
    places = limits.concurrency - _sum(live, live.c.name == limits.name)
    return live, select(*limits, places.label("places"), _bucket(runs, limits).label("bucket")).subquery("reckoned")


def _sum(live: CTE, *conditions: ColumnElement[bool]) -> ColumnElement[int]:
    counted = select(func.coalesce(func.sum(live.c.runs), 0)).where(*conditions)
    return cast(counted.scalar_subquery(), Integer)


def _tenants_places(tenant: ColumnElement[Any], open_: Any, live: CTE) -> tuple[ColumnElement[Any], ColumnElement[Any]]:
    """Return how many runs more a tenant may have, of an open function and of all; NULL is any number."""
    own = open_.c.per_tenant - _sum(live, live.c.tenant == tenant, live.c.name == open_.c.name)
    every = bound("tenant_limit", Integer()) - _sum(live, live.c.tenant == tenant)
    return case((tenant.is_not(None), own)), case((tenant.is_not(None), every))


# the rate: a bucket that is known by when it is full again


def _bucket(runs: _Rows, limits: Any) -> ColumnElement[Any]:
    """Return when a function's bucket is full again, or the present where it is.

    A stamp beyond the horizon is from before the function had this rate, and would keep it waiting for the old one. A
    stamp that has passed says no more than the clock does, so that runs may be deleted from then on.
    """
    stamped = select(runs.paced_at).where(
        runs.function == limits.name,
        runs.paced_at.is_not(None),
        runs.paced_at <= clock.now() + _times(limits.pace, limits.tokens),
    )
    last = stamped.order_by(runs.paced_at.desc()).limit(1).scalar_subquery()
    return func.greatest(clock.now(), last, type_=DateTime(timezone=True))


def _paced(open_: Any, number: ColumnElement[Any]) -> ColumnElement[Any]:
    """Return when the bucket is full again after so many runs more; without a rate, the present."""
    taken = open_.c.bucket + _times(open_.c.pace, number)
    return case((open_.c.pace.is_(None), clock.now()), else_=taken)


def _token(open_: Any) -> ColumnElement[Any]:
    return _paced(open_, literal_column("1"))


def _horizon(open_: Any) -> ColumnElement[Any]:
    """Return when an empty bucket is full again."""
    return clock.now() + _times(open_.c.pace, open_.c.tokens)


def _times(pace: ColumnElement[Any], number: ColumnElement[Any]) -> ColumnElement[Any]:
    # In microseconds: a day of an interval has 23 or 25 hours at times.
    return number * pace * cast(literal_column("'1 microsecond'"), Interval)


def _pacing(runs: _Rows) -> dict[Column[Any], Any]:
    return {runs.paced_at: named("pace_to", DateTime(timezone=True))}


# which of the due runs


def _chosen(runs: _Rows, limit: int) -> CTE:
    """Return the keys of the first due runs that the limits allow, and what each is stamped with.

    Each scope is given no more than it has places left, the narrowest first: a run that its tenant has no place for
    takes none of its function.
    """
    live, open_ = _scopes(runs)
    due = _candidates(runs, limit, live, open_)
    for scope, places in ((("name", "tenant"), "own"), (("tenant",), "every"), (("name",), "places")):
        number = func.row_number().over(partition_by=[due.c[each] for each in scope], order_by=_order(runs, due))
        ranked = select(*(column for column in due.c if column.key != "number"), number.label("number")).subquery()
        left = ranked.c[places]
        due = select(ranked).where(or_(left.is_(None), ranked.c.number <= left)).subquery()
    late = _paced(due, due.c.number) > _horizon(due)
    keys = [due.c[name] for name in runs.key_names]
    chosen = select(*keys, _paced(due, due.c.number).label("pace_to")).where(late.is_not(true()))
    return chosen.order_by(*_order(runs, due)).limit(at_most(limit)).cte("chosen")


def _order(runs: _Rows, due: Any) -> list[ColumnElement[Any]]:
    return [due.c.priority.desc(), due.c.available_at, *(due.c[name] for name in runs.key_names)]


def _candidates(runs: _Rows, limit: int, live: CTE, open_: CTE) -> Any:
    """Return the first due runs of each open function; where tenants have limits, of each of its tenants.

    There is an index for either. One scan in due order would read all runs of a tenant that has no place left, before
    it came to the first of the next one.
    """
    whole = and_(open_.c.per_tenant.is_(None), bound("tenant_limit", Integer()).is_(None))
    functions = select(open_, *_NO_SHARE).where(whole).subquery("functions")
    tenants = _tenants(runs, open_, whole)
    own, every = _tenants_places(tenants.c.tenant, open_, live)
    reckoned = select(open_, tenants.c.tenant, own.label("own"), every.label("every"))
    share = reckoned.where(tenants.c.name == open_.c.name).subquery("reckoned_shares")
    full = or_(share.c.own <= 0, share.c.every <= 0)
    shares = select(share).where(full.is_not(true())).cte("shares")
    each = [
        _first(runs, limit, functions, {runs.function: functions.c.name}),
        _first(runs, limit, shares, {runs.function: shares.c.name, runs.tenant: shares.c.tenant}),
        _first(runs, limit, shares, {runs.function: shares.c.name}, shares.c.tenant.is_(None), runs.tenant.is_(None)),
    ]
    return union_all(*each).subquery("due")


def _tenants(runs: _Rows, open_: CTE, whole: ColumnElement[bool]) -> CTE:
    """Return the tenants that have ready runs of each open function, by one look at the index each, and NULL."""

    def following(function: ColumnElement[Any], *after: ColumnElement[bool]) -> ColumnElement[Any]:
        ready = runs.in_status(runs.lifecycle.ready), runs.function == function, runs.tenant.is_not(None)
        found = select(runs.tenant).where(*ready, *after, *runs.of_class())
        return found.order_by(runs.tenant).limit(1).scalar_subquery()

    first = select(open_.c.name, following(open_.c.name).label("tenant")).where(whole.is_not(true()))
    found = first.cte("tenants", recursive=True)
    more = select(found.c.name, following(found.c.name, runs.tenant > found.c.tenant))
    return found.union_all(more.where(found.c.tenant.is_not(None)))


def _first(
    runs: _Rows, limit: int, scopes: Any, scope: dict[Column[Any], ColumnElement[Any]], *without: ColumnElement[bool]
) -> AnySelect:
    """Return the first due runs of each of some scopes and each priority.

    :param scope: the columns that say which scope a run is in, with the value of each.
    :param without: the conditions of a scope in which runs have no tenant.
    """
    levels = func.generate_series(literal_column(str(LOWEST)), literal_column(str(HIGHEST)))
    level = levels.table_valued(named("level", Integer())).render_derived(name="levels")
    number = cast(level.c.level, SmallInteger)
    priority: Any = runs.priority
    columns = runs.function, runs.tenant, priority, runs.available_at
    names = *runs.key_names, "function", "tenant", "priority", "available_at"
    read = [column.label(name) for column, name in zip((*runs.key, *columns), names, strict=True)]
    due = select(*read).where(*ready_and_due(runs, run_now=True), *runs.of_class())
    if without:
        due = due.where(runs.function == scopes.c.name, priority == number, runs.available_at <= clock.now(), *without)
        due = due.order_by(*columns)
    else:
        # From one place in the index on, and what is past the scope is dropped afterwards. With equalities the planner
        # may take another index, and where there are no statistics yet it does: all that others have due is read then.
        index = *scope, priority, runs.available_at
        earliest = cast(literal_column("'-infinity'"), DateTime(timezone=True))
        due = due.where(tuple_(*index) >= tuple_(*scope.values(), number, earliest)).order_by(*index)
    found = due.limit(at_most(limit)).lateral()
    inside = [found.c.function == scopes.c.name, found.c.priority == number, found.c.available_at <= clock.now()]
    if runs.tenant in scope:
        inside.append(found.c.tenant == scope[runs.tenant])
    taken = [column for column in found.c if column.key != "function"]
    of_scope = [scopes.c[name] for name in ("name", "pace", "tokens", "places", "bucket", "own", "every")]
    return select(*taken, *of_scope).select_from(scopes).join(level, true()).join(found, true()).where(*inside)


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
