"""Guards: what they refuse whoever writes it, and that no verb of the library ever meets one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import DBAPIError

from sqla_durable import GuardViolation, guard_violation
from tests.support_guards import World

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
