"""The priority of a run: which of the ready runs that are due is claimed first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Integer, SmallInteger, text
from sqlalchemy.orm import Mapped, Mapper, mapped_column

from sqla_durable.beside import require_type, root_rows
from sqla_durable.mapping import add_check, when_mapped

LOWEST: Final = 0
HIGHEST: Final = 9
_SORT_ORDER: Final = 1040


class PriorityMixin:
    """Gives the runs of a class a priority from 0, the default, to 9; a higher one is claimed first.

    It is mixed in beside :class:`.RunMixin`, as in ``class Order(PriorityMixin, RunMixin, Base)``. Procrastinate and
    PgQueuer count the same way, with the higher first. Among runs of one priority the one due for longest comes first.
    """

    if TYPE_CHECKING:
        priority: Mapped[int]
    else:
        priority = mapped_column(SmallInteger, nullable=False, server_default=text("0"), sort_order=_SORT_ORDER)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        when_mapped(cls, _configure)


def _configure(mapper: Mapper[Any]) -> None:
    if (rows := root_rows(mapper, PriorityMixin)) is None:
        return
    priority = rows.column("priority")
    require_type(priority, rows, PriorityMixin, "an Integer", Integer)
    add_check(rows.table, "priority", priority.between(LOWEST, HIGHEST))
