"""A run: one row of the user's model that stands for one piece of work, and how that model is configured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import datetime
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast
from weakref import WeakKeyDictionary

from sqlalchemy import (
    JSON,
    Column,
    ColumnElement,
    Connection,
    DateTime,
    Integer,
    String,
    Update,
    and_,
    case,
    event,
    false,
    func,
    literal,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, Mapper, mapped_column
from sqlalchemy.orm.attributes import get_history, set_committed_value
from sqlalchemy.orm.base import PASSIVE_NO_INITIALIZE

from sqla_durable import clock, expiry, frozen, monthly
from sqla_durable.attempts import AttemptsMixin
from sqla_durable.deadline import DeadlineMixin, deadline
from sqla_durable.exc import ConfigurationError, UsageError
from sqla_durable.guarded_runs import guard_runs
from sqla_durable.key import KeyMixin, key_scope
from sqla_durable.lease import LeaseMixin
from sqla_durable.lifecycle import Lifecycle
from sqla_durable.mapping import add_check, add_index, add_unique_index, set_fillfactor, when_mapped
from sqla_durable.priority import PriorityMixin
from sqla_durable.rows import AnySelect, Ident, Rows, constant
from sqla_durable.status import TransitionHook, reserved_of
from sqla_durable.waits_for import WaitMixin
from sqla_durable.wake import notification

_SORT_ORDER = 1010
_FILLFACTOR = 80
ONE_IN_FLIGHT = "one_in_flight"


class RunMixin(LeaseMixin, TransitionHook):
    """Makes a mapped class a run: lease, fence, cancel request, error and timestamps on the user's own table.

    The class declares ``__lifecycle__`` and a status column made by that lifecycle's machine. The mixin goes on the
    class that owns the root table of an inheritance hierarchy. An ORM flush that leaves
    the status alone leaves the lease alone, and none lowers the fence.
    """

    __lifecycle__: ClassVar[Lifecycle[Any]]
    __guard__: ClassVar[bool] = False
    """Whether triggers keep the table to the rules, whoever writes to it, and that of its receipts as well."""
    __partition__: ClassVar[monthly.Monthly | None] = None
    __reserved__ = frozenset(
        {
            *("fence", "attempts", "lease_owner", "lease_expires_at", "cancel_requested_at", "error", "failures"),
            *("created_at", "started_at", "finished_at"),
        }
    )

    if TYPE_CHECKING:
        cancel_requested_at: Mapped[datetime | None]
        error: Mapped[dict[str, Any] | None]
        failures: Mapped[list[dict[str, Any]]]
        created_at: Mapped[datetime]
        started_at: Mapped[datetime | None]
        finished_at: Mapped[datetime | None]
    else:
        cancel_requested_at = mapped_column(DateTime(timezone=True), sort_order=_SORT_ORDER)
        error = mapped_column(JSONB(none_as_null=True), sort_order=_SORT_ORDER + 1)
        failures = mapped_column(JSONB, nullable=False, server_default=text("'[]'"), sort_order=_SORT_ORDER + 2)
        created_at = mapped_column(
            DateTime(timezone=True), nullable=False, server_default=text("now()"), sort_order=_SORT_ORDER + 3
        )
        started_at = mapped_column(DateTime(timezone=True), sort_order=_SORT_ORDER + 4)
        finished_at = mapped_column(DateTime(timezone=True), sort_order=_SORT_ORDER + 5)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        when_mapped(cls, _configure)

    @classmethod
    def __on_transition__(cls, to: StrEnum) -> Mapping[str, Any]:
        lifecycle = cls.__lifecycle__
        if to == lifecycle.running:
            raise UsageError(
                f"{cls.__name__} becomes {to.value} by a claim, which issues its fence and lease; use Runs.claim() or "
                "Runs.execute()."
            )
        landed = to in lifecycle.machine.terminal
        waits_no_more = {"waits_for": None} if landed and issubclass(cls, WaitMixin) else {}
        finished_at = clock.stamp() if landed else None
        return {"lease_owner": None, "lease_expires_at": None, "finished_at": finished_at, **waits_no_more}

    @classmethod
    def __held__(cls) -> AbstractSet[StrEnum]:
        return {cls.__lifecycle__.running}

    @classmethod
    def __on_arrival__(cls, to: StrEnum) -> Sequence[ColumnElement[Any]]:
        if to != cls.__lifecycle__.ready:
            return ()
        if cls not in _notices:
            _notices[cls] = cls.__rows__().notices
        return _notices[cls]

    @classmethod
    def __on_values__(cls, values: Mapping[str, Any], sources: Collection[StrEnum]) -> Mapping[str, Any]:
        frozen.refuse(cls, cls.__lifecycle__, values, sources)
        if cls.__lifecycle__.expired is not None:
            expiry.refuse_naive(values.get("expires_at"))
        ours = {"available_at"} if cls.__lifecycle__.expired is None else {"available_at", "expires_at"}
        return {name: clock.within(value) if name in ours else value for name, value in values.items()}

    @classmethod
    def __rows__(cls) -> RunRows[Any]:
        """Make the rows that every helper on this class, whichever it is, builds its statements from."""
        return RunRows(cls)

    @classmethod
    def __until__(cls, rows: Rows[Any], sources: Collection[StrEnum], to: StrEnum) -> ColumnElement[Any] | None:
        lifecycle = cls.__lifecycle__
        status = lifecycle.machine.column_of(cls)
        return None if to == lifecycle.expired else expiry.until(rows, status, lifecycle, sources)


RunT = TypeVar("RunT", bound=RunMixin)
_notices: WeakKeyDictionary[type[RunMixin], Sequence[ColumnElement[Any]]] = WeakKeyDictionary()


class RunRows(Rows[RunT]):
    """The rows of a run class, with the columns and statuses that the library's statements speak of."""

    started_with: Collection[str] = ()
    """The attributes of a mixin that a run is started with; on a dataclass base no parameters of the constructor."""
    claimed_by: str | None = None
    """What claims them, where :class:`.Runs` may not."""

    def __init__(self, entity: type[RunT]) -> None:
        super().__init__(entity)
        self.lifecycle: Lifecycle[Any] = entity.__lifecycle__
        self.status: Column[Any] = self.lifecycle.machine.column_of(entity)
        self.fence = self.column("fence")
        self.attempts = self.column("attempts")
        self.lease_owner = self.column("lease_owner")
        self.lease_expires_at = self.column("lease_expires_at")
        self.available_at = self.column("available_at")
        self.cancel_requested_at = self.column("cancel_requested_at")
        self.error = self.column("error")
        self.failures = self.column("failures")
        self.created_at = self.column("created_at")
        self.started_at = self.column("started_at")
        self.finished_at = self.column("finished_at")
        keyed, prioritized = issubclass(entity, KeyMixin), issubclass(entity, PriorityMixin)
        limited, timed = issubclass(entity, AttemptsMixin), issubclass(entity, DeadlineMixin)
        waiting = issubclass(entity, WaitMixin)
        self.idempotency_key = self.column("idempotency_key") if keyed else None
        self.key_fingerprint = self.column("key_fingerprint") if keyed else None
        self.key_scope = self.declared(key_scope(entity), "__key_scope__") if keyed else ()
        self.priority = self.column("priority") if prioritized else None
        self.max_attempts = self.column("max_attempts") if limited else None
        self.max_duration = self.column("max_duration") if timed else None
        self.waits_for = self.column("waits_for") if waiting else None
        self.output: Column[Any] | None = None
        """Where a landing as done writes the result of the whole run, in rows that have one."""
        self.of_one_life: Sequence[Column[Any]] = ()
        """What else a requeue clears, in rows that have more of a life."""
        self.group = self.declared(self.lifecycle.one_in_flight or (), "Lifecycle(one_in_flight=...)")
        self.tells: Callable[[], bool] = lambda: True
        """Says whether a statement may send a notification."""

    def called(self, identity: Ident, values: Mapping[str, Any]) -> str:  # noqa: ARG002 - of those that do
        """Return how an error calls a run.

        :param values: the attributes that it is started with.
        """
        return f"{self.entity.__name__} {identity!r}"

    def offered(self) -> Sequence[ColumnElement[bool]]:
        """What else must hold for a run to be claimed, with the parameters that :meth:`.Claims.terms` gives."""
        return ()

    def needless(self) -> Sequence[ColumnElement[bool]]:
        """What else must hold for a terminal run to be purged."""
        return ()

    def resumable(self) -> ColumnElement[bool] | None:
        """What must hold for the holder of a run that was reaped to ready to take it back; None where it always may."""
        return None

    def upon_landing(self, landed: ColumnElement[bool]) -> Mapping[Column[Any], Any]:  # noqa: ARG002 - of those that do
        """What else a statement that may land a run sets, in terms of the row as it was.

        :param landed: the condition that it does land this one.
        """
        return {}

    def update(
        self,
        locking: AnySelect,
        values: Mapping[Column[Any], Any],
        name: str = "target",
        *,
        until: ColumnElement[Any] | None = None,
        quietly: bool = False,
    ) -> Update:
        """See :meth:`.Rows.update`; one that sets when a run finished is one that may land it.

        :param quietly: whether it is made in a transaction that may send no notification.
        """
        if self.finished_at in values and not quietly:
            value = values[self.finished_at]
            ends = value.is_not(None) if isinstance(value, ColumnElement) else literal(value is not None)
            values = {**values, **self.upon_landing(and_(self.finished_at.is_(None), ends))}
        return super().update(locking, values, name, until=until)

    @cached_property
    def used_up(self) -> ColumnElement[bool] | None:
        """The condition that a run has used up its attempts; None where there is no end to them."""
        most = self.lifecycle.retry.max_attempts
        if self.max_attempts is None:
            return None if most is None else self.attempts >= most
        return self.attempts >= (self.max_attempts if most is None else func.coalesce(self.max_attempts, most))

    @cached_property
    def deadline(self) -> ColumnElement[datetime] | None:
        """The instant at which the time of a run's execution is over; None where no run of the class has a limit."""
        return None if self.max_duration is None else deadline(self.started_at, self.max_duration)

    def out_of_time(self) -> list[ColumnElement[bool]]:
        """The condition that a run's deadline has passed on the database clock, in a class that has deadlines."""
        return [] if self.deadline is None else [func.coalesce(self.deadline <= clock.stamp(), false())]

    def waits_no_more(self) -> dict[Column[Any], Any]:
        """The assignment that a run waits for nothing, in rows that can wait."""
        return {} if self.waits_for is None else {self.waits_for: None}

    def until(self, *sources: StrEnum) -> ColumnElement[Any] | None:
        """Until when a run may leave one of ``sources``. See :func:`.expiry.until`."""
        return expiry.until(self, self.status, self.lifecycle, sources)

    def constant(self, status: StrEnum) -> ColumnElement[Any]:
        """Return ``status`` as a constant in the SQL text. See :func:`.rows.constant`."""
        return constant(self.status, status)

    def in_status(self, status: StrEnum) -> ColumnElement[bool]:
        """The condition that a run is in ``status``."""
        return self.status == self.constant(status)

    def in_flight(self) -> ColumnElement[bool]:
        """The condition that a run is in a status that is not terminal."""
        machine = self.lifecycle.machine
        living = [status for status in machine.transitions if status not in machine.terminal]
        return self.status.in_([self.constant(status) for status in living])

    @cached_property
    def notices(self) -> Sequence[ColumnElement[Any]]:
        """What a statement that may have made a run ready returns, so that listening workers are told if it has.

        A run that is not due yet wakes nobody. The clock is the one that ``available_at`` is stamped with.
        """
        if not self.lifecycle.notify:
            return ()
        due = self.available_at <= clock.stamp()
        return [notification(self.table.name, and_(self.in_status(self.lifecycle.ready), due))]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.entity.__name__}>"


