"""The idempotency key of a run: what makes starting the same work twice start it once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final, cast

from sqlalchemy import String
from sqlalchemy.orm import Mapped, Mapper, mapped_column

from sqla_durable.beside import require_run, require_type
from sqla_durable.exc import ConfigurationError
from sqla_durable.mapping import add_unique_index, when_mapped
from sqla_durable.rows import Rows

KEY_LENGTH: Final = 255
KEY_INDEX: Final = "idempotency_key"
_SORT_ORDER: Final = 1030


class KeyMixin:
    """Gives the runs of a class an idempotency key and the fingerprint of what they were started with.

    It is mixed in beside :class:`.RunMixin`, as in ``class Order(KeyMixin, RunMixin, Base)``. ``__key_scope__`` names
    the attributes within which a key is unique, such as ``("tenant_id",)``. Runs without a key may exist.
    """

    __key_scope__: ClassVar[tuple[str, ...]] = ()

    if TYPE_CHECKING:
        idempotency_key: Mapped[str | None]
        key_fingerprint: Mapped[str | None]
    else:
        __reserved__ = frozenset({"idempotency_key", "key_fingerprint"})

        idempotency_key = mapped_column(String(KEY_LENGTH), sort_order=_SORT_ORDER)
        key_fingerprint = mapped_column(String(64), sort_order=_SORT_ORDER + 1)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        when_mapped(cls, _configure)


def key_scope(cls: type[Any]) -> tuple[str, ...]:
    """Return the attributes within which a class's keys are unique."""
    scope: tuple[str, ...] = cls.__key_scope__
    if not isinstance(cast(object, scope), tuple) or not all(isinstance(cast(object, name), str) for name in scope):
        raise ConfigurationError(
            f'{cls.__name__}.__key_scope__ is {scope!r}; write a tuple of attribute names, as in ("tenant_id",).'
        )
    return scope


def _configure(mapper: Mapper[Any]) -> None:
    cls: type[Any] = mapper.class_
    require_run(cls, KeyMixin)
    scope = key_scope(cls)
    if mapper.inherits is not None:
        if scope != getattr(mapper.inherits.class_, "__key_scope__", None):
            raise ConfigurationError(
                f"{cls.__name__} shares a table with its base class, and so its keys; KeyMixin and __key_scope__ go "
                f"on the class that owns the root table, here {mapper.base_mapper.class_.__name__}."
            )
        return
    rows: Rows[Any] = Rows(cls)
    key, fingerprint = rows.column("idempotency_key"), rows.column("key_fingerprint")
    for column in key, fingerprint:
        require_type(column, rows, KeyMixin, "a String", String)
    # Partial, where a unique constraint would not do: with nulls that are not distinct, which the scope needs, two runs
    # without a key would conflict.
    columns = [*rows.declared(scope, "__key_scope__"), key]
    add_unique_index(KEY_INDEX, columns, key.is_not(None), postgresql_nulls_not_distinct=True)
