"""``sqla-durable diagram``: draws a status machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from enum import StrEnum
from typing import Annotated, Any

import typer

from sqla_durable.cli.target import find, is_functions, is_run_class, is_runs
from sqla_durable.lifecycle import Lifecycle
from sqla_durable.status import StatusMachine

EXPECTED = "a StatusMachine, a Lifecycle, a run class, a Runs, an AsyncRuns, or a callable that returns one of these"


def diagram(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=f"{EXPECTED[0].upper()}{EXPECTED[1:]}.")],
) -> None:
    """Draw a status machine as Mermaid, with the roles of its statuses."""
    found: Any = find(target, _drawable, EXPECTED)
    lifecycle = _lifecycle(found)
    machine: StatusMachine[Any] = found if lifecycle is None else lifecycle.machine
    typer.echo(machine.to_mermaid({} if lifecycle is None else _roles(lifecycle)), nl=False)


def _lifecycle(found: Any) -> Lifecycle[Any] | None:
    owner: Any = found.run_class if is_runs(found) or is_functions(found) else found
    lifecycle: Any = owner.__lifecycle__ if is_run_class(owner) else owner
    return lifecycle if _is_lifecycle(lifecycle) else None


def _is_lifecycle(found: object) -> bool:
    return isinstance(found, Lifecycle)


def _drawable(found: object) -> bool:
    kinds = is_runs, is_functions, is_run_class, _is_lifecycle
    return any(kind(found) for kind in kinds) or isinstance(found, StatusMachine)


def _roles(lifecycle: Lifecycle[Any]) -> Mapping[StrEnum, str]:
    given = {field.name: getattr(lifecycle, field.name) for field in fields(lifecycle)}
    roles: dict[StrEnum, list[str]] = {}
    for role, status in given.items():
        if isinstance(status, lifecycle.machine.statuses):
            roles.setdefault(status, []).append(role)
    for status in sorted(lifecycle.requeue):
        roles.setdefault(status, []).append("requeue")
    return {status: ", ".join(names) for status, names in roles.items()}
