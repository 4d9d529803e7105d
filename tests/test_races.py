"""For every pair of verbs on one run, both ways round: one wins, the other is told, and the row is consistent."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import LostLease, Runs
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, entries, let_lapse, plan_statuses
from tests.support_races import LOST, WON, Party, install_gate, race

# Each line is the verb that has made its write and not yet committed; each column the one that comes next. A cell is
# what the second is told, and where the run is left:
#   mine     running under the first fence, held by the lease that the two parties share
#   theirs   running under the next fence
#   reaped   ready, and the holder may resume it
#   let-go   ready, without an owner
#   requeued ready, in another life
# The first always wins, except where "either" of them may. "yet" is a renewal that skips the locked row: it does
# not know of the loss yet, and the next one does. Where both win, the second came lawfully after the first: a holder's
# renewal, then its step; a step that is replayed from the receipt of the same holder's other thread; a reaped run that
# its holder resumes; an operator's transition, which asks for no fence; a claim by id, which waits for the row of a
# lapsed run and then finds it ready.

RUNNING_BUT_LAPSED = """
           |step        |renew       |heal        |reap        |claim       |finish      |release     |transition
step       |won  mine   |won  mine   |lost mine   |lost mine   |lost mine   |won  done   |won  let-go |won  failed
renew      |won  mine   |won  mine   |lost mine   |lost mine   |lost mine   |won  done   |won  let-go |won  failed
heal       |won  mine   |won  reaped |lost reaped |lost reaped |won  theirs |won  done   |won  let-go |lost reaped
reap       |won  mine   |won  reaped |lost reaped |lost reaped |won  theirs |won  done   |won  let-go |lost reaped
claim      |lost theirs |yet  theirs |lost theirs |lost theirs |lost theirs |lost theirs |lost theirs |won  failed
finish     |lost done   |yet  done   |lost done   |lost done   |lost done   |lost done   |lost done   |lost done
release    |lost let-go |yet  let-go |lost let-go |lost let-go |won  theirs |lost let-go |lost let-go |lost let-go
transition |lost failed |yet  failed |lost failed |lost failed |lost failed |lost failed |lost failed |lost failed
"""

CANCEL_REQUESTED = """
           | cancel
step       | won  mine
renew      | won  mine
heal       | won  cancelled
reap       | won  cancelled
claim      | won  theirs
claim_due  | either cancelled-or-theirs
finish     | lost done
fail       | lost failed
release    | won  cancelled
transition | lost failed
cancel     | won  mine
"""
# A batch claim reaps in one statement and claims what it has reaped in the next; in between that is anybody's: the
# request lands a run that is ready, or is put down on one that is claimed again.

CANCEL_REQUESTED_FIRST = """
       | step           | renew     | heal      | reap      | claim          | claim_due | finish         | fail           | release       | requeue   | transition
cancel | cancelled mine | won  mine | lost mine | lost mine | lost cancelled | lost mine | cancelled mine | cancelled mine | won cancelled | lost mine | won  failed
"""  # noqa: E501

REAPED_TO_READY = """
        | step           | renew          | claim          | finish         | release        | reject
step    | won  mine      | won  mine      | lost mine      | won  done      | won  let-go    | lost mine
renew   | won  mine      | won  mine      | lost mine      | won  done      | won  let-go    | lost mine
claim   | lost theirs    | yet  theirs    | lost theirs    | lost theirs    | lost theirs    | lost theirs
finish  | lost done      | yet  done      | lost done      | lost done      | lost done      | lost done
release | lost let-go    | yet  let-go    | won  theirs    | lost let-go    | lost let-go    | won  cancelled
reject  | lost cancelled | yet  cancelled | lost cancelled | lost cancelled | lost cancelled | lost cancelled
"""

NEVER_CLAIMED = """
          | claim          | claim_due      | reject         | cancel
claim     | lost mine      | lost mine      | lost mine      | won  mine
claim_due | lost mine      | lost mine      | lost mine      | won  mine
reject    | lost cancelled | lost cancelled | lost cancelled | lost cancelled
cancel    | lost cancelled | lost cancelled | lost cancelled | lost cancelled
"""

FAILED = """
        | step          | renew         | heal          | claim         | requeue       | cancel
