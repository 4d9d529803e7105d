"""Claiming the runs of functions: those without limits as any others, those with limits in turns."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Final, cast

from sqlalchemy import Connection
from sqlalchemy.orm import Session

from sqla_durable.claims import Claimed, ClaimedRow, Claims
from sqla_durable.exc import RetryableError
from sqla_durable.functions import limited
from sqla_durable.functions.definition import Registry
from sqla_durable.functions.model import FunctionRows, FunctionT
from sqla_durable.holder import Holder
from sqla_durable.prepared import Prepared
from sqla_durable.reading import Reading
from sqla_durable.rows import AnyRow, arguments
from sqla_durable.store import Store

_Part = Callable[[int], list[Holder[FunctionT]]]
_REAPED: Final = 100


class FunctionClaims(Claims[FunctionT]):
    """Claims the runs of the functions that this process knows.

    :param store: whose runs these are.
    :param reading: reads them.
    :param owner: the holder's name.
    :param registry: the functions.
    """

    def __init__(
        self, store: Store[FunctionT], reading: Reading[FunctionT], owner: str | None, registry: Registry
    ) -> None:
        super().__init__(store, reading, owner)
        self._registry = registry
        self._limited_first = False
        self._limited: dict[int, Prepared] = {}

    def check(self) -> None:
        """Refuse nothing: this is what claims them."""

    def terms(self) -> dict[str, Any]:
        """What a claim of runs without limits is executed with, besides a key."""
        return {**super().terms(), **arguments(functions=self._registry.unlimited())}

    @property
    def isolation(self) -> str | None:
        """The isolation level that a claim by key needs: one in which each statement sees what was committed before."""
        return "READ COMMITTED" if self._registry.limits() else None

    def due(self, limit: int) -> list[Holder[FunctionT]]:
        """Claim up to ``limit`` due runs, with and without limits, which take turns to be claimed first."""
        if not self._registry.limits():
            return super().due(limit)
        parts: list[_Part[FunctionT]] = [super().due, self._due_under_limits]
        if not self._registry.unlimited():
            del parts[0]
        elif self._limited_first:
            parts.reverse()
        self._limited_first = not self._limited_first
        claimed: list[Holder[FunctionT]] = []
        for part in parts:
            try:
                claimed += part(limit - len(claimed)) if len(claimed) < limit else []
            except RetryableError:
                if not claimed:
                    raise
        return claimed

    # under limits

    def _due_under_limits(self, limit: int) -> list[Holder[FunctionT]]:
        """Claim in a transaction, which the lock on the limits lasts for."""
        if self._loading.plain:
            sent = time.monotonic()
            claimed = self.store.execute(
                lambda _, connection: self._rows_under_limits(connection, limit), isolation=self.isolation
            )
            return self._marked(self._plain_holders(claimed, sent))

        def work(session: Session, connection: Connection) -> list[Holder[FunctionT]]:
            claimed = self._rows_under_limits(connection, limit)
            return self._holders(session, connection, [self._lease_of(values) for values, _ in claimed])

        return self._marked(self.store.execute(work, isolation=self.isolation))

    def _rows_under_limits(self, connection: Connection, limit: int) -> list[ClaimedRow]:
        """Claim until there is nothing more that may be.

        Once is enough unless something was reaped, whose place the statement did not see to be free, or a run took a
        place of its tenant's and was then refused one of its function's.
        """
        connection.execute(self._turn)
        claimed: list[ClaimedRow] = []
        crossing = self._registry.concurrency_per_tenant is not None
        while True:
            reaped, more = self._once_under_limits(connection, limit - len(claimed))
            claimed += more
            if len(claimed) == limit or not (reaped or (more and crossing)):
                break
        self.soon = None
        if len(claimed) < limit and any(each.rate for each in self._registry.limits().values()):
            self.soon = connection.scalar(self._next_token, self._terms_under_limits())
        return claimed

    def _once_under_limits(self, connection: Connection, limit: int) -> Claimed:
        statement = self._prepare(self._limited, limit, partial(limited.claim_due, self._rows))
        return self._claimed(statement, connection, self._terms_under_limits())

    def _claim_one(self, connection: Connection, key: dict[str, Any], *, run_now: bool) -> AnyRow | None:
        """Claim one run, whichever kind it is of.

        Its row is locked before the turn to claim under limits has come: a step of its holder's may take long, and all
        who claim under limits would wait for it.
        """
        limits = self._registry.limits()
        if self._registry.unlimited() or not limits:
            row = super()._claim_one(connection, key, run_now=run_now)
            if row is not None or not limits:
                return row
        terms = {**key, **self._terms_under_limits()}
        locked: AnyRow | None = connection.execute(limited.lock_one(self._rows, run_now=run_now), terms).first()
        if locked is None:
            return None
        connection.execute(self._turn)
        claiming = limited.claim_one(self._rows, run_now=run_now)
        while (row := connection.execute(claiming, terms).one_or_none()) is None:
            # Only then: where there is a place, the dead are left to a worker.
            *_, function, tenant = locked
            rivals = arguments(function=function, tenant=tenant)
            if not connection.execute(limited.reap_rivals(self._rows, _REAPED), rivals).all():
                return None
        return row

    def _marked(self, holders: list[Holder[FunctionT]]) -> list[Holder[FunctionT]]:
        for holder in holders:
            holder.limited = True
        return holders

    def _terms_under_limits(self) -> dict[str, Any]:
        limits, per_tenant = self._registry.limits(), self._registry.concurrency_per_tenant
        return {**super().terms(), **limited.terms(limits, per_tenant)}

    @property
    def _rows(self) -> FunctionRows[FunctionT]:
        return cast("FunctionRows[FunctionT]", self.runs)

    @cached_property
    def _next_token(self) -> Any:
        return limited.next_token(self._rows)

    @cached_property
    def _turn(self) -> Any:
        store = self.store
        schema = store.schema_translate_map.get(self.runs.table.schema, self.runs.table.schema)
        return limited.turn(self._rows, schema)
