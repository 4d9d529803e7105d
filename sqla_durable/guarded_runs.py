"""The rules of a run as its table's guard knows them: from which row to which one it may go.

The guard sees rows, not writers. What looks like a claim, a renewal or a landing is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import Any, Final

from sqlalchemy import Column, Table

from sqla_durable.guard import Trigger, attach, is_guarded, overrides_of, verdict
from sqla_durable.lifecycle import Lifecycle
from sqla_durable.plain_sql import literal, literals, quoted
from sqla_durable.rows import Rows

STATUS: Final = "SD001"
FENCE: Final = "SD002"
LEASE: Final = "SD003"
KEY: Final = "SD004"


def guard_runs(rows: Rows[Any], status: Column[Any], lifecycle: Lifecycle[Any]) -> None:
    """Give the table of a run class its guard, if the class asks for one.

    :param status: its status column.
    """
    if not is_guarded(rows.entity):
        return
    overrides = overrides_of(rows.table)
    # After the update, so that no trigger of the user's changes the row when it has been looked at. Most updates, such
    # as a renewal of the lease, change nothing of this and call nothing.
    fixed = [*rows.key, rows.column("created_at")]
    watched = [status, rows.column("fence"), rows.column("lease_owner"), *fixed]
    expires = quoted(rows.column("lease_expires_at").name)
    condition = f"{_differ(watched)} OR (OLD.{expires} IS NULL) <> (NEW.{expires} IS NULL)"
    triggers = {"update": Trigger("AFTER UPDATE", condition)}
    is_partitioned = rows.table.dialect_options["postgresql"].get("partition_by") is not None
    if is_partitioned:
        # Of a row that moves to another partition no trigger after the update hears.
        triggers["move"] = Trigger("BEFORE UPDATE", _differ(fixed))
    rules = _Rules(rows, status, lifecycle, "BEFORE" if is_partitioned else "AFTER")
    attach(
        rows.table,
        triggers,
        lambda name_of: rules.source(name_of, overrides),
        overrides,
    )


class _Rules:
    def __init__(self, rows: Rows[Any], status: Column[Any], lifecycle: Lifecycle[Any], moves: str) -> None:
        self._rows = rows
        self._lifecycle = lifecycle
        self._moves = moves
        self._status = quoted(status.name)
        self._fence, self._attempts, self._owner, self._expires = (
            quoted(rows.column(name).name) for name in ("fence", "attempts", "lease_owner", "lease_expires_at")
        )

    def source(self, name_of: Callable[[Table], str], overrides: Table) -> str:
        status, fence, owner, expires, attempts = (
            self._status,
            self._fence,
            self._owner,
            self._expires,
            self._attempts,
        )
        ready, running = literal(self._lifecycle.ready), literal(self._lifecycle.running)
        terminal = literals(self._ordered(self._lifecycle.machine.terminal))
        return f"""\
DECLARE
  code text;
  problem text;
  remedy text;
  reason text;
