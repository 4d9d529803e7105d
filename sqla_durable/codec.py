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
import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from pydantic import ConfigDict, TypeAdapter
from pydantic_core import to_json

from sqla_durable.equality import ATOMS, difference
from sqla_durable.exc import ResultError, ResultMismatch, UsageError
from sqla_durable.storable import UnstorableError, as_jsonb, culprits, display, kind_of, why

T = TypeVar("T")

_BASE64 = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")


class Codec(Generic[T]):
    """How results of one type are written to JSONB and read back.

    :param annotation: the type, as a resolved annotation; ``Any`` for plain JSON values.
    """

    __slots__ = ("__weakref__", "_annotation", "_dump", "_load")

    def __init__(self, annotation: Any) -> None:
        adapter = _adapter(annotation)
        self._annotation = display(annotation)
        self._dump: Callable[..., bytes] = adapter.serializer.to_json
        self._load: Callable[..., T] = adapter.validator.validate_json

    def encode(self, value: T, step: str) -> str:
        """Write ``value`` as JSON text, in the form in which JSONB would return it.

        :raises ResultError: when JSONB cannot hold it.
        """
        try:
            # By name, not by alias: an alias may exist in one direction only, and would not be read back.
            raw = self._dump(value, by_alias=False, round_trip=True, warnings=False)
            return as_jsonb(raw.decode())
        except Exception as error:
            shown = str(error) if isinstance(error, UnstorableError) else f"result cannot be written: {error}"
            reason = next(culprits(value, str(error)), shown)
            raise ResultError(f"step {step!r}: {reason}.") from error

    def decode(self, stored: object, step: str) -> T:
        """Rebuild the result from ``stored``, the parsed JSON of a receipt.

        :raises ResultMismatch: when it does not decode as the function's return annotation.
        """
        try:
            # Not validate_python: a strict model takes a date or a tuple from JSON only.
            return self._load_text(to_json(stored))
        except Exception as error:
            raise ResultMismatch(
                f"step {step!r}: the receipt does not decode as {self._annotation}: {why(error)}. Keep the"
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
            if type(value) is type(decoded) and type(value) in ATOMS and value == decoded:
                return text, decoded
            found = difference(value, decoded)
        except Exception as error:
            reason = next(culprits(value), f"{why(error)}{self._remedy}")
            raise ResultError(f"step {step!r}: {reason}.") from error
        if found:
            raise ResultError(f"step {step!r}: result{found[0]} {found[1]}{self._remedy}.")
        return text, decoded

    @property
    def annotation(self) -> str:
        """The type, for people to read."""
        return self._annotation

    def _load_text(self, text: str | bytes) -> T:
        return self._load(text, by_alias=True, by_name=True)

    @property
    def _remedy(self) -> str:
        return f"; annotate the function with exactly the type that it returns (now: {self._annotation})"


def codec_for(fn: Callable[..., object], *, apart_from: type | None = None) -> Codec[Any]:
    """The codec of ``fn``'s return annotation; without one, that of plain JSON values.

    :param apart_from: a member of a union in the annotation that is never stored.
    :raises UsageError: when the annotation cannot be resolved, or pydantic has no schema for it.
    """
    owner = _owner(fn)
    if apart_from is not None:
        return codec_of(_without(_annotation(owner), apart_from), _name(owner))
    if not isinstance(owner, types.FunctionType):  # a class, a builtin
        return _build(owner)
    codec = _codecs.get(owner)
    if codec is None:
        codec = _codecs[owner] = _build(owner)
    return codec


def codec_for_argument(fn: Callable[..., object], position: int) -> Codec[Any]:
    """The codec of the annotation of a positional parameter of ``fn``; without one, that of plain JSON values.

    :param position: as ``fn`` is called, so that what a method or partial is bound to does not count.
    :raises UsageError: when the annotation cannot be resolved, or pydantic has no schema for it.
    """
    owner = _owner(fn)
    kinds = inspect.Parameter
    annotation: Any = Any
    positional = [
        parameter
        for parameter in inspect.signature(fn).parameters.values()
        if parameter.kind in {kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD, kinds.VAR_POSITIONAL}
    ]
    if positional and (len(positional) > position or positional[-1].kind is kinds.VAR_POSITIONAL):
        annotation = positional[min(position, len(positional) - 1)].annotation
    if annotation is kinds.empty:
        annotation = Any
    try:
        annotation = _resolved(inspect.unwrap(owner), annotation)
    except Exception as error:
        raise UsageError(
            f"{_name(owner)}: the annotation {annotation!r} of argument {position + 1} cannot be resolved ({error});"
            " import its names at run time, not only under TYPE_CHECKING, and define them at module level."
        ) from error
    return codec_of(annotation, _name(owner))


_codecs: WeakKeyDictionary[Any, Codec[Any]] = WeakKeyDictionary()


@functools.lru_cache(maxsize=256)
def _shared(annotation: Any, spelling: str) -> Codec[Any]:  # noqa: ARG001
    """One codec per annotation, so that a step function defined inside a run's body costs no new schema.

    ``spelling`` is part of the key since ``int | str`` equals ``str | int``, yet decodes differently.
    """
    return Codec(annotation)


def _build(owner: Any) -> Codec[Any]:
    return codec_of(_annotation(owner), _name(owner))


def codec_of(annotation: Any, name: str = "the result") -> Codec[Any]:
    """The codec of a type.

    :param annotation: the type, as a return annotation would say it; ``Any`` for plain JSON values.
    :param name: what an error names.
    :raises UsageError: when pydantic has no schema for it.
    """
    try:
        hash(annotation)
        build: Callable[[Any, str], Codec[Any]] = _shared
    except TypeError:  # metadata without a hash, as in Annotated[int, {}]
        build = _shared.__wrapped__
    try:
        return build(annotation, repr(annotation))
    except Exception as error:
        raise UsageError(
            f"{name}: pydantic has no schema for the annotation {display(annotation)}; use"
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
        kind = kind_of(fn)
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


def _without(annotation: Any, member: type) -> Any:
    """Return a union's annotation without one of its members, wherever the union is written out."""
    origin, arms = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        kept = tuple(_without(arm, member) for arm in arms if arm is not member)
        return typing.Union[kept]  # noqa: UP007 - of a tuple of any length
    if origin is typing.Annotated:
        return typing.Annotated[(_without(arms[0], member), *arms[1:])]
    if (value := getattr(annotation, "__value__", None)) is not None:  # type X = ..., of Python 3.12 on
        without = _without(value, member)
        return annotation if without == value else without
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
