"""What a command says where it cannot do what it was asked to: one line on standard error, and an exit status."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import NoReturn, ParamSpec, cast

import typer
from sqlalchemy.exc import DBAPIError

from sqla_durable.cli.output import one_line
from sqla_durable.exc import DatabaseUnavailable, DurableError
from sqla_durable.sqlstate import schema_mismatch

P = ParamSpec("P")


class CommandError(Exception):
    """The command was called in a way that cannot be right: exit status 2."""


def reporting(command: Callable[P, None]) -> Callable[P, None]:
    """Return the command with errors of its call, of ours and of the database's said in one line.

    Anything else is a fault in a program, and shows where it is by its traceback.
    """

    @wraps(command)
    def reported(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            _refuse_bytes(kwargs)
            command(*args, **kwargs)
        except CommandError as error:
            _end(command.__name__, str(error), 2)
        except DatabaseUnavailable as error:
            _end(command.__name__, _unreachable(error) or str(error), 1)
        except DurableError as error:
            _end(command.__name__, str(error), 1)
        except DBAPIError as error:
            # The message only: the lines after it repeat the statement.
            lacking = schema_mismatch(error)
            _end(command.__name__, str(error.orig).partition("\n")[0] if lacking is None else str(lacking), 1)

    return reported


def _unreachable(error: DatabaseUnavailable) -> str | None:
    """Return what is said where there is no connection at all; None where a statement was cut off."""
    cause = error.__cause__
    # Without a statement the error is of connecting.
    if not isinstance(cause, DBAPIError) or cause.statement is not None:
        return None
    return f"cannot reach the database: {cause.orig}; check DATABASE_URL or --url"


def _refuse_bytes(arguments: Mapping[str, object]) -> None:
    for given in arguments.values():
        for word in cast("list[object]", given) if isinstance(given, list) else [given]:
            # How Python shows bytes on a command line that are not text.
            if isinstance(word, str) and any("\ud800" <= char <= "\udfff" for char in word):
                raise CommandError(f"{word!r} is not text in the encoding of this system.")


def _end(command: str, message: str, status: int) -> NoReturn:
    typer.echo(f"sqla-durable {command}: {one_line(message)}", err=True)
    raise typer.Exit(status) from None
