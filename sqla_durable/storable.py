"""What PostgreSQL's JSONB can hold, and how it returns it: key order, odd numbers, limits.

See `JSON Types <https://www.postgresql.org/docs/current/datatype-json.html>`_.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import typing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from typing import Any

from pydantic import BaseModel, ValidationError

_MAX_BYTES = 0x0FFFFFFF  # of one JSONB container; an element takes at most 12 bytes more there than in text
ABSENT = object()
_MAX_DEPTH = 200  # of pydantic's JSON parser
CONTAINERS = (dict, list, tuple, deque, set, frozenset)
kind_of: Callable[[Any], Any] = type  # isinstance() would narrow to members of unknown types


def display(annotation: Any) -> str:
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__qualname__
    return str(annotation).removeprefix("typing.")


class UnstorableError(ValueError):
    """What JSONB cannot hold, and where."""


def _in_jsonb_order(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(sorted(pairs, key=lambda pair: (len(pair[0].encode()), pair[0])))


_read = json.JSONDecoder(object_pairs_hook=_in_jsonb_order).decode
_write = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode
_MARKS = ("e", "-0.0", "N", "I")  # of an odd number; sought first, at a hundredth of the pattern's cost
_has_odd_number = re.compile(r"(?:^|[\[,:])-?(?:[\d.]+e\+?\d|0\.0(?!\d)|Inf|NaN)").search
_strings_and_odd_numbers = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|-?[\d.]+e\+?\d+|-0\.0(?!\d)|-?Infinity|NaN', re.DOTALL)


def as_jsonb(text: str) -> str:
    if "{" in text:
        text = _write(_read(text))
    if any(mark in text for mark in _MARKS) and _has_odd_number(text):
        text = _strings_and_odd_numbers.sub(_as_numeric, text)
    if "\\u0000" in text:
        for reason in culprits(_read(text)):
            raise UnstorableError(reason)
    if len(text) > _MAX_BYTES // 16 and len(text.encode()) + 12 * text.count(",") > _MAX_BYTES:
        raise UnstorableError("result exceeds the 256 MiB of one JSONB value; return a reference to it instead")
    return text


def _as_numeric(token: re.Match[str]) -> str:
    if token[0].startswith('"'):
        return token[0]
    number = float(token[0])
    if not math.isfinite(number):
        raise UnstorableError(f"result holds {number}, which JSONB cannot")
    # With a fraction: numeric writes 1e16 out in full, and its digits alone would be read back as an int.
    return f"{int(number)}.0"


def culprits(value: Any, message: str = "", path: str = "result", outer: tuple[int, ...] = ()) -> Iterator[str]:
    """Where and why ``value`` cannot be stored, after that failed with ``message``."""
    if id(value) in outer:
        yield f"{path} contains itself; return a tree, with identifiers in place of references back"
    elif len(outer) > _MAX_DEPTH:
        yield f"{path[:60]}... is nested more than {_MAX_DEPTH} levels deep; return a flatter value"
    elif reason := reason_of(value, message):
        yield f"{path} {reason}"
    else:
        for label, part in _parts(value, path):
            yield from culprits(part, message, label, (*outer, id(value)))


def reason_of(leaf: Any, message: str = "") -> str | None:
    kind = kind_of(leaf)
    if issubclass(kind, str):
        return _text_reason(leaf)
    if issubclass(kind, float | Decimal) and not math.isfinite(leaf):
        return f"is {leaf}, which JSONB cannot hold; return None or a str in its place"
    if issubclass(kind, bytes) and "invalid utf-8" in message and leaf != leaf.decode(errors="replace").encode():
        remedy = 'pydantic configuration (ser_json_bytes="base64", val_json_bytes="base64")'
        return f"is bytes that are not UTF-8; give the class that has them the {remedy}"
    if repr(kind) in message:
        return f"is of type {display(kind)}, which pydantic cannot write; return plain data in its place"
    return None


def _text_reason(text: str) -> str | None:
    if "\0" in text:
        return "contains a NUL character (U+0000), which JSONB cannot hold; remove it"
    if re.search("[\ud800-\udfff]", text):
        return "contains a lone surrogate, which JSONB cannot hold; decode its bytes without surrogateescape"
    return None


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if issubclass(type(value), dict):
        for key, part in value.items():
            yield f"a key of {path}", key
            yield member(path, key), part
    elif issubclass(type(value), CONTAINERS):
        yield from ((member(path, name), part) for name, part in zip(names_of(value), value, strict=True))
    else:
        yield from ((member(path, name), part) for name, part in (state_of(value) or {}).items())


def names_of(sequence: Any) -> Iterable[object]:
    return getattr(sequence, "_fields", range(len(sequence)))


def member(path: str, key: object) -> str:
    return f"{path}.{key}" if isinstance(key, str) and key.isidentifier() else f"{path}[{key!r:.80}]"


def why(error: Exception, what: str = "result") -> str:
    """Say which part of a value does not decode, and why.

    :param what: what the value is.
    """
    if not isinstance(error, ValidationError):
        return f"{what} cannot be rebuilt: {type(error).__name__}: {error}"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{functools.reduce(member, first['loc'], what)} cannot be rebuilt: {first['msg']}"


def state_of(value: Any) -> dict[str, Any] | None:
    """The attributes of a model or dataclass; a cached property is not one."""
    kind = kind_of(value)
    if issubclass(kind, BaseModel):
        fields: dict[str, Any] = kind.model_fields
        state: dict[str, Any] = {
            **vars(value),
            **(value.__pydantic_extra__ or {}),
            **(value.__pydantic_private__ or {}),
        }
    elif dataclasses.is_dataclass(kind):
        fields = {field.name: getattr(value, field.name, ABSENT) for field in dataclasses.fields(kind)}
        state = {**getattr(value, "__dict__", {}), **fields}
    else:
        return None
    computed = functools.cached_property
    return {k: v for k, v in state.items() if k in fields or not isinstance(getattr(kind, k, None), computed)}
