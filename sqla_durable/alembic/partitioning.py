"""A table that becomes a partitioned one: its rows stay where they are, in what is the default partition from then on.

PostgreSQL cannot turn a table into a partitioned one, but it attaches a table to one. So nothing is copied, and the
locks are short; rows move when their months are created, and back together with a downgrade.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from alembic.operations import ops
from sqlalchemy import Connection, Row, Table, text

from sqla_durable import catalogue
from sqla_durable.alembic.operation import SqlOp
from sqla_durable.guard import PREFIX
from sqla_durable.mapping import plain_dialect
from sqla_durable.monthly import COPIED, Partitioned, partitioned

_log: Final = logging.getLogger(f"alembic.{__name__}")  # below that one, whose level Alembic's ini file sets
_LONGEST_NAME: Final = 63
_LABELS: Final = {"p": "pkey", "u": "key", "x": "excl"}
_COMMENT: Final = (
    "The table becomes the default partition of one of its name. Privileges and policies of the table are not",
    "taken along: grant them here again.",
)

_KIND: Final = text("SELECT relkind FROM pg_class WHERE oid = to_regclass(:table)")
_DEFAULT: Final = text(
    "SELECT pg_get_partkeydef(partrelid) AS key, format('%I', relname) AS name,"
    " array_to_string(reloptions, ', ') AS storage,"
    " ARRAY(SELECT format('ADD CONSTRAINT %I %s', conname, pg_get_constraintdef(f.oid)) FROM pg_constraint f"
    " WHERE conrelid = partdefid AND contype = 'f' AND conparentid = 0 ORDER BY conname) AS own"
    " FROM pg_partitioned_table LEFT JOIN pg_class ON pg_class.oid = partdefid WHERE partrelid = to_regclass(:table)"
)
_CONSTRAINTS: Final = text(
    "SELECT conname AS name, contype AS kind, pg_get_constraintdef(c.oid) AS definition, confrelid = conrelid AS own,"
    " ARRAY(SELECT attname::text FROM unnest(conkey) WITH ORDINALITY AS k (number, position)"
    " JOIN pg_attribute ON attrelid = conrelid AND attnum = number ORDER BY position) AS columns"
    " FROM pg_constraint c WHERE conrelid = to_regclass(:table) AND contype IN ('p', 'u', 'x', 'f')"
    " ORDER BY contype = 'f', contype, conname"
)
_INDEXES: Final = text(
    "SELECT c.relname AS name, pg_get_indexdef(indexrelid, 0, true) AS definition,"
    " ARRAY(SELECT attname::text FROM pg_attribute WHERE attrelid = indexrelid ORDER BY attnum) AS columns"
    " FROM pg_index JOIN pg_class c ON c.oid = indexrelid WHERE indrelid = to_regclass(:table)"
    " AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = indexrelid AND conrelid = indrelid) ORDER BY 1"
)
_REFERRING: Final = text(
    "SELECT conrelid::regclass::text AS table, conname AS name, pg_get_constraintdef(oid) AS definition"
    " FROM pg_constraint WHERE contype = 'f' AND conparentid = 0"
    " AND confrelid = to_regclass(:table) AND conrelid <> confrelid ORDER BY 1, 2"
)
_TRIGGERS: Final = text(
    "SELECT tgname AS name, pg_get_triggerdef(oid, true) AS definition FROM pg_trigger"
    " WHERE tgrelid = to_regclass(:table) AND NOT tgisinternal AND NOT starts_with(tgname, :prefix) ORDER BY tgname"
)


def compare_partitioning(
    connection: Connection, modified: ops.ModifyTableOps, there: Table | None, table: Table | None
) -> bool:
    """Have a table that exists become a partitioned one, before all else; return whether it does.

    The other way round, there is nothing but a warning.
    """
    if there is None:
        return False
    if table is None:
        _keep_partitioning(connection, modified, there)
        return False
    name, parts = catalogue.qualified(connection, there), partitioned(table)
    is_there = connection.execute(_KIND, {"table": name}).scalar() == "p"
    if parts is None or is_there:
        if is_there and table.dialect_options["postgresql"].get("partition_by") is None:
            _log.warning("Table %r is partitioned, and its model does not say so; nothing is done about that", name)
        return False
    _log.info("Detected that table %r becomes a partitioned one", name)
    conversion = _Conversion(connection, there, name, parts)
    # Each partition has that foreign key to itself, and the table has none.
    unsealed = conversion.unsealed()
    kept = (op for op in modified.ops if unsealed is None or getattr(op, "constraint_name", None) != unsealed)
    modified.ops[:] = [SqlOp(list(conversion.forth()), list(conversion.back()), _COMMENT), *kept]
    return True


def _keep_partitioning(connection: Connection, modified: ops.ModifyTableOps, there: Table) -> None:
    """Have a table that is removed come back with its default partition, without which it would refuse all rows."""
    name = catalogue.qualified(connection, there)
    found = connection.execute(_DEFAULT, {"table": name}).one_or_none()
    if found is None:
        return
    there.dialect_kwargs["postgresql_partition_by"] = found.key.replace("%", "%%")
    if found.name is not None:
        default = f"{name.removesuffix(_quoted(there.name))}{found.name}"
        storage = f" WITH ({found.storage})" if found.storage else ""
        own = [f"ALTER TABLE {default} {each}" for each in found.own]
        modified.ops.append(SqlOp([], [f"CREATE TABLE {default} PARTITION OF {name} DEFAULT{storage}", *own]))


@dataclass(frozen=True)
class _Conversion:
    connection: Connection
    there: Table
    name: str
    parts: Partitioned

    def forth(self) -> Iterator[str]:
        """Attach the table to a partitioned one that takes its name."""
        yield from self._detached()
        yield f"ALTER TABLE {self.name} RENAME TO {_quoted(self.parts.default_name)}"
        yield from self._renamed()
        like = " ".join(f"INCLUDING {each}" for each in (*COPIED, "COMMENTS"))
        key = self.parts.column_name
        yield f"CREATE TABLE {self.name} (LIKE {self.default} {like}) PARTITION BY RANGE ({key})"
        yield f"ALTER TABLE {self.name} ATTACH PARTITION {self.default} DEFAULT"
        for each in self._constraints():
            if each.name != self.unsealed():
                yield f"ALTER TABLE {self.name} ADD CONSTRAINT {_quoted(each.name)} {each.definition}"
        yield from (each.definition for each in self._read(_INDEXES))
        yield from self._attached()

    def back(self) -> Iterator[str]:
        """Gather all rows in the default partition, and give that the name of the table."""
        yield from self._detached()
        yield f"ALTER TABLE {self.name} DETACH PARTITION {self.default}"
        columns = ", ".join(_quoted(column.name) for column in self.there.columns if column.computed is None)
        # Or the table could not be altered before what the INSERT defers has been checked.
        yield "SET CONSTRAINTS ALL IMMEDIATE"
        yield f"INSERT INTO {self.default} ({columns}) SELECT {columns} FROM {self.name}"
        yield f"DROP TABLE {self.name}"
        yield f"ALTER TABLE {self.default} RENAME TO {_quoted(self.there.name)}"
        yield from self._renamed_back()
        yield from self._attached()

    @property
    def default(self) -> str:
        return self._beside(self.parts.default_name)

    def unsealed(self) -> str | None:
        """The name of the foreign key by which the table refuses a receipt that is not sealed."""
        if self.parts.guard is None:
            return None
        columns = [column.name for column in self.parts.guard[1]]
        return next((str(each.name) for each in self._constraints() if each.own and each.columns == columns), None)

    def _detached(self) -> Iterator[str]:
        for each in self._read(_REFERRING):
            yield f"ALTER TABLE {each.table} DROP CONSTRAINT {_quoted(each.name)}"
        for each in self._triggers():
            yield f"DROP TRIGGER {_quoted(each.name)} ON {self.name}"

    def _attached(self) -> Iterator[str]:
        yield from (each.definition for each in self._triggers())
        for each in self._read(_REFERRING):
            yield f"ALTER TABLE {each.table} ADD CONSTRAINT {_quoted(each.name)} {each.definition}"

    def _renamed(self) -> Iterator[str]:
        for before, after in self._constraint_names():
            yield f"ALTER TABLE {self.default} RENAME CONSTRAINT {_quoted(before)} TO {_quoted(after)}"
        for before, after in self._index_names():
            yield f"ALTER INDEX {self._beside(before)} RENAME TO {_quoted(after)}"

    def _renamed_back(self) -> Iterator[str]:
        for before, after in self._constraint_names():
            yield f"ALTER TABLE {self.name} RENAME CONSTRAINT {_quoted(after)} TO {_quoted(before)}"
        for before, after in self._index_names():
            yield f"ALTER INDEX {self._beside(after)} RENAME TO {_quoted(before)}"

    def _constraint_names(self) -> Iterator[tuple[str, str]]:
        """The names of constraints, and those that they would have in a partition that was created as one."""
        for each in self._constraints():
            if each.name == self.unsealed() and self.parts.guard is not None:
                yield each.name, self.parts.guard[0]
            elif each.kind in _LABELS:
                columns: list[str] = [] if each.kind == "p" else each.columns
                yield each.name, _chosen(self.parts.default_name, columns, _LABELS[each.kind])

    def _index_names(self) -> Iterator[tuple[str, str]]:
        for each in self._read(_INDEXES):
            yield each.name, _chosen(self.parts.default_name, each.columns, "idx")

    def _constraints(self) -> Sequence[Row[Any]]:
        return self._read(_CONSTRAINTS)

    def _triggers(self) -> Sequence[Row[Any]]:
        return self.connection.execute(_TRIGGERS, {"table": self.name, "prefix": PREFIX}).all()

    def _read(self, query: Any) -> Sequence[Row[Any]]:
        return self.connection.execute(query, {"table": self.name}).all()

    def _beside(self, name: str) -> str:
        """A name in the schema of the table, in SQL."""
        return self.name.removesuffix(_quoted(self.there.name)) + _quoted(name)


def _chosen(table: str, columns: Sequence[str], label: str) -> str:
    """Return the name that PostgreSQL would choose for a constraint or index of a table."""
    parts = [part.encode() for part in (table, "_".join(columns)) if part]
    lengths = [len(part) for part in parts]
    while sum(lengths) + len(lengths) + len(label) > _LONGEST_NAME:
        lengths[0 if lengths[0] > lengths[-1] else -1] -= 1
    cut = [part[:length].decode(errors="ignore") for part, length in zip(parts, lengths, strict=True)]
    return "_".join([*cut, label])


def _quoted(name: str) -> str:
    return plain_dialect().identifier_preparer.quote(name)
