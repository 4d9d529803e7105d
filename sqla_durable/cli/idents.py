"""IDENT: primary keys as words of a command line."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter, ValidationError
from sqlalchemy import Column

from sqla_durable.cli.errors import CommandError
from sqla_durable.rows import Ident, Rows


class Idents:
    """The primary keys of one class, read by the Python types of their columns.

    The parts of a composite key are a line of CSV, so that a part with a comma can be quoted.
    """

    def __init__(self, rows: Rows[Any]) -> None:
        self.names = [rows.attribute(column) for column in rows.key]
        self._entity = rows.entity.__name__
        self._types = [TypeAdapter[Any](_python_type(column)) for column in rows.key]

    @property
    def title(self) -> str:
        """The name of the key."""
        return ",".join(self.names)

    def read(self, arguments: Sequence[str]) -> list[Ident]:
        """Return the keys that the arguments of a command stand for.

        :raises CommandError: where one of them is no key.
        """
        if len(self.names) == 1:
            return [self._identity([argument]) for argument in arguments]
        parts = [_parts(argument) for argument in arguments]
        if all(len(each) == len(self.names) for each in parts):
            return [self._identity(each) for each in parts]
        if len(arguments) == len(self.names):
            return [self._identity(arguments)]
        raise CommandError(
            f"{' '.join(arguments)!r} does not identify a {self._entity}; its key is ({self.title}): write the parts "
            "with commas between them."
        )

    def write(self, identity: Ident) -> str:
        """Return the argument that :meth:`read` takes for a key."""
        words = [str(word) for word in self.as_json(identity).values()]
        if len(words) == 1:
            return words[0]
        line = io.StringIO()
        csv.writer(line, lineterminator="").writerow(words)
        return line.getvalue()

    def as_json(self, identity: Ident) -> dict[str, Any]:
        """Return the parts of a key by their names."""
        parts = zip(self.names, self._types, identity, strict=True)
        return {
            name: type_.dump_python(value, mode="json", warnings=False, fallback=str) for name, type_, value in parts
        }

    def _identity(self, words: Sequence[str]) -> Ident:
        values: list[Any] = []
        for name, type_, word in zip(self.names, self._types, words, strict=True):
            try:
                values.append(type_.validate_strings(word))
            except ValidationError as error:
                reason = error.errors()[0]["msg"]
                raise CommandError(f"{word!r} cannot be the {name} of a {self._entity}: {reason}.") from None
        return tuple(values)


def _parts(argument: str) -> list[str]:
    try:
        return next(csv.reader([argument], strict=True), list[str]())
    except csv.Error:
        return []


def _python_type(column: Column[Any]) -> Any:
    try:
        return column.type.python_type
    except NotImplementedError:
        return str
