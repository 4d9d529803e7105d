"""A step's result as JSONB, such that the first run and every replay return values equal in value and type.

The first run is handed what :meth:`Codec.round_trip` decoded from the very text that is stored, so it sees
what a replay sees. Whatever would come back different is refused there, before any SQL, with its path.

Equal means: the same type at every level, and the same value. Four things are not part of it:

* the order of a ``dict``'s keys: JSONB has its own (shorter first, then bytewise), and so has the first run;
* the name of a time zone: an aware ``datetime`` is the same instant at the same UTC offset, a fixed one;
* the sign of a zero: JSONB has no ``-0.0``, and the first run returns ``0.0`` too;
* which fields of a pydantic model were set explicitly: all are, after either.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import json
import math
import re
import types
import typing
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import to_json

from sqla_durable.exc import ReceiptMismatch, ResultError, UsageError

T = TypeVar("T")

_MAX_BYTES = 0x0FFFFFFF  # of one JSONB container; an element takes at most 12 bytes more there than in text
_MAX_DEPTH = 200  # of pydantic's JSON parser
_BASE64 = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
_ATOMS = frozenset({type(None), bool, int, float, str, bytes, date, timedelta, uuid.UUID})
_CONTAINERS = (dict, list, tuple, deque, set, frozenset)
_kind: Callable[[Any], Any] = type  # isinstance() would narrow to members of unknown types


class Codec(Generic[T]):
    """How results of one type are written to JSONB and read back.

    :param annotation: the type, as a resolved annotation; ``Any`` for plain JSON values.
    """

    __slots__ = ("__weakref__", "_annotation", "_dump", "_load")

    def __init__(self, annotation: Any) -> None:
        adapter = _adapter(annotation)
        self._annotation = _display(annotation)
        self._dump: Callable[..., bytes] = adapter.serializer.to_json
        self._load: Callable[..., T] = adapter.validator.validate_json

    def encode(self, value: T, step: str) -> str:
        """Write ``value`` as JSON text, in the form in which JSONB would return it.

        :raises ResultError: when JSONB cannot hold it.
        """
        try:
            # By name, not by alias: an alias may exist in one direction only, and would not be read back.
            raw = self._dump(value, by_alias=False, round_trip=True, warnings=False)
            return _as_jsonb(raw.decode())
        except Exception as error:
            shown = (
                str(error) if isinstance(error, _UnstorableError) else f"result cannot be written: {error}"
            )
            reason = next(_culprits(value, str(error)), shown)
            raise ResultError(f"step {step!r}: {reason}.") from error

    def decode(self, stored: object, step: str) -> T:
        """Rebuild the result from ``stored``, the parsed JSON of a receipt.

        :raises ReceiptMismatch: when it does not decode as the function's return annotation.
        """
        try:
            # Not validate_python: a strict model takes a date or a tuple from JSON only.
            return self._load_text(to_json(stored))
        except Exception as error:
            raise ReceiptMismatch(
                f"step {step!r}: the receipt does not decode as {self._annotation}: {_why(error)}. Keep the"
                " return type able to read older receipts, or give the changed step a new key."
            ) from error

    def round_trip(self, value: T, step: str) -> tuple[str, T]:
        """Encode ``value`` and decode that text.

        :returns: the JSON text to store, and the value as each replay will return it.
        :raises ResultError: when that is not equal to ``value`` in value and type, or JSONB cannot hold it.
        """
        text = self.encode(value, step)
        try:
            decoded = self._load_text(text)
            if type(value) is type(decoded) and type(value) in _ATOMS and value == decoded:
                return text, decoded
            found = _difference(value, decoded)
        except Exception as error:
            reason = next(_culprits(value), f"{_why(error)}{self._remedy}")
            raise ResultError(f"step {step!r}: {reason}.") from error
        if found:
            raise ResultError(f"step {step!r}: result{found[0]} {found[1]}{self._remedy}.")
        return text, decoded

    def _load_text(self, text: str | bytes) -> T:
        return self._load(text, by_alias=True, by_name=True)

    @property
    def _remedy(self) -> str:
        return f"; annotate the function with exactly the type that it returns (now: {self._annotation})"


def codec_for(fn: Callable[..., object]) -> Codec[Any]:
    """The codec of ``fn``'s return annotation; without one, that of plain JSON values.

    :raises UsageError: when the annotation cannot be resolved, or pydantic has no schema for it.
    """
    owner = _owner(fn)
    if not isinstance(owner, types.FunctionType):  # a class, a builtin
        return _build(owner)
    codec = _codecs.get(owner)
    if codec is None:
        codec = _codecs[owner] = _build(owner)
    return codec


_codecs: WeakKeyDictionary[Any, Codec[Any]] = WeakKeyDictionary()


@functools.lru_cache(maxsize=256)
def _shared(annotation: Any, spelling: str) -> Codec[Any]:  # noqa: ARG001
    """One codec per annotation, so that a step function defined inside a run's body costs no new schema.

    ``spelling`` is part of the key since ``int | str`` equals ``str | int``, yet decodes differently.
    """
    return Codec(annotation)


def _build(owner: Any) -> Codec[Any]:
    annotation = _annotation(owner)
    try:
        hash(annotation)
        build: Callable[[Any, str], Codec[Any]] = _shared
    except TypeError:  # metadata without a hash, as in Annotated[int, {}]
        build = _shared.__wrapped__
    try:
        return build(annotation, repr(annotation))
    except Exception as error:
        raise UsageError(
            f"{_name(owner)}: pydantic has no schema for the return annotation {_display(annotation)}; return"
            f" a pydantic model, a dataclass or plain JSON values instead. ({str(error).splitlines()[0]})"
        ) from error


def _adapter(annotation: Any) -> TypeAdapter[Any]:
    # Wrapped: pydantic takes no configuration for a bare dataclass, yet applies it to one inside `X | None`,
    # so that a receipt of the one would be read back as other bytes by the other.
    wrap: Any = typing.NewType
    return TypeAdapter(wrap("Result", annotation), config=_BASE64)


# ---------------------------------------------------------------------------- a function's return annotation


def _owner(fn: Any) -> Any:
    """What carries the annotations: the function behind partials, methods, wrappers and callable objects."""
    while not isinstance(fn, type):
        kind = _kind(fn)
        if kind is functools.partial:
            fn = fn.func
        elif kind is types.MethodType:
            fn = fn.__func__
        elif "return" not in getattr(fn, "__annotations__", {}) and hasattr(fn, "__wrapped__"):
            fn = fn.__wrapped__
        elif isinstance(kind.__call__, types.FunctionType):
            fn = kind.__call__
        else:
            break
    return fn


def _annotation(owner: Any) -> Any:
    annotation = owner
    try:
        if not isinstance(owner, type):
            annotation = getattr(owner, "__annotations__", {}).get("return", Any)
        annotation = _resolved(inspect.unwrap(owner), annotation)
    except Exception as error:
        raise UsageError(
            f"{_name(owner)}: the return annotation {annotation!r} cannot be resolved ({error}); import its"
            " names at run time, not only under TYPE_CHECKING, and define them at module level."
        ) from error
    if typing.get_origin(annotation) in (collections.abc.Awaitable, collections.abc.Coroutine):
        return typing.get_args(annotation)[-1]
    return annotation


def _resolved(fn: Any, annotation: Any) -> Any:
    enclosing = {
        name: cell.cell_contents
        for name, cell in zip(*_cells(fn), strict=True)
        if cell != types.CellType()  # not assigned yet
    }
    # By itself: get_type_hints(fn) would fail for a parameter whose type is known to type checkers only.
    alone = types.SimpleNamespace(
        __annotations__={"return": annotation}, __type_params__=getattr(fn, "__type_params__", ())
    )
    hints = typing.get_type_hints(alone, getattr(fn, "__globals__", {}), enclosing, include_extras=True)
    return hints["return"]


def _cells(fn: Any) -> tuple[tuple[str, ...], tuple[types.CellType, ...]]:
    closure = getattr(fn, "__closure__", None)
    return (fn.__code__.co_freevars, closure) if closure else ((), ())


def _name(owner: Any) -> str:
    return f"{getattr(owner, '__module__', '')}.{getattr(owner, '__qualname__', repr(owner))}"


def _display(annotation: Any) -> str:
    if isinstance(annotation, type) and not typing.get_args(annotation):
        return annotation.__qualname__
    return str(annotation).removeprefix("typing.")


# ------------------------------------------------------------------------- the text as JSONB would return it


class _UnstorableError(ValueError):
    """What JSONB cannot hold, and where."""


def _in_jsonb_order(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return dict(sorted(pairs, key=lambda pair: (len(pair[0].encode()), pair[0])))


_read = json.JSONDecoder(object_pairs_hook=_in_jsonb_order).decode
_write = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode
_MARKS = ("e", "-0.0", "N", "I")  # of an odd number; sought first, at a hundredth of the pattern's cost
_has_odd_number = re.compile(r"(?:^|[\[,:])-?(?:[\d.]+e\+?\d|0\.0(?!\d)|Inf|NaN)").search
_strings_and_odd_numbers = re.compile(
    r'"[^"\\]*(?:\\.[^"\\]*)*"|-?[\d.]+e\+?\d+|-0\.0(?!\d)|-?Infinity|NaN', re.DOTALL
)


def _as_jsonb(text: str) -> str:
    if "{" in text:
        text = _write(_read(text))
    if any(mark in text for mark in _MARKS) and _has_odd_number(text):
        text = _strings_and_odd_numbers.sub(_as_numeric, text)
    if "\\u0000" in text:
        for reason in _culprits(_read(text)):
            raise _UnstorableError(reason)
    if len(text) > _MAX_BYTES // 16 and len(text.encode()) + 12 * text.count(",") > _MAX_BYTES:
        raise _UnstorableError(
            "result exceeds the 256 MiB of one JSONB value; return a reference to it instead"
        )
    return text


def _as_numeric(token: re.Match[str]) -> str:
    if token[0].startswith('"'):
        return token[0]
    number = float(token[0])
    if not math.isfinite(number):
        raise _UnstorableError(f"result holds {number}, which JSONB cannot")
    # With a fraction: numeric writes 1e16 out in full, and its digits alone would be read back as an int.
    return f"{int(number)}.0"


# ------------------------------------------------------------------------------------- what cannot be stored


def _culprits(
    value: Any, message: str = "", path: str = "result", outer: tuple[int, ...] = ()
) -> Iterator[str]:
    """Where and why ``value`` cannot be stored, after that failed with ``message``."""
    if id(value) in outer:
        yield f"{path} contains itself; return a tree, with identifiers in place of references back"
    elif len(outer) > _MAX_DEPTH:
        yield f"{path[:60]}... is nested more than {_MAX_DEPTH} levels deep; return a flatter value"
    elif reason := _reason(value, message):
        yield f"{path} {reason}"
    else:
        for label, part in _parts(value, path):
            yield from _culprits(part, message, label, (*outer, id(value)))


def _reason(leaf: Any, message: str = "") -> str | None:
    kind = _kind(leaf)
    if issubclass(kind, str):
        return _text_reason(leaf)
    if issubclass(kind, float | Decimal) and not math.isfinite(leaf):
        return f"is {leaf}, which JSONB cannot hold; return None or a str in its place"
    if (
        issubclass(kind, bytes)
        and "invalid utf-8" in message
        and leaf != leaf.decode(errors="replace").encode()
    ):
        remedy = 'pydantic configuration (ser_json_bytes="base64", val_json_bytes="base64")'
        return f"is bytes that are not UTF-8; give the class that has them the {remedy}"
    if repr(kind) in message:
        return f"is of type {_display(kind)}, which pydantic cannot write; return plain data in its place"
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
            yield _member(path, key), part
    elif issubclass(type(value), _CONTAINERS):
        yield from ((_member(path, name), part) for name, part in zip(_names(value), value, strict=True))
    else:
        yield from ((_member(path, name), part) for name, part in (_state(value) or {}).items())


def _names(sequence: Any) -> Iterable[object]:
    return getattr(sequence, "_fields", range(len(sequence)))


def _member(path: str, key: object) -> str:
    return f"{path}.{key}" if isinstance(key, str) and key.isidentifier() else f"{path}[{key!r:.80}]"


def _why(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return f"result cannot be rebuilt: {type(error).__name__}: {error}"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{functools.reduce(_member, first['loc'], 'result')} cannot be rebuilt: {first['msg']}"


# --------------------------------------------------------------------------- equal in value and type, deeply

_Finding = tuple[str, str]  # the path below the compared value, and what is wrong there
_ABSENT = object()


def _instant(moment: Any) -> tuple[object, ...]:
    # Not ==: a moment that daylight saving repeats is unequal to itself in any other zone (PEP 495).
    offset = moment.utcoffset()
    return moment.replace(tzinfo=None), offset, moment.tzinfo is None, moment.fold if offset is None else 0


_EXACT: dict[Any, Callable[[Any], object]] = {Decimal: Decimal.as_tuple, datetime: _instant, time: _instant}


def _difference(a: Any, b: Any) -> _Finding | None:
    """Where ``b`` is not equal to ``a`` in value and type, or ``None``."""
    kind = _kind(a)
    if kind is not type(b):
        return "", _reason(a) or f"is {_display(kind)}, but a replay would return {_display(type(b))}"
    if kind in _ATOMS:
        same = a == b
    elif kind in _EXACT:
        same = _EXACT[kind](a) == _EXACT[kind](b)
    elif issubclass(kind, _CONTAINERS):
        return _container_difference(a, b, kind)
    elif (state := _state(a)) is not None:
        other = _state(b) or {}
        names = {**state, **other}
        return _first((name, state.get(name, _ABSENT), other.get(name, _ABSENT)) for name in names)
    else:
        same = (a == b) is True
    return None if same else _unequal(a)


def _container_difference(a: Any, b: Any, kind: Any) -> _Finding | None:
    if issubclass(kind, dict):
        return _dict_difference(a, b, kind)
    if issubclass(kind, set | frozenset):
        return _unordered_difference(a, b, "element")
    if len(a) != len(b) or getattr(a, "maxlen", None) != getattr(b, "maxlen", None):
        return _unequal(a)
    if _alike(a, b) and a == b:
        return None
    return _first(zip(_names(a), a, b, strict=True))


def _dict_difference(a: Any, b: Any, kind: Any) -> _Finding | None:
    if issubclass(kind, OrderedDict) and list(a) != list(b):
        return "", "is an OrderedDict, and JSONB reorders keys; return a list of pairs"
    if found := _unordered_difference(a, b, "key"):
        return found
    if _alike(a.values(), b.values()) and a == b:
        return None
    return _first((key, value, b[key]) for key, value in a.items())


def _unordered_difference(a: Any, b: Any, what: str) -> _Finding | None:
    if len(a) == len(b) and _alike(a, b) and all(map(b.__contains__, a)):
        return None
    others = {other: other for other in b}
    for one in a:
        if one not in others or _difference(one, others[one]):
            shown = f"{one!r:.80} ({_display(type(one))})"
            return "", f"has the {what} {shown}, which a replay would not return like that"
    return None if len(a) == len(b) else _unequal(a)


def _alike(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """Whether all members are atoms of one type: ``==`` then compares types too, at the speed of C."""
    kinds = set(map(type, a))
    return len(kinds) == 1 and kinds <= _ATOMS and kinds == set(map(type, b))


def _first(members: Iterable[tuple[Any, Any, Any]]) -> _Finding | None:
    for name, a, b in members:
        if found := _difference(a, b):
            return _member("", name) + found[0], found[1]
    return None


def _unequal(value: Any) -> _Finding:
    return "", _reason(value) or f"is {_display(type(value))}, and a replay would return an unequal one"


def _state(value: Any) -> dict[str, Any] | None:
    """The attributes of a model or dataclass; a cached property is not one."""
    kind = _kind(value)
    if issubclass(kind, BaseModel):
        fields: dict[str, Any] = kind.model_fields
        state: dict[str, Any] = {
            **vars(value),
            **(value.__pydantic_extra__ or {}),
            **(value.__pydantic_private__ or {}),
        }
    elif dataclasses.is_dataclass(kind):
        fields = {field.name: getattr(value, field.name, _ABSENT) for field in dataclasses.fields(kind)}
        state = {**getattr(value, "__dict__", {}), **fields}
    else:
        return None
    computed = functools.cached_property
    return {k: v for k, v in state.items() if k in fields or not isinstance(getattr(kind, k, None), computed)}
