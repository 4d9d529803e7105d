"""What every mixin checks that goes beside :class:`.RunMixin`, on the class that owns the root table."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column
from sqlalchemy.orm import Mapper

from sqla_durable.exc import ConfigurationError
from sqla_durable.rows import Rows
from sqla_durable.status import TransitionHook


def require_run(cls: type[Any], mixin: type[Any]) -> None:
    """Refuse a class that has a mixin without being a run.

    :raises ConfigurationError: naming how to declare it.
    """
    if not issubclass(cls, TransitionHook):
        raise ConfigurationError(
            f"{cls.__name__} has {mixin.__name__} without RunMixin; declare it as class {cls.__name__}"
            f"({mixin.__name__}, RunMixin, ...)."
        )


def root_rows(mapper: Mapper[Any], mixin: type[Any]) -> Rows[Any] | None:
    """Return the rows of a class that a mixin is to configure; None for one that inherits it, which is configured.

    :raises ConfigurationError: where it is no run, or does not own the root table.
    """
    cls: type[Any] = mapper.class_
    require_run(cls, mixin)
    if mapper.inherits is None:
        return Rows(cls)
    if not issubclass(mapper.inherits.class_, mixin):
        raise ConfigurationError(
            f"{cls.__name__}: {mixin.__name__} goes on the class that owns the root table, here "
            f"{mapper.base_mapper.class_.__name__}, not on one that inherits from it."
        )
    return None


def require_type(column: Column[Any], rows: Rows[Any], mixin: type[Any], what: str, *kinds: type[Any]) -> None:
    """Refuse a column of the user's that has a name of the mixin's and cannot hold what it keeps there.

    :param what: the type, with its article.
    :param kinds: the types that can.
    :raises ConfigurationError: naming the column and the remedy.
    """
    if not isinstance(column.type, kinds):
        raise ConfigurationError(
            f"{rows.entity.__name__}.{rows.attribute(column)} is {column.type!r}, but {mixin.__name__} keeps {what} "
            "there; give your own column another name."
        )
