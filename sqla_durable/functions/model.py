"""The run class of functions: a table of the user's own, made of a ready mixin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar
from uuid import UUID

from sqlalchemy import ARRAY, Boolean, Column, ColumnElement, String, Uuid, and_, any_, case, false, or_
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, Mapper, declared_attr, mapped_column

from sqla_durable import clock, wake
from sqla_durable.attempts import AttemptsMixin
from sqla_durable.deadline import DeadlineMixin
from sqla_durable.functions.pacing import PacedMixin
from sqla_durable.ids import uuid7
from sqla_durable.key import KeyMixin
from sqla_durable.lifecycle import Lifecycle
from sqla_durable.mapping import add_index, when_mapped
from sqla_durable.priority import PriorityMixin
from sqla_durable.retry import Retry
from sqla_durable.rows import Ident, bound
from sqla_durable.run import RunMixin, RunRows
from sqla_durable.status import StatusMachine
from sqla_durable.waits_for import WaitMixin

NAME_LENGTH: Final = 200
TENANT_LENGTH: Final = 200
_SORT_ORDER: Final = -100


class FunctionStatus(StrEnum):
    """Where the run of a function stands."""

    READY = "ready"
    """It waits for a worker, for its time, or for a signal."""
    RUNNING = "running"
    """A worker carries it out."""
    DONE = "done"
    """It returned."""
    FAILED = "failed"
    """It raised, for good or once too often."""
    CANCELLED = "cancelled"
    """Someone asked for it to be cancelled."""
    TIMED_OUT = "timed_out"
    """It ran past its deadline."""


function_statuses: Final = StatusMachine(
    FunctionStatus,
    initial=FunctionStatus.READY,
    transitions={
        FunctionStatus.READY: {FunctionStatus.RUNNING, FunctionStatus.CANCELLED},
        FunctionStatus.RUNNING: {
            FunctionStatus.DONE,
            FunctionStatus.FAILED,
            FunctionStatus.READY,
            FunctionStatus.CANCELLED,
            FunctionStatus.TIMED_OUT,
        },
    },
)


def function_lifecycle(
    *,
    lease: timedelta = timedelta(seconds=120),
    retry: Retry | None = None,
    step_timeout: timedelta | Literal["lease"] | None = "lease",
    notify: bool = True,
    guard: bool = False,
) -> Lifecycle[FunctionStatus]:
    """Return the lifecycle of a run class of functions, for its ``__lifecycle__``.

    :param lease: for how long a holder is presumed alive after its last sign of life.
    :param retry: what goes for functions that say nothing else.
    :param step_timeout: for how long a transactional step may leave its connection idle. See :class:`.Lifecycle`.
    :param notify: whether workers that listen are told of a run that has become ready.
    :param guard: whether triggers keep the tables to the rules, whoever writes to them.
    """
    return Lifecycle(
        function_statuses,
        ready=FunctionStatus.READY,
        running=FunctionStatus.RUNNING,
        done=FunctionStatus.DONE,
        failed=FunctionStatus.FAILED,
        cancelled=FunctionStatus.CANCELLED,
        timed_out=FunctionStatus.TIMED_OUT,
        requeue={FunctionStatus.FAILED, FunctionStatus.CANCELLED, FunctionStatus.TIMED_OUT},
        lease=lease,
        retry=Retry() if retry is None else retry,
        step_timeout=step_timeout,
        notify=notify,
        guard=guard,
    )


class FunctionMixin(PacedMixin, AttemptsMixin, DeadlineMixin, KeyMixin, PriorityMixin, WaitMixin, RunMixin):
    """Makes a mapped class the runs of functions, as in ``class DurableRun(FunctionMixin, Base)``.

    It brings all columns, the primary key too; your own may stand beside them, and are given to ``start()`` by name.
    Write ``__lifecycle__ = function_lifecycle(...)`` for another lease or retry.
    """

    __abstract__ = True
    __lifecycle__ = function_lifecycle()
    __key_scope__ = ("function", "tenant")

    if TYPE_CHECKING:
        id: Mapped[UUID]
        function: Mapped[str]
        tenant: Mapped[str | None]
        status: Mapped[FunctionStatus]
        input: Mapped[Any]
        output: Mapped[Any]
        state: Mapped[Any]
        awaited: Mapped[bool]
    else:
        __reserved__ = frozenset({"output", "state", "awaited"})

        id = mapped_column(Uuid, primary_key=True, default=uuid7, sort_order=_SORT_ORDER)
        function = mapped_column(String(NAME_LENGTH), nullable=False, sort_order=_SORT_ORDER + 1)
        tenant = mapped_column(String(TENANT_LENGTH), sort_order=_SORT_ORDER + 2)
        input = mapped_column(JSONB(none_as_null=True), sort_order=_SORT_ORDER + 4)
        output = mapped_column(JSONB(none_as_null=True), sort_order=_SORT_ORDER + 5)
        state = mapped_column(JSONB(none_as_null=True), sort_order=_SORT_ORDER + 6)

        @declared_attr  # it is listened to, which no import should do
        def status(cls):  # noqa: N805 - a class method, as SQLAlchemy calls it
            return function_statuses.column(sort_order=_SORT_ORDER + 3)

        @declared_attr  # as above
        def awaited(cls):  # noqa: N805 - as above
            return mapped_column(Boolean, nullable=False, server_default=false(), sort_order=_SORT_ORDER + 7)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        when_mapped(cls, _configure)

    @classmethod
    def __rows__(cls) -> FunctionRows[Any]:
        return FunctionRows(cls)

    @classmethod
    def __on_arrival__(cls, to: StrEnum) -> Sequence[ColumnElement[Any]]:
        if to not in function_statuses.terminal or not cls.__lifecycle__.notify:
            return super().__on_arrival__(to)
        rows = cls.__rows__()
        return [case((rows.awaited, wake.landing(rows.id))).label("landed")]


FunctionT = TypeVar("FunctionT", bound=FunctionMixin)


class FunctionRows(RunRows[FunctionT]):
    """The rows of a run class of functions."""

    started_with = "function", "tenant", "input"
    claimed_by = "Functions.execute() or Worker(functions)"

    def __init__(self, entity: type[FunctionT]) -> None:
        super().__init__(entity)
        self.id = self.column("id")
        self.function = self.column("function")
        self.tenant = self.column("tenant")
        self.input = self.column("input")
        self.result: Column[Any] = self.column("output")
        self.output = self.result
        self.state = self.column("state")
        self.of_one_life = (self.state,)
        self.paced_at = self.column("paced_at")
        self.awaited = self.column("awaited")

    def called(self, identity: Ident, values: Mapping[str, Any]) -> str:
        """Return how an error calls a run."""
        return (
            f"the run {identity[0]} of function {values['function']!r}"
            if "function" in values
            else super().called(identity, values)
        )

    def upon_landing(self, landed: ColumnElement[bool]) -> dict[Column[Any], Any]:
        """Tell those who wait for the run, and note that nobody does any more."""
        if not self.lifecycle.notify or not self.tells():
            return {}
        awaited = and_(self.awaited, self.finished_at.is_(None))
        # In an assignment and not among what is returned, of which each statement has its own.
        return {self.awaited: case((and_(awaited, landed), wake.landing(self.id).is_(None)), else_=awaited)}

    def offered(self) -> Sequence[ColumnElement[bool]]:
        """Only runs of functions that this process knows; with the parameter ``functions``."""
        return (self.function == any_(bound("functions", ARRAY(String()))),)

    def key_index(self) -> dict[str, Any]:
        """What ``ON CONFLICT`` is told of the index of the keys: no other unique index of the table is meant."""
        key = self.column("idempotency_key")
        return {"index_elements": [*self.key_scope, key], "index_where": key.is_not(None)}

    def needless(self) -> Sequence[ColumnElement[bool]]:
        """Only a run whose token is back in its function's bucket: a rate is known by the stamps of the runs."""
        return (or_(self.paced_at.is_(None), self.paced_at <= clock.now()),)

    def resumable(self) -> ColumnElement[bool]:
        """Only a run that was not claimed under a limit: the place of one that was may be another's."""
        return self.paced_at.is_(None)


def _configure(mapper: Mapper[Any]) -> None:
    if mapper.inherits is not None:
        return
    rows: FunctionRows[Any] = FunctionRows(mapper.class_)
    # Without these a page of the list reads the whole table, and so does what looks for runs that are old enough to go.
    add_index([rows.created_at, rows.id])
    add_index([rows.function, rows.created_at, rows.id])
    add_index([rows.finished_at], rows.finished_at.is_not(None))
