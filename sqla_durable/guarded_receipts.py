"""The rules of a receipt as its table's guard knows them: what may be recorded, changed and taken back.

A receipt is recorded under its run's present fence and is final, but for what the library itself leaves open: a step
that has failed may be done again, an operation is issued and then ends, and a wait goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import JSON, Column, ColumnElement, String, Table, func
from sqlalchemy.dialects.postgresql import JSONB

from sqla_durable.guard import Trigger, attach, is_guarded, overrides_of, verdict
from sqla_durable.outcome import Effect, StepOutcome
from sqla_durable.owned import OwnedRows
from sqla_durable.plain_sql import literal, quoted
from sqla_durable.rows import bound

INSERTED: Final = "SD011"
CHANGED: Final = "SD012"
DELETED: Final = "SD013"
_TAKEN_BACK: Final = "sqla_durable.taken_back"


def taking_back() -> ColumnElement[Any]:
    """Say, until the transaction ends, that the receipt of ``step`` is taken back by a verb that may do so.

    The guard cannot tell it from any other DELETE otherwise.
    """
    return func.set_config(_TAKEN_BACK, bound("step", String()), True).label("taken_back")  # noqa: FBT003 - SQL


def guard_receipts(receipts: OwnedRows) -> None:
    """Give the table of a receipt class its guard, if its run class asks for one."""
    if not is_guarded(receipts.entity.__run__):
        return
    overrides = overrides_of(receipts.table)
    rules = _Rules(receipts)
    attach(
        receipts.table,
        {
            # Before the write, since one statement may record a wait and hand the run back.
            "insert": Trigger("BEFORE INSERT"),
            "update": Trigger("BEFORE UPDATE", rules.is_watched()),
            # After it: where the run goes in the same statement, it is gone by then.
            "delete": Trigger("AFTER DELETE"),
            "truncate": Trigger("AFTER TRUNCATE", each="STATEMENT"),
        },
        lambda name_of: rules.source(name_of, overrides),
        receipts.runs.table,
        overrides,
    )


class _Rules:
    def __init__(self, receipts: OwnedRows) -> None:
        run: type[Any] = receipts.entity.__run__
        self._receipts = receipts
        self._lifecycle = run.__lifecycle__
        self._status: Column[Any] = self._lifecycle.machine.column_of(run)

    def is_watched(self) -> str:
        """The condition that an update is looked at.

        Sealing a receipt, which every step does, is not: nobody else has seen it unsealed.
        """
        names = "step", "outcome", "result", "error", "effect", "fence", "unsealed", "ids", "input_fingerprint"
        columns = [*self._receipts.run_key, *(self._receipts.column(name) for name in (*names, "recorded_at"))]
        fixed = [*self._receipts.run_key, *(self._receipts.column(name) for name in ("step", "effect", "fence"))]
        changed = " OR ".join(_differs(column) for column in columns)
        moved = " OR ".join(_differs(column) for column in fixed)
        return f"CASE WHEN OLD.{self._name('outcome')} IS NULL THEN {moved} ELSE {changed} END"

    def source(self, name_of: Callable[[Table], str], overrides: Table) -> str:
        key = [*self._receipts.run_key, self._receipts.column("step")]
        return f"""\
DECLARE
  code text;
  problem text;
  remedy text;
  reason text;
  run_status text;
  run_fence bigint;
  run_is_unclaimed boolean;
  run_is_new boolean;