BEGIN
  IF TG_WHEN = '{self._moves}' AND ({_differ([*self._rows.key, self._rows.column("created_at")])}) THEN
    code := '{KEY}';
    problem := 'its primary key or created_at would change';
    remedy := 'Receipts, leases and idempotency keys go by them: start another run.';
  ELSIF TG_WHEN = 'BEFORE' THEN
    RETURN NEW;
  ELSIF NEW.{fence} < OLD.{fence} THEN
    code := '{FENCE}';
    problem := format('its fence would go back from %s to %s', OLD.{fence}, NEW.{fence});
    remedy := 'A fence only ever grows, so that a stale holder can write nothing.';
  ELSIF NEW.{status} IS DISTINCT FROM OLD.{status} THEN
    IF NOT {self._edges()} THEN
      code := '{STATUS}';
      problem := format('its status would go from %s to %s', OLD.{status}, NEW.{status});
      remedy := 'Only declared transitions and requeues change it; see Lifecycle.';
    ELSIF NEW.{status} = {running} THEN
      IF OLD.{status} <> {ready} OR NEW.{owner} IS NULL OR NEW.{expires} IS NULL OR (
        (NEW.{fence} = OLD.{fence} + 1 AND NEW.{attempts} = OLD.{attempts} + 1)
        OR (NEW.{fence} = OLD.{fence} AND NEW.{attempts} = OLD.{attempts} AND NEW.{owner} = OLD.{owner})
      ) IS NOT TRUE THEN
        code := '{FENCE}';
        problem := format('it would be %s without a claim', NEW.{status});
        remedy := 'A claim raises the fence, counts an attempt and sets a lease; use Runs.claim() or execute().';
      END IF;
    ELSIF NEW.{fence} <> OLD.{fence} THEN
      code := '{FENCE}';
      problem := format('its fence would go from %s to %s without a claim', OLD.{fence}, NEW.{fence});
      remedy := 'Leave the fence as it is.';
    ELSIF NEW.{expires} IS NOT NULL
      OR (NEW.{owner} IS NOT NULL AND ({self._may_resume()}) IS NOT TRUE) THEN
      code := '{LEASE}';
      problem := format('it would be %s and keep its lease', NEW.{status});
      remedy := 'Clear lease_owner and lease_expires_at in the same statement, or use the verbs of Runs.';
    ELSIF OLD.{status} IN ({terminal}) AND NEW.{attempts} <> 0 THEN
      code := '{STATUS}';
      problem := format('it would be requeued with %s attempts counted', NEW.{attempts});
      remedy := 'Use Runs.requeue().';
    END IF;
  ELSIF NEW.{fence} <> OLD.{fence} THEN
    code := '{FENCE}';
    problem := format('its fence would go from %s to %s without a claim', OLD.{fence}, NEW.{fence});
    remedy := 'A claim takes a run that is ready, raises its fence and counts an attempt.';
  ELSIF (OLD.{status} = {running}) <> (NEW.{expires} IS NOT NULL)
    OR (NEW.{owner} IS DISTINCT FROM OLD.{owner}
      AND (NEW.{owner} IS NOT NULL OR OLD.{status} IN ({running}, {terminal}))) THEN
    code := '{LEASE}';
    problem := format('its lease would change while it stays %s', OLD.{status});
    remedy := 'A lease is made by a claim, and ends when the run is released, requeued or landed.';
  END IF;
{verdict(self._rows.table, name_of(overrides), self._rows.entity.__name__, self._rows.key)}"""

    def _edges(self) -> str:
        """The condition that a status may follow another, along an edge or by a requeue."""
        machine, lifecycle = self._lifecycle.machine, self._lifecycle
        cases: list[str] = []
        for status in machine.transitions:
            requeued = {lifecycle.ready} if status in lifecycle.requeue else set[StrEnum]()
            if following := self._ordered(machine.transitions[status] | requeued):
                cases.append(f"      WHEN {literal(status)} THEN NEW.{self._status} IN ({literals(following)})\n")
        # In parentheses, or PL/pgSQL takes the first THEN for its own.
        return f"(CASE OLD.{self._status}\n{''.join(cases)}      ELSE false END)"

    def _may_resume(self) -> str:
        """The condition that the owner of a run that was reaped to ready stays noted, and so may take it back."""
        ready, running = literal(self._lifecycle.ready), literal(self._lifecycle.running)
        return (
            f"OLD.{self._status} = {running} AND NEW.{self._status} = {ready} AND NEW.{self._owner} = OLD.{self._owner}"
        )

    def _ordered(self, statuses: AbstractSet[StrEnum]) -> list[str]:
        return [status.value for status in self._lifecycle.machine.transitions if status in statuses]


def _differ(columns: Sequence[Column[Any]]) -> str:
    """The condition that an update changes one of these columns."""
    return " OR ".join(f"OLD.{quoted(c.name)} IS DISTINCT FROM NEW.{quoted(c.name)}" for c in columns)
