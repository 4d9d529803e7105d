"""Starting a run: one INSERT in the caller's transaction, or the run that the same key has started before."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Any, Final, Generic

from sqlalchemy import Connection, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, with_polymorphic
from sqlalchemy.sql import ClauseElement

from sqla_durable import clock
from sqla_durable.exc import KeyConflict, UsageError
from sqla_durable.fingerprint import fingerprint
from sqla_durable.in_flight import occupant, occupied, refusing_occupied, same
from sqla_durable.insert import Insertion
from sqla_durable.key import KEY_INDEX, KEY_LENGTH
from sqla_durable.mapping import unique_index
from sqla_durable.priority import HIGHEST
from sqla_durable.retry import LONGEST
from sqla_durable.rows import Ident, among
from sqla_durable.run import RunRows, RunT
from sqla_durable.sqlstate import violated
from sqla_durable.status import reserved_of

_INSTANTS: Final = frozenset({"available_at", "expires_at"})
_ROUNDS: Final = 5


class Start(Generic[RunT]):
    """One run being started.

    :param runs: the rows of its class.
    :param session: the caller's session, flushed.
    :param connection: that session's connection.
    :param key: the idempotency key, if it has one.
    :param values: the attributes that the caller gives.
    """

    def __init__(
        self, runs: RunRows[RunT], session: Session, connection: Connection, key: str | None, values: Mapping[str, Any]
    ) -> None:
        self._runs = runs
        self._session = session
        self._connection = connection
        self._key = key
        self._fingerprint: str | None = None
        refuse(runs, key, values)
        self._values = values

    def run(self) -> RunT:
        """Return the new run, or the one that the same key and payload started before."""
        with self._session.no_autoflush:
            instance = construct(self._runs, self._values)
            insertion = Insertion(self._session, self._connection, instance)
            try:
                insertion.link()
                if self._key is not None:
                    self._give_key(instance, insertion)
                started = self._insert_or_find(instance, insertion)
            except BaseException:
                insertion.discard()
                raise
            if started is not instance:
                insertion.discard()
            return started

    def _give_key(self, instance: RunT, insertion: Insertion) -> None:
        self._fingerprint = fingerprint(self._payload(instance, insertion), self._kind())
        vars_of: Any = instance
        vars_of.idempotency_key, vars_of.key_fingerprint = self._key, self._fingerprint

    def _payload(self, instance: RunT, insertion: Insertion) -> dict[str, Any]:
        """What a key stands for: the given values as the object holds them, without what only says when to run.

        A request that is made again counts its times from a later instant.
        """
        mapper = self._runs.mapper
        left_out = set(scheduling(self._runs)) | {self._status}
        payload: dict[str, Any] = {}
        for name, value in self._values.items():
            if name in mapper.relationships:
                payload |= insertion.foreign_keys(name)
            elif name not in left_out:
                payload[name] = getattr(instance, name) if name in mapper.all_orm_descriptors else value
        return payload

    def _kind(self) -> object:
        return self._runs.mapper.polymorphic_identity if self._runs.mapper.inherits is not None else None

    @property
    def _status(self) -> str:
        return self._runs.attribute(self._runs.status)

    def _insert_or_find(self, instance: RunT, insertion: Insertion) -> RunT:
        """Insert, or find what is in the way. Whatever was there may be gone a moment later, so this is done again."""
        runs = self._runs
        scope = runs.key_scope if self._key is not None else ()
        settled = insertion.begin([*scope, *runs.group])
        notices = () if self._session.twophase else runs.notices
        may_conflict = self._key is not None or bool(runs.group)
        for _ in range(_ROUNDS if may_conflict else 0):
            if insertion.insert(notices, on_conflict=True):
                insertion.finish()
                return instance
            if (found := self._find({column: settled[column] for column in scope})) is not None:
                return found
            holder = occupant(runs, self._connection, {column: settled[column] for column in runs.group})
            if holder is not None:
                raise occupied(runs, holder)
        # What was in the way is neither the key nor the group; without ON CONFLICT, PostgreSQL says what it is.
        with refusing_occupied(runs):
            try:
                insertion.insert(notices, on_conflict=False)
            except IntegrityError as error:
                if self._key is not None and violated(error) == unique_index(runs.table, KEY_INDEX):
                    raise self._conflict(None) from error
                raise
        insertion.finish()
        return instance

    def _find(self, scope: Mapping[Any, Any]) -> RunT | None:
        """Return the run that has this key, loaded afresh, if there is one."""
        if (found := self._look_up(scope)) is None:
            return None
        identity, recorded = found
        if recorded != self._fingerprint:
            raise self._conflict(identity, payload_known=recorded is not None)
        mapper = self._runs.mapper
        whole = with_polymorphic(mapper, "*") if len(list(mapper.self_and_descendants)) > 1 else mapper
        statement = select(whole).where(among(self._runs.key, [identity]))
        run = self._session.scalars(statement.execution_options(populate_existing=True)).unique().one_or_none()
        if run is None and self._look_up(scope) is not None:
            raise UsageError(
                f"{self._runs.entity.__name__} {identity!r}, which has the key {self._key!r}, is hidden from the "
                "session, by loader criteria for one; a run that was started must be visible to be returned."
            )
        return run

    def _look_up(self, scope: Mapping[Any, Any]) -> tuple[Ident, str | None] | None:
        key, recorded = self._runs.idempotency_key, self._runs.key_fingerprint
        if self._key is None or key is None or recorded is None:
            return None
        conditions = key == self._key, *(same(column, value) for column, value in scope.items())
        row = self._connection.execute(select(recorded, *self._runs.key).where(*conditions)).first()
        return None if row is None else (tuple(row)[1:], row[0])

    def _conflict(self, identity: Ident | None, *, payload_known: bool = True) -> KeyConflict:
        assert self._key is not None  # noqa: S101 - only a run with a key comes here
        runs = self._runs
        if identity is None:
            reason = (
                f"of {runs.entity.__name__} belongs to a run that this session does not see, by row security for one; "
                "name what separates the two in __key_scope__"
            )
        elif payload_known:
            reason = "was started with other values; use a key for one payload only"
        else:
            reason = "has no fingerprint as it was not started by start(), so it cannot be told whether it is the same"
        if identity is not None:
            reason = f"belongs to {runs.called(identity, self._values)}, which {reason}"
        return KeyConflict(f"the key {self._key!r} {reason}.", self._key, identity)


def construct(runs: RunRows[RunT], values: Mapping[str, Any]) -> RunT:
    """Build the object by the user's own constructor.

    What the mixins map is set afterwards where the constructor has no parameter for it, as on a dataclass base, where
    it is not a field.
    """
    entity, status = runs.entity, runs.attribute(runs.status)
    when = scheduling(runs)
    ours = {status, *when, *runs.started_with}
    given = scheduled(values, when)
    parameters = set(inspect.signature(entity).parameters) if ours.intersection(given) else set[str]()
    later = {name: value for name, value in given.items() if name in ours and name not in parameters}
    instance = entity(**{name: value for name, value in given.items() if name not in later})
    for name, value in later.items():
        if value is not None:
            setattr(instance, name, value)
    held = vars(instance).get(status)
    if held is not None:
        refuse_status(runs, held)
    return instance


def scheduling(runs: RunRows[Any]) -> list[str]:
    """The attributes of mixins that a caller may give: when, how often and for how long a run is carried out."""
    names = {
        "available_at": True,
        "priority": runs.priority is not None,
        "expires_at": runs.lifecycle.expired is not None,
        "max_attempts": runs.max_attempts is not None,
        "max_duration": runs.max_duration is not None,
    }
    return [name for name, known in names.items() if known]


def scheduled(values: Mapping[str, Any], when: Collection[str]) -> dict[str, Any]:
    """Return values as they are inserted: a duration given for an instant counts from now on the database's clock.

    :param when: the attributes of :func:`scheduling`; an attribute of the user's may have the same name as one.
    """
    instants = _INSTANTS.intersection(when)
    return {name: _instant(value) if name in instants else value for name, value in values.items()}


def _instant(value: Any) -> Any:
    return clock.ahead(value) if isinstance(value, timedelta) else clock.within(value)


def refuse(runs: RunRows[Any], key: object, values: Mapping[str, Any]) -> None:
    """Refuse a key or values that cannot be right, before anything is built."""
    name = runs.entity.__name__
    if reserved := sorted(reserved_of(runs.entity).intersection(values)):
        hint = " Give the key as key=." if "idempotency_key" in reserved else ""
        raise UsageError(f"{name}.{reserved[0]} is written by the library only; leave it out.{hint}")
    if key is not None:
        refuse_key(runs, key)
    if (status := values.get(runs.attribute(runs.status))) is not None:
        refuse_status(runs, status)
    for when in _INSTANTS.intersection(scheduling(runs)):
        refuse_instant(when, values.get(when))
    priority: object = values.get("priority") if runs.priority is not None else None
    if isinstance(priority, int) and not 0 <= priority <= HIGHEST:
        raise UsageError(f"priority={priority}: from 0 to {HIGHEST}, of which {HIGHEST} is claimed first.")

    if runs.max_duration is not None:
        refuse_duration(values.get("max_duration"))


def refuse_duration(value: object) -> None:
    """Refuse what is no duration that an execution may last."""
    if value is not None and not (isinstance(value, timedelta) and timedelta(0) < value <= LONGEST):
        raise UsageError(f"max_duration={value!r}: a timedelta of more than 0 and up to {LONGEST.days} days, or None.")


def refuse_instant(name: str, value: object) -> None:
    """Refuse what is no instant, and one that the session's time zone would have a say in."""
    if isinstance(value, datetime) and value.utcoffset() is None:
        raise UsageError(f"{name}={value!r} is naive; give an aware datetime, or a timedelta from now.")
    expression = isinstance(value, ClauseElement) or hasattr(value, "__clause_element__")
    if not (value is None or expression or isinstance(value, datetime | timedelta)):
        raise UsageError(f"{name}={value!r}: give an aware datetime, a timedelta from now, or an SQL expression.")


def refuse_key(runs: RunRows[Any], key: object) -> None:
    """Refuse a key that the class has no column for, or that cannot be stored."""
    if runs.idempotency_key is None:
        raise UsageError(
            f"{runs.entity.__name__} has no idempotency keys; declare it as class {runs.entity.__name__}(KeyMixin, "
            "RunMixin, ...), or leave out key=."
        )
    if not isinstance(key, str):
        raise UsageError(f"key={key!r} is a {type(key).__name__}; a key is a str.")
    if not 0 < len(key) <= KEY_LENGTH or not key.isprintable():
        raise UsageError(f"key={key!r:.300}: from 1 to {KEY_LENGTH} printable characters.")


def refuse_status(runs: RunRows[Any], status: Any) -> None:
    """Refuse a status that a run does not begin in."""
    machine, ready = runs.lifecycle.machine, runs.lifecycle.ready
    machine.check_status(status)
    if status not in {machine.initial, ready}:
        raise UsageError(
            f"a {runs.entity.__name__} cannot be started as {status.value}; it begins as "
            f"{' or '.join(dict.fromkeys([machine.initial.value, ready.value]))}."
        )
