"""A handler's own row in the sessions of its bodies: added, merged, changed; its lease is not theirs to write."""

from __future__ import annotations

from contextlib import suppress
from uuid import UUID

import pytest
from sqlalchemy import Engine
from sqlalchemy.orm import Session, load_only, sessionmaker

from sqla_durable import LostLease, Run, Runs, UsageError
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, column, let_lapse, write_entry


@pytest.fixture
def ident(session_factory: sessionmaker[Session]) -> UUID:
    return approved_plan(session_factory, actions=["a"])


@pytest.fixture
def run(session_factory: sessionmaker[Session], ident: UUID) -> Run[Plan]:
    run = Runs(session_factory, Plan, PlanStep).claim(ident)
    assert run is not None
    return run


def test_the_row_added_to_a_steps_session_is_changed_there_and_readable_afterwards(
    engine: Engine, run: Run[Plan], ident: UUID
) -> None:
    def body(session: Session, note: str) -> None:
        session.add(run.row)
        run.row.note = note

    run.step("one", body, "first")
    assert run.row.actions == ["a"]
    run.step("two", body, "second")
    assert (run.row.note, column(engine, ident, "note")) == ("second", "second")


def test_merging_the_row_does_not_put_its_old_lease_back(engine: Engine, run: Run[Plan], ident: UUID) -> None:
    run.renew()
    renewed = column(engine, ident, "lease_expires_at")
    assert renewed > run.row.lease_expires_at

    def body(session: Session) -> None:
        session.merge(run.row).note = "merged"

    run.step("one", body)
    assert column(engine, ident, "note") == "merged"
    assert column(engine, ident, "lease_expires_at") >= renewed


def test_a_stale_holder_that_merges_its_row_elsewhere_does_not_get_its_fence_back(
    engine: Engine, session_factory: sessionmaker[Session], run: Run[Plan], ident: UUID
) -> None:
    let_lapse(session_factory, ident)
    other = Runs(session_factory, Plan, PlanStep).claim(ident)
    assert other is not None
    # Being refused is as good.
    with suppress(UsageError), session_factory.begin() as session:
        session.merge(run.row).note = "stale"
    assert column(engine, ident, "fence") == other.lease.fence
    with pytest.raises(LostLease):
        run.step("one", write_entry, "stale")
    assert other.step("one", write_entry, "fresh") == "fresh"


def test_a_row_that_was_loaded_in_part_can_be_changed(
    engine: Engine, session_factory: sessionmaker[Session], ident: UUID
) -> None:
    with session_factory.begin() as session:
        plan = session.get_one(Plan, ident, options=[load_only(Plan.note, raiseload=True)])
        plan.note = "in part"
    assert column(engine, ident, "note") == "in part"


def test_an_operator_may_take_a_run_away_through_the_orm(
    engine: Engine, session_factory: sessionmaker[Session], run: Run[Plan], ident: UUID
) -> None:
    with session_factory.begin() as session:
        plan = session.get_one(Plan, ident)
        plan.status = PlanStatus.FAILED
        plan.lease_owner = plan.lease_expires_at = None
    assert column(engine, ident, "status") is PlanStatus.FAILED
    with pytest.raises(LostLease):
        run.step("one", write_entry, "stale")


def test_an_operator_may_reset_the_attempts_through_the_orm(
    engine: Engine, session_factory: sessionmaker[Session], run: Run[Plan], ident: UUID
) -> None:
    run.release()
    with session_factory.begin() as session:
        session.get_one(Plan, ident).attempts = 0
    assert column(engine, ident, "attempts") == 0
