"""Which tables are compared: those of the library's in what a caller names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

from sqlalchemy import MetaData, Table, inspect
from sqlalchemy.orm import MappedColumn, Mapper, class_mapper, declared_attr

from sqla_durable.exc import UsageError
from sqla_durable.guard import guard_of, is_overrides, overrides_of
from sqla_durable.lease import LeaseMixin
from sqla_durable.mapping import owned_checks, owned_foreign_keys, owned_indexes, root_table, values_of
from sqla_durable.receipt import ReceiptMixin
from sqla_durable.rows import Rows
from sqla_durable.signal import SignalMixin

_MIXINS: tuple[type[Any], ...] = (LeaseMixin, ReceiptMixin, SignalMixin)
_OF_THE_USERS_KEY = "sqla_durable.owned"
"""The module of the mixins that repeat the columns of a run's key, whose types are the user's."""


@dataclass(frozen=True)
class Expected:
    """A table that the models want.

    :param table: the table.
    :param entities: the mapped classes with mixins of the library that are rooted in it.
    :param written: the names of the columns that mixins have brought, or that hold a status.
    """

    table: Table
    entities: tuple[type[Any], ...]
    written: frozenset[str]


def expected(target: object) -> list[Expected]:
    """Return the tables that are compared.

    :param target: see :func:`.check`.
    :raises UsageError: where it is nothing that has models, or none of them is of this library.
    """
    found = [_expected(table) for table in _tables(target)]
    if not found:
        raise UsageError(
            f"{target!r:.100} has no table of a run, receipt or status; import the module that declares them, and give "
            "the Base or MetaData that they belong to, a module with models, or a Runs."
        )
    return found


def _tables(target: object) -> list[Table]:
    run: type[Any] | None = getattr(target, "run_class", None)
    if run is not None and not isinstance(target, type | ModuleType):
        return list(dict.fromkeys(_of_runs(run, cast("Any", target).receipt_class)))
    return [table for metadata in _metadatas(target) for table in metadata.tables.values() if _is_ours(table)]


def _of_runs(run: type[Any], receipt: type[Any]) -> Iterator[Table]:
    mine = root_table(class_mapper(run, configure=False))
    yield mine
    yield root_table(class_mapper(receipt, configure=False))
    for signal in _mapped(SignalMixin):
        if issubclass(run, signal.__run__):
            yield root_table(class_mapper(signal, configure=False))
    if guard_of(mine) is not None:
        yield overrides_of(mine)


def _metadatas(target: object) -> list[MetaData]:
    if isinstance(target, ModuleType):
        named = [_metadata(each) for each in vars(target).values()]
    elif (alone := _metadata(target)) is not None:
        named = [alone]
    else:
        raise UsageError(
            f"{target!r:.100} has no models; expected a declarative Base, a MetaData, a module with models, or a Runs "
            "or Functions of either form."
        )
    return list(dict.fromkeys(each for each in named if each is not None))


def _metadata(each: object) -> MetaData | None:
    if isinstance(each, MetaData):
        return each
    metadata = getattr(each, "metadata", None) if isinstance(each, type) else None
    return metadata if isinstance(metadata, MetaData) else None


def _is_ours(table: Table) -> bool:
    if not table.primary_key.columns:
        return False
    owned = owned_checks(table) or owned_indexes(table) or owned_foreign_keys(table)
    return bool(owned) or guard_of(table) is not None or is_overrides(table)


def _expected(table: Table) -> Expected:
    entities = tuple(dict.fromkeys(cls for mixin in _MIXINS for cls in _mapped(mixin) if _root(cls) is table))
    if is_overrides(table):
        return Expected(table, (), frozenset(table.columns.keys()))
    listed = (values_of(check) for check in owned_checks(table).values())
    brought = (name for cls in entities for name in _brought(cls))
    return Expected(table, entities, frozenset({*brought, *(name for name in listed if name is not None)}))


def _brought(cls: type[Any]) -> Iterator[str]:
    """The names of the columns of a class that mixins of the library declare."""
    rows: Rows[Any] = Rows(cls)
    attributes = {attribute: column.name for column, attribute in rows.attributes().items()}
    for base in cls.__mro__:
        package, module = base.__module__.partition(".")[0], base.__module__
        if package == "sqla_durable" and module != _OF_THE_USERS_KEY and "__mapper__" not in vars(base):
            for name, value in vars(base).items():
                if isinstance(value, MappedColumn | declared_attr) and name in attributes:
                    yield attributes[name]


def _root(cls: type[Any]) -> Table:
    mapper: Mapper[Any] = inspect(cls)
    return root_table(mapper)


def _mapped(mixin: Any) -> Iterable[type[Any]]:
    """The mapped classes with a mixin."""
    # Not of a registry: a MetaData does not know whose it is.
    waiting: list[type[Any]] = [mixin]
    while waiting:
        each = waiting.pop()
        waiting += each.__subclasses__()
        if "__mapper__" in vars(each):
            yield each
