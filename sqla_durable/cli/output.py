"""What a command writes: tables for people, lines that can be cut and searched for pipes, and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import typer
from pydantic_core import to_json
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

_LONGEST = 200


def write_json(value: object) -> None:
    """Write one line of JSON."""
    typer.echo(json.dumps(value, ensure_ascii=False))


def write_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table, of which the first column is never cut or wrapped.

    On a terminal the other columns are wrapped to its width. Elsewhere, or where they would not fit beside the first,
    each row is one line, however long.
    """
    console = Console(highlight=False)
    widths = [max(map(cell_len, column)) for column in zip(columns, *rows, strict=True)]
    if not console.is_terminal or widths[0] + sum(2 + cell_len(column) for column in columns[1:]) > console.width:
        for row in (columns, *rows):
            cells = (cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True))
            typer.echo("  ".join(cells).rstrip())
        return
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for position, column in enumerate(columns):
        table.add_column(column, overflow="fold", min_width=None if position else widths[0])
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def write_pairs(pairs: Mapping[str, str]) -> None:
    """Write names and values, one pair on a line."""
    width = max(map(cell_len, pairs), default=0)
    for name, value in pairs.items():
        typer.echo(f"{name}{' ' * (width - cell_len(name))}  {value}".rstrip())


def say(message: str) -> None:
    """Say something that is not a part of the answer."""
    typer.echo(message, err=True)


def printable(text: str, *, keep: str = "") -> str:
    """Escape what a terminal would take for a command, or could not show.

    :param keep: characters to leave as they are.
    """
    return "".join(char if char.isprintable() or char in keep else ascii(char)[1:-1] for char in text)


def one_line(text: str) -> str:
    """Return a text with its lines joined."""
    return printable(" ".join(text.split()))


def abbreviated(value: object) -> str:
    """Return a value as one line of no more than 200 characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    head = printable(text[:_LONGEST].partition("\n")[0])
    return head if len(text) == len(text[:_LONGEST].partition("\n")[0]) else f"{head} ..."


def jsonable(value: object) -> Any:
    """Return a value as JSON can hold it; a time in UTC."""
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC).isoformat()
    return json.loads(to_json(value, bytes_mode="base64", inf_nan_mode="strings", fallback=str))
