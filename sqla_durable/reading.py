"""What is read of runs for the library's own use: the users' objects, and receipts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, Generic

from sqlalchemy import Connection, select
from sqlalchemy.orm import Session, with_polymorphic

from sqla_durable import receipt
from sqla_durable.exc import RunNotFound
from sqla_durable.receipt import Receipt, receipt_of
from sqla_durable.rows import AnyRow, Ident, among
from sqla_durable.run import RunT
from sqla_durable.store import Store


class Reading(Generic[RunT]):
    """Reads the runs of one store and their receipts.

    :param store: whose runs these are.
    """

    def __init__(self, store: Store[RunT]) -> None:
        self._store = store

    def load(self, session: Session, identities: Sequence[Ident]) -> dict[Ident, RunT]:
        """Load runs through the ORM and return them, detached, by their keys."""
        if not identities:
            return {}
        runs = self._store.runs
        # The rows are detached, where a subclass's own columns could not be loaded any more.
        whole = with_polymorphic(runs.mapper, "*") if len(list(runs.mapper.self_and_descendants)) > 1 else runs.mapper
        found = session.scalars(select(whole).where(among(runs.key, identities))).unique().all()
        session.expunge_all()
        return {runs.identity(row): row for row in found}

    def look(self, connection: Connection, identity: Ident) -> AnyRow:
        """Read who holds a run now, and how it stands.

        :raises RunNotFound: where there is no such run.
        """
        row = connection.execute(self._store.look, self._store.runs.parameters(identity)).one_or_none()
        if row is None:
            raise RunNotFound(f"there is no {self._store.runs.entity.__name__} with the key {identity!r}.")
        return row

    def receipts(self, connection: Connection, identity: Ident) -> tuple[Receipt, ...]:
        """Read the receipts of one run, in the order they were recorded."""
        # Whatever the key in its rows: the caller's may be a value that the column's type converts.
        return tuple(known for _, known in self._receipts(connection, [identity]))

    def known(self, connection: Connection, identities: Sequence[Ident]) -> dict[Ident, list[Receipt]]:
        """Read the receipts of some runs by their keys."""
        known: defaultdict[Ident, list[Receipt]] = defaultdict(list)
        for identity, recorded in self._receipts(connection, identities):
            known[identity].append(recorded)
        return known

    def _receipts(self, connection: Connection, identities: Sequence[Ident]) -> Iterator[tuple[Ident, Receipt]]:
        width = len(self._store.runs.key)
        for row in connection.execute(receipt.of_runs(self._store.receipts, identities)) if identities else ():
            columns: Sequence[Any] = tuple(row)
            yield tuple(columns[:width]), receipt_of(columns[width:])
