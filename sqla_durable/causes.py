"""What led to an exception: the members of its groups, its causes and its contexts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast


def leaves(error: BaseException) -> list[BaseException]:
    """Return the exceptions in an exception group, however deep; of another exception, itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    group = cast("BaseExceptionGroup[BaseException]", error)
    return [leaf for member in group.exceptions for leaf in leaves(member)]


def chain(error: BaseException) -> Iterator[BaseException]:
    """Return ``error`` and what led to it, the nearest first."""
    seen: set[int] = set()
    links: list[BaseException | None] = [error]
    while links:
        link = links.pop(0)
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        links += [leaf for leaf in leaves(link) if leaf is not link]
        links.append(link.__cause__ or link.__context__)
