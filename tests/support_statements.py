"""The statements that an engine sends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, event


class Sent(list[str]):
    """The SQL of each statement, with what it was executed with in :attr:`parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters: list[Any] = []


@contextmanager
def statements(engine: Engine) -> Iterator[Sent]:
    """Note every statement that is sent through an engine, or one made from it by execution options."""
    sent = Sent()

    def note(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        sent.append(statement)
        sent.parameters.append(parameters)

    event.listen(engine, "before_cursor_execute", note)
    yield sent
    event.remove(engine, "before_cursor_execute", note)
