"""A status machine on the user's own column, and the conditional transition along one of its edges."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import Any, ClassVar, cast
from weakref import WeakSet

from sqlalchemy import Column, ColumnElement, Enum, Table, event, inspect, select
from sqlalchemy.orm import MappedColumn, Mapper, Session, class_mapper, mapped_column, object_session, scoped_session

from sqla_durable.caller import require_postgresql, unproxied
from sqla_durable.exc import ConfigurationError, UndeclaredTransition, UsageError
from sqla_durable.machine import Machine, StatusT, names_of
from sqla_durable.mapping import add_check
from sqla_durable.rows import AnyRow, Rows
from sqla_durable.sqlstate import translated

_INFO = "sqla_durable.machine"
_CHECKED = "sqla_durable.checked"


class TransitionHook:
    """A mapped class that says what else changes whenever its status does."""

    __reserved__: ClassVar[AbstractSet[str]] = frozenset()
    """The attributes that a caller may not set along with a transition."""

    @classmethod
    def __on_transition__(cls, to: StrEnum) -> Mapping[str, Any]:
        """Return the attributes to set together with the status ``to``; raise to refuse the transition."""
        raise NotImplementedError

    @classmethod
    def __held__(cls) -> AbstractSet[StrEnum]:
        """Return the statuses that a transition leaves only where ``from_`` says so."""
        raise NotImplementedError

    @classmethod
    def __on_arrival__(cls, to: StrEnum) -> Sequence[ColumnElement[Any]]:
        """Return what else the statement of a won transition to ``to`` returns, for its effect."""
        raise NotImplementedError

    @classmethod
    def __on_values__(cls, values: Mapping[str, Any], sources: Collection[StrEnum]) -> Mapping[str, Any]:
        """Return what a caller sets along with a transition that leaves one of ``sources``; raise to refuse it."""
        raise NotImplementedError

    @classmethod
    def __until__(cls, rows: Rows[Any], sources: Collection[StrEnum], to: StrEnum) -> ColumnElement[Any] | None:
        """Return until when a row may leave one of ``sources`` for ``to``; see :meth:`.Rows.update`."""
        raise NotImplementedError


class StatusMachine(Machine[StatusT]):
    """A :class:`.Machine` that knows its column and how a row moves from one status to the next.

    ::

        plan_statuses = StatusMachine(
            PlanStatus,
            initial=PlanStatus.PENDING,
            transitions={PlanStatus.PENDING: {PlanStatus.APPROVED, PlanStatus.REJECTED}},
        )


        class Plan(Base):
            __tablename__ = "plan"
            id: Mapped[int] = mapped_column(primary_key=True)
            status: Mapped[PlanStatus] = plan_statuses.column()
    """

    def __init__(
        self, statuses: type[StatusT], *, initial: StatusT, transitions: Mapping[StatusT, AbstractSet[StatusT]]
    ) -> None:
        super().__init__(statuses, initial=initial, transitions=transitions)
        self._served: WeakSet[type[Any]] = WeakSet()

    def serves(self, entity: type[Any]) -> None:
        """Note a run class whose lifecycle this is, so that :meth:`transition` can take a bare primary key."""
        self._served.add(entity)

    def column(self, name: str | None = None, **kwargs: Any) -> MappedColumn[StatusT]:
        """Return the mapped column for this machine's status.

        It is a ``VARCHAR`` holding the members' *values* with a named ``CHECK`` on them, and starts as
        ``initial`` in Python and on the server. It is never a native enum, whose type outlives a downgrade and
        whose new values cannot be used in the migration that adds them.

        :param name: the column's name where it differs from the attribute's.
        :param kwargs: what :func:`~sqlalchemy.orm.mapped_column` takes besides a type, a nullability and a server
         default; ``init=False`` on a dataclass base, for one.
        """

        def values(statuses: type[StatusT]) -> list[str]:
            return [status.value for status in statuses]

        type_ = Enum(
            self.statuses,
            native_enum=False,
            length=max(64, *(len(status.value) for status in self.statuses)),
            values_callable=values,
        )
        info = {**kwargs.pop("info", {}), _INFO: self}
        kwargs.setdefault("default", self.initial)
        arguments: Any = (type_,) if name is None else (name, type_)
        mapped: MappedColumn[StatusT] = mapped_column(
            *arguments, nullable=False, server_default=self.initial.value, info=info, **kwargs
        )
        event.listen(mapped.column, "after_parent_attach", self._add_check, propagate=True)
        return mapped

    def transition(
        self,
        session: Session | scoped_session[Any],
        run_or_ident: object,
        to: StatusT,
        *,
        from_: StatusT | Collection[StatusT] | None = None,
        where: ColumnElement[bool] | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> bool:
        r"""Move one row to the status ``to`` with one conditional ``UPDATE`` in the session's transaction.

        A loaded object shows the row's true status afterwards, won or lost. The session is flushed first.

        :param session: the caller's session; nothing is committed here.
        :param run_or_ident: an object of the mapped class; or ``(Class, ident)`` as
         :meth:`~sqlalchemy.orm.Session.get` takes them; or the primary key alone, where one run class uses this
         machine.
        :param to: the status to move to.
        :param from\_: the status, or statuses, to leave; by default every one that has an edge to ``to``, except the
         running status of a run, whose holder would lose it.
        :param where: a further condition of the same statement, such as one on the version that was approved.
        :param values: other attributes to set if, and only if, the transition is won; values or SQL expressions.
        :return: True if this call moved the row; False is a lost race, not an error. A run whose expiry has passed is
         moved to its lifecycle's expired status only.
        :raises UndeclaredTransition: before any SQL, for an edge that the machine does not declare.
        :raises FrozenPayload: before any SQL, for values that a status to be left keeps frozen.
        :raises TransactionConflict: where another transaction won under REPEATABLE READ or SERIALIZABLE; retry
         the whole transaction.
        """
        session = unproxied(session)
        entity, ident = self._target(session, run_or_ident)
        status = self.column_of(entity)
        sources = self._sources(entity, to, from_)
        table: Any = status.table
        rows = Rows(entity, table)
        hook = entity if issubclass(entity, TransitionHook) else None
        also: Mapping[str, Any] = {} if hook is None else hook.__on_transition__(to)
        changed = {rows.column(name): value for name, value in also.items()}
        changed |= {**assignments(rows, status, values or {}, sources), status: to}
        require_postgresql(session.get_bind(rows.mapper))
        session.flush()
        identity = rows.identity(ident)
        locking = rows.lock(rows.matches(), status.in_(sources), *(() if where is None else (where,)))
        until = None if hook is None else hook.__until__(rows, sources, to)
        arrival = () if hook is None or session.twophase else hook.__on_arrival__(to)
        statement = rows.update(locking, changed, until=until).returning(*rows.key, *changed, *arrival)
        with translated():
            connection = session.connection(bind_arguments={"mapper": rows.mapper})
            row: AnyRow = connection.execute(statement, rows.parameters(identity)).one_or_none()
            won = row is not None
            shown = ident, *session.identity_map.values()
            if row is None and any(isinstance(loaded, entity) for loaded in shown):
                truth = select(*rows.key, *changed).where(rows.matches())
                row = connection.execute(truth, rows.parameters(identity)).one_or_none()
        instance = ident if isinstance(ident, entity) else rows.loaded(session, row, identity)
        if instance is not None and row is not None:
            rows.show(instance, row._mapping)
        elif instance is not None and instance in session:
            session.expire(instance)
        return won

    def column_of(self, entity: type[Any]) -> Column[StatusT]:
        """Return the column of a mapped class that was made by this machine's :meth:`column`.

        :raises ConfigurationError: where the mapped class has none, or several.
        """
        mapper: Mapper[Any] = inspect(entity)
        # An expression of a column_property is among them, and has no info.
        found = [column for column in mapper.columns if getattr(column, "info", {}).get(_INFO) is self]
        if len(found) != 1:
            raise ConfigurationError(
                f"{entity.__name__} has {len(found)} columns made by {self!r}.column(); it needs one, as in "
                f"status: Mapped[{self.statuses.__name__}] = machine.column()."
            )
        return cast(Column[StatusT], found[0])

    def _add_check(self, column: Column[Any], table: Table) -> None:
        """Add the check on the column's values to the table that the column becomes a part of.

        The check that :class:`~sqlalchemy.Enum` itself can create is part of the type. Alembic then has two ways to
        it, and takes both where the column is added to an existing table and checks are compared by name.
        """
        # A column copied from one that has its check already comes with a copy of the check.
        if not column.info.get(_CHECKED):
            column.info[_CHECKED] = True
            add_check(table, f"{column.name}_values", column.in_(list(self.statuses)), column)

    def _sources(self, entity: type[Any], to: StatusT, from_: StatusT | Collection[StatusT] | None) -> list[StatusT]:
        self.check_status(to)
        if from_ is None:
            held: AbstractSet[StrEnum] = entity.__held__() if issubclass(entity, TransitionHook) else set()
            sources: Collection[StatusT] = self.sources(to) - held
            if not sources and self.sources(to):
                raise UndeclaredTransition(
                    f"only {names_of(held)} leads to {to.value}, and a run in it has a holder that would lose it; "
                    "say from_= to take it away."
                )
        elif isinstance(from_, str):
            sources = [cast(StatusT, from_)]
        else:
            sources = from_
        if not sources:
            raise UndeclaredTransition(f"no edge of {self.statuses.__name__} that was asked for leads to {to.value}.")
        for source in sources:
            self.check_edge(source, to)
        return [status for status in self.statuses if status in sources]

    def attribute_of(self, entity: type[Any]) -> str:
        """Return the attribute of a mapped class that was made by this machine's :meth:`column`."""
        mapper: Mapper[Any] = class_mapper(entity, configure=False)
        return mapper.get_property_by_column(self.column_of(entity)).key

    def _target(self, session: Session, run_or_ident: object) -> tuple[type[Any], object]:
        if (pair := _pair(run_or_ident)) is not None:
            return pair
        entity = type(run_or_ident)
        if isinstance(inspect(entity, raiseerr=False), Mapper):
            owner = object_session(run_or_ident)
            if owner is not None and owner is not session:
                raise UsageError(
                    f"{run_or_ident!r} belongs to another session; pass an object of this session, or (Class, ident)."
                )
            return entity, run_or_ident
        if len(self._served) != 1:
            names = ", ".join(sorted(entity.__name__ for entity in self._served)) or "no run class"
            use = "use" if len(self._served) > 1 else "uses"
            raise UsageError(
                f"{names} {use} this machine, so {run_or_ident!r} does not say which row is meant; pass an object, "
                "or (Class, ident)."
            )
        return next(iter(self._served)), run_or_ident


