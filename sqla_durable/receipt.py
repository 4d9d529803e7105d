"""Receipts: the recorded outcome of each step, committed with the step's effect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from sqlalchemy import (
    CTE,
    BigInteger,
    Column,
    ColumnElement,
    DateTime,
    Delete,
    String,
    Text,
    Update,
    and_,
    case,
    delete,
    func,
    literal,
    not_,
    null,
    or_,
    select,
    text,
    update,
)
from sqlalchemy import cast as sql_cast
from sqlalchemy.dialects.postgresql import JSONB, Insert, insert
from sqlalchemy.orm import Mapped, Mapper, mapped_column
from sqlalchemy.sql.dml import ReturningInsert

from sqla_durable import clock
from sqla_durable.exc import ConfigurationError
from sqla_durable.failure import Failure
from sqla_durable.guarded_receipts import guard_receipts
from sqla_durable.mapping import add_check, add_foreign_key, when_mapped
from sqla_durable.monthly import Monthly, configure, partitioned
from sqla_durable.outcome import Effect as Effect  # noqa: PLC0414 - a receipt's words are had from here
from sqla_durable.outcome import StepOutcome as StepOutcome  # noqa: PLC0414 - as above
from sqla_durable.owned import OwnedRows, of_run_class
from sqla_durable.rows import AnySelect, Ident, among, bound

RunT = TypeVar("RunT")

KEY_LENGTH = 200
FINGERPRINT_LENGTH = 64
UNSEALED = ""
_RECORDED = "step", "outcome", "result", "error", "effect", "fence", "recorded_at", "ids", "input_fingerprint"


@dataclass(frozen=True, slots=True)
class Receipt:
    """What was recorded of one step.

    :param step: the step's key, as stored.
    :param outcome: how it ended, or how far an operation has come.
    :param result: what it returned, as JSON; None where it failed or has not ended.
    :param failure: what it raised; None where it succeeded or has not ended.
    :param effect: how often the effect happens.
    :param fence: the fence of the holder that recorded it; of a pending operation, the issuer's.
    :param recorded_at: when, on the database clock; of an operation that has not ended, when it came as far as it has.
    :param ids: what the service knows an operation by, as JSON; of a wait or sleep that the run was handed back for, an
     object whose ``until`` says until when; None for other steps.
    :param input_fingerprint: the SHA-256 of what a function's step was called with; None for other steps.
    """

    step: str
    outcome: StepOutcome
    result: Any
    failure: Failure | None
    effect: Effect
    fence: int
    recorded_at: datetime
    ids: Any = None
    input_fingerprint: str | None = None


class _ReceiptColumns:
    if TYPE_CHECKING:
        step: Mapped[str]
        outcome: Mapped[str | None]
        result: Mapped[Any]
        error: Mapped[dict[str, Any] | None]
        effect: Mapped[str]
        fence: Mapped[int]
        recorded_at: Mapped[datetime]
        unsealed: Mapped[str | None]
        ids: Mapped[Any]
        input_fingerprint: Mapped[str | None]
    else:
        step = mapped_column(String(KEY_LENGTH), primary_key=True, sort_order=-1)
        outcome = mapped_column(String(20))
        result = mapped_column(JSONB(none_as_null=True))
        error = mapped_column(JSONB(none_as_null=True))
        effect = mapped_column(String(20), nullable=False)
        fence = mapped_column(BigInteger, nullable=False)
        recorded_at = mapped_column(DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()"))
        unsealed = mapped_column(String(KEY_LENGTH))
        ids = mapped_column(JSONB(none_as_null=True))
        input_fingerprint = mapped_column(String(FINGERPRINT_LENGTH))

    __run__: ClassVar[type[Any]]
    __partition__: ClassVar[Monthly | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        when_mapped(cls, lambda mapper: _configure(mapper))  # noqa: PLW0108 - it is defined below


if TYPE_CHECKING:

    class ReceiptMixin(_ReceiptColumns, Generic[RunT]):
        """The receipts of one run class, as in ``class PlanStep(ReceiptMixin[Plan], Base)``.

        The primary key is the run's key columns, each prefixed with the run's table name, and ``step``; the foreign
        key to the run cascades deletes. ``unsealed`` is set while the step's transaction is under way: a deferred
        foreign key from it to a step that cannot exist makes PostgreSQL itself refuse a ``COMMIT`` that a body slips
        in before its receipt is sealed. ``__partition__ = Monthly()`` gives each month's receipts a partition.
        """

else:

    class ReceiptMixin(_ReceiptColumns):
        __abstract__ = True

        def __class_getitem__(cls, run: Any) -> type[Any]:
            return of_run_class(cls, run, "receipts")

    ReceiptMixin.__doc__ = "The receipts of one run class, as in ``class PlanStep(ReceiptMixin[Plan], Base)``."


def _configure(mapper: Mapper[Any]) -> None:
    if not hasattr(mapper.class_, "__run__"):
        raise ConfigurationError(
            f"{mapper.class_.__name__} does not say whose receipts it holds; write ReceiptMixin[YourRunClass]."
        )
    receipts = ReceiptRows(mapper.class_)
    receipts.refuse_unfilled(*(receipts.column(name) for name in (*_RECORDED, "unsealed")))
    receipts.add_run_key()
    # The unsealed column comes first, or a convention that names a foreign key by its first column gives both
    # foreign keys one name.
    guard = [receipts.unsealed, *receipts.run_key], [receipts.step, *receipts.run_key]
    configure(receipts, receipts.runs, receipts.run_key, guard=guard)
    if partitioned(receipts.table) is None:
        add_foreign_key(receipts.table, *guard, deferrable=True, initially="DEFERRED")
    succeeded = and_(receipts.unsealed.is_(None), receipts.result.is_not(None), receipts.error.is_(None))
    failed = and_(receipts.unsealed.is_(None), receipts.result.is_(None), receipts.error.is_not(None))
    under_way = and_(
        receipts.outcome.is_(None),
        # No other value: a receipt that names itself would satisfy the foreign key.
        func.coalesce(receipts.unsealed == literal(UNSEALED, String), False),
        receipts.result.is_(None),
        receipts.error.is_(None),
    )
    # Neither result nor error, and of what takes more than one execution only.
    open_ended = receipts.unsealed.is_(None), receipts.result.is_(None), receipts.error.is_(None)
    pending = or_(receipts.is_operation, receipts.is_waiting)
    outcome = {
        StepOutcome.SUCCEEDED.value: succeeded,
        StepOutcome.FAILED.value: failed,
        StepOutcome.ISSUED.value: and_(*open_ended, receipts.is_operation, receipts.ids.is_(None)),
        StepOutcome.PENDING.value: and_(*open_ended, pending, receipts.ids.is_not(None)),
    }
    add_check(receipts.table, "outcome", case(outcome, value=receipts.outcome, else_=under_way))
    guard_receipts(receipts)


class ReceiptRows(OwnedRows):
    """The rows of a receipt class, with the columns that the library's statements speak of."""

    def __init__(self, entity: type[Any]) -> None:
        super().__init__(entity)
        self.step = self.column("step")
        self.outcome = self.column("outcome")
        self.result = self.column("result")
        self.error = self.column("error")
        self.effect = self.column("effect")
        self.fence = self.column("fence")
        self.recorded_at = self.column("recorded_at")
        self.unsealed = self.column("unsealed")
        self.ids = self.column("ids")
        self.input_fingerprint = self.column("input_fingerprint")

    @property
    def is_operation(self) -> ColumnElement[bool]:
        """The condition that a receipt is of an operation."""
        return self.effect == literal(Effect.OPERATION.value, String)

    @property
    def is_waiting(self) -> ColumnElement[bool]:
        """The condition that a receipt is of a signal that a run waits for, or of a sleep."""
        return or_(*(self.effect == literal(effect.value, String) for effect in (Effect.SIGNAL, Effect.SLEEP)))

    @property
    def until(self) -> ColumnElement[datetime]:
        """Until when a run waits or sleeps, on the database clock."""
        return sql_cast(self.ids["until"].astext, DateTime(timezone=True))

    def in_outcome(self, *outcomes: StepOutcome) -> ColumnElement[bool]:
        """The condition that a receipt has one of these outcomes."""
        return or_(*(self.outcome == literal(outcome.value, String) for outcome in outcomes))

    @property
    def may_be_done_again(self) -> ColumnElement[bool]:
        """The condition that a step has failed and may be done anew; an operation's receipt is its only permission."""
        return and_(self.in_outcome(StepOutcome.FAILED), not_(self.is_operation))

    @property
    def is_forgotten(self) -> ColumnElement[bool]:
        """The condition that a requeue removes a receipt: of a failure, or of a wait, which begins anew."""
        waits = self.effect == literal(Effect.SIGNAL.value, String)
        return or_(self.may_be_done_again, and_(self.in_outcome(StepOutcome.PENDING), waits))

    @property
    def may_be_overwritten(self) -> ColumnElement[bool]:
        """The condition that a receipt is not final: it may be done again, or says that a run waits."""
        return or_(self.may_be_done_again, and_(self.in_outcome(StepOutcome.PENDING), self.is_waiting))

    @property
    def guard(self) -> str:
        """The name of the constraint that refuses to commit an unsealed receipt."""
        parts = partitioned(self.table)
        if parts is not None and parts.guard is not None:
            return parts.guard[0]
        key = next(key for key in self.unsealed.foreign_keys if key.column is self.step)
        return str(key.constraint and key.constraint.name)

    def recorded(self) -> list[ColumnElement[Any]]:
        """The columns that :func:`receipt_of` reads.

        JSON is read as text, since the user's engine may decode it its own way, floats as decimals for one.
        """
        json_columns = {"result", "error", "ids"}
        columns = [(name, self.column(name)) for name in _RECORDED]
        return [sql_cast(column, Text) if name in json_columns else column for name, column in columns]


