"""A claim: which runs it takes, in which order, what it hands out, and what it leaves alone."""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, func, text, update
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Cancelled, Ending, LostLease, Run, RunNotFound, Runs, UsageError
from sqla_durable.testing import make_due
from tests.support import (
    Plan,
    PlanStatus,
    PlanStep,
    approved_plan,
    column,
    entries,
    let_lapse,
    plan_statuses,
    write_entry,
)


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep)


@pytest.fixture
def others(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep, owner="another")


def due_in(factory: sessionmaker[Session], ident: UUID, seconds: float) -> None:
    with factory.begin() as session:
        due = func.now() + timedelta(seconds=seconds)
        session.execute(update(Plan).where(Plan.id == ident).values(available_at=due))


def test_a_claim_issues_a_fence_and_a_lease_and_counts_an_attempt(
    engine: Engine, session_factory: sessionmaker[Session], others: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory, note="as it was")
    run = others.claim(ident)
    assert run is not None
    lease = run.lease
    assert (lease.run, lease.identity, lease.fence, lease.attempt, lease.owner) == ("plan", (ident,), 1, 1, "another")
    assert pickle.loads(pickle.dumps(lease)) == lease
    assert (run.row.id, run.row.status, run.row.note) == (ident, PlanStatus.EXECUTING, "as it was")
    assert run.receipts == ()
    assert column(engine, ident, "lease_owner") == "another"
    with engine.connect() as connection:
        left = connection.scalar(text("SELECT lease_expires_at - started_at FROM plan"))
    assert timedelta(seconds=29) < left <= Plan.__lifecycle__.lease + timedelta(seconds=1)