def _configure(mapper: Mapper[Any]) -> None:
    cls = mapper.class_
    parent = mapper.inherits
    if parent is not None and mapper.concrete:
        raise ConfigurationError(
            f"{cls.__name__} inherits concretely from {parent.class_.__name__}, so its rows are in a table of their "
            "own that the base class does not see; give it RunMixin and a __lifecycle__ as a class of its own."
        )
    if parent is not None and issubclass(parent.class_, RunMixin):
        if vars(cls).get("__lifecycle__", parent.class_.__lifecycle__) is not parent.class_.__lifecycle__:
            raise ConfigurationError(f"{cls.__name__} shares a table with its base class, and so its __lifecycle__.")
        if bool(cls.__guard__) is not bool(parent.class_.__guard__):
            raise ConfigurationError(f"{cls.__name__} shares a table with its base class, and so its __guard__.")
        return
    if parent is not None:
        raise ConfigurationError(
            f"{cls.__name__}: RunMixin goes on the class that owns the root table, here "
            f"{mapper.base_mapper.class_.__name__}, not on one that inherits from it."
        )
    if not isinstance(getattr(cls, "__lifecycle__", None), Lifecycle):
        raise ConfigurationError(f"{cls.__name__} is a run and needs __lifecycle__ = Lifecycle(...).")
    rows: RunRows[Any] = RunRows(cls)
    expiry.configure(rows, rows.status, rows.lifecycle)
    _refuse_other_types(rows)
    _refuse_moving_group(rows)
    rows.lifecycle.machine.serves(cls)
    event.listen(cls, "before_update", _keep_lease, propagate=True)
    event.listen(cls.available_at, "set", _within, propagate=True, retval=True)
    frozen.configure(rows, rows.status, rows.lifecycle, RunMixin.__reserved__ | {"available_at"})
    _add_constraints(rows)
    _partition(rows)
    guard_runs(rows, rows.status, rows.lifecycle)
    set_fillfactor(rows.table, _FILLFACTOR)


