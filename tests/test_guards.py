"""Guards: what they refuse whoever writes it, and that no verb of the library ever meets one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import create_engine, func, text, update
from sqlalchemy.exc import DBAPIError

from sqla_durable import (
    PENDING,
    Cancelled,
    DatabaseUnavailable,
    Ending,
    GuardViolation,
    LostLease,
    NotIssued,
    Outcome,
    Run,
    SignalTimeout,
    StepOutcome,
    Worker,
    call,
    guard_violation,
    keyed_call,
)
from sqla_durable.testing import expire, let_pass, make_due, overrun
from tests.support_guards import HOUR, Status, World, number, operate, pending, refuse, write

KINDS = pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "unguarded"])


@pytest.fixture
def world(empty_url: str, guarded: bool) -> Iterator[World]:
    engine = create_engine(empty_url)
    yield World(engine, guarded)
    engine.dispose()


# --- what nobody may write

_RUN = "UPDATE job SET {} WHERE id = :id"
_CLAIM = "status = 'running', lease_owner = 'other', lease_expires_at = now() + interval '1 hour'"
_RESUME = "status = 'running', lease_expires_at = now() + interval '1 hour'"
_OVER = "lease_owner = NULL, lease_expires_at = NULL"
_RECEIPT = """INSERT INTO job_step (job_id, step, outcome, result, effect, fence)
    SELECT id, 'raw', 'succeeded', '1', 'external', {} FROM job WHERE id = :id"""
_PENDING = """INSERT INTO job_step (job_id, step, outcome, ids, effect, fence)
    SELECT id, 'raw', 'pending', '{{"until": null}}', 'sleep', {} FROM job WHERE id = :id"""
_STEP = "UPDATE job_step SET {} WHERE job_id = :id AND step = '{}'"
_DELETE = "DELETE FROM job_step WHERE job_id = :id AND step = '{}'"

ATTACKS: dict[str, tuple[str, str, str]] = {
    # the status machine
    "an edge that is not declared": ("ready", _RUN.format("status = 'done'"), "SD001"),
    "an edge backwards": ("ready", _RUN.format("status = 'draft'"), "SD001"),
    "from one end to another": ("done", _RUN.format("status = 'failed'"), "SD001"),
    "a run that is done taken up again": ("done", _RUN.format("status = 'ready', attempts = 0"), "SD001"),
    "a requeue that counts old attempts": ("failed", _RUN.format("status = 'ready'"), "SD001"),
    "a requeue that names an owner": (
        "failed",
        _RUN.format("status = 'ready', attempts = 0, lease_owner = 'x'"),
        "SD003",
    ),
    "a requeue that raises the fence": ("failed", _RUN.format("status = 'ready', attempts = 0, fence = 9"), "SD002"),
    "an end that comes without a claim": ("ready", _RUN.format("status = 'failed'"), "SD001"),
    # the fence
    "a claim that keeps the fence": ("released", _RUN.format(f"{_CLAIM}, attempts = attempts + 1"), "SD002"),
    "a claim that skips fences": (
        "ready",
        _RUN.format(f"{_CLAIM}, fence = fence + 2, attempts = attempts + 1"),
        "SD002",
    ),
    "a claim that uses up all fences": (
        "ready",
        _RUN.format(f"{_CLAIM}, fence = 9223372036854775807, attempts = attempts + 1"),
        "SD002",
    ),
    "a claim that counts no attempt": ("ready", _RUN.format(f"{_CLAIM}, fence = fence + 1"), "SD002"),
    "a claim that counts two": ("ready", _RUN.format(f"{_CLAIM}, fence = fence + 1, attempts = 2"), "SD002"),
    "a claim of a run that is held": ("running", _RUN.format("lease_owner = 'x', fence = 2, attempts = 2"), "SD002"),
    "a claim of a draft": ("draft", _RUN.format(f"{_CLAIM}, fence = 1, attempts = 1"), "SD001"),
    "a resume by another owner": ("reaped", _RUN.format(f"{_RESUME}, lease_owner = 'other'"), "SD002"),
    "a resume of what was let go": ("released", _RUN.format(_CLAIM), "SD002"),
    "a resume that counts an attempt": ("reaped", _RUN.format(f"{_RESUME}, attempts = attempts + 1"), "SD002"),
    "a fence that goes back": ("released", _RUN.format("fence = 0"), "SD002"),
    "a fence that goes back with an edge": ("released", _RUN.format("status = 'cancelled', fence = 0"), "SD002"),
    "a fence raised while the run is held": ("running", _RUN.format("fence = fence + 1"), "SD002"),
    "a fence raised while the run waits": ("ready", _RUN.format("fence = fence + 1"), "SD002"),
    "a fence raised by a landing": ("running", _RUN.format(f"status = 'done', fence = 2, {_OVER}"), "SD002"),
    "a fence raised by a release": ("running", _RUN.format(f"status = 'ready', fence = 2, {_OVER}"), "SD002"),
    "a fence raised at the end": ("done", _RUN.format("fence = fence + 1"), "SD002"),
    # the lease
    "another owner under the same fence": ("running", _RUN.format("lease_owner = 'other'"), "SD003"),
    "another owner of a reaped run": ("reaped", _RUN.format("lease_owner = 'other'"), "SD003"),
    "an owner of a run that waits": ("ready", _RUN.format("lease_owner = 'other'"), "SD003"),
    "an owner of a run that has ended": ("done", _RUN.format("lease_owner = 'other'"), "SD003"),
    "a landing that keeps its owner": ("running", _RUN.format("status = 'done', lease_expires_at = NULL"), "SD003"),
    "a release to another owner": (
        "running",
        _RUN.format("status = 'ready', lease_expires_at = NULL, lease_owner = 'other'"),
        "SD003",
    ),
    "a cancellation that keeps its owner": ("reaped", _RUN.format("status = 'cancelled'"), "SD003"),
    # the key
    "another key": ("ready", _RUN.format("id = gen_random_uuid()"), "SD004"),
    "another instant of its beginning": ("ready", _RUN.format("created_at = 'infinity'"), "SD004"),
    # receipts recorded
    "a receipt of a run that waits": ("released", _RECEIPT.format("fence"), "SD011"),
    "a receipt of a run that was reaped": ("reaped", _RECEIPT.format("fence"), "SD011"),
    "a receipt of a run that was never claimed": ("ready", _RECEIPT.format("fence"), "SD011"),
    "a receipt of a run that has ended": ("done", _RECEIPT.format("fence"), "SD011"),
    "a receipt of a run that has failed": ("failed", _RECEIPT.format("fence"), "SD011"),
    "a receipt under an old fence": ("running", _RECEIPT.format("fence - 1"), "SD011"),
    "a receipt under a fence to come": ("running", _RECEIPT.format("fence + 1"), "SD011"),
    "a wait of a run that waits": ("released", _PENDING.format("fence"), "SD011"),
    # receipts changed
    "another result": ("done", _STEP.format("result = '2'", "a"), "SD012"),
    "a success made a failure": (
        "done",
        _STEP.format("outcome = 'failed', result = NULL, error = '{\"type\": \"E\"}'", "a"),
        "SD012",
    ),
    "another instant": ("done", _STEP.format("recorded_at = now() - interval '1 day'", "a"), "SD012"),
    "another fence": ("done", _STEP.format("fence = fence + 1", "a"), "SD012"),
    "another effect": ("done", _STEP.format("effect = 'external'", "a"), "SD012"),
    "another input": ("done", _STEP.format("input_fingerprint = 'x'", "a"), "SD012"),
    "another step": ("done", _STEP.format("step = 'c'", "a"), "SD012"),
    "a failure made a success": (
        "failed",
        _STEP.format("outcome = 'succeeded', error = NULL, result = '1'", "b"),
        "SD012",
    ),
    "the intent of another fence": ("issued", _STEP.format("fence = 7", "op"), "SD012"),
    "an operation that nobody polled": (
        "polled",
        _STEP.format("outcome = 'succeeded', result = '1'", "op"),
        "SD012",
    ),
    "other ids": ("polled", _STEP.format("ids = '{\"number\": 2}'", "op"), "SD012"),
    "an operation that failed made a success": (
        "operation_failed",
        _STEP.format("outcome = 'succeeded', result = '1', error = NULL", "op"),
        "SD012",
    ),
    "a signal that nobody sent": ("waiting", _STEP.format("outcome = 'succeeded', result = '1'", "go"), "SD012"),
    "a sleep that is over": ("asleep", _STEP.format("outcome = 'succeeded', result = 'null'", "nap"), "SD012"),
    # receipts removed
    "a success removed": ("done", _DELETE.format("a"), "SD013"),
    "a success of a requeued run removed": ("failed", _DELETE.format("a"), "SD013"),
    "a failure removed": ("failed", _DELETE.format("b"), "SD013"),
    "an intent removed": ("issued", _DELETE.format("op"), "SD013"),
    "a pending operation removed": ("polled", _DELETE.format("op"), "SD013"),
    "a failed operation removed": ("operation_failed", _DELETE.format("op"), "SD013"),
    "a wait removed": ("waiting", _DELETE.format("go"), "SD013"),
    "a sleep removed": ("asleep", _DELETE.format("nap"), "SD013"),
    "all receipts removed": ("done", "TRUNCATE job_step", "SD013"),
}


@KINDS
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_forbidden_write_is_refused_with_a_guard_and_done_without(world: World, guarded: bool, attack: str) -> None:
    state, sql, code = ATTACKS[attack]
    ident: UUID = getattr(world, state)()
    before = everything(world)
    if not guarded:
        assert world.execute(sql, id=ident) != 0
        assert everything(world) != before
        return
    with pytest.raises(DBAPIError) as caught:
        world.execute(sql, id=ident)
    refused = guard_violation(caught.value)
    assert isinstance(refused, GuardViolation)
    assert (refused.sqlstate, refused.table) == (code, "job_step" if code > "SD01" else "job")
    assert everything(world) == before


def everything(world: World) -> list[Any]:
    with world.engine.connect() as connection:
        return [
            connection.execute(text(f"SELECT to_jsonb({table}) FROM {table} ORDER BY 1")).all()
            for table in ("job", "job_step")
        ]


# --- what the library writes


def executed(world: World, handler: Callable[[Run[Any]], object], **values: Any) -> Outcome:
    return world.runs.execute(world.ready(**values), handler)


def twice(world: World, handler: Callable[[Run[Any]], object], ident: UUID) -> None:
    """Carry a run out, let it be due, and carry it out again."""
    assert world.runs.execute(ident, handler).ending is Ending.SUSPENDED
    with world.factory.begin() as session:
        make_due(session, world.models.job, ident)
    world.runs.execute(ident, handler)


def every_kind_of_step(world: World) -> None:
    def handler(run: Run[Any]) -> None:
        run.step("a", write, 1)
        run.external("b", int)
        run.keyed("c", str)
        run.gather(call("d", int), keyed_call("e", str))

    assert executed(world, handler).status == Status.DONE


def a_step_that_fails_and_is_done_again(world: World) -> None:
    def handler(run: Run[Any]) -> None:
        with suppress(ValueError):
            run.step("a", refuse)
        run.step("a", write, 1)
        with suppress(ValueError):
            run.external("b", int, "x")
        run.external("b", int)

    assert executed(world, handler).status == Status.DONE


def an_operation_that_ends(world: World) -> None:
    polls = iter([PENDING, 1])
    ident = world.ready()
    twice(world, lambda run: run.operation("op", start=number, poll=lambda ids: next(polls), every=HOUR), ident)
    assert world.row(ident).status == Status.DONE


def an_operation_that_fails(world: World) -> None:
    ident = world.operation_failed()
    with world.factory.begin() as session:
        assert world.runs.requeue(ident)
        assert world.runs.never_issued(session, ident, "op")


def an_operation_that_was_not_issued(world: World) -> None:
    def start() -> Any:
        raise NotIssued

    ident = world.ready()
    world.runs.execute(ident, lambda run: run.operation("op", start=start, poll=pending))
    assert world.runs.receipts(ident) == ()


def an_operation_resolved_by_an_operator(world: World) -> None:
    had, never = world.issued(), world.issued()
    for ident in had, never:
        world.lapse(ident)
    world.runs.reap()
    with world.factory.begin() as session:
        assert world.runs.attach_ids(session, had, "op", {"number": 1})
        assert world.runs.never_issued(session, never, "op")
    assert world.runs.execute(had, operate).ending is Ending.SUSPENDED


def ids_that_a_stale_holder_attaches(world: World) -> None:
    ident = world.ready()

    def start() -> dict[str, int]:
        world.lapse(ident)
        world.runs.reap()
        world.claimed(ident).release()
        return {"number": 1}

    world.runs.execute(ident, lambda run: run.operation("op", start=start, poll=pending, every=HOUR))
    (receipt,) = world.runs.receipts(ident)
    assert receipt.outcome is StepOutcome.PENDING


def a_signal(world: World) -> None:
    ident = world.waiting()
    with world.factory.begin() as session:
        assert world.runs.signal(session, ident, "go", 1)
    assert world.runs.execute(ident, lambda run: run.wait("go")).status == Status.DONE


def a_signal_that_is_given_back(world: World) -> None:
    ident = world.ready()
    with world.factory.begin() as session:
        assert world.runs.signal(session, ident, "go", "x")
    world.runs.execute(ident, lambda run: run.wait("go", int))
    assert all(receipt.outcome is not StepOutcome.SUCCEEDED for receipt in world.runs.receipts(ident))


def a_wait_that_times_out(world: World) -> None:
    ident = world.waiting()
    with world.factory.begin() as session:
        let_pass(session, world.models.step, ident, "go")

    def handler(run: Run[Any]) -> None:
        with suppress(SignalTimeout):
            run.wait("go", timeout=HOUR)

    assert world.runs.execute(ident, handler).status == Status.DONE


def a_wait_that_goes_on(world: World) -> None:
    twice(world, lambda run: run.wait("go", timeout=HOUR), world.ready())


def an_answer(world: World) -> None:
    def handler(run: Run[Any]) -> None:
        run.answer("add", write)

    ident = world.ready()
    world.runs.execute(ident, handler)
    with world.factory.begin() as session:
        assert world.runs.signal(session, ident, "add", 1)
    assert world.runs.execute(ident, handler).status == Status.DONE


def a_sleep(world: World) -> None:
    ident = world.ready()
    twice(world, lambda run: run.sleep("nap", HOUR), ident)
    with world.factory.begin() as session:
        let_pass(session, world.models.step, ident, "nap")
    assert world.runs.execute(ident, lambda run: run.sleep("nap", HOUR)).status == Status.DONE


def a_batch(world: World) -> None:
    for _ in range(3):
        world.ready()
    for run in world.runs.claim_due(10):
        run.renew()
        run.finish(note="done")


def a_release(world: World) -> None:
    world.claimed(world.released()).release()


def a_failure(world: World) -> None:
    assert executed(world, lambda run: run.step("a", refuse)).status == Status.FAILED
    world.claimed().fail(ValueError("no"), note="failed")


def a_retry_until_the_attempts_are_used_up(world: World) -> None:
    def handler(run: Run[Any]) -> None:
        raise DatabaseUnavailable

    ident = world.ready()
    for _ in range(2):
        world.runs.execute(ident, handler, run_now=True)
    assert world.row(ident).status == Status.DEAD


def reaping(world: World) -> None:
    ident = world.reaped()
    world.claimed(ident)
    world.lapse(ident)
    assert world.runs.heal(ident)
    assert world.row(ident).status == Status.DEAD


def a_resume(world: World) -> None:
    for resume in (
        lambda run: run.step("a", write, 1),
        lambda run: run.external("a", int),
        lambda run: run.renew(),
        lambda run: run.finish(),
        lambda run: run.release(),
    ):
        run = world.reaped_run()
        resume(run)
        assert run.lease.fence == world.row(run.row.id).fence == 1


def a_lost_lease(world: World) -> None:
    run = world.reaped_run()
    world.claimed(run.row.id)
    with pytest.raises(LostLease):
        run.step("a", write, 1)


def a_requeue(world: World) -> None:
    ident = world.failed()
    assert world.runs.requeue(ident)
    assert [receipt.step for receipt in world.runs.receipts(ident)] == ["a"]
    world.claimed(ident).fail(ValueError("no"))
    assert world.runs.requeue_all(everything=True) == 1
    assert world.runs.execute(ident, lambda run: run.step("b", write, 1)).status == Status.DONE


def a_requeue_of_a_wait(world: World) -> None:
    ident = world.waiting()
    with world.factory.begin() as session:
        assert world.runs.request_cancel(session, ident)
    assert world.runs.requeue(ident)
    assert world.runs.receipts(ident) == ()


def cancelling(world: World) -> None:
    run, idents = world.claimed(), [world.ready(), world.reaped(), world.waiting()]
    with world.factory.begin() as session:
        assert world.runs.request_cancel(session, idents[0])
        assert world.runs.cancel_all(session, everything=True) == 3
    with pytest.raises(Cancelled):
        run.step("a", write, 1)
    run.release()
    assert {world.row(ident).status for ident in (*idents, run.row.id)} == {Status.CANCELLED}


def a_deadline(world: World) -> None:
    run = world.claimed(max_duration=HOUR)
    with world.factory.begin() as session:
        overrun(session, world.models.job, run.row.id)
    assert world.runs.execute(run, lambda run: run.step("a", write, 1)).status == Status.TIMED_OUT


def an_expiry(world: World) -> None:
    idents = [world.ready(expires_at=func.now() + HOUR), world.draft(expires_at=func.now() + HOUR)]
    with world.factory.begin() as session:
        for ident in idents:
            expire(session, world.models.job, ident)
    assert world.runs.heal(idents[0])
    assert world.runs.reap() == 1
    assert {world.row(ident).status for ident in idents} == {Status.EXPIRED}


def purging(world: World) -> None:
    ended = world.done(), world.failed(), world.operation_failed()
    assert world.runs.purge(timedelta(0)) == len(ended)
    assert world.scalar("SELECT count(*) FROM job_step") == 0


def a_transition(world: World) -> None:
    ident, held = world.draft(), world.running()
    with world.factory.begin() as session:
        assert world.models.machine.transition(session, ident, Status.READY, values={"note": "x"})
        assert world.models.machine.transition(session, ident, Status.CANCELLED)
        assert world.models.machine.transition(session, held, Status.FAILED, from_=Status.RUNNING)


def a_transaction_of_the_callers(world: World) -> None:
    run = world.claimed()
    with world.factory.begin() as session:
        world.runs.fence(session, run.lease)
        world.runs.record(session, run.lease, "a", 1)
        job = world.runs.start(session, key="k", status=Status.READY)
        assert world.runs.start(session, key="k", status=Status.READY).id == job.id


def a_flush(world: World) -> None:
    ident = world.draft()
    with world.factory.begin() as session:
        job = session.get_one(world.models.job, ident)
        job.note = "mine"
        job.status = Status.READY
    run = world.claimed(ident)
    run.step("a", lambda session: session.get_one(world.models.job, ident) and 1)
    with world.factory.begin() as session:
        session.execute(update(world.models.step).values(tag="a column of the user's"))
    run.finish()
    with world.factory.begin() as session:
        session.delete(session.get_one(world.models.job, ident))


def a_worker(world: World) -> None:
    idents = [world.ready() for _ in range(3)]
    worker = Worker(world.runs.handled_by(lambda run: run.step("a", write, 1)))
    assert worker.run_due(timedelta(seconds=20)) == {Ending.LANDED: len(idents)}


VERBS = [
    every_kind_of_step,
    a_step_that_fails_and_is_done_again,
    an_operation_that_ends,
    an_operation_that_fails,
    an_operation_that_was_not_issued,
    an_operation_resolved_by_an_operator,
    ids_that_a_stale_holder_attaches,
    a_signal,
    a_signal_that_is_given_back,
    a_wait_that_times_out,
    a_wait_that_goes_on,
    an_answer,
    a_sleep,
    a_batch,
    a_release,
    a_failure,
    a_retry_until_the_attempts_are_used_up,
    reaping,
    a_resume,
    a_lost_lease,
    a_requeue,
    a_requeue_of_a_wait,
    cancelling,
    a_deadline,
    an_expiry,
    purging,
    a_transition,
    a_transaction_of_the_callers,
    a_flush,
    a_worker,
]


@KINDS
@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
def test_the_library_never_meets_a_guard(world: World, verb: Callable[[World], None]) -> None:
    verb(world)
    if world.guarded:
        assert world.scalar("SELECT count(*) FROM durable_override") == 0
