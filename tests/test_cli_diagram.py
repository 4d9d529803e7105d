"""``sqla-durable diagram``: a status machine, with the roles of its statuses where a lifecycle gives them."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine

from tests.support import Plan, plan_statuses
from tests.support_cli import FORMS, answered, importable, made, refused

ROLES = [
    "    note right of s1 : ready",
    "    note right of s2 : running",
    "    note right of s3 : done",
    "    note right of s4 : failed, requeue",
    "    note right of s5 : dead, requeue",
    "    note right of s6 : cancelled",
]


def test_a_machine_is_drawn_as_it_draws_itself() -> None:
    assert answered("diagram", "tests.support:plan_statuses") == plan_statuses.to_mermaid()


@pytest.mark.parametrize("target", ["tests.support:Plan", "tests.support:Plan.__lifecycle__"])
def test_a_lifecycle_is_drawn_with_the_roles_of_its_statuses(target: str) -> None:
    shown = answered("diagram", target)
    machine = plan_statuses.to_mermaid()
    assert shown.startswith(machine)
    assert shown.removeprefix(machine).splitlines() == ROLES
    assert shown.endswith("\n")


@pytest.mark.parametrize("form", FORMS)
def test_runs_are_drawn_without_their_database(engine: Engine, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    engine.dispose()
    module = importable(monkeypatch, runs=made(form, engine), make=lambda: plan_statuses)
    assert answered("diagram", f"{module}:runs") == answered("diagram", "tests.support:Plan")
    assert answered("diagram", f"{module}:make") == plan_statuses.to_mermaid()


def test_another_object_is_refused() -> None:
    exit_code, line = refused("diagram", "tests.support:PlanStatus")
    assert exit_code == 2
    assert line.endswith(
        "expected a StatusMachine, a Lifecycle, a run class, a Runs, an AsyncRuns, or a callable that returns one of "
        "these."
    )


def test_notes_stand_beside_their_statuses() -> None:
    drawn = Plan.__lifecycle__.machine.to_mermaid({Plan.__lifecycle__.ready: "waits here"})
    assert drawn.splitlines()[-1] == "    note right of s1 : waits here"