requeue | lost requeued | lost requeued | lost requeued | lost requeued | lost requeued | lost requeued
"""

READY_AND_ASKED_TO_CANCEL = """
       | heal           | reap           | requeue        | cancel
cancel | lost cancelled | lost cancelled | lost cancelled | lost cancelled
"""

READ_COMMITTED, REPEATABLE_READ, SERIALIZABLE = "READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"
SNAPSHOTS = [REPEATABLE_READ, SERIALIZABLE]
Both = tuple[Party, Party]
IMPORTANT = {"step", "claim", "finish", "heal", "transition"}


def cells(table: str) -> Iterator[tuple[str, str, str, str]]:
    header, *lines = [line.split("|") for line in table.strip("\n").splitlines()]
    for first, *row in lines:
        for second, cell in zip(header[1:], row, strict=True):
            told, left = cell.split()
            yield first.strip(), second.strip(), told, left


def every(*tables: str) -> Any:
    """Each pair under READ COMMITTED, and the most important ones under the levels that keep a snapshot."""
    found = [
        pytest.param(*cell, isolation, id=f"{cell[0]}-{cell[1]}-{isolation.replace(' ', '_').lower()}")
        for isolation in [READ_COMMITTED, *SNAPSHOTS]
        for cell in chain.from_iterable(map(cells, tables))
        if isolation == READ_COMMITTED or IMPORTANT.issuperset(cell[:2])
    ]
    return pytest.mark.parametrize(("first", "second", "told", "left", "isolation"), found)


@pytest.fixture
def gated(engine: Engine) -> Engine:
    install_gate(engine)
    return engine


@pytest.fixture
def parties(gated: Engine, isolation: str) -> Iterator[tuple[Party, Party]]:
    both = Party(gated, "first", isolation), Party(gated, "second", isolation)
    yield both
    for party in both:
        party.engine.dispose()


@every(RUNNING_BUT_LAPSED, CANCEL_REQUESTED, CANCEL_REQUESTED_FIRST)
def test_of_two_verbs_on_a_lapsed_run_one_wins_and_the_other_is_told(
    gated: Engine, session_factory: sessionmaker[Session], parties: Both, first: str, second: str, told: str, left: str
) -> None:
    ahead, behind = parties
    ident = held_by_both(session_factory, ahead, behind)
    let_lapse(session_factory, ident)
    meet(gated, ident, (ahead, first), (behind, second), told, left)


@every(REAPED_TO_READY)
def test_of_two_verbs_on_a_reaped_run_one_wins_and_the_other_is_told(
    gated: Engine, session_factory: sessionmaker[Session], parties: Both, first: str, second: str, told: str, left: str
) -> None:
    ahead, behind = parties
    ident = held_by_both(session_factory, ahead, behind)
    let_lapse(session_factory, ident)
    assert Runs(session_factory, Plan, PlanStep).heal(ident)
    meet(gated, ident, (ahead, first), (behind, second), told, left)


@every(NEVER_CLAIMED)
def test_of_two_verbs_on_a_ready_run_one_wins_and_the_other_is_told(
    gated: Engine, session_factory: sessionmaker[Session], parties: Both, first: str, second: str, told: str, left: str
) -> None:
    ahead, behind = parties
    ident = approved_plan(session_factory)
    meet(gated, ident, (ahead, first), (behind, second), told, left)


@every(READY_AND_ASKED_TO_CANCEL)
def test_of_a_request_and_another_verb_on_a_ready_run_the_request_stands(
    gated: Engine, session_factory: sessionmaker[Session], parties: Both, first: str, second: str, told: str, left: str
) -> None:
    ahead, behind = parties
    ident = approved_plan(session_factory)
    meet(gated, ident, (ahead, first), (behind, second), told, left)


@every(FAILED)
def test_of_two_verbs_on_a_failed_run_one_wins_and_the_other_is_told(
    gated: Engine, session_factory: sessionmaker[Session], parties: Both, first: str, second: str, told: str, left: str
) -> None:
    ahead, behind = parties
    ident = held_by_both(session_factory, ahead, behind)
    with session_factory.begin() as session:
        assert plan_statuses.transition(session, (Plan, ident), PlanStatus.FAILED, from_=PlanStatus.EXECUTING)
    meet(gated, ident, (ahead, first), (behind, second), told, left)


def test_every_pair_of_verbs_stands_in_the_table() -> None:
    verbs = {"step", "renew", "heal", "reap", "claim", "finish", "release", "transition"}
    pairs = {(first, second) for first, second, _, _ in cells(RUNNING_BUT_LAPSED)}
    assert pairs >= {(first, second) for first in verbs for second in verbs}


def held_by_both(factory: sessionmaker[Session], *parties: Party) -> UUID:
    """A running plan whose one lease several processes have a copy of."""
    ident = approved_plan(factory)
    run = Runs(factory, Plan, PlanStep, owner="holder").claim(ident)
    assert run is not None
    for party in parties:
        party.handle = party.plans.hold(run.lease)
    return ident


def meet(
    engine: Engine, ident: UUID, ahead: tuple[Party, str], behind: tuple[Party, str], expected: str, left: str
) -> None:
    (first, one), (second, other) = ahead, behind
    told = race(engine, lambda: first.act(one, ident), lambda: second.act(other, ident))
    if expected == "either":
        expected, left = WON, "cancelled" if told.first == LOST else "theirs"
    else:
        assert told.first == WON
    assert told.second == (WON if expected == "yet" else expected)
    if expected == "yet":
        assert not told.waited
    if other == "transition":
        # The caller's own transaction is the caller's to retry: no savepoint hides the conflict.
        assert (second.conflicts > 0) == (told.waited and second.isolation in SNAPSHOTS)
    assert_left(engine, ident, left)
    assert_effects_match_receipts(engine, ident)
    if second.handle is not None and left in {"theirs", "done", "let-go", "failed", "cancelled"}:
        assert_spent(engine, ident, first if one not in {"finish", "fail", "release"} else second)


def assert_left(engine: Engine, ident: UUID, left: str) -> None:
    with Session(engine) as session:
        plan = session.get_one(Plan, ident)
        assert (
            plan.status
            is {
                "mine": PlanStatus.EXECUTING,
                "theirs": PlanStatus.EXECUTING,
                "reaped": PlanStatus.APPROVED,
                "let-go": PlanStatus.APPROVED,
                "requeued": PlanStatus.APPROVED,
                "done": PlanStatus.EXECUTED,
                "failed": PlanStatus.FAILED,
                "cancelled": PlanStatus.CANCELLED,
            }[left]
        )
        running = plan.status is PlanStatus.EXECUTING
        assert (plan.lease_expires_at is not None) == running
        assert (plan.lease_owner is not None) == (running or left == "reaped")
        assert (plan.finished_at is not None) == (plan.status in plan_statuses.terminal)
        if left in {"theirs", "mine", "reaped", "let-go", "done"}:
            assert plan.fence == plan.attempts == (2 if left == "theirs" else 1)


def assert_effects_match_receipts(engine: Engine, ident: UUID) -> None:
    with Session(engine) as session:
        receipts = session.scalars(select(PlanStep).where(PlanStep.plan_id == ident)).all()
        assert [receipt.result for receipt in receipts] == entries(engine)


def assert_spent(engine: Engine, ident: UUID, party: Party) -> None:
    """The lease that the two shared can write nothing any more."""
    before = snapshot(engine, ident)
    handle = party.held
    for write in (handle.renew, lambda: handle.step("late", lambda session: None), handle.finish, handle.release):
        with pytest.raises(LostLease):
            write()
    assert snapshot(engine, ident) == before


def snapshot(engine: Engine, ident: UUID) -> Any:
    with engine.connect() as connection:
        return connection.execute(select(Plan.__table__).where(Plan.id == ident)).one()
