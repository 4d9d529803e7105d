"""A handle: the value that stands for the run of a function, wherever it is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic
from uuid import UUID

from typing_extensions import TypeVar

OutputT_co = TypeVar("OutputT_co", covariant=True, default=Any)  # else print(await result(handle)) is refused by mypy


@dataclass(frozen=True, slots=True)
class FunctionHandle(Generic[OutputT_co]):
    """What :meth:`.Functions.start` returns: plain values that can be stored, sent, and rebuilt from key or id.

    :param function: the function's name.
    :param id: the primary key of the run; None in one that was rebuilt from the key.
    :param key: the idempotency key that the run was started with, if any.
    :param tenant: whose run it is, if anybody's.
    """

    function: str
    id: UUID | None = None
    key: str | None = None
    tenant: str | None = None
