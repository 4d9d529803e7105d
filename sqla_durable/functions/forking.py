"""Forking a run: a new one of the same function, with the receipts that were recorded before a step copied."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, Final
from uuid import UUID

from sqlalchemy import (
    ARRAY,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    String,
    Uuid,
    and_,
    any_,
    exists,
    func,
    literal,
    not_,
    or_,
    select,
    true,
    tuple_,
)
from sqlalchemy.dialects.postgresql import insert

from sqla_durable.clock import stamp
from sqla_durable.exc import KeyConflict, RunNotFound, TransactionConflict, UsageError
from sqla_durable.fingerprint import fingerprint
from sqla_durable.functions.model import FunctionRows
from sqla_durable.ids import uuid7
from sqla_durable.in_flight import same
from sqla_durable.receipt import ReceiptRows, StepOutcome
from sqla_durable.rows import AnyRow, AnySelect, arguments, bound
from sqla_durable.start import refuse, scheduled, scheduling
from sqla_durable.status import reserved_of

FIRST_FENCE: Final = 1
"""The fence that a forked run and its receipts begin with: the next claim's is greater, and so looks for receipts."""
_ROUNDS: Final = 5


class Fork:
    """One run being forked.

    :param runs: the rows of its class.
    :param receipts: those of its receipts.
    :param connection: the caller's.
    :param notify: whether workers that listen are told.
    """

    def __init__(self, runs: FunctionRows[Any], receipts: ReceiptRows, connection: Connection, *, notify: bool) -> None:
        self._runs = runs
        self._receipts = receipts
        self._connection = connection
        self._notices = runs.notices if notify else ()

    def run(self, source: UUID, steps: Sequence[str], key: str | None, values: Mapping[str, Any]) -> AnyRow:
        """Insert the fork with its receipts, or find the one that the same key has started before.

        :param source: the run that is forked.
        :param steps: the keys that the first step to be done again is known by, its present one first.
        :param key: the idempotency key of the fork, if it has one.
        :param values: the attributes that are not the source's.
        :return: a row with the fork's ``id``, ``function`` and ``tenant``.
        :raises UsageError: where the run has no such receipt, or one before it is of a step that has not ended.
        :raises KeyConflict: where the key belongs to another run.
        """
        refuse(self._runs, key, values)
        given = scheduled(values, scheduling(self._runs))
        payload: str | None = None
        if key is not None:
            own = {name: value for name, value in values.items() if name not in scheduling(self._runs)}
            payload = fingerprint({**own, "fork of": source, "from step": steps[0]})
            given |= {"idempotency_key": key, "key_fingerprint": payload}
        statement = self._statement(given, on_conflict=key is not None)
        for _ in range(_ROUNDS):
            parameters = {**self._runs.parameters((source,)), **arguments(fork=uuid7(), steps=list(steps))}
            row = self._connection.execute(statement, parameters).one_or_none()
            if row is not None:
                return row
            if key is not None and (found := self._find(source, key, payload)) is not None:
                return found
            self._refuse(source, steps)
        if key is None:
            raise TransactionConflict(f"the run {source} changed again and again while it was forked; do it again.")
        raise KeyConflict(
            f"the key {key!r} belongs to a run that this session does not see, by row security for one.", key, None
        )

    # the statement

    def _statement(self, given: Mapping[str, Any], *, on_conflict: bool) -> AnySelect:
        """Insert the run and its receipts in one statement, which sees the source as of one instant, and locks nothing.

        The source may be carried out meanwhile: what it commits later is not copied.
        """
        runs, receipts = self._runs, self._receipts
        start = self._start.cte("start")
        before = tuple_(receipts.recorded_at, receipts.step) < tuple_(start.c.recorded_at, start.c.step)
        kept = and_(*receipts.of_run(), receipts.outcome.is_not(None), before)
        unended = exists().where(kept, not_(_ended(receipts)))
        own = self._own(given)
        source = select(*own.values()).where(runs.matches(), exists(select(start.c.step)), not_(unended))
        inserting = insert(runs.table).from_select(list(own), source, include_defaults=False)
        if on_conflict:
            inserting = inserting.on_conflict_do_nothing(**runs.key_index())
        fork = inserting.returning(runs.id, runs.function, runs.tenant, *self._notices).cte("fork")
        copied = self._copied(fork, start, kept)
        copying = insert(receipts.table).from_select(list(copied[0]), copied[1], include_defaults=False)
        done = copying.returning(receipts.step).cte("copied")
        return select(*fork.c).add_cte(done)

    @cached_property
    def _start(self) -> AnySelect:
        """The receipt of the first step to be done again, by its present key if it has one."""
        receipts = self._receipts
        names = bound("steps", ARRAY(String()))
        found = *receipts.of_run(), receipts.outcome.is_not(None), receipts.step == any_(names)
        order = func.array_position(names, receipts.step)
        return select(receipts.recorded_at, receipts.step).where(*found).order_by(order).limit(1)

    def _own(self, given: Mapping[str, Any]) -> dict[Column[Any], ColumnElement[Any]]:
        """What the fork is inserted with: what the caller gives, and else the source's, but for how that went."""
        runs = self._runs
        attributes = runs.attributes()
        if any(len(mapper.tables) > 1 for mapper in runs.mapper.self_and_descendants):
            raise UsageError(f"{runs.entity.__name__} has more tables than one, and a fork copies the row of one.")
        left_out = reserved_of(runs.entity) | {"id", "available_at", runs.attribute(runs.status)}
        values: dict[Column[Any], ColumnElement[Any]] = {
            column: column
            for column in runs.table.columns
            if attributes.get(column) not in left_out and column.computed is None and column.identity is None
        }
        values |= {
            runs.id: bound("fork", Uuid()),
            runs.status: runs.constant(runs.lifecycle.ready),
            runs.fence: literal(FIRST_FENCE, BigInteger),
            runs.available_at: stamp(),
        }
        for name, value in given.items():
            column = runs.column(name)
            values[column] = value if isinstance(value, ColumnElement) else literal(value, column.type)
        return values

    def _copied(self, fork: Any, start: Any, kept: ColumnElement[bool]) -> tuple[Collection[Column[Any]], AnySelect]:
        receipts = self._receipts
        names = "step", "outcome", "result", "effect", "recorded_at", "ids", "input_fingerprint"
        same_: dict[Column[Any], Any] = {receipts.column(name): receipts.column(name) for name in names}
        values = {
            receipts.run_key[0]: fork.c[self._runs.id.key],
            receipts.fence: literal(FIRST_FENCE, BigInteger),
            **same_,
        }
        succeeded = receipts.in_outcome(StepOutcome.SUCCEEDED)
        copied = receipts.table.join(start, kept).join(fork, true())
        return list(values), select(*values.values()).select_from(copied).where(succeeded)

    # what is in the way

    def _refuse(self, source: UUID, steps: Sequence[str]) -> None:
        """Say why the run cannot be forked, unless it can."""
        runs, receipts = self._runs, self._receipts
        parameters = self._runs.parameters((source,))
        if self._connection.execute(select(runs.id).where(runs.matches()), parameters).first() is None:
            raise RunNotFound(f"the run {source} does not exist.")
        known = select(receipts.step, _ended(receipts)).where(*receipts.of_run(), receipts.outcome.is_not(None))
        rows = self._connection.execute(known.order_by(receipts.recorded_at, receipts.step), parameters).all()
        names = [step for step, _ in rows]
        start = next((step for step in steps if step in names), None)
        if start is None:
            raise UsageError(
                f"fork(from_step={steps[0]!r}): the run {source} has no receipt of that step. Known: "
                f"{', '.join(map(repr, names)) or 'none'}."
            )
        unended = [step for step, ended in rows[: names.index(start)] if not ended]
        if unended:
            raise UsageError(
                f"fork(from_step={steps[0]!r}): step {unended[0]!r} before it has not ended, and what it waits for can "
                "only be waited for by one run. Fork when it has, or from that step."
            )

    def _find(self, source: UUID, key: str, payload: str | None) -> AnyRow | None:
        """Return the run that the key has started before, if there is one."""
        runs = self._runs
        if runs.idempotency_key is None or runs.key_fingerprint is None:
            return None
        origin = select(runs.function, runs.tenant).where(runs.matches())
        scope = self._connection.execute(origin, runs.parameters((source,))).one_or_none()
        if scope is None:
            return None
        conditions = runs.function == scope[0], same(runs.tenant, scope[1]), runs.idempotency_key == key
        wanted = select(runs.id, runs.function, runs.tenant, runs.key_fingerprint).where(*conditions)
        row = self._connection.execute(wanted).one_or_none()
        if row is not None and row[3] != payload:
            raise KeyConflict(
                f"the key {key!r} belongs to {runs.entity.__name__} {row[0]!r}, which is not this fork of that run; "
                "use a key for one fork only.",
                key,
                (row[0],),
            )
        return row


def _ended(receipts: ReceiptRows) -> ColumnElement[bool]:
    return or_(*(receipts.in_outcome(outcome) for outcome in StepOutcome if outcome.terminal))