def reserved_of(entity: type[Any]) -> frozenset[str]:
    """Return the attributes of a mapped class that only the library writes: those of every mixin."""
    reserved: frozenset[str] = frozenset()
    return reserved.union(*(vars(base).get("__reserved__", ()) for base in entity.__mro__))


def assignments(
    rows: Rows[Any], status: Column[Any], values: Mapping[str, Any], sources: Collection[StrEnum]
) -> dict[Column[Any], Any]:
    """Return what a caller sets along with a transition, by column.

    :param sources: the statuses that the transition may leave.
    :raises UsageError: for the status, the key, or what only the library writes.
    :raises FrozenPayload: for what is frozen in one of ``sources``.
    """
    reserved = reserved_of(rows.entity)
    for column in map(rows.column, values):
        name = rows.attribute(column)
        if column is status or column in rows.key or name in reserved:
            raise UsageError(
                f"{rows.entity.__name__}.{name} is not set along with a transition; leave it out of values."
            )
    if issubclass(rows.entity, TransitionHook):
        values = rows.entity.__on_values__(values, sources)
    return {rows.column(name): value for name, value in values.items()}


def _pair(target: object) -> tuple[type[Any], object] | None:
    pair: Any = cast(Any, target)
    if isinstance(target, tuple) and len(pair) == 2 and isinstance(pair[0], type):  # noqa: PLR2004
        return pair[0], pair[1]
    return None
