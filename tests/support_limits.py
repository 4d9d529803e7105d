"""Functions with limits: a table for their runs, and a log of every run that begins or ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from sqlalchemy import Engine, func, select, text, update
from sqlalchemy.orm import DeclarativeBase, Session, sessionmaker

from sqla_durable import FunctionHandle, FunctionMixin, FunctionRun, Functions, ReceiptMixin, Retry, function_lifecycle

LEASE = timedelta(seconds=2)


class LimitsBase(DeclarativeBase):
    pass


class DurableRun(FunctionMixin, LimitsBase):
    __tablename__ = "durable_run"
    __lifecycle__ = function_lifecycle(
        lease=LEASE, retry=Retry(max_attempts=100, backoff=timedelta(0), cap=timedelta(0))
    )


class DurableStep(ReceiptMixin[DurableRun], LimitsBase):
    __tablename__ = "durable_step"


OtherFunctions = Functions[DurableRun]


def functions_on(engine: Engine, **options: Any) -> Functions[DurableRun]:
    """Functions on the tables here, which are created."""
    LimitsBase.metadata.create_all(engine)
    return Functions(sessionmaker(engine), DurableRun, DurableStep, **options)


def declare(functions: Functions[DurableRun], name: str, body: Any = None, **limits: Any) -> Any:
    """Declare a function that returns at once, or has the given body."""

    def nothing(run: FunctionRun) -> None:
        """A body without a step."""

    return functions.function(name, **limits)(nothing if body is None else body)


def start(functions: Functions[DurableRun], function: Any, count: int, **values: Any) -> list[FunctionHandle[None]]:
    """Start so many runs."""
    with functions.session_factory.begin() as session:
        return [functions.start(session, function, **values) for _ in range(count)]