def _partition(rows: RunRows[Any]) -> None:
    """Partition the table if the class says so, unless something must be unique across partitions."""
    monthly.configure(rows, rows, rows.key, fillfactor=_FILLFACTOR)
    if monthly.partitioned(rows.table) is None:
        return
    unique = "KeyMixin" if rows.idempotency_key is not None else "Lifecycle(one_in_flight=...)" if rows.group else None
    if unique is not None:
        raise ConfigurationError(
            f"{rows.entity.__name__} has {unique}, which needs a unique index of the whole table, and PostgreSQL has "
            "none across partitions; leave __partition__ away, and partition the receipts instead."
        )


def _within(_: object, value: object, *__: object) -> object:
    return clock.within(value)


def _refuse_other_types(rows: RunRows[Any]) -> None:
    """Refuse a column of the user's that has a name of the mixin's and cannot hold what the library writes."""
    wanted: dict[type[Any], tuple[str, ...]] = {
        Integer: ("fence", "attempts"),
        String: ("lease_owner",),
        DateTime: (
            *("lease_expires_at", "available_at", "cancel_requested_at", "started_at", "finished_at"),
            *(() if rows.lifecycle.expired is None else ("expires_at",)),
        ),
        JSON: ("error", "failures"),
    }
    for kind, names in wanted.items():
        for name in names:
            column = rows.column(name)
            if not isinstance(column.type, kind) or (kind is DateTime and not cast(DateTime, column.type).timezone):
                raise ConfigurationError(
                    f"{rows.entity.__name__}.{name} is {column.type!r}, but RunMixin writes a {kind.__name__} "
                    f"{'with time zone ' if kind is DateTime else ''}there; give your own column another name."
                )


