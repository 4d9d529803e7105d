"""Holders in processes of their own: frozen past their lease and thawed again, or handed a lease by another process."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, select, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, LostLease, Outcome, Run, Runs
from tests.programs import holder
from tests.support import Entry, entries, eventually, write_entry
from tests.support_brief import BRIEF, ErrandStatus
from tests.support_processes import Program

STEPS = ["first", "second", "third"]


@pytest.fixture
def errands(engine: Engine) -> Iterator[Runs[Any]]:
    BRIEF.create(engine)
    # A frozen holder that kept its row for ever would be waited for no longer than this.
    patience = create_engine(engine.url, connect_args={"options": "-c lock_timeout=15s"})
    yield BRIEF.runs(sessionmaker(patience), owner="the new holder")
    patience.dispose()


def started(engine: Engine, place: str) -> Program:
    return Program("holder", engine.url.render_as_string(hide_password=False), place)


def carry_out(run: Run[Any]) -> None:
    """What the program does, by another hand."""
    run.step("first", write_entry, "fresh, first")
    run.step("second", write_entry, "fresh")
    run.external("third", lambda: "fresh")


def take_over(errands: Runs[Any], ident: UUID) -> Outcome:
    """Try until the run can be had, as a worker does."""

    def tried() -> Outcome | None:
        outcome = errands.execute(ident, carry_out)
        return outcome if outcome.ending is Ending.LANDED else None

    return eventually(tried, "the end of the frozen holder's lease")


def everything(engine: Engine) -> list[Any]:
    with engine.connect() as connection:
        tables = BRIEF.run.__table__, BRIEF.receipt.__table__, Entry.__table__
        return [connection.execute(select(table)).all() for table in tables]


def backends(engine: Engine, state: str) -> int:
    query = text("SELECT count(*) FROM pg_stat_activity WHERE application_name = :name AND state = :state")
    with engine.connect() as connection:
        return connection.scalar(query, {"name": holder.NAME, "state": state}) or 0


@pytest.mark.parametrize(
    ("place", "kept"),
    [
        ("step", ["holder, first", "fresh"]),
        ("call", ["holder, first", "holder"]),
        ("between", ["holder, first", "fresh"]),
        ("landing", ["holder, first", "holder"]),
    ],
)
def test_a_holder_frozen_past_its_lease_is_replaced_and_writes_nothing_when_it_thaws(
    engine: Engine, session_factory: sessionmaker[Session], errands: Runs[Any], place: str, kept: list[str]
) -> None:
    ident = BRIEF.new(session_factory)
    with started(engine, place) as frozen:
        assert frozen.ask({"ident": str(ident)}) == place
        frozen.freeze()
        outcome = take_over(errands, ident)
        assert outcome.status is ErrandStatus.DONE
        assert [receipt.step for receipt in outcome.receipts] == STEPS
        assert entries(engine) == kept
        before = everything(engine)
        frozen.thaw()
        frozen.send("go on")
        ending, _, _ = frozen.receive()
        assert frozen.wait() == 0
    assert ending == Ending.LOST_LEASE.value
    assert everything(engine) == before
    with session_factory() as session:
        run = session.get_one(BRIEF.run, ident)
        assert (run.fence, run.attempts) == (2, 2)


def test_a_frozen_step_gives_its_row_back_when_its_idle_time_is_over(
    engine: Engine, session_factory: sessionmaker[Session], errands: Runs[Any]
) -> None:
    ident = BRIEF.new(session_factory)
    with started(engine, "step") as frozen:
        frozen.ask({"ident": str(ident)})
        frozen.freeze()
        eventually(lambda: backends(engine, "idle in transaction") == 0, "the end of the frozen transaction")
        assert eventually(errands.reap, "the lapse of the frozen holder's lease") == 1
        # Reaped to ready and claimed by nobody: the holder learns that its step was cut off, and gives the run back.
        frozen.thaw()
        frozen.send("go on")
        assert frozen.receive() == [Ending.INTERRUPTED.value, ErrandStatus.READY.value, "StepTimeout"]
    assert entries(engine) == ["holder, first"]
    assert [receipt.step for receipt in errands.receipts(ident)] == ["first"]
    assert errands.execute(ident, carry_out).status is ErrandStatus.DONE
    assert entries(engine) == ["holder, first", "fresh"]


def test_a_message_sent_by_a_frozen_holder_is_not_sent_twice_if_nobody_took_the_run(
    engine: Engine, session_factory: sessionmaker[Session], errands: Runs[Any]
) -> None:
    ident = BRIEF.new(session_factory)
    with started(engine, "call") as frozen:
        frozen.ask({"ident": str(ident)})
        frozen.freeze()
        assert eventually(errands.reap, "the lapse of the frozen holder's lease") == 1
        frozen.thaw()
        frozen.send("go on")
        assert frozen.receive() == [Ending.LANDED.value, ErrandStatus.DONE.value, "NoneType"]
    receipts = errands.receipts(ident)
    assert [(receipt.step, receipt.result, receipt.fence) for receipt in receipts][2] == ("third", "holder", 1)
    with session_factory() as session:
        assert session.get_one(BRIEF.run, ident).attempts == 1


# a lease in another process


def claimed(session_factory: sessionmaker[Session], errands: Runs[Any]) -> Run[Any]:
    run = errands.claim(BRIEF.new(session_factory))
    assert run is not None
    return run


def test_a_pickled_lease_is_held_in_another_process_to_the_end(
    engine: Engine, session_factory: sessionmaker[Session], errands: Runs[Any]
) -> None:
    run = claimed(session_factory, errands)
    with started(engine, "nowhere") as other:
        answer = other.ask({"lease": pickle.dumps(run.lease).hex()})
    assert answer == [Ending.LANDED.value, ErrandStatus.DONE.value, "NoneType"]
    assert {receipt.fence for receipt in errands.receipts(run.lease.identity)} == {run.lease.fence}
    with pytest.raises(LostLease):
        run.step("late", write_entry, "late")
    assert entries(engine) == ["holder, first", "holder"]


def test_a_lease_comes_back_from_a_process_that_was_killed_with_it(
    engine: Engine, session_factory: sessionmaker[Session], errands: Runs[Any]
) -> None:
    run = claimed(session_factory, errands)
    with started(engine, "between") as other:
        other.ask({"lease": pickle.dumps(run.lease).hex()})
        other.kill()
    # The same fence: the lease may have lapsed meanwhile, and what the dead process did is found, not done again.
    outcome = errands.execute(run, carry_out)
    assert outcome.status is ErrandStatus.DONE
    assert [(receipt.step, receipt.fence) for receipt in outcome.receipts] == [
        (step, run.lease.fence) for step in STEPS
    ]
    assert entries(engine) == ["holder, first", "fresh"]


def test_a_pickled_lease_is_worth_nothing_once_the_run_was_claimed_again(
    engine: Engine, session_factory: sessionmaker[Session], errands: Runs[Any]
) -> None:
    run = claimed(session_factory, errands)
    run.release()
    newer = errands.claim(run.lease.identity)
    assert newer is not None
    with started(engine, "nowhere") as other:
        other.send({"lease": pickle.dumps(run.lease).hex()})
        assert other.wait() != 0
    assert entries(engine) == []
    newer.finish()


def test_a_lease_that_was_released_in_another_process_is_spent_here(
    session_factory: sessionmaker[Session], errands: Runs[Any]
) -> None:
    run = claimed(session_factory, errands)
    copy = pickle.loads(pickle.dumps(run.lease))
    assert copy == run.lease
    errands.hold(copy).release()
    with pytest.raises(LostLease):
        run.renew()
    with pytest.raises(LostLease):
        errands.hold(run.lease)
