"""What a parked run waits for, on its own row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import String
from sqlalchemy.orm import Mapped, Mapper, mapped_column

from sqla_durable.beside import require_type, root_rows
from sqla_durable.exc import ConfigurationError
from sqla_durable.mapping import when_mapped

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
    if (rows := root_rows(mapper, WaitMixin)) is None:
        return
    waits_for = rows.column("waits_for")
    require_type(waits_for, rows, WaitMixin, "a String", String)
    if not waits_for.nullable:
        raise ConfigurationError(
            f"{rows.entity.__name__}.{rows.attribute(waits_for)} may not be null, but WaitMixin keeps null there while "
            "a run waits for nothing; give your own column another name."
        )
