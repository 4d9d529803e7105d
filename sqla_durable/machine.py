"""A status machine as pure data: statuses, the edges between them, and what follows from those.

No database is involved here; :mod:`sqla_durable.status` puts a machine on a column.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from enum import StrEnum
from types import MappingProxyType
from typing import Generic, TypeVar, cast

from sqla_durable.exc import ConfigurationError, UndeclaredTransition

StatusT = TypeVar("StatusT", bound=StrEnum)


class Machine(Generic[StatusT]):
    """The statuses of a :class:`~enum.StrEnum` and the edges between them.

    :param statuses: the enumeration; every member takes part.
    :param initial: the status a new row has.
    :param transitions: for each status the statuses that may follow it. A status without an entry is terminal.
    :raises ConfigurationError: where an edge names a status of another enumeration, a status cannot be reached
     from ``initial``, or a status has no way to a terminal one.
    """

    def __init__(
        self, statuses: type[StatusT], *, initial: StatusT, transitions: Mapping[StatusT, AbstractSet[StatusT]]
    ) -> None:
        self.statuses = statuses
        self.initial = initial
        self._refuse_strangers(initial, transitions)
        self.transitions: Mapping[StatusT, frozenset[StatusT]] = MappingProxyType(
            {status: frozenset(transitions.get(status, ())) for status in statuses}
        )
        self.terminal: frozenset[StatusT] = frozenset(status for status in statuses if not self.transitions[status])
        self._refuse_unreachable()
        self._refuse_endless()

    def sources(self, to: StatusT) -> frozenset[StatusT]:
        """Return the statuses from which an edge leads to ``to``."""
        return frozenset(status for status, following in self.transitions.items() if to in following)

    def reachable(self, status: StatusT) -> frozenset[StatusT]:
        """Return the statuses that a row in ``status`` can still come to be in, ``status`` among them."""
        return frozenset(_closure({status}, self.transitions))

    def check_edge(self, from_: StatusT, to: StatusT) -> None:
        """Raise :class:`.UndeclaredTransition` unless the edge ``from_`` → ``to`` is declared."""
        self.check_status(from_)
        self.check_status(to)
        if to not in self.transitions[from_]:
            allowed = names_of(self.transitions[from_]) or "nothing, it is terminal"
            raise UndeclaredTransition(
                f"{self.statuses.__name__} has no edge {from_.value} -> {to.value}; "
                f"from {from_.value} it may go to {allowed}. Declare the edge in transitions=."
            )

    def check_status(self, status: StatusT) -> None:
        """Raise :class:`.UndeclaredTransition` unless ``status`` is a member of this machine's enumeration."""
        if not isinstance(status, self.statuses):
            raise UndeclaredTransition(
                f"{status!r} is not a status of {self.statuses.__name__}; pass one of its members: "
                f"{', '.join(str(member.name) for member in self.statuses)}."
            )

    def to_mermaid(self, notes: Mapping[StatusT, str] | None = None) -> str:
        """Draw the machine as a `Mermaid state diagram <https://mermaid.js.org/syntax/stateDiagram.html>`_.

        :param notes: a few words to stand beside a status.
        """
        ids = {status: f"s{position}" for position, status in enumerate(self.statuses)}
        lines = ["stateDiagram-v2"]
        lines += [f'    state "{_quoted(status)}" as {ids[status]}' for status in self.statuses]
        lines.append(f"    [*] --> {ids[self.initial]}")
        for status in self.statuses:
            following = [other for other in self.statuses if other in self.transitions[status]]
            lines += [f"    {ids[status]} --> {ids[other]}" for other in following]
            if not following:
                lines.append(f"    {ids[status]} --> [*]")
        lines += [f"    note right of {ids[status]} : {note}" for status, note in (notes or {}).items()]
        return "\n".join(lines) + "\n"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.statuses.__name__}>"

    def _refuse_strangers(self, initial: StatusT, transitions: Mapping[StatusT, AbstractSet[StatusT]]) -> None:
        for from_, following in transitions.items():
            if isinstance(cast(object, following), str):
                raise ConfigurationError(
                    f"transitions of {self.statuses.__name__} give {following!r} for {from_!r}; write a set: {{...}}."
                )
        edges = [(from_, to) for from_, following in transitions.items() for to in following]
        if not list(self.statuses):
            raise ConfigurationError(f"{self.statuses.__name__} has no members; a status machine needs some.")
        for role, status in [
            ("initial", initial),
            *(("a transition leaves", from_) for from_ in transitions),
            *(("a transition reaches", to) for _, to in edges),
        ]:
            if not isinstance(status, self.statuses):
                raise ConfigurationError(
                    f"{role} {status!r}, which is not a status of {self.statuses.__name__}; "
                    f"it has {names_of(self.statuses)}."
                )
        for from_, to in edges:
            if from_ is to:
                raise ConfigurationError(
                    f"{self.statuses.__name__} declares {to.value} -> {to.value}; a transition to the same "
                    "status cannot be told from a lost race. Remove that edge."
                )

    def _refuse_unreachable(self) -> None:
        reached = _closure({self.initial}, self.transitions)
        if lost := set(self.statuses) - reached:
            raise ConfigurationError(
                f"{names_of(lost)} of {self.statuses.__name__} cannot be reached from {self.initial.value}; "
                "declare an edge that leads there, or remove the status."
            )

    def _refuse_endless(self) -> None:
        backwards = {status: self.sources(status) for status in self.statuses}
        if endless := set(self.statuses) - _closure(set(self.terminal), backwards):
            raise ConfigurationError(
                f"{names_of(endless)} of {self.statuses.__name__} has no way to a terminal status (one that no "
                "edge leaves); declare an edge that leads out."
            )


def _closure(start: set[StatusT], edges: Mapping[StatusT, AbstractSet[StatusT]]) -> set[StatusT]:
    reached, frontier = set(start), list(start)
    while frontier:
        for status in edges[frontier.pop()] - reached:
            reached.add(status)
            frontier.append(status)
    return reached


def names_of(statuses: Iterable[StrEnum]) -> str:
    """Return the values of some statuses, for an error to name them."""
    return ", ".join(sorted(status.value for status in statuses))


def _quoted(status: StrEnum) -> str:
    return status.value.replace('"', "#quot;")
