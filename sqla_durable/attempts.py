"""How often a run may be started, where that is a matter of the single run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Integer
from sqlalchemy.orm import Mapped, Mapper, mapped_column

from sqla_durable.beside import require_type, root_rows
from sqla_durable.mapping import add_check, when_mapped

UNLIMITED: Final = 2**31 - 1
_SORT_ORDER: Final = 1050


class AttemptsMixin:
    """Gives each run of a class a ``max_attempts`` of its own; NULL is what ``Lifecycle(retry=...)`` says.

    It is mixed in beside :class:`.RunMixin`, as in ``class Order(AttemptsMixin, RunMixin, Base)``. It is a column and
    not a matter of the process that carries a run out, since a run that kills its process is judged by another one.
    """

    if TYPE_CHECKING:
        max_attempts: Mapped[int | None]
    else:
        max_attempts = mapped_column(Integer, sort_order=_SORT_ORDER)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        when_mapped(cls, _configure)


def _configure(mapper: Mapper[Any]) -> None:
    if (rows := root_rows(mapper, AttemptsMixin)) is None:
        return
    limit = rows.column("max_attempts")
    require_type(limit, rows, AttemptsMixin, "an Integer", Integer)
    add_check(rows.table, "max_attempts", limit > 0)
