"""``sqla-durable show``: one run with its columns, its failures and its receipts. Nothing is healed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, cast

import typer
from sqlalchemy import inspect
from sqlalchemy.orm import InstanceState

from sqla_durable.cli.chosen import OneRun
from sqla_durable.cli.durations import rounded
from sqla_durable.cli.form import opened
from sqla_durable.cli.groups import grouped
from sqla_durable.cli.idents import Idents
from sqla_durable.cli.options import AsJson, Ident, Target, Url
from sqla_durable.cli.output import abbreviated, jsonable, one_line, printable, write_json, write_pairs, write_table
from sqla_durable.cli.record import error_of, holder_of, message_of, record_of, status_of, time_of
from sqla_durable.exc import RunNotFound, UsageError
from sqla_durable.functions import FunctionSummary
from sqla_durable.listing import RunSummary
from sqla_durable.receipt import Effect, Receipt, StepOutcome
from sqla_durable.run import RunMixin, RunRows

_ENDLESS = 9998  # the year, in whichever time zone


@grouped
def show(
    target: Target,
    ident: Ident = None,
    *,
    url: Url = None,
    which: OneRun,
    traceback: Annotated[bool, typer.Option("--traceback", help="With the tracebacks of its errors.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one run with its columns, its failures and its receipts. Nothing is healed."""
    with opened(target, url) as runs:
        idents = Idents(runs.rows)
        identity = which.identity(runs, ident or (), "show")
        summary, row, receipts = runs.describe(identity), runs.get_unhealed(identity), runs.receipts(identity)
    if summary is None:
        raise RunNotFound(f"there is no {runs.name} with the key {idents.write(identity)}.")
    if row is None:
        raise UsageError(
            f"{runs.name} {idents.write(identity)} is hidden from the session, by loader criteria for one."
        )
    loaded = _loaded(row)
    columns = {name: value for name, value in loaded.items() if name not in _ours(runs.rows)}
    if as_json:
        write_json(
            {
                **record_of(summary, idents, runs.rows, traceback=traceback),
                "columns": {name: jsonable(value) for name, value in columns.items()},
                "failures": [jsonable(failure) for failure in row.failures],
                "receipts": [_record(receipt, traceback=traceback) for receipt in receipts],
            }
        )
        return
    typer.echo(f"{runs.name} {printable(idents.write(summary.identity))} is {status_of(summary)}.")
    pairs = {**_mixed_in(summary, loaded), **_pairs(summary, ready=summary.status == runs.rows.lifecycle.ready)}
    own = {f".{name}": abbreviated(jsonable(value)) for name, value in columns.items()}
    typer.echo()
    write_pairs({**{name: value for name, value in pairs.items() if value}, **own})
    _write_failures(summary, row.failures)
    _write_receipts(summary, receipts)
    if traceback:
        _write_tracebacks(summary, receipts)


def _loaded(row: RunMixin) -> dict[str, Any]:
    """Return the columns of a row by attribute, as far as they are loaded."""
    state = cast(InstanceState[Any], inspect(row))
    return {each.key: state.dict[each.key] for each in state.mapper.column_attrs if each.key in state.dict}


def _ours(rows: RunRows[Any]) -> set[str]:
    """Return the attributes that are not the user's own: the key, the status, and what mixins of the library bring."""
    mixins = [base for base in rows.entity.__mro__ if base.__module__.partition(".")[0] == "sqla_durable"]
    brought = {name for base in mixins if "__mapper__" not in vars(base) for name in vars(base)}
    return brought.union(map(rows.attribute, (*rows.key, rows.status)))


def _mixed_in(summary: RunSummary, loaded: Mapping[str, Any]) -> dict[str, str]:
    """Return what only some runs have."""
    pairs = {"key": summary.key, "waits for": summary.waits_for}
    if isinstance(summary, FunctionSummary):
        given = {name: abbreviated(jsonable(loaded.get(name))) for name in ("input", "output", "state")}
        given = {name: text for name, text in given.items() if text != "null"}
        priority = str(summary.priority or "")
        pairs = {"function": summary.function, "tenant": summary.tenant, **pairs, "priority": priority, **given}
    return {name: printable(value) for name, value in pairs.items() if value}


