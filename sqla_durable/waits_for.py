"""What a parked run waits for, on its own row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import String
from sqlalchemy.orm import Mapped, Mapper, mapped_column

from sqla_durable.exc import ConfigurationError
from sqla_durable.mapping import when_mapped
from sqla_durable.rows import Rows
from sqla_durable.status import TransitionHook

NAME_LENGTH: Final = 200
_SORT_ORDER: Final = 1070


class WaitMixin:
    """Lets the runs of a class wait for signals; ``waits_for`` names the one that a run was handed back to wait for.

    It is mixed in beside :class:`.RunMixin`, as in ``class Order(WaitMixin, RunMixin, Base)``. A signal of that name
    makes the run due; every claim clears the column.
    """

    if TYPE_CHECKING:
        waits_for: Mapped[str | None]
    else:
        __reserved__ = frozenset({"waits_for"})
        waits_for = mapped_column(String(NAME_LENGTH), sort_order=_SORT_ORDER)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        when_mapped(cls, _configure)


def _configure(mapper: Mapper[Any]) -> None:
    cls: type[Any] = mapper.class_
    if not issubclass(cls, TransitionHook):
        raise ConfigurationError(
            f"{cls.__name__} has WaitMixin without RunMixin; declare it as class {cls.__name__}(WaitMixin, RunMixin, "
            "...)."
        )
    if mapper.inherits is not None:
        if not issubclass(mapper.inherits.class_, WaitMixin):
            raise ConfigurationError(
                f"{cls.__name__}: WaitMixin goes on the class that owns the root table, here "
                f"{mapper.base_mapper.class_.__name__}, not on one that inherits from it."
            )
        return
    rows: Rows[Any] = Rows(cls)
    waits_for = rows.column("waits_for")
    if not isinstance(waits_for.type, String) or not waits_for.nullable:
        raise ConfigurationError(
            f"{cls.__name__}.waits_for is {waits_for.type!r}, but WaitMixin keeps a String that may be null there; "
            "give your own column another name."
        )
