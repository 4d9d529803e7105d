"""How often a run may be started, where that is a matter of the single run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Integer
from sqlalchemy.orm import Mapped, Mapper, mapped_column

from sqla_durable.exc import ConfigurationError
from sqla_durable.mapping import add_check, when_mapped
from sqla_durable.rows import Rows
from sqla_durable.status import TransitionHook

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
    cls: type[Any] = mapper.class_
    if not issubclass(cls, TransitionHook):
        raise ConfigurationError(
            f"{cls.__name__} has AttemptsMixin without RunMixin; declare it as class {cls.__name__}(AttemptsMixin, "
            "RunMixin, ...)."
        )
    if mapper.inherits is not None:
        if not issubclass(mapper.inherits.class_, AttemptsMixin):
            raise ConfigurationError(
                f"{cls.__name__}: AttemptsMixin goes on the class that owns the root table, here "
                f"{mapper.base_mapper.class_.__name__}, not on one that inherits from it."
            )
        return
    rows: Rows[Any] = Rows(cls)
    limit = rows.column("max_attempts")
    if not isinstance(limit.type, Integer):
        raise ConfigurationError(
            f"{cls.__name__}.max_attempts is {limit.type!r}, but AttemptsMixin keeps an Integer there; give your own "
            "column another name."
        )
    add_check(rows.table, "max_attempts", limit > 0)
