"""What an operator who must may do past a guard, what becomes of it, and what a refusal is raised as."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import create_engine, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.orm import Session

from sqla_durable import ConfigurationError, GuardViolation, guard_violation
from sqla_durable.guard import overrides_of
from tests.support import Background, wait_until_blocked
from tests.support_guards import Status, World, write

UNDO = "UPDATE job SET status = 'ready', attempts = 0 WHERE id = :id"
REWRITE = "UPDATE job_step SET result = '2' WHERE job_id = :id"
ERASE = "DELETE FROM job_step WHERE job_id = :id"


@pytest.fixture
def world(empty_url: str) -> Iterator[World]:
    engine = create_engine(empty_url)
    yield World(engine, True)
    engine.dispose()


def records(world: World) -> list[Any]:
    overrides = overrides_of(world.models.job.__table__)
    with world.engine.connect() as connection:
        return list(connection.execute(select(overrides).order_by(overrides.c.id)))


def past(world: World, reason: str, *statements: str, **values: Any) -> None:
    with world.engine.begin() as connection:
        connection.execute(text("SELECT set_config('sqla_durable.override', :reason, true)"), {"reason": reason})
        for statement in statements:
            assert connection.execute(text(statement), values).rowcount == 1


def test_with_a_reason_it_is_done_and_recorded_in_the_same_transaction(world: World) -> None:
    ident = world.done()
    before = world.row(ident)
    past(world, " ticket 7 ", UNDO, REWRITE, ERASE, id=ident)
    assert world.row(ident).status == Status.READY
    assert world.runs.receipts(ident) == ()
    undone, rewritten, erased = records(world)
    assert (undone.table_name, undone.row_key, undone.operation) == ("job", {"id": str(ident)}, "UPDATE")
    assert (undone.old_row["status"], undone.new_row["status"]) == ("done", "ready")
    assert undone.old_row["created_at"] == undone.new_row["created_at"] != None  # noqa: E711
    assert undone.problem == "SD001: its status would go from done to ready"
    assert undone.written_at > before.finished_at
    key = {"job_id": str(ident), "step": "a"}
    assert (rewritten.table_name, rewritten.row_key, rewritten.operation) == ("job_step", key, "UPDATE")
    assert (rewritten.old_row["result"], rewritten.new_row["result"]) == (1, 2)
    assert (erased.row_key, erased.operation, erased.new_row) == (key, "DELETE", None)
    assert erased.old_row["result"] == 2
    assert {record.reason for record in (undone, rewritten, erased)} == {"ticket 7"}
    assert {record.written_by for record in (undone, rewritten, erased)} == {world.scalar("SELECT session_user")}


def test_a_receipt_that_is_inserted_and_all_that_are_truncated_are_recorded_as_well(world: World) -> None:
    ident = world.done()
    receipt = """INSERT INTO job_step (job_id, step, outcome, result, effect, fence)
        VALUES (:id, 'by hand', 'succeeded', '1', 'external', 1)"""
    past(world, "ticket 8", receipt, id=ident)
    with world.engine.begin() as connection:
        connection.execute(text("SET LOCAL sqla_durable.override = 'ticket 9'"))
        connection.execute(text("TRUNCATE job_step"))
    inserted, truncated = records(world)
    assert (inserted.operation, inserted.old_row, inserted.new_row["step"]) == ("INSERT", None, "by hand")
    assert inserted.row_key == {"job_id": str(ident), "step": "by hand"}
    assert (truncated.operation, truncated.row_key, truncated.old_row) == ("TRUNCATE", None, None)
    assert truncated.reason == "ticket 9"


@pytest.mark.parametrize("reason", ["", "   ", "\n"])
def test_an_empty_reason_does_not_count(world: World, reason: str) -> None:
    ident = world.done()
    with pytest.raises(DBAPIError, match="to ready"):
        past(world, reason, UNDO, id=ident)
    assert records(world) == []


def test_it_ends_with_its_transaction_and_what_is_rolled_back_is_not_recorded(world: World) -> None:
    ident = world.done()
    with world.engine.connect() as connection:
        with connection.begin() as transaction:
            connection.execute(text("SET LOCAL sqla_durable.override = 'ticket 7'"))
            connection.execute(text(UNDO), {"id": ident})
            transaction.rollback()
        with connection.begin(), pytest.raises(DBAPIError):
            connection.execute(text(UNDO), {"id": ident})
    assert records(world) == []


def test_what_would_not_have_been_refused_is_not_recorded(world: World) -> None:
    ident = world.failed()
    with world.factory.begin() as session:
        session.execute(text("SET LOCAL sqla_durable.override = 'ticket 7'"))
        session.execute(text("UPDATE job SET note = 'x', status = 'ready', attempts = 0, started_at = NULL"))
        session.execute(text("DELETE FROM job_step WHERE outcome = 'failed'"))
    assert world.row(ident).status == Status.READY
    assert records(world) == []


def test_checks_and_keys_hold_all_the_same(world: World) -> None:
    with pytest.raises(IntegrityError):
        past(world, "ticket 7", "UPDATE job SET status = 'running' WHERE id = :id", id=world.ready())
    assert records(world) == []


# --- what an operator may do without


def test_runs_are_deleted_with_their_receipts_and_both_tables_are_truncated_together(world: World) -> None:
    ident = world.done()
    world.done()
    assert world.execute("DELETE FROM job WHERE id = :id", id=ident) == 1
    world.execute("TRUNCATE job, job_step, job_signal")
    assert world.scalar("SELECT count(*) FROM job") == 0


def test_a_requeue_by_hand_is_a_requeue(world: World) -> None:
    ident = world.failed()
    requeue = "UPDATE job SET status = 'ready', attempts = 0, started_at = NULL, finished_at = NULL, error = NULL"
    assert world.execute(requeue) == 1
    assert world.execute("DELETE FROM job_step WHERE outcome = 'failed'") == 1
    assert world.runs.execute(ident, lambda run: run.step("b", write, 1)).status == Status.DONE


def test_columns_of_the_users_own_may_always_change(world: World) -> None:
    world.done()
    assert world.execute("UPDATE job SET note = 'x', id = id, fence = fence, status = status") == 1
    assert world.execute("UPDATE job_step SET tag = 'x', result = result, fence = fence") == 1


def test_where_triggers_do_not_fire_a_copy_of_the_rows_is_taken_as_it_is(world: World) -> None:
    """A restored dump, or what logical replication applies."""
    ident = world.done()
    columns = "job_id, step, outcome, result, error, effect, fence"
    copy = (
        f"INSERT INTO job_step ({columns}) SELECT job_id, 'copy', outcome, result, error, effect, fence FROM job_step"
    )
    with world.engine.begin() as connection:
        connection.execute(text("SET LOCAL session_replication_role = replica"))
        connection.execute(text(copy))
    assert [receipt.step for receipt in world.runs.receipts(ident)] == ["a", "copy"]


# --- what a refusal is raised as


def test_a_step_raises_it_as_an_error_of_ours_and_is_not_tried_again(world: World) -> None:
    other = world.done()

    def cheats(session: Session) -> None:
        session.execute(text(UNDO), {"id": other})

    outcome = world.runs.execute(world.ready(), lambda run: run.step("a", cheats))
    assert isinstance(outcome.exception, GuardViolation)
    assert (outcome.exception.sqlstate, outcome.exception.table) == ("SD001", "job")
    assert isinstance(outcome.exception.__cause__, DBAPIError)
    assert outcome.status == Status.FAILED
    assert outcome.receipts == ()
    assert world.row(other).status == Status.DONE


def test_a_body_that_lets_its_own_run_go_on_under_another_fence_commits_nothing(world: World) -> None:
    ident = world.ready()

    def cheats(session: Session) -> int:
        session.execute(text("UPDATE job SET fence = fence + 1 WHERE id = :id"), {"id": ident})
        return 1

    outcome = world.runs.execute(ident, lambda run: run.step("a", cheats))
    assert isinstance(outcome.exception, GuardViolation)
    assert world.row(ident).fence == 1


def test_a_body_may_try_and_go_on_in_a_savepoint(world: World) -> None:
    other = world.done()

    def tries(session: Session) -> str | None:
        try:
            with session.begin_nested():
                session.execute(text(UNDO), {"id": other})
        except DBAPIError as error:
            refused = guard_violation(error)
            return None if refused is None else refused.sqlstate
        return "done"

    outcome = world.runs.execute(world.ready(), lambda run: run.step("a", tries))
    assert (outcome.status, outcome.receipts[0].result) == (Status.DONE, "SD001")


def test_the_message_names_the_row_the_rule_and_the_remedy(world: World) -> None:
    ident = world.done()
    with pytest.raises(DBAPIError) as caught:
        world.execute(UNDO, id=ident)
    refused = guard_violation(caught.value)
    assert str(refused) == (
        f"Job ({ident}) in job: its status would go from done to ready (SQLSTATE SD001). Only declared transitions and "
        "requeues change it; see Lifecycle. An operator who must: SET LOCAL sqla_durable.override = '<reason>'; it is "
        "recorded."
    )
    assert guard_violation(ValueError("no")) is None
    assert guard_violation(ConfigurationError("no")) is None
    with pytest.raises(IntegrityError) as other:
        world.execute("UPDATE job SET status = 'none such'")
    assert guard_violation(other.value) is None


# --- races


def test_a_receipt_by_hand_waits_for_a_step_and_is_judged_by_what_it_leaves(world: World) -> None:
    run = world.claimed()
    ident: UUID = run.row.id
    receipt = """INSERT INTO job_step (job_id, step, outcome, result, effect, fence)
        VALUES (:id, 'by hand', 'succeeded', '1', 'external', 1)"""
    with world.engine.begin() as connection:
        landing = "UPDATE job SET status = 'done', lease_owner = NULL, lease_expires_at = NULL WHERE id = :id"
        connection.execute(text(landing), {"id": ident})
        writing = Background(lambda: world.execute(receipt, id=ident))
        wait_until_blocked(world.engine)
    with pytest.raises(DBAPIError, match="its run is not running: it is done, under fence 1"):
        writing.result()
    assert world.runs.receipts(ident) == ()


def test_a_receipt_under_a_former_fence_is_told_from_one_of_a_run_that_is_not_running(world: World) -> None:
    run = world.claimed()
    receipt = """INSERT INTO job_step (job_id, step, outcome, result, effect, fence)
        VALUES (:id, 'by hand', 'succeeded', '1', 'external', :fence)"""
    with pytest.raises(DBAPIError, match="it is recorded under fence 0, and its run is running under fence 1"):
        world.execute(receipt, id=run.row.id, fence=0)
    with pytest.raises(DBAPIError, match="it is recorded under fence 0, and its run is not running: it is ready"):
        world.execute(receipt, id=world.ready(), fence=0)


def test_a_refusal_that_is_of_no_row_names_none(world: World) -> None:
    world.done()
    with pytest.raises(DBAPIError, match="JobStep in job_step: all receipts would be removed, and the runs stay"):
        world.execute("TRUNCATE job_step")


def test_two_writers_of_one_status_cannot_both_be_right(world: World) -> None:
    """A statement that waited is judged by the row that it finds, and not by the one that it has read."""
    ident = world.ready()
    with world.engine.begin() as connection:
        connection.execute(text("UPDATE job SET status = 'cancelled' WHERE id = :id"), {"id": ident})
        claiming = """UPDATE job SET status = 'running', fence = fence + 1, attempts = attempts + 1, lease_owner = 'x',
            lease_expires_at = now() WHERE id = :id"""
        other = Background(lambda: world.execute(claiming, id=ident))
        wait_until_blocked(world.engine)
    with pytest.raises(DBAPIError, match="from cancelled to running"):
        other.result()