BEGIN
  IF TG_OP = 'INSERT' THEN
{self._look_up("NEW", name_of)}
{self._inserted()}
  ELSIF TG_OP = 'UPDATE' THEN
{self._changed(name_of)}
  ELSIF TG_OP = 'DELETE' THEN
{self._look_up("OLD", name_of)}
{self._deleted()}
  ELSIF EXISTS (SELECT FROM {name_of(self._receipts.runs.table)}) THEN
    code := '{DELETED}';
    problem := 'all receipts would be removed, and the runs stay';
    remedy := 'Truncate both tables in one statement.';
  END IF;
{verdict(self._receipts.table, name_of(overrides), self._receipts.entity.__name__, key)}"""

    def _look_up(self, row: str, name_of: Callable[[Table], str]) -> str:
        """Read the run, and lock it as a step does, which has locked it already: its fence must not move meanwhile."""
        runs = self._receipts.runs
        status, ready = f"run.{quoted(self._status.name)}", literal(self._lifecycle.ready)
        fence, attempts, owner, started_at, created_at = (
            f"run.{quoted(runs.column(name).name)}"
            for name in ("fence", "attempts", "lease_owner", "started_at", "created_at")
        )
        pairs = zip(runs.key, self._receipts.run_key, strict=True)
        same = " AND ".join(f"run.{quoted(mine.name)} = {row}.{quoted(theirs.name)}" for mine, theirs in pairs)
        return f"""\
    SELECT {status}, {fence},
      {status} = {ready} AND {attempts} = 0 AND {owner} IS NULL AND {started_at} IS NULL, {created_at} >= now()
    INTO run_status, run_fence, run_is_unclaimed, run_is_new
    FROM {name_of(runs.table)} AS run WHERE {same} FOR NO KEY UPDATE;"""  # noqa: S608 - identifiers and literals are quoted

    def _inserted(self) -> str:
        fence, outcome = self._name("fence"), self._name("outcome")
        # A fork begins with receipts of the run it is made from.
        return f"""\
    IF run_status IS NULL OR run_fence <> NEW.{fence} OR (
      run_status = {literal(self._lifecycle.running)}
      OR (run_is_unclaimed AND run_is_new AND NEW.{outcome} IS NOT DISTINCT FROM {literal(StepOutcome.SUCCEEDED)})
    ) IS NOT TRUE THEN
      code := '{INSERTED}';
      problem := {self._other_fence()};
      remedy := 'Only the holder of a running run records a step, with the fence of its lease: see Runs.record().';
    END IF;"""

    def _changed(self, name_of: Callable[[Table], str]) -> str:
        outcome, effect, fence, ids = (self._name(name) for name in ("outcome", "effect", "fence", "ids"))
        issued, pending, failed = (
            literal(each) for each in (StepOutcome.ISSUED, StepOutcome.PENDING, StepOutcome.FAILED)
        )
        operation = f"OLD.{effect} = {literal(Effect.OPERATION)}"
        kept = " AND ".join(_same(self._receipts.column(name)) for name in ("effect", "fence", "input_fingerprint"))
        moved = " OR ".join(_differs(c) for c in (*self._receipts.run_key, self._receipts.column("step")))
        return f"""\
    IF {moved} THEN
      problem := 'it would become the receipt of another step';
    ELSIF OLD.{outcome} IS NULL THEN
      problem := 'it would be sealed under another fence, or as another kind of step';
    ELSIF NEW.{outcome} = {pending} AND {kept} AND (
      (OLD.{outcome} = {issued} AND {operation})
      OR (OLD.{outcome} = {pending} AND NOT {operation})
    ) THEN
      NULL;  -- the ids of an operation are attached, or a wait is given another time
    ELSIF (OLD.{outcome} IN ({failed}, {pending}) AND NOT {operation})
      OR (OLD.{outcome} = {pending} AND {operation} AND NEW.{effect} = OLD.{effect}
        AND NEW.{ids} IS NOT DISTINCT FROM OLD.{ids}) THEN
{self._look_up("NEW", name_of)}
      IF run_status IS DISTINCT FROM {literal(self._lifecycle.running)} OR run_fence <> NEW.{fence} THEN
        problem := {self._other_fence()};
      END IF;
    ELSE
      problem := format('it would be changed, and it is %s', OLD.{outcome});
    END IF;
    code := '{CHANGED}';
    remedy := 'What is recorded of a step that has ended is never changed: see Runs.fork() for functions.';"""

    def _deleted(self) -> str:
        outcome, effect, step = (self._name(name) for name in ("outcome", "effect", "step"))
        issued, pending, failed = (
            literal(each) for each in (StepOutcome.ISSUED, StepOutcome.PENDING, StepOutcome.FAILED)
        )
        operation, signal = literal(Effect.OPERATION), literal(Effect.SIGNAL)
        return f"""\
    IF run_status IS NULL OR OLD.{outcome} IS NULL THEN
      NULL;  -- it goes with its run, or was never committed
    ELSIF OLD.{effect} = {operation} AND OLD.{outcome} IN ({issued}, {failed})
      AND current_setting('{_TAKEN_BACK}', true) = OLD.{step} THEN
      NULL;  -- it was never issued
    ELSIF run_is_unclaimed AND (
      (OLD.{outcome} = {failed} AND OLD.{effect} <> {operation})
      OR (OLD.{outcome} = {pending} AND OLD.{effect} = {signal})
    ) THEN
      NULL;  -- the run is requeued
    ELSE
      code := '{DELETED}';
      problem := format('it would be removed, and its run stays, %s', run_status);
      remedy := 'A receipt goes with its run, and a failed one when that is requeued: see Runs.purge() and requeue().';
    END IF;"""

    def _other_fence(self) -> str:
        running, recorded = self._lifecycle.running.value, f"NEW.{self._name('fence')}"
        is_running = literal(running)
        running = running.replace("%", "%%")
        unseen = literal("it is recorded under fence %s, and its run is not to be seen")
        other = literal("it is recorded under fence %s, and its run is %s under fence %s")
        idle = literal(f"it is recorded under fence %s, and its run is not {running}: it is %s, under fence %s")
        return f"""CASE WHEN run_status IS NULL THEN format({unseen}, {recorded})
        WHEN run_status = {is_running} THEN format({other}, {recorded}, run_status, run_fence)
        ELSE format({idle}, {recorded}, run_status, run_fence) END"""

    def _name(self, attribute: str) -> str:
        return quoted(self._receipts.column(attribute).name)


def _differs(column: Column[Any]) -> str:
    return _compared(column, "IS DISTINCT FROM")


def _same(column: Column[Any]) -> str:
    return _compared(column, "IS NOT DISTINCT FROM")


def _compared(column: Column[Any], operator: str) -> str:
    # The type json has no equality.
    cast = "::jsonb" if isinstance(column.type, JSON) and not isinstance(column.type, JSONB) else ""
    return f"OLD.{quoted(column.name)}{cast} {operator} NEW.{quoted(column.name)}{cast}"
