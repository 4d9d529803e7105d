"""Signals: what is sent to a run from outside, kept in a table until the run takes it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from sqlalchemy import BigInteger, DateTime, Identity, String, Table, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, Mapper, mapped_column

from sqla_durable.exc import ConfigurationError, UsageError
from sqla_durable.mapping import add_index, when_mapped
from sqla_durable.owned import OwnedRows, of_run_class
from sqla_durable.plain_sql import qualified, quoted
from sqla_durable.receipt import KEY_LENGTH
from sqla_durable.waits_for import NAME_LENGTH, WaitMixin

RunT = TypeVar("RunT")


class _SignalColumns:
    if TYPE_CHECKING:
        id: Mapped[int]
        name: Mapped[str]
        payload: Mapped[Any]
        created_at: Mapped[datetime]
        step: Mapped[str | None]
        reply: Mapped[Any]
        error: Mapped[dict[str, Any] | None]
        answered_at: Mapped[datetime | None]
    else:
        id = mapped_column(BigInteger, Identity(), primary_key=True, sort_order=-1)
        name = mapped_column(String(NAME_LENGTH), nullable=False)
        payload = mapped_column(JSONB, nullable=False)
        created_at = mapped_column(DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()"))
        step = mapped_column(String(KEY_LENGTH))
        reply = mapped_column(JSONB(none_as_null=True))
        error = mapped_column(JSONB(none_as_null=True))
        answered_at = mapped_column(DateTime(timezone=True))

    __run__: ClassVar[type[Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        when_mapped(cls, lambda mapper: _configure(mapper))  # noqa: PLW0108 - it is defined below


if TYPE_CHECKING:

    class SignalMixin(_SignalColumns, Generic[RunT]):
        """The signals of one run class, as in ``class PlanSignal(SignalMixin[Plan], Base)``.

        The primary key is the run's key columns, each prefixed with the run's table name, and ``id``; the foreign key
        to the run cascades deletes. ``step`` is the key of the step that took the signal, and null until then;
        ``reply`` or ``error``, and ``answered_at``, say how an update was answered.
        """

else:

    class SignalMixin(_SignalColumns):
        __abstract__ = True

        def __class_getitem__(cls, run: Any) -> type[Any]:
            return of_run_class(cls, run, "signals")

    SignalMixin.__doc__ = "The signals of one run class, as in ``class PlanSignal(SignalMixin[Plan], Base)``."


class SignalRows(OwnedRows):
    """The rows of a signal class, with the columns that the library's statements speak of."""

    def __init__(self, entity: type[Any]) -> None:
        super().__init__(entity)
        self.id = self.column("id")
        self.name = self.column("name")
        self.payload = self.column("payload")
        self.created_at = self.column("created_at")
        self.step = self.column("step")
        self.reply = self.column("reply")
        self.error = self.column("error")
        self.answered_at = self.column("answered_at")

    def deletion(self, schema_of: Callable[[Table], str | None], signal: int) -> str:
        """Return the statement by which an operator deletes a signal.

        :param schema_of: says in which schema a table is.
        :param signal: its id.
        """
        table = qualified(schema_of(self.table), self.table.name)
        return f"DELETE FROM {table} WHERE {quoted(self.id.name)} = {signal}"  # noqa: S608 - names are quoted


def _configure(mapper: Mapper[Any]) -> None:
    cls = mapper.class_
    run: type[Any] | None = getattr(cls, "__run__", None)
    if run is None:
        raise ConfigurationError(
            f"{cls.__name__} does not say whose signals it holds; write SignalMixin[YourRunClass]."
        )
    if not issubclass(run, WaitMixin):
        raise ConfigurationError(
            f"{cls.__name__} holds the signals of {run.__name__}, which cannot wait for them; declare it as class "
            f"{run.__name__}(WaitMixin, RunMixin, ...)."
        )
    signals = SignalRows(cls)
    signals.refuse_unfilled(signals.name, signals.payload)
    signals.add_run_key()
    # What a run has taken must not make it longer to find what it has not.
    add_index([*signals.run_key, signals.name, signals.id], signals.step.is_(None))


def signal_name(name: object) -> str:
    """Return the name of a signal as it is stored.

    :raises UsageError: for one that is not a str, or is too long.
    """
    if not isinstance(name, str) or not 0 < len(name) <= NAME_LENGTH or not name.isprintable():
        raise UsageError(f"signal {name!r}: a name is a str of 1 to {NAME_LENGTH} printable characters.")
    return str.__str__(name)
