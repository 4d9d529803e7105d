"""Purging: what is over for long enough is deleted, with its receipts."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from sqlalchemy import CTE, ColumnElement, Table, delete, func, select
from sqlalchemy.exc import IntegrityError

from sqla_durable.exc import RunReferenced
from sqla_durable.rows import AnySelect, at_most
from sqla_durable.run import RunRows
from sqla_durable.sqlstate import FOREIGN_KEY_VIOLATION, RESTRICT_VIOLATION, sqlstate_of


def purge(
    runs: RunRows[Any], statuses: Collection[StrEnum], finished_until: ColumnElement[Any], limit: int
) -> AnySelect:
    """Delete up to ``limit`` runs in these terminal statuses, those that finished first, and return how many.

    Their receipts go with them by the foreign key. Locked ones are left: somebody may be giving them another life. In
    one statement, at whose end PostgreSQL checks the foreign keys between the tables of a hierarchy.
    """
    of_status = runs.status.in_([runs.constant(status) for status in statuses])
    over = of_status, runs.finished_at <= finished_until, *runs.needless(), *runs.of_class()
    keys = [column.label(name) for column, name in zip(runs.key, runs.key_names, strict=True)]
    locking = select(*keys).where(*over).order_by(runs.finished_at).limit(at_most(limit))
    # Not FOR NO KEY UPDATE: rows that are about to refer to one of these must wait.
    target = locking.with_for_update(of=runs.table, skip_locked=True).cte("target").prefix_with("MATERIALIZED")
    purged = _delete(runs, runs.table, target).cte("purged")
    besides = [_delete(runs, table, target).cte(f"purged_{at}") for at, table in enumerate(_other_tables(runs))]
    return select(func.count()).select_from(purged).add_cte(*besides)


@contextmanager
def refusing_referenced(runs: RunRows[Any], purged: int) -> Generator[None, None, None]:
    """Raise :class:`.RunReferenced` in place of the violation of a foreign key.

    :param purged: how many runs are gone already.
    """
    try:
        yield
    except IntegrityError as error:
        if sqlstate_of(error) not in {FOREIGN_KEY_VIOLATION, RESTRICT_VIOLATION}:
            raise
        diagnosis: Any = getattr(error.orig, "diag", None)
        table, constraint = str(diagnosis.table_name), str(diagnosis.constraint_name)
        name = runs.entity.__name__
        raise RunReferenced(
            f"rows of table {table!r} refer to runs of {name} that are old enough to be purged ({constraint}), and "
            f"keep them from being deleted; {purged} others are gone. Declare that foreign key with ondelete='CASCADE' "
            "or 'SET NULL', or delete those rows first.",
            table,
            constraint,
            purged,
        ) from error


def _delete(runs: RunRows[Any], table: Table, target: CTE) -> Any:
    key = runs.key if table is runs.table else tuple(table.primary_key.columns)
    same = [column == target.c[name] for column, name in zip(key, runs.key_names, strict=True)]
    return delete(table).where(*same).returning(key[0])


def _other_tables(runs: RunRows[Any]) -> list[Table]:
    """The tables of a joined hierarchy beside that of its root."""
    every = dict.fromkeys(table for mapper in runs.mapper.self_and_descendants for table in mapper.tables)
    return [table for table in every if isinstance(table, Table) and table is not runs.table]
