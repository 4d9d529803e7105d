"""The conditions on runs that commands take as options."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Any

import typer

from sqla_durable.cli.errors import CommandError
from sqla_durable.cli.form import OpenFunctions, OpenRuns
from sqla_durable.cli.options import Key, Statuses, age
from sqla_durable.cli.output import say

_OF_FUNCTIONS = "function", "tenant", "waiting"


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What may be asked of runs, for a list of them or for something that is done to all of them."""

    status: Statuses = None
    older_than: Annotated[
        timedelta | None,
        typer.Option(parser=age, metavar="DURATION", help="Only runs inserted longer ago: 90s, 15m, 2h, 7d."),
    ] = None
    newer_than: Annotated[
        timedelta | None, typer.Option(parser=age, metavar="DURATION", help="Only runs inserted since.")
    ] = None
    error: Annotated[
        str | None,
        typer.Option("--error", metavar="TEXT", help="Only runs with this in the type or message of their error."),
    ] = None
    function: Annotated[str | None, typer.Option("--function", metavar="NAME", help="Only runs of this function.")] = (
        None
    )
    tenant: Annotated[
        str | None, typer.Option("--tenant", metavar="NAME", help="Only runs of functions of this tenant.")
    ] = None

    def given(self, runs: OpenRuns) -> dict[str, Any]:
        """Return the conditions that were given, as the verbs take them.

        :raises CommandError: for a status that the runs do not have, or a condition that they do not know.
        """
        return checked(runs, **vars(self))


@dataclass(frozen=True, kw_only=True)
class ListConditions(Conditions):
    """What may be asked of runs, for a list of them."""

    key: Key = None
    owner: Annotated[
        str | None, typer.Option("--owner", metavar="NAME", help="Only runs whose lease carries this name.")
    ] = None
    cancel_requested: Annotated[
        bool | None,
        typer.Option("--cancel-requested/--no-cancel-requested", help="Only runs with, or without, a cancel request."),
    ] = None
    waiting: Annotated[
        bool | None,
        typer.Option("--waiting/--not-waiting", help="Only runs of functions that are ready and not due, or others."),
    ] = None


def checked(runs: OpenRuns, **conditions: Any) -> dict[str, Any]:
    """Return the conditions that are not None or empty.

    :raises CommandError: see :meth:`Conditions.given`.
    """
    given = {name: value for name, value in conditions.items() if value is not None and value != []}
    if not isinstance(runs, OpenFunctions) and (wrong := [name for name in _OF_FUNCTIONS if name in given]):
        raise CommandError(f"--{wrong[0]} goes with a Functions or an AsyncFunctions, and TARGET has {runs.name}.")
    if "key" in given and runs.rows.idempotency_key is None:
        raise CommandError(
            f"--key goes with runs that have idempotency keys, and {runs.name} is declared without KeyMixin; name "
            "a run by its primary key."
        )
    if isinstance(runs, OpenFunctions) and "function" in given and not runs.knows(given["function"]):
        # No error: the runs of a function outlive its code.
        say(f"This process knows no function {given['function']!r}; only runs that other code has started are of it.")
    if "status" in given:
        given["status"] = statuses_of(runs, given["status"])
    return given


def statuses_of(runs: OpenRuns, names: list[str]) -> list[StrEnum]:
    """Return the statuses of these names.

    :raises CommandError: for one that the runs do not have.
    """
    statuses: dict[str, StrEnum] = {status.value: status for status in runs.rows.lifecycle.machine.transitions}
    for name in names:
        if name not in statuses:
            raise CommandError(f"{name!r} is not a status of {runs.name}; it has {', '.join(map(repr, statuses))}.")
    return [statuses[name] for name in names]
