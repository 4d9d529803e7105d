"""The conditions that commands take as options."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from sqla_durable.cli.errors import CommandError
from sqla_durable.cli.form import OpenFunctions, OpenRuns

_OF_FUNCTIONS = "function", "tenant", "waiting"


def conditions_of(runs: OpenRuns, *, status: list[str] | None, **options: Any) -> dict[str, Any]:
    """Return those that were given, as the verbs take them.

    :raises CommandError: for a status that the runs do not have, or a condition that the runs do not know.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if not isinstance(runs, OpenFunctions) and (wrong := [name for name in _OF_FUNCTIONS if name in given]):
        raise CommandError(f"--{wrong[0]} goes with a Functions or an AsyncFunctions, and TARGET has {runs.name}.")
    if "key" in given:
        require_keys(runs)
    return {**({"status": statuses_of(runs, status)} if status else {}), **given}


def require_keys(runs: OpenRuns) -> None:
    """Refuse ``--key`` for runs that have no idempotency keys.

    :raises CommandError: for these.
    """
    if runs.rows.idempotency_key is None:
        raise CommandError(
            f"--key goes with runs that have idempotency keys, and {runs.name} has none: it is no "
            f"class {runs.name}(KeyMixin, RunMixin, ...). Name a run by its primary key."
        )


def statuses_of(runs: OpenRuns, names: list[str]) -> list[StrEnum]:
    """Return the statuses of these names.

    :raises CommandError: for one that the runs do not have.
    """
    statuses: dict[str, StrEnum] = {status.value: status for status in runs.rows.lifecycle.machine.transitions}
    for name in names:
        if name not in statuses:
            raise CommandError(f"{name!r} is not a status of {runs.name}; it has {', '.join(map(repr, statuses))}.")
    return [statuses[name] for name in names]
