"""Which run a command means, or which runs: by primary key, by idempotency key, or by conditions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from sqla_durable.cli.conditions import Conditions, checked
from sqla_durable.cli.errors import CommandError
from sqla_durable.cli.form import OpenRuns
from sqla_durable.cli.idents import Idents
from sqla_durable.cli.options import AtMost
from sqla_durable.exc import RunNotFound
from sqla_durable.functions import FunctionSummary
from sqla_durable.listing import RunSummary
from sqla_durable.rows import Ident

_SHOWN = 3


@dataclass(frozen=True, kw_only=True)
class OneRun:
    """The options that name one run by its idempotency key."""

    key: Annotated[str | None, typer.Option("--key", metavar="KEY", help="Its idempotency key, instead of IDENT.")] = (
        None
    )
    function: Annotated[
        str | None, typer.Option("--function", metavar="NAME", help="With --key: the function it is a run of.")
    ] = None
    tenant: Annotated[str | None, typer.Option("--tenant", metavar="NAME", help="With --key: whose run it is.")] = None

    def identity(self, runs: OpenRuns, arguments: Sequence[str], command: str) -> Ident:
        """Return the primary key of the run that is meant.

        :param arguments: IDENT.
        :raises CommandError: where not exactly one run is meant.
        :raises RunNotFound: where no run has that key.
        """
        if self.key is not None:
            if arguments:
                raise CommandError("both IDENT and --key say which run is meant; leave one of them out.")
            return _keyed(runs, self.key, self.function, self.tenant)
        if self.function is not None or self.tenant is not None:
            raise CommandError("--function and --tenant go with --key; give the key, or IDENT alone.")
        if not arguments:
            raise CommandError("nothing says which run is meant; give IDENT, its primary key, or --key.")
        identity, *more = Idents(runs.rows).read(arguments)
        if more:
            raise CommandError(f"{command} takes one run, not {len(more) + 1}.")
        return identity


@dataclass(frozen=True, kw_only=True)
class SomeRuns(Conditions):
    """The options that say to which runs something is done."""

    key: Annotated[
        str | None,
        typer.Option("--key", metavar="KEY", help="The one run with this idempotency key, instead of IDENTs."),
    ] = None
    everything: Annotated[bool, typer.Option("--all", help="All runs that it can be done to, without a condition.")] = (
        False
    )
    limit: AtMost = None

    def named(self, runs: OpenRuns, arguments: Sequence[str] | None) -> list[Ident] | None:
        """Return the primary keys of the runs that are named; None where conditions say which are meant.

        :param arguments: the IDENTs.
        :raises CommandError: where both are there, or neither.
        :raises RunNotFound: where no run has the given idempotency key.
        """
        chosen = {name for name, value in vars(self).items() if value not in (None, False, [])}
        if arguments:
            if chosen:
                raise CommandError("IDENTs say which runs are meant; leave the conditions out.")
            return Idents(runs.rows).read(arguments)
        if self.key is not None:
            if chosen - {"key", "function", "tenant"}:
                raise CommandError("--key says which run is meant; only --function and --tenant may stand beside it.")
            return [_keyed(runs, self.key, self.function, self.tenant)]
        if not chosen - {"limit"}:
            raise CommandError("nothing says which runs are meant; give IDENTs, --key, a condition, or --all.")
        return None

    def options(self, runs: OpenRuns) -> dict[str, Any]:
        """Return what a verb on many runs is called with."""
        return {**self.given(runs), "everything": self.everything, "limit": self.limit}

    def given(self, runs: OpenRuns) -> dict[str, Any]:
        """See :meth:`.Conditions.given`."""
        own = {"key", "everything", "limit"}
        return checked(runs, **{name: value for name, value in vars(self).items() if name not in own})


def _keyed(runs: OpenRuns, key: str, function: str | None, tenant: str | None) -> Ident:
    """Return the primary key of the one run with an idempotency key."""
    found = runs.find(limit=_SHOWN + 1, **checked(runs, key=key, function=function, tenant=tenant))
    if len(found) == 1:
        return found[0].identity
    of = "".join(
        f" of {word} {name!r}" for word, name in (("function", function), ("tenant", tenant)) if name is not None
    )
    if not found:
        raise RunNotFound(f"there is no {runs.name}{of} with the idempotency key {key!r}.")
    idents = Idents(runs.rows)
    listed = ", ".join(f"{idents.write(each.identity)}{_whose(each)}" for each in found[:_SHOWN])
    more = ", ..." if len(found) > _SHOWN else ""
    narrower = "add --function or --tenant, or " if isinstance(found[0], FunctionSummary) else ""
    raise CommandError(
        f"more than one {runs.name}{of} has the idempotency key {key!r}: {listed}{more}; {narrower}give one of these "
        "as IDENT."
    )


def _whose(summary: RunSummary) -> str:
    if not isinstance(summary, FunctionSummary):
        return ""
    return f" ({summary.function}{'' if summary.tenant is None else f', tenant {summary.tenant}'})"
