"""Whether two results are equal in value and type, at every level, and where they differ first."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from sqla_durable.storable import ABSENT, CONTAINERS, display, kind_of, member, names_of, reason_of, state_of

ATOMS = frozenset({type(None), bool, int, float, str, bytes, date, timedelta, uuid.UUID})


_Finding = tuple[str, str]  # the path below the compared value, and what is wrong there


def _instant(moment: Any) -> tuple[object, ...]:
    # Not ==: a moment that daylight saving repeats is unequal to itself in any other zone (PEP 495).
    offset = moment.utcoffset()
    return moment.replace(tzinfo=None), offset, moment.tzinfo is None, moment.fold if offset is None else 0


_EXACT: dict[Any, Callable[[Any], object]] = {Decimal: Decimal.as_tuple, datetime: _instant, time: _instant}


def difference(a: Any, b: Any) -> _Finding | None:
    """Where ``b`` is not equal to ``a`` in value and type, or ``None``."""
    kind = kind_of(a)
    if kind is not type(b):
        return "", reason_of(a) or f"is {display(kind)}, but a replay would return {display(type(b))}"
    if kind in ATOMS:
        same = a == b
    elif kind in _EXACT:
        same = _EXACT[kind](a) == _EXACT[kind](b)
    elif issubclass(kind, CONTAINERS):
        return _container_difference(a, b, kind)
    elif (state := state_of(a)) is not None:
        other = state_of(b) or {}
        names = {**state, **other}
        return _first((name, state.get(name, ABSENT), other.get(name, ABSENT)) for name in names)
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
    return _first(zip(names_of(a), a, b, strict=True))


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
        if one not in others or difference(one, others[one]):
            shown = f"{one!r:.80} ({display(type(one))})"
            return "", f"has the {what} {shown}, which a replay would not return like that"
    return None if len(a) == len(b) else _unequal(a)


def _alike(a: Iterable[Any], b: Iterable[Any]) -> bool:
    """Whether all members are atoms of one type: ``==`` then compares types too, at the speed of C."""
    kinds = set(map(type, a))
    return len(kinds) == 1 and kinds <= ATOMS and kinds == set(map(type, b))


def _first(members: Iterable[tuple[Any, Any, Any]]) -> _Finding | None:
    for name, a, b in members:
        if found := difference(a, b):
            return member("", name) + found[0], found[1]
    return None


def _unequal(value: Any) -> _Finding:
    return "", reason_of(value) or f"is {display(type(value))}, and a replay would return an unequal one"
