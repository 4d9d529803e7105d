"""The fingerprint of a payload: a hash that is the same for equal values in every process.

The values are written as canonical JSON first: keys sorted, sets sorted, instants in UTC, decimals without trailing
zeros, bytes in base64. Fields of a model or dataclass that have their default are left out, so that one may be added.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import Any, cast

from pydantic import BaseModel
from pydantic_core import to_jsonable_python
from sqlalchemy.sql import ClauseElement

from sqla_durable.exc import UsageError

_PLAIN = frozenset({bool, int, float})


def fingerprint(values: Mapping[str, object], kind: object = None) -> str:
    """Return the SHA-256 of ``values`` as 64 hexadecimal digits.

    :param values: the payload by attribute.
    :param kind: what else tells payloads apart, such as the polymorphic identity of a subclass.
    :raises UsageError: for a value that JSON cannot hold, naming its attribute.
    """
    parts = {name: _part(name, value) for name, value in values.items()}
    return hashlib.sha256(_text([None if kind is None else _part("kind", kind), parts]).encode()).hexdigest()


def of_call(fn: Callable[..., object], args: Iterable[object], kwargs: Mapping[str, object]) -> str:
    """Return the SHA-256 of what a function is called with as 64 hexadecimal digits.

    An argument that JSON cannot hold, such as a client, counts by its type's name; so does a mapped object, which
    changes with its row, and an iterator, which would be used up.
    """
    kwargs = dict(kwargs)
    while isinstance(fn, partial):
        args, kwargs, fn = (*fn.args, *args), fn.keywords | kwargs, fn.func
    given = [_argument(each) for each in args], {name: _argument(each) for name, each in kwargs.items()}
    return hashlib.sha256(_text(given).encode()).hexdigest()


def _argument(value: object) -> Any:
    try:
        part = _canonical(value)
        _text(part)
    except Exception:  # noqa: BLE001 - whatever a value of the user's raises when it is looked at
        return {"\0type": type(value).__qualname__}
    return part


def _part(name: str, value: object) -> Any:
    if isinstance(value, ClauseElement) or hasattr(value, "__clause_element__"):
        raise UsageError(
            f"{name} is an SQL expression, whose value is not known before it is inserted, so a run with a key cannot "
            "be recognised by it; give a plain value, or start the run without a key."
        )
    try:
        part = _canonical(value)
        _text(part).encode()
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"{name} cannot be written as JSON, so a run with a key cannot be recognised by it ({error}); give plain "
            "data, or start the run without a key."
        ) from error
    return part


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _canonical(value: Any) -> Any:
    if value is None or type(value) in _PLAIN or (type(value) is str and value.isascii()):
        return value
    if hasattr(value, "_sa_instance_state"):
        raise TypeError(f"{type(value).__qualname__} is a mapped class")
    if isinstance(value, Enum):
        return _canonical(value.value)
    if isinstance(value, BaseModel):
        return _canonical(value.model_dump(exclude_defaults=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {field: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {field.name: _canonical(part) for field, part in given.items() if not _is_default(field, part)}
    return _container(value)


def _is_default(field: dataclasses.Field[Any], value: object) -> bool:
    default: Any = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return default is not dataclasses.MISSING and type(default) is type(value) and bool(default == value)


def _container(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_name(key): _canonical(part) for key, part in _members(value)}
    if isinstance(value, AbstractSet):
        return sorted((_canonical(part) for part in _elements(value)), key=_text)
    if isinstance(value, list | tuple):
        return [_canonical(part) for part in _elements(value)]
    return _atom(value)


def _atom(value: Any) -> Any:
    if isinstance(value, datetime) and value.utcoffset() is not None:
        return value.astimezone(UTC).isoformat()
    if isinstance(value, Decimal) and value.is_finite():
        text = format(value or Decimal(0), "f")
        return text.rstrip("0").rstrip(".") if "." in text else text
    if isinstance(value, bytes | bytearray):
        return b64encode(value).decode()
    if isinstance(cast(object, value), Iterator):
        raise TypeError("an iterator would be used up")
    return to_jsonable_python(value)


def _members(mapping: Any) -> Iterable[tuple[object, object]]:
    return cast("Iterable[tuple[object, object]]", mapping.items())


def _elements(collection: Any) -> Iterable[object]:
    return cast("Iterable[object]", collection)


def _name(key: object) -> str:
    # With a mark, so that the key 1 is not taken for the key "1".
    return key if type(key) is str else f"\0{_text(_canonical(key))}"