def test_an_owner_that_is_not_named_says_which_process_holds_the_run(
    session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    import os
    import socket

    run = plans.claim(approved_plan(session_factory))
    assert run is not None
    assert run.lease.owner.startswith(f"{socket.gethostname()}:{os.getpid()}:")


def test_the_fence_only_ever_grows_and_attempts_start_anew_with_another_life(
    session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    issued = []
    for _ in range(2):
        run = plans.claim(ident)
        assert run is not None
        issued.append((run.lease.fence, run.lease.attempt))
        run.release()
    run = plans.claim(ident)
    assert run is not None
    run.fail(ValueError("no stock"))
    assert plans.requeue(ident)
    again = plans.claim(ident)
    assert again is not None
    assert [*issued, (again.lease.fence, again.lease.attempt)] == [(1, 1), (2, 2), (4, 1)]


@pytest.mark.past_guards
@pytest.mark.parametrize("status", [status for status in PlanStatus if status is not PlanStatus.APPROVED])
def test_only_a_ready_run_is_claimed(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], status: PlanStatus
) -> None:
    ident = approved_plan(session_factory)
    with session_factory.begin() as session:
        path = {PlanStatus.PENDING: None, PlanStatus.REJECTED: None}
        if status in path:
            session.execute(update(Plan).values(status=status))
        elif status is PlanStatus.CANCELLED:
            assert plan_statuses.transition(session, (Plan, ident), status)
        else:
            values = {
                "fence": 1,
                "attempts": 1,
                "lease_owner": "x",
                "lease_expires_at": func.now() + timedelta(hours=1),
            }
            session.execute(update(Plan).values(status=PlanStatus.EXECUTING, **values))
            if status is not PlanStatus.EXECUTING:
                assert plan_statuses.transition(session, (Plan, ident), status, from_=PlanStatus.EXECUTING)
    fence = column(engine, ident, "fence")
    assert plans.claim(ident) is None
    assert plans.claim(ident, run_now=True) is None
    assert plans.claim_due(10) == []
    assert column(engine, ident, "fence") == fence
    assert column(engine, ident, "status") is status


@pytest.mark.parametrize("verb", ["claim", "execute"])
def test_a_run_that_does_not_exist_is_an_error_and_not_a_lost_race(plans: Runs[Plan], verb: str) -> None:
    missing = uuid4()
    call = {"claim": plans.claim, "execute": lambda ident: plans.execute(ident, lambda run: None)}[verb]
    with pytest.raises(RunNotFound, match=f"there is no Plan with the key .*{missing}"):
        call(missing)


@pytest.mark.parametrize("wrong", [None, (), (1, 2)], ids=repr)
def test_what_is_no_key_is_refused(plans: Runs[Plan], wrong: object) -> None:
    with pytest.raises(UsageError, match=r"does not identify a Plan; its key is \(id\)"):
        plans.claim(wrong)


def test_the_loaded_object_stands_for_its_run(session_factory: sessionmaker[Session], plans: Runs[Plan]) -> None:
    ident = approved_plan(session_factory)
    with session_factory() as session:
        plan = session.get_one(Plan, ident)
        run = plans.claim(plan)
    assert run is not None
    assert run.lease.identity == (ident,)


# due


def test_a_run_that_is_not_due_is_not_claimed_unless_told_to_run_it_now(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    due_in(session_factory, ident, 3600)
    assert plans.claim(ident) is None
    assert plans.claim_due(10) == []
    outcome = plans.execute(ident, lambda run: pytest.fail("a run that is not due ran"))
    assert (outcome.ending, outcome.status) == (Ending.NOT_CLAIMABLE, PlanStatus.APPROVED)
    assert column(engine, ident, "attempts") == 0
    assert plans.execute(ident, lambda run: None, run_now=True).ending is Ending.LANDED


def test_a_run_becomes_due_by_itself(session_factory: sessionmaker[Session], plans: Runs[Plan]) -> None:
    ident = approved_plan(session_factory)
    due_in(session_factory, ident, 3600)
    with session_factory.begin() as session:
        make_due(session, Plan, ident)
    assert plans.claim(ident) is not None


def test_a_batch_takes_those_that_are_due_for_longest_first_and_no_more_than_asked(
    session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    due = {seconds: approved_plan(session_factory) for seconds in (-5, -60, 3600, -1, -30)}
    for seconds, ident in due.items():
        due_in(session_factory, ident, seconds)
    taken = [[run.lease.identity[0] for run in plans.claim_due(limit)] for limit in (2, 10, 10)]
    assert taken == [[due[-60], due[-30]], [due[-5], due[-1]], []]


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(plans: Runs[Plan], limit: int) -> None:
    for verb in (plans.claim_due, plans.reap):
        with pytest.raises(UsageError, match=f"limit={limit}: at least 1"):
            verb(limit)


# what a claim does with a dead holder's run


@pytest.mark.parametrize("verb", ["claim", "claim_due", "execute"])
def test_every_form_of_claim_reaps_what_has_lapsed_first(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], others: Runs[Plan], verb: str
) -> None:
    ident = approved_plan(session_factory)
    dead = others.claim(ident)
    assert dead is not None
    let_lapse(session_factory, ident)
    fences: list[int] = []
    if verb == "execute":
        plans.execute(ident, lambda run: fences.append(run.lease.fence))
    else:
        taken: Any = plans.claim(ident) if verb == "claim" else plans.claim_due(1)[0]
        fences.append(taken.lease.fence)
    assert fences == [2]
    assert [failure["type"] for failure in column(engine, ident, "failures")] == ["LeaseLapsed"]
    with pytest.raises(LostLease):
        dead.step("late", write_entry, "late")
    assert entries(engine) == []


def test_a_run_that_another_holds_is_a_lost_race(
    session_factory: sessionmaker[Session], plans: Runs[Plan], others: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    assert others.claim(ident) is not None
    assert plans.claim(ident) is None
    outcome = plans.execute(ident, lambda run: pytest.fail("ran twice"))
    assert (outcome.ending, outcome.status) == (Ending.LOST_RACE, PlanStatus.EXECUTING)


# a run that was claimed before it is carried out


def test_a_batch_claimed_run_is_checked_and_renewed_before_its_body_and_no_attempt_is_counted(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    (run,) = plans.claim_due(1)
    let_lapse(session_factory, ident)
    lapsed: list[bool] = []

    def carry_out(same: Run[Plan]) -> None:
        assert same is run
        with engine.connect() as connection:
            lapsed.append(bool(connection.scalar(text("SELECT lease_expires_at < now() FROM plan"))))

    assert plans.execute(run, carry_out).ending is Ending.LANDED
    assert lapsed == [False]
    assert column(engine, ident, "attempts") == 1


def test_a_batch_claimed_run_that_was_taken_over_does_not_start(
    session_factory: sessionmaker[Session], plans: Runs[Plan], others: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    (run,) = plans.claim_due(1)
    let_lapse(session_factory, ident)
    assert others.claim(ident) is not None
    assert plans.execute(run, lambda run: pytest.fail("ran without the lease")).ending is Ending.LOST_LEASE


def test_a_batch_claimed_run_that_was_asked_to_cancel_does_not_start(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    (run,) = plans.claim_due(1)
    with session_factory.begin() as session:
        assert plans.request_cancel(session, ident)
    outcome = plans.execute(run, lambda run: pytest.fail("ran though cancelled"))
    assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.CANCELLED)


def test_a_lease_goes_to_another_process_until_it_is_released(
    session_factory: sessionmaker[Session], plans: Runs[Plan], others: Runs[Plan]
) -> None:
    run = plans.claim(approved_plan(session_factory))
    assert run is not None
    run.step("first", write_entry, "a")
    elsewhere = others.hold(pickle.loads(pickle.dumps(run.lease)))
    assert [receipt.step for receipt in elsewhere.receipts] == ["first"]
    elsewhere.step("second", write_entry, "b")
    run.release()
    with pytest.raises(LostLease):
        elsewhere.step("third", write_entry, "c")
    with pytest.raises(LostLease):
        others.hold(run.lease)
    with pytest.raises(UsageError, match="this run has ended as approved; its handle is spent"):
        run.step("third", write_entry, "c")


def test_a_lease_on_another_table_is_refused(session_factory: sessionmaker[Session], plans: Runs[Plan]) -> None:
    from dataclasses import replace

    run = plans.claim(approved_plan(session_factory))
    assert run is not None
    with pytest.raises(UsageError, match="is a lease on other, not on plan"):
        plans.hold(replace(run.lease, run="other"))


def test_a_lease_taken_up_with_a_pending_cancel_request_learns_of_it_at_its_first_step(
    session_factory: sessionmaker[Session], plans: Runs[Plan]
) -> None:
    run = plans.claim(ident := approved_plan(session_factory))
    assert run is not None
    with session_factory.begin() as session:
        assert plans.request_cancel(session, ident)
    elsewhere = plans.hold(run.lease)
    with pytest.raises(Cancelled):
        elsewhere.step("only", write_entry, "a")