def _pairs(summary: RunSummary, *, ready: bool) -> dict[str, str]:
    lease = time_of(summary.lease_expires_at, summary)
    return {
        "attempts": str(summary.attempts),
        "fence": str(summary.fence),
        "holder": abbreviated(holder_of(summary)),
        "lease": f"lapsed {lease}; nobody has reaped it yet" if summary.lapsed else lease and f"until {lease}",
        "created": time_of(summary.created_at, summary),
        "due": _due(summary) if ready else "",
        "started": time_of(summary.started_at, summary),
        "cancel requested": time_of(summary.cancel_requested_at, summary),
        "finished": time_of(summary.finished_at, summary),
        "error": one_line(message_of(summary.failure)),
    }


def _due(summary: RunSummary) -> str:
    # What waits for a signal only is due at the end of time, as far as its column is concerned.
    endless = summary.waits_for is not None and summary.available_at.year >= _ENDLESS
    return "when the signal comes" if endless else time_of(summary.available_at, summary)


def _write_failures(summary: RunSummary, failures: Sequence[Mapping[str, Any]]) -> None:
    if failures:
        typer.echo("\nFailures")
        rows = [
            (
                time_of(datetime.fromisoformat(failure["at"]), summary),
                str(failure["attempt"]),
                printable(failure.get("step") or ""),  # which failures that were kept by an early version do not have
                abbreviated(f"{failure['type']}: {failure['message']}"),
            )
            for failure in failures
        ]
        write_table(["at", "attempt", "step", "error"], rows)


def _write_receipts(summary: RunSummary, receipts: Sequence[Receipt]) -> None:
    if not receipts:
        return
    typer.echo("\nReceipts")
    first = receipts[0].recorded_at
    rows = [
        (
            printable(receipt.step),
            time_of(receipt.recorded_at, summary)
            if receipt is receipts[0]
            else f"+{rounded(receipt.recorded_at - first)}",
            receipt.effect.value,
            str(receipt.fence),
            receipt.outcome.value,
            abbreviated(_said(receipt)),
        )
        for receipt in receipts
    ]
    write_table(["step", "at", "effect", "fence", "outcome", "result"], rows)


def _said(receipt: Receipt) -> Any:
    """Return what a receipt says of its step; of an operation that has not ended, what the service knows it by."""
    match receipt.outcome:
        case StepOutcome.ISSUED:
            return "no ids recorded"
        case StepOutcome.PENDING:
            return _pending(receipt)
        case _:
            return receipt.result if receipt.failure is None else message_of(receipt.failure)


def _pending(receipt: Receipt) -> str:
    if receipt.effect in {Effect.SIGNAL, Effect.SLEEP}:
        until = receipt.ids["until"]
        return "waits" if until is None else f"waits until {until}"
    return f"ids {abbreviated(receipt.ids)}"


def _write_tracebacks(summary: RunSummary, receipts: Sequence[Receipt]) -> None:
    failures = {"error": summary.failure, **{f"step {receipt.step}": receipt.failure for receipt in receipts}}
    for name, failure in failures.items():
        if failure is not None and failure.traceback is not None:
            typer.echo(f"\nTraceback of the {printable(name)}")
            typer.echo(printable(failure.traceback, keep="\n\t").rstrip())


def _record(receipt: Receipt, *, traceback: bool) -> dict[str, Any]:
    return {
        "step": receipt.step,
        "effect": receipt.effect.value,
        "outcome": receipt.outcome.value,
        "result": receipt.result,
        "error": error_of(receipt.failure, traceback=traceback),
        "ids": receipt.ids,
        "fence": receipt.fence,
        "recorded_at": jsonable(receipt.recorded_at),
    }