def opening(receipts: ReceiptRows, held: CTE) -> ReturningInsert[Any]:
    """Insert the unsealed receipt of a step whose run is ``held``; a receipt that is there already stays.

    Inserted before the body rather than after it, the receipt also answers whether another transaction has recorded
    this step: its unique key sees what the statement's snapshot does not. One that failed earlier is opened again.
    """
    values: dict[Column[Any], ColumnElement[Any]] = {
        receipts.unsealed: literal(UNSEALED, String),
        receipts.input_fingerprint: input_fingerprint(),
    }
    return insert_receipt(receipts, held, values)


def sealing(receipts: ReceiptRows) -> Update:
    """Turn the unsealed receipt into the recorded outcome; no row means that its transaction was ended."""
    return (
        update(receipts.table)
        .where(*receipts.of_run(), receipts.step == step_key(), receipts.unsealed.is_not(None))
        .values(
            {
                **receipts.untouched(),
                receipts.unsealed: null(),
                receipts.outcome: literal(StepOutcome.SUCCEEDED.value, String),
                receipts.result: json_bound("result"),
                receipts.recorded_at: clock.stamp(),
            }
        )
        .returning(
            receipts.recorded_at,
            (clock.stamp() >= bound("renew_at", DateTime(timezone=True))).label("renewal_due"),
        )
    )


