"""The priority of a run: which of the ready runs that are due is claimed first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Integer, SmallInteger, text
from sqlalchemy.orm import Mapped, Mapper, mapped_column

from sqla_durable.exc import ConfigurationError
from sqla_durable.mapping import add_check, when_mapped
from sqla_durable.rows import Rows
from sqla_durable.status import TransitionHook

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
    cls: type[Any] = mapper.class_
    if not issubclass(cls, TransitionHook):
        raise ConfigurationError(
            f"{cls.__name__} has PriorityMixin without RunMixin; declare it as class {cls.__name__}(PriorityMixin, "
            "RunMixin, ...)."
        )
    if mapper.inherits is not None:
        if not issubclass(mapper.inherits.class_, PriorityMixin):
            raise ConfigurationError(
                f"{cls.__name__}: PriorityMixin goes on the class that owns the root table, here "
                f"{mapper.base_mapper.class_.__name__}, not on one that inherits from it."
            )
        return
    rows: Rows[Any] = Rows(cls)
    priority = rows.column("priority")
    if not isinstance(priority.type, Integer):
        raise ConfigurationError(
            f"{cls.__name__}.priority is {priority.type!r}, but PriorityMixin keeps an Integer there; give your own "
            "column another name."
        )
    add_check(rows.table, "priority", priority.between(LOWEST, HIGHEST))
