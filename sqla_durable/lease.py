"""The lease on a run: who holds it, until when it is presumed alive, and the fence that decides who may write."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import BigInteger, DateTime, Integer, String, text
from sqlalchemy.orm import Mapped, mapped_column

_SORT_ORDER = 1000


@dataclass(frozen=True, slots=True)
class Lease:
    """What a claim hands out: a small value that can be pickled and sent to another process.

    It carries no expiry, which only the database clock could judge; the fence decides.

    :param run: the name of the table, with its schema, that the run is a row of.
    :param identity: the run's primary key.
    :param fence: the number this claim was issued; only its holder may write.
    :param attempt: which start of the run this is, from 1.
    :param owner: the holder's name, for people to read.
    """

    run: str
    identity: tuple[Any, ...]
    fence: int
    attempt: int
    owner: str


class LeaseMixin:
    """Lease and fence columns.

    They are declared with explicit types and without run-time annotations, so that they are the same on plain and on
    dataclass bases and under any ``type_annotation_map``.
    """

    if TYPE_CHECKING:
        fence: Mapped[int]
        attempts: Mapped[int]
        lease_owner: Mapped[str | None]
        lease_expires_at: Mapped[datetime | None]
        available_at: Mapped[datetime]
    else:
        # With active history, so that a flush that would lower it knows what it was.
        fence = mapped_column(
            BigInteger, nullable=False, server_default=text("0"), sort_order=_SORT_ORDER, active_history=True
        )
        attempts = mapped_column(Integer, nullable=False, server_default=text("0"), sort_order=_SORT_ORDER + 1)
        lease_owner = mapped_column(String, sort_order=_SORT_ORDER + 2)
        lease_expires_at = mapped_column(DateTime(timezone=True), sort_order=_SORT_ORDER + 3)
        available_at = mapped_column(
            DateTime(timezone=True), nullable=False, server_default=text("now()"), sort_order=_SORT_ORDER + 4
        )
