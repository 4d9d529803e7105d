"""A status machine without a database: what may be declared, which edges exist, and how it is drawn."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import pytest

from sqla_durable import ConfigurationError, UndeclaredTransition
from sqla_durable.machine import Machine


class Light(StrEnum):
    RED = "red"
    GREEN = "green"
    OUT = "out of order"
    GONE = 'taken "away"'


class Door(StrEnum):
    RED = "red"
    OPEN = "open"


EDGES: dict[Light, set[Light]] = {
    Light.RED: {Light.GREEN, Light.OUT},
    Light.GREEN: {Light.RED, Light.OUT},
    Light.OUT: {Light.GONE},
}


def machine(**changes: Any) -> Machine[Light]:
    return Machine(Light, **{"initial": Light.RED, "transitions": EDGES, **changes})


def test_a_status_that_no_edge_leaves_is_terminal() -> None:
    assert machine().terminal == {Light.GONE}


def test_the_sources_of_a_status_are_those_with_an_edge_to_it() -> None:
    assert machine().sources(Light.OUT) == {Light.RED, Light.GREEN}
    assert machine().sources(Light.RED) == {Light.GREEN}


def test_a_declared_edge_passes_and_an_undeclared_one_names_what_is_allowed() -> None:
    machine().check_edge(Light.RED, Light.GREEN)
    with pytest.raises(UndeclaredTransition) as caught:
        machine().check_edge(Light.OUT, Light.RED)
    assert str(caught.value) == (
        'Light has no edge out of order -> red; from out of order it may go to taken "away". '
        "Declare the edge in transitions=."
    )


def test_leaving_a_terminal_status_says_that_it_is_terminal() -> None:
    with pytest.raises(UndeclaredTransition, match="it may go to nothing, it is terminal"):
        machine().check_edge(Light.GONE, Light.RED)


@pytest.mark.parametrize("stranger", [Door.OPEN, Door.RED, "red", None], ids=repr)
def test_a_status_of_another_enumeration_is_refused_even_with_an_equal_value(stranger: Any) -> None:
    with pytest.raises(
        UndeclaredTransition, match="is not a status of Light; pass one of its members: RED, GREEN, OUT, GONE"
    ):
        machine().check_status(stranger)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"initial": Door.OPEN}, "initial .*Door.OPEN.* is not a status of Light"),
        ({"transitions": {**EDGES, Door.OPEN: {Light.RED}}}, "a transition leaves .*Door.OPEN"),
        ({"transitions": {**EDGES, Light.OUT: {Door.OPEN}}}, "a transition reaches .*Door.OPEN"),
        ({"transitions": {**EDGES, Light.RED: {Light.RED, Light.GREEN, Light.OUT}}}, "red -> red.* Remove that edge"),
        ({"initial": Light.OUT}, "green, red of Light cannot be reached from out of order; declare an edge"),
        (
            {"transitions": {Light.RED: {Light.GREEN, Light.OUT, Light.GONE}, Light.GREEN: {Light.RED}}},
            None,
        ),
    ],
    ids=["initial", "leaves", "reaches", "same status", "unreachable", "two terminal ones"],
)
def test_a_declaration_that_cannot_work_is_refused_with_the_remedy(changes: Any, message: str | None) -> None:
    if message is None:
        assert machine(**changes).terminal == {Light.OUT, Light.GONE}
    else:
        with pytest.raises(ConfigurationError, match=message):
            machine(**changes)


def test_statuses_without_a_way_to_a_terminal_one_are_refused() -> None:
    circle = {Light.RED: {Light.GREEN, Light.GONE}, Light.GREEN: {Light.OUT}, Light.OUT: {Light.GREEN}}
    with pytest.raises(ConfigurationError, match="green, out of order of Light has no way to a terminal status"):
        machine(transitions=circle)


def test_an_enumeration_without_members_is_refused() -> None:
    class Nothing(StrEnum):
        pass

    with pytest.raises(ConfigurationError, match="Nothing has no members"):
        Machine(Nothing, initial="none", transitions={})  # type: ignore[type-var]


def test_the_transitions_of_a_machine_cannot_be_changed_afterwards() -> None:
    edges = {status: set(following) for status, following in EDGES.items()}
    made = machine(transitions=edges)
    edges[Light.OUT].add(Light.RED)
    assert made.sources(Light.RED) == {Light.GREEN}
    with pytest.raises(TypeError):
        made.transitions[Light.OUT] = frozenset()  # type: ignore[index]


def test_a_machine_draws_itself_in_the_order_of_its_statuses() -> None:
    assert machine().to_mermaid().splitlines() == [
        "stateDiagram-v2",
        '    state "red" as s0',
        '    state "green" as s1',
        '    state "out of order" as s2',
        '    state "taken #quot;away#quot;" as s3',
        "    [*] --> s0",
        "    s0 --> s1",
        "    s0 --> s2",
        "    s1 --> s0",
        "    s1 --> s2",
        "    s2 --> s3",
        "    s3 --> [*]",
    ]
