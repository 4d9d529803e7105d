"""Telling those who listen of a run: workers of one that has become ready, and waiters of one that has landed.

A notification is sent by the very statement that makes the run so: PostgreSQL delivers it when the transaction
commits, drops it when that rolls back, and delivers equal ones of a transaction once. It says which table or row to
look at and no more: a payload is limited to 8000 bytes. Nothing depends on its arrival.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import ColumnElement, String, Text, case, cast, func, literal

CHANNEL: Final = "sqla_durable"
LANDED: Final = "sqla_durable_landed"


def notification(table: str, condition: ColumnElement[bool]) -> ColumnElement[Any]:
    """Return what a statement has among its ``RETURNING`` to notify, for each row that meets the condition.

    :param table: the name of the run table, the payload.
    """
    return case((condition, func.pg_notify(literal(CHANNEL, String), literal(table, String)))).label("notified")


def landing(ident: ColumnElement[Any]) -> ColumnElement[Any]:
    """Return the call that tells waiters of a run that has landed; never null.

    :param ident: its primary key, the payload.
    """
    return func.pg_notify(literal(LANDED, String), cast(ident, Text))
