"""Operations carried out by workers: nobody waits for them, and each is issued once however many workers poll."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import PENDING, Ending, Pending
from tests.support import PlanStatus, approved_plan, column, eventually
from tests.support_workers import Crew, plans_by, working


class Bank:
    """Takes batches in, and is through with each after it was asked for the third time."""

    def __init__(self) -> None:
        self.issues: Counter[UUID] = Counter()
        self.polls: Counter[UUID] = Counter()
        self._lock = threading.Lock()

    def carry_out(self, run: Any) -> None:
        ident: UUID = run.row.id

        def start() -> UUID:
            with self._lock:
                self.issues[ident] += 1
            return ident

        def poll(ids: UUID) -> str | Pending:
            assert ids == ident
            with self._lock:
                self.polls[ident] += 1
                return PENDING if self.polls[ident] < 3 else "booked"

        assert run.operation("batch", start=start, poll=poll, every=timedelta(0)) == "booked"


def test_many_operations_are_each_issued_once_and_polled_to_their_end_by_workers_of_both_forms(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    idents = [approved_plan(session_factory) for _ in range(40)]
    bank = Bank()
    with (
        working("sync", engine, plans_by(bank.carry_out), concurrency=4),
        working("async", engine, plans_by(bank.carry_out), concurrency=8),
    ):
        eventually(
            lambda: {column(engine, ident, "status") for ident in idents} == {PlanStatus.EXECUTED}, "all of them"
        )
    assert bank.issues == Counter(idents)
    assert set(bank.polls.values()) == {3}
    assert {column(engine, ident, "fence") for ident in idents} == {3}


@pytest.mark.parametrize("form", ["sync", "async"])
def test_a_worker_leaves_an_operation_that_is_pending_and_counts_it_as_suspended(
    engine: Engine, session_factory: sessionmaker[Session], form: str, caplog: pytest.LogCaptureFixture
) -> None:
    ident = approved_plan(session_factory)

    def carry_out(run: Any) -> None:
        run.operation("batch", start=lambda: 1, poll=lambda ids: PENDING)

    crew = Crew(form, engine.url, plans_by(carry_out))
    with caplog.at_level(logging.WARNING, "sqla_durable"):
        assert crew.run_due(timedelta(seconds=20)) == Counter({Ending.SUSPENDED: 1})
    assert caplog.records == [], "to wait is nothing to warn of"
    assert column(engine, ident, "status") is PlanStatus.APPROVED


def test_a_worker_warns_of_a_service_that_cannot_be_asked(
    engine: Engine, session_factory: sessionmaker[Session], caplog: pytest.LogCaptureFixture
) -> None:
    approved_plan(session_factory)

    def poll(ids: int) -> int:
        raise ConnectionError("no route to host")

    crew = Crew("sync", engine.url, plans_by(lambda run: run.operation("batch", start=lambda: 1, poll=poll)))
    assert crew.run_due(timedelta(seconds=20)) == Counter({Ending.SUSPENDED: 1})
    assert "could not be asked" in caplog.text
    assert "ConnectionError" in caplog.text
