"""Telling workers that listen of a run that has become ready.

A notification is sent by the very statement that makes the run ready: PostgreSQL delivers it when the transaction
commits, drops it when that rolls back, and delivers equal ones of a transaction once. It says which table to look at
and no more: a payload is limited to 8000 bytes. Nothing depends on its arrival.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import ColumnElement, String, case, func, literal

CHANNEL: Final = "sqla_durable"


def notification(table: str, condition: ColumnElement[bool]) -> ColumnElement[Any]:
    """Return what a statement has among its ``RETURNING`` to notify, for each row that meets the condition.

    :param table: the name of the run table, the payload.
    """
    return case((condition, func.pg_notify(literal(CHANNEL, String), literal(table, String)))).label("notified")
