"""When a run was last claimed under a limit: the column that limits are reckoned with, and the indexes they need."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import DateTime
from sqlalchemy.orm import Mapped, Mapper, mapped_column

from sqla_durable.mapping import add_index, when_mapped
from sqla_durable.run import RunRows

_SORT_ORDER: Final = 1060


class PacedMixin:
    """Gives the runs of functions ``paced_at``, which a claim under a limit stamps; any other claim leaves it alone.

    With a rate it is when the bucket is full again, else when the run was claimed. A run that has it was claimed under
    a limit, so that its place may be another's once its lease has lapsed.
    """

    if TYPE_CHECKING:
        paced_at: Mapped[datetime | None]
    else:
        __reserved__ = frozenset({"paced_at"})

        paced_at = mapped_column(DateTime(timezone=True), sort_order=_SORT_ORDER)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        when_mapped(cls, _configure)


def _configure(mapper: Mapper[Any]) -> None:
    if mapper.inherits is not None:
        return
    rows: RunRows[Any] = RunRows(mapper.class_)
    function, tenant, paced_at = (rows.column(name) for name in ("function", "tenant", "paced_at"))
    order = rows.column("priority"), rows.available_at
    ready = rows.status == rows.lifecycle.ready
    # Apart, as there may be many tenants, and the runs of a function that is limited as a whole come in one order.
    add_index([function, *order], ready, "function_due")
    add_index([function, tenant, *order], ready, "tenant_due")
    add_index([function, paced_at], paced_at.is_not(None), "paced_at")
