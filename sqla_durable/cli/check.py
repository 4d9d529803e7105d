"""``sqla-durable check``: compares a live database with the models, for people and for CI."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Annotated, Any

import typer
from sqlalchemy import MetaData, create_engine
from sqlalchemy.orm import Session

from sqla_durable.checkup import CODES, Finding, Severity
from sqla_durable.checkup import check as compare
from sqla_durable.cli.errors import CommandError
from sqla_durable.cli.form import opened
from sqla_durable.cli.options import AsJson
from sqla_durable.cli.output import one_line, printable, write_json, write_table
from sqla_durable.cli.target import find, is_functions, is_runs, module_at, url_of
from sqla_durable.exc import UsageError

EXPECTED = "a declarative Base, a MetaData, a Runs or Functions of either form, or a callable that returns one of these"


def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help=f"{EXPECTED[0].upper()}{EXPECTED[1:]}, as module:object; or a module with models."
        ),
    ],
    *,
    url: Annotated[
        str | None,
        typer.Option("--url", metavar="URL", help="The database, where TARGET has no engine. Default: DATABASE_URL."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit status 1 for warnings as well.")] = False,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="CODE", help="Leave findings of this kind out; may be given several times."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare a live database with the models, and look at its server.

    Exit status 1 where there is an error among the findings; with --strict, where there is any finding.
    """
    ignored = set(ignore or ())
    if unknown := sorted(ignored - {*CODES}):
        raise CommandError(f"{unknown[0]!r} is no kind of finding; there are {', '.join(CODES)}.")
    found = [each for each in _found(target, url) if each.code not in ignored]
    _write(found, as_json=as_json)
    if any(strict or each.severity is Severity.ERROR for each in found):
        raise typer.Exit(1)


def _found(target: str, url: str | None) -> list[Finding]:
    models = find(target, _is_wanted, EXPECTED) if ":" in target else module_at(target)
    try:
        if is_runs(models) or is_functions(models):
            with opened(target, url) as runs:
                return runs.transact(_in_session, models)
        engine = create_engine(url_of(target, url))
        try:
            return compare(engine, models)
        finally:
            engine.dispose()
    except UsageError as error:
        raise CommandError(str(error)) from error


def _in_session(session: Session, models: object) -> list[Finding]:
    return compare(session.connection(), models)


def _is_wanted(found: object) -> bool:
    metadata: Any = getattr(found, "metadata", None) if isinstance(found, type) else found
    return isinstance(metadata, MetaData | ModuleType) or is_runs(found) or is_functions(found)


def _write(found: Sequence[Finding], *, as_json: bool) -> None:
    if as_json:
        for each in found:
            write_json(
                {
                    "severity": each.severity.value,
                    "code": each.code,
                    "subject": each.subject,
                    "meaning": each.meaning,
                    "remedy": each.remedy,
                }
            )
    elif found:
        rows = [
            [each.code, each.severity.value, printable(each.subject), one_line(each.meaning), one_line(each.remedy)]
            for each in found
        ]
        write_table(["finding", "severity", "what", "meaning", "remedy"], rows)
    else:
        typer.echo("No findings.")