def _refuse_moving_group(rows: RunRows[Any]) -> None:
    """Refuse a group that a run would leave, and so enter another one, as it is claimed or goes on."""
    written = reserved_of(rows.entity) | {"available_at", rows.attribute(rows.status)}
    if moving := sorted(written.intersection(rows.lifecycle.one_in_flight or ())):
        raise ConfigurationError(
            f"{rows.entity.__name__}: Lifecycle(one_in_flight=...) names {', '.join(moving)}, which the library "
            "writes; a group is made of attributes of your own."
        )


def _keep_lease(_: Mapper[Any], __: Connection, row: RunMixin) -> None:
    """Keep an ORM flush from putting an old lease back, as ``session.merge(run.row)`` in a step would."""
    fence = get_history(row, "fence", PASSIVE_NO_INITIALIZE)
    if fence.added and fence.deleted and fence.added[0] < fence.deleted[0]:
        raise UsageError(
            f"{row!r} would go back from fence {fence.deleted[0]} to {fence.added[0]}; it only ever grows."
        )
    status = row.__lifecycle__.machine.attribute_of(type(row))
    if get_history(row, status, PASSIVE_NO_INITIALIZE).has_changes():
        return
    for name in ("lease_owner", "lease_expires_at"):
        history = get_history(row, name, PASSIVE_NO_INITIALIZE)
        if history.added and history.deleted:
            set_committed_value(row, name, history.deleted[0])


def _add_constraints(rows: RunRows[Any]) -> None:
    lifecycle = rows.lifecycle
    # No lease column in any index: an update of an indexed column is never HOT, and every heartbeat would write both
    # indexes again.
    first = [] if rows.priority is None else [rows.priority]
    add_index([*first, rows.available_at], rows.status == lifecycle.ready)
    add_index([rows.started_at], rows.status == lifecycle.running)
    if rows.group:
        add_unique_index(ONE_IN_FLIGHT, rows.group, rows.in_flight())
    leased = and_(rows.lease_expires_at.is_not(None), rows.lease_owner.is_not(None), rows.fence > 0)
    condition = case((rows.status == lifecycle.running, leased), else_=rows.lease_expires_at.is_(None))
    add_check(rows.table, "lease", condition)