def recording(receipts: ReceiptRows, held: CTE) -> ReturningInsert[Any]:
    """Insert a finished receipt of a run that is ``held``, with either a ``result`` or an ``error``."""
    values = {
        receipts.outcome: bound("outcome", String()),
        receipts.result: json_bound("result"),
        receipts.error: json_bound("error"),
        receipts.recorded_at: clock.stamp(),
        receipts.input_fingerprint: input_fingerprint(),
    }
    return insert_receipt(receipts, held, values)


def of_runs(receipts: ReceiptRows, identities: Sequence[Ident]) -> AnySelect:
    """Read the receipts of some runs, each after its run's key, in the order they were recorded."""
    return (
        select(*receipts.run_key, *receipts.recorded())
        .where(among(receipts.run_key, identities), receipts.outcome.is_not(None))
        .order_by(receipts.recorded_at, receipts.step)
    )


def one(receipts: ReceiptRows) -> AnySelect:
    """Read the receipt of one step."""
    return select(*receipts.recorded()).where(*receipts.of_run(), receipts.step == step_key())


def forget_failed(receipts: ReceiptRows) -> Delete:
    """Remove the failed receipts of a run that is given another life, and those of waits; those of operations stay."""
    return delete(receipts.table).where(*receipts.of_run(), receipts.is_forgotten)


def forget_failed_of(receipts: ReceiptRows, identities: Sequence[Ident]) -> Delete:
    """Do the same with some runs."""
    return delete(receipts.table).where(among(receipts.run_key, identities), receipts.is_forgotten)


def receipt_of(row: Sequence[Any]) -> Receipt:
    """Return the value for the columns that :meth:`.ReceiptRows.recorded` names."""
    step, outcome, result, error, effect, fence, recorded_at, ids, given = row
    failure = None if error is None else Failure.from_json(json.loads(error))
    ended = StepOutcome(outcome), parsed(result), failure
    return Receipt(step, *ended, Effect(effect), fence, recorded_at, parsed(ids), given)


def parsed(text: str | None) -> Any:
    """Return the value of a JSON text; None where there is no text."""
    return None if text is None else json.loads(text)


def from_held(receipts: ReceiptRows, held: CTE, values: Mapping[Column[Any], Any]) -> tuple[Insert, list[Column[Any]]]:
    """Insert a receipt of a run that is ``held``; also return the columns it is given."""
    named: dict[Column[Any], ColumnElement[Any]] = {
        **{column: held.c[f"key_{position}"] for position, column in enumerate(receipts.run_key)},
        receipts.step: step_key(),
        receipts.effect: bound("effect", String()),
        receipts.fence: held.c.fence,
        **values,
    }
    rows = select(*named.values())
    return insert(receipts.table).from_select(list(named), rows, include_defaults=False), list(named)


def insert_receipt(
    receipts: ReceiptRows, held: CTE, values: Mapping[Column[Any], ColumnElement[Any]]
) -> ReturningInsert[Any]:
    """Insert a receipt of a run that is ``held``; one that is not final is overwritten."""
    statement, named = from_held(receipts, held, values)
    again = [receipts.outcome, receipts.result, receipts.error, receipts.unsealed]
    replaced = {
        **{column.key: null() for column in again},
        **{column.key: statement.excluded[column.key] for column in named if not column.primary_key},
    }
    return statement.on_conflict_do_update(
        index_elements=[*receipts.run_key, receipts.step],
        set_=replaced,
        where=receipts.may_be_overwritten,
    ).returning(receipts.recorded_at)


def step_key() -> ColumnElement[str]:
    """The parameter ``step``."""
    return bound("step", String())


def input_fingerprint() -> ColumnElement[str | None]:
    """The parameter ``input_fingerprint``."""
    return bound("input_fingerprint", String())


def json_bound(name: str) -> ColumnElement[Any]:
    """A parameter that is given as JSON text."""
    return sql_cast(bound(name, Text()), JSONB)
