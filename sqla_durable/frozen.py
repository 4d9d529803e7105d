"""Frozen attributes: the payload that was approved is the payload that is carried out.

They are a draft's to change, and nobody's from then on. The conditional ``UPDATE`` of a transition sees to that for
itself; here it is seen to for an ORM flush.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import Any

from sqlalchemy import Column, Connection, event, inspect, select
from sqlalchemy.orm import Mapper
from sqlalchemy.orm.attributes import get_history
from sqlalchemy.orm.base import PASSIVE_NO_INITIALIZE

from sqla_durable.exc import ConfigurationError, FrozenPayload, UsageError
from sqla_durable.lifecycle import Lifecycle
from sqla_durable.machine import names_of
from sqla_durable.rows import Rows
from sqla_durable.sqlstate import translated


def configure(rows: Rows[Any], status: Column[Any], lifecycle: Lifecycle[Any], written: AbstractSet[str]) -> None:
    """Guard the frozen attributes of a run class, if its lifecycle names any.

    :param written: the attributes that the library itself writes.
    :raises ConfigurationError: for what is not an attribute of the root table, or changes in any case.
    """
    for name in lifecycle.frozen:
        try:
            column = rows.column(name)
        except UsageError as error:
            raise ConfigurationError(f"Lifecycle(frozen=): {error}") from error
        if column is status or column in rows.key or name in written:
            raise ConfigurationError(
                f"Lifecycle(frozen=): {rows.entity.__name__}.{name} is the status, the key, or written by the library; "
                "name attributes of your own."
            )
    if lifecycle.frozen:
        _guard_flushes(rows, status, lifecycle)


def refuse(entity: type[Any], lifecycle: Lifecycle[Any], names: Collection[str], sources: Collection[StrEnum]) -> None:
    """Refuse to set frozen attributes along with a transition, unless each status it leaves is a draft's."""
    frozen = [name for name in names if name in lifecycle.frozen]
    if frozen and (settled := set(sources) - lifecycle.drafts):
        raise _refusal(entity.__name__, lifecycle, frozen, settled)


def _guard_flushes(rows: Rows[Any], status: Column[Any], lifecycle: Lifecycle[Any]) -> None:
    # What this session has read may be outdated: another may have approved the run since. So the committed status is
    # read, under the lock that the flush's own UPDATE is about to take.
    committed = select(status).where(rows.matches()).with_for_update(key_share=True, of=rows.table)

    def keep_payload(_: Mapper[Any], connection: Connection, row: Any) -> None:
        changed = [name for name in lifecycle.frozen if get_history(row, name, PASSIVE_NO_INITIALIZE).has_changes()]
        if not changed:
            return
        with translated():
            identity = inspect(row).identity
            found: Any = connection.execute(committed, rows.parameters(identity)).scalar_one_or_none()
        if found is not None and found not in lifecycle.drafts:
            shown = identity[0] if len(identity) == 1 else identity
            raise _refusal(f"{type(row).__name__} {shown}", lifecycle, changed, {found})

    event.listen(rows.entity, "before_update", keep_payload, propagate=True)


def _refusal(
    name: str, lifecycle: Lifecycle[Any], frozen: Collection[str], settled: AbstractSet[StrEnum]
) -> FrozenPayload:
    where = f"only while it is {names_of(lifecycle.drafts)}" if lifecycle.drafts else "never, once it is inserted"
    return FrozenPayload(
        f"{', '.join(frozen)} of {name} cannot change in {names_of(settled)}: Lifecycle(frozen=) says {where}. Insert "
        "a new run with the other payload instead."
    )
