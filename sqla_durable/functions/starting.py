"""Starting many runs of a function with one statement in the caller's transaction."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from sqlalchemy import Connection, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.sql import ClauseElement

from sqla_durable.exc import KeyConflict, UsageError
from sqla_durable.fingerprint import fingerprint
from sqla_durable.functions.model import FunctionRows
from sqla_durable.ids import uuid7
from sqla_durable.in_flight import same
from sqla_durable.start import refuse, scheduled, scheduling

_ROUNDS: Final = 5


class StartMany:
    """Runs being started together.

    :param runs: the rows of their class.
    :param connection: the caller's.
    :param notify: whether workers that listen are told.
    """

    def __init__(self, runs: FunctionRows[Any], connection: Connection, *, notify: bool) -> None:
        self._runs = runs
        self._connection = connection
        self._notices = runs.notices if notify else ()

    def run(self, every: Sequence[Mapping[str, Any]], keys: Sequence[str] | None) -> list[UUID]:
        """Insert the runs, or find those that the same keys have started before; return their ids in order.

        :param every: the attributes of each.
        :param keys: the key of each, if they have any.
        :raises KeyConflict: where a key belongs to a run that was started with other values.
        """
        if keys is not None and len(keys) != len(every):
            raise UsageError(f"start_many() was given {len(every)} inputs and {len(keys)} keys; one key for each.")
        rows = [self._row(values, None if keys is None else keys[at]) for at, values in enumerate(every)]
        ids: list[UUID | None] = [None] * len(rows)
        for _ in range(_ROUNDS):
            left = [at for at, ident in enumerate(ids) if ident is None]
            if not left:
                break
            inserted = self._insert([rows[at] for at in left])
            found = self._find([rows[at] for at in left if rows[at]["id"] not in inserted])
            for at in left:
                row = rows[at]
                ids[at] = row["id"] if row["id"] in inserted else self._same(row, found)
        started = [ident for ident in ids if ident is not None]
        if len(started) < len(ids):
            key = rows[ids.index(None)]["idempotency_key"]
            raise KeyConflict(
                f"the key {key!r} belongs to a run that this session does not see, by row security for one.", key, None
            )
        return started

    def _row(self, values: Mapping[str, Any], key: str | None) -> dict[str, Any]:
        refuse(self._runs, key, values)
        when = scheduling(self._runs)
        row = {**self._first_values(), **scheduled(values, when), "id": uuid7()}
        if key is not None:
            payload = {name: value for name, value in values.items() if name not in when}
            row |= {"idempotency_key": key, "key_fingerprint": fingerprint(payload)}
        return row

    def _first_values(self) -> dict[str, Any]:
        """What a flush would insert besides: the discriminator, a first version, and defaults of a dataclass."""
        mapper: Any = self._runs.mapper
        attributes = self._runs.attributes()
        first: dict[str, Any] = {}
        if mapper.polymorphic_identity is not None and mapper.polymorphic_on in attributes:
            first[attributes[mapper.polymorphic_on]] = mapper.polymorphic_identity
        if mapper.version_id_col is not None and mapper.version_id_generator:
            first[attributes[mapper.version_id_col]] = mapper.version_id_generator(None)
        for field in dataclasses.fields(mapper.class_) if dataclasses.is_dataclass(mapper.class_) else ():
            if field.default_factory is not dataclasses.MISSING and field.name in attributes.values():
                first[field.name] = field.default_factory()
        return first

    def _insert(self, rows: Sequence[Mapping[str, Any]]) -> set[UUID]:
        runs = self._runs
        columns = {name: runs.column(name) for name in rows[0]}
        # An instant may be an SQL expression, which is the same for all.
        shared = {columns[name]: value for name, value in rows[0].items() if isinstance(value, ClauseElement)}
        own = {name: column.key for name, column in columns.items() if column not in shared}
        values = [{key: row[name] for name, key in own.items()} for row in rows]
        inserting = insert(runs.table).values(shared)
        if "idempotency_key" in columns:
            inserting = inserting.on_conflict_do_nothing(**runs.key_index())
        statement = inserting.returning(runs.id, *self._notices)
        return {row[0] for row in self._connection.execute(statement, values)}

    def _find(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[UUID, str | None]]:
        runs = self._runs
        keys = [row["idempotency_key"] for row in rows if row.get("idempotency_key") is not None]
        if not keys or runs.idempotency_key is None or runs.key_fingerprint is None:
            return {}
        scope = runs.function == rows[0]["function"], same(runs.tenant, rows[0].get("tenant"))
        read = select(runs.idempotency_key, runs.id, runs.key_fingerprint)
        found = self._connection.execute(read.where(*scope, runs.idempotency_key.in_(keys)))
        return {key: (ident, recorded) for key, ident, recorded in found}

    def _same(self, row: Mapping[str, Any], found: Mapping[str, tuple[UUID, str | None]]) -> UUID | None:
        """Return the id of the run that a row's key started before, if it is there still."""
        if (known := found.get(row["idempotency_key"])) is None:
            return None
        ident, recorded = known
        if recorded != row["key_fingerprint"]:
            key = row["idempotency_key"]
            raise KeyConflict(
                f"the key {key!r} belongs to {self._runs.called((ident,), row)}, which was started with other "
                "values; use a key for one payload only.",
                key,
                (ident,),
            )
        return ident
