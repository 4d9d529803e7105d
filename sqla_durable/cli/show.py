"""``sqla-durable show``: one run with its columns, its failures and its receipts. Nothing is healed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, cast

import typer
from sqlalchemy import inspect
from sqlalchemy.orm import InstanceState

from sqla_durable.cli.durations import rounded
from sqla_durable.cli.errors import CommandError
from sqla_durable.cli.form import opened
from sqla_durable.cli.idents import Idents
from sqla_durable.cli.options import AsJson, Ident, Target, Url
from sqla_durable.cli.output import abbreviated, jsonable, one_line, printable, write_json, write_pairs, write_table
from sqla_durable.cli.record import error_of, holder_of, message_of, record_of, status_of, time_of
from sqla_durable.exc import RunNotFound, UsageError
from sqla_durable.functions import FunctionSummary
from sqla_durable.listing import RunSummary
from sqla_durable.receipt import Receipt, StepOutcome
from sqla_durable.run import RunMixin, RunRows


def show(
    target: Target,
    ident: Ident,
    *,
    url: Url = None,
    traceback: Annotated[bool, typer.Option("--traceback", help="With the tracebacks of its errors.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show one run with its columns, its failures and its receipts. Nothing is healed."""
    with opened(target, url) as runs:
        idents = Idents(runs.rows)
        identity, *more = idents.read(ident)
        if more:
            raise CommandError(f"show takes one run, not {len(more) + 1}.")
        summary, row, receipts = runs.describe(identity), runs.get_unhealed(identity), runs.receipts(identity)
    if summary is None:
        raise RunNotFound(f"there is no {runs.name} with the key {idents.write(identity)}.")
    if row is None:
        raise UsageError(
            f"{runs.name} {idents.write(identity)} is hidden from the session, by loader criteria for one."
        )
    columns = _own_columns(runs.rows, row)
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
    _write_summary(summary, columns, ready=summary.status == runs.rows.lifecycle.ready)
    _write_failures(summary, row.failures)
    _write_receipts(summary, receipts)
    if traceback:
        _write_tracebacks(summary, receipts)


def _own_columns(rows: RunRows[Any], row: RunMixin) -> dict[str, Any]:
    """Return the user's own columns by attribute, as far as they are loaded."""
    state = cast(InstanceState[Any], inspect(row))
    ours = {*RunMixin.__reserved__, "available_at", *map(rows.attribute, (*rows.key, rows.status))}
    names = [each.key for each in state.mapper.column_attrs if each.key in state.dict and each.key not in ours]
    return {name: state.dict[name] for name in names}


def _write_summary(summary: RunSummary, columns: Mapping[str, Any], *, ready: bool) -> None:
    lease = time_of(summary.lease_expires_at, summary)
    pairs = {
        **_function(summary),
        "attempts": str(summary.attempts),
        "fence": str(summary.fence),
        "holder": abbreviated(holder_of(summary)),
        "lease": f"lapsed {lease}; nobody has reaped it yet" if summary.lapsed else lease and f"until {lease}",
        "created": time_of(summary.created_at, summary),
        "due": time_of(summary.available_at, summary) if ready else "",
        "started": time_of(summary.started_at, summary),
        "cancel requested": time_of(summary.cancel_requested_at, summary),
        "finished": time_of(summary.finished_at, summary),
        "error": one_line(message_of(summary.failure)),
        **{f".{name}": abbreviated(jsonable(value)) for name, value in columns.items()},
    }
    typer.echo()
    write_pairs({name: value for name, value in pairs.items() if value})


def _function(summary: RunSummary) -> dict[str, str]:
    if not isinstance(summary, FunctionSummary):
        return {}
    key = "" if summary.key is None else printable(summary.key)
    return {"of function": printable(summary.function), "with the key": key}


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
            return f"ids {abbreviated(receipt.ids)}"
        case _:
            return receipt.result if receipt.failure is None else message_of(receipt.failure)


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
