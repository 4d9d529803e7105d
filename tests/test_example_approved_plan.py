"""The application of approved plans: over real HTTP, with real kills, on a real PostgreSQL."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Iterator
from decimal import Decimal
from http import HTTPStatus
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session

from docs.examples.approved_plan.models import Plan, PlanStep
from docs.examples.approved_plan.steps import move_stock, write_note
from sqla_durable import Outcome
from sqla_durable.asyncio import AsyncRun, AsyncRuns
from sqla_durable.testing import expire, lapse
from tests.support import Background, eventually, wait_until_blocked
from tests.support_approved_plan import (
    EXAMPLES,
    MOVE,
    NOTE,
    PAY,
    TOO_MUCH,
    Process,
    Server,
    effects,
    ident,
    payee_locked,
    plan_locked,
    reset,
)
from tests.test_docs import blocks

UNTOUCHED = {"Hamburg": 100, "Berlin": 0}, {"shop": Decimal(500), "Elbe Haulage": Decimal(0)}, []
MOVED = {"Hamburg": 76, "Berlin": 24}, *UNTOUCHED[1:]
DONE = MOVED[0], {"shop": Decimal("415.50"), "Elbe Haulage": Decimal("84.50")}, ["On its way."]


@pytest.fixture(scope="module")
def server(database_url: str) -> Iterator[Server]:
    with Server(database_url) as server:
        yield server
    admin = create_engine(database_url)
    with admin.begin() as connection:
        connection.execute(text("DROP SCHEMA public CASCADE"))
        connection.execute(text("CREATE SCHEMA public"))
    admin.dispose()


@pytest.fixture
def engine(server: Server, database_url: str) -> Iterator[Engine]:
    """The server's database, with the samples in it and nothing else."""
    engine = create_engine(database_url)
    reset(engine)
    yield engine
    engine.dispose()


def let_expire(engine: Engine, plan: str) -> None:
    with Session(engine) as session, session.begin():
        expire(session, Plan, ident(plan))


def let_lapse(engine: Engine, plan: str) -> None:
    with Session(engine) as session, session.begin():
        lapse(session, Plan, ident(plan))


def refusal(answer: httpx.Response) -> tuple[int, str]:
    """The code and the plan's status of a problem."""
    problem = answer.json()
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert problem["status"] == answer.status_code
    return answer.status_code, problem["plan_status"]


def summary(plan: dict[str, Any]) -> tuple[str, list[tuple[int, str, Any]]]:
    """The status of a plan, and position, outcome and result of its receipts."""
    receipts = [(each["position"], each["outcome"], each["result"]) for each in plan["receipts"]]
    return plan["status"], receipts


EXECUTED = "executed", [(0, "succeeded", 76), (1, "succeeded", "415.50"), (2, "succeeded", 1)]


# proposing


def test_a_proposal_is_pending_with_an_expiry_and_without_receipts(server: Server, engine: Engine) -> None:
    answer = server.propose(MOVE, PAY, NOTE)
    plan = answer.json()
    assert answer.status_code == 201
    assert answer.headers["Location"] == f"/plans/{plan['id']}"
    assert summary(plan) == ("pending", [])
    assert plan["actions"] == [MOVE, PAY, NOTE]
    assert plan["expires_at"] is not None
    assert server.get(f"/plans/{plan['id']}") == plan


def test_the_same_proposal_again_is_the_same_plan_whatever_has_become_of_it(server: Server, engine: Engine) -> None:
    first = server.propose(MOVE, key="tea")
    again = server.propose(MOVE, key="tea")
    assert (again.status_code, again.json()) == (200, first.json())
    plan = first.headers["Location"]
    server.post(plan, "approve", by="ada", revision=1)
    executed = server.post(plan, "execute")
    later = server.propose(MOVE, key="tea")
    assert (later.status_code, later.json()) == (200, executed.json())
    assert effects(engine) == MOVED


def test_the_same_key_for_another_proposal_is_refused(server: Server, engine: Engine) -> None:
    server.propose(MOVE, key="tea")
    assert server.propose(NOTE, key="tea").status_code == 422


def test_two_requests_with_one_key_at_the_same_moment_make_one_plan(server: Server, engine: Engine) -> None:
    with Session(engine) as session, session.begin():
        session.execute(text("LOCK TABLE approved_plan IN SHARE MODE"))
        both = [Background(lambda: server.propose(MOVE, key="tea")) for _ in range(2)]
        wait_until_blocked(engine, 2)
    answers = [each.result() for each in both]
    assert sorted(answer.status_code for answer in answers) == [200, 201]
    assert answers[0].json() == answers[1].json()


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("{", 400),
        ('{"author": "assistant", "actions": []}', 422),
        ('{"author": "assistant", "actions": [{"kind": "launch_rocket"}]}', 422),
        ('{"author": "assistant", "actions": [{"kind": "write_note", "text": "\\u0000"}]}', 422),
        ('{"author": "assistant", "actions": [{"kind": "write_note", "text": "x", "by": "y"}]}', 422),
    ],
)
def test_what_is_no_proposal_is_refused(server: Server, engine: Engine, content: str, code: int) -> None:
    answer = server.client.post("/plans", content=content, headers={"Idempotency-Key": "x"})
    assert answer.status_code == answer.json()["status"] == code
    assert answer.headers["Content-Type"] == "application/problem+json"


def test_a_proposal_without_a_key_is_refused(server: Server, engine: Engine) -> None:
    assert server.client.post("/plans", json={"author": "assistant", "actions": [NOTE]}).status_code == 400


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "", None),
        ("POST", "/approve", {"by": "ada", "revision": 1}),
        ("POST", "/reject", {"by": "ada"}),
        ("POST", "/execute", None),
        ("POST", "/cancel", None),
        ("PUT", "/actions", {"actions": [NOTE], "revision": 1}),
    ],
)
def test_a_plan_that_does_not_exist_is_not_found(
    server: Server, engine: Engine, method: str, path: str, body: Any
) -> None:
    answer = server.client.request(method, f"/plans/{uuid4()}{path}", json=body)
    assert answer.status_code == answer.json()["status"] == 404


# deciding


def test_two_people_who_approve_at_once_have_one_winner(server: Server, engine: Engine) -> None:
    plan = server.pending(MOVE)
    with plan_locked(engine, plan):
        both = [
            Background(lambda name=name: server.post(plan, "approve", by=name, revision=1)) for name in ("ada", "ben")
        ]
        wait_until_blocked(engine, 2)
    won, lost = sorted((each.result() for each in both), key=lambda answer: answer.status_code)
    assert won.status_code == 200
    assert refusal(lost) == (409, "approved")
    assert server.get(plan)["decided_by"] == won.json()["decided_by"]


def test_an_approval_and_a_rejection_at_once_have_one_winner(server: Server, engine: Engine) -> None:
    plan = server.pending(MOVE)
    with plan_locked(engine, plan):
        both = [
            Background(lambda: server.post(plan, "approve", by="ada", revision=1)),
            Background(lambda: server.post(plan, "reject", by="ben")),
        ]
        wait_until_blocked(engine, 2)
    codes = [each.result().status_code for each in both]
    assert sorted(codes) == [200, 409]
    assert server.get(plan)["status"] == ("approved" if codes[0] == 200 else "rejected")


def test_an_approval_that_waits_while_the_consent_expires_comes_too_late(server: Server, engine: Engine) -> None:
    plan = server.pending(MOVE)
    with plan_locked(engine, plan) as session:
        approval = Background(lambda: server.post(plan, "approve", by="ada", revision=1))
        wait_until_blocked(engine)
        expire(session, Plan, ident(plan))
    assert refusal(approval.result()) == (410, "expired")
    assert server.get(plan)["decided_by"] is None


def test_a_plan_that_nobody_decided_on_in_time_is_expired_for_every_request(server: Server, engine: Engine) -> None:
    plan = server.pending(MOVE)
    let_expire(engine, plan)
    edit = server.client.put(f"{plan}/actions", json={"actions": [NOTE], "revision": 1})
    assert refusal(edit) == (410, "expired")
    assert refusal(server.post(plan, "approve", by="ada", revision=1)) == (410, "expired")
    assert refusal(server.post(plan, "reject", by="ada")) == (410, "expired")
    assert refusal(server.post(plan, "execute")) == (410, "expired")
    assert refusal(server.post(plan, "cancel")) == (410, "expired")
    assert server.get(plan)["status"] == "expired"


def test_a_plan_that_is_only_read_expires_too(server: Server, engine: Engine) -> None:
    plan = server.pending(MOVE)
    let_expire(engine, plan)
    assert server.get(plan)["status"] == "expired"


def test_an_approval_that_is_not_used_in_time_expires(server: Server, engine: Engine) -> None:
    plan = server.approved(MOVE)
    let_expire(engine, plan)
    assert refusal(server.post(plan, "execute")) == (410, "expired")
    assert effects(engine) == UNTOUCHED


def test_a_rejected_plan_is_not_executed(server: Server, engine: Engine) -> None:
    plan = server.pending(MOVE)
    assert server.post(plan, "reject", by="ada").json()["decided_by"] == "ada"
    assert refusal(server.post(plan, "execute")) == (409, "rejected")
    assert refusal(server.post(plan, "approve", by="ada", revision=1)) == (409, "rejected")
    assert effects(engine) == UNTOUCHED


def test_a_plan_that_nobody_approved_is_not_executed(server: Server, engine: Engine) -> None:
    plan = server.pending(MOVE)
    assert refusal(server.post(plan, "execute")) == (409, "pending")
    assert effects(engine) == UNTOUCHED


# editing


def test_what_changed_since_it_was_looked_at_is_not_approved(server: Server, engine: Engine) -> None:
    plan = server.pending(MOVE)
    edited = server.client.put(f"{plan}/actions", json={"actions": [TOO_MUCH], "revision": 1})
    assert (edited.status_code, edited.json()["revision"], edited.json()["actions"]) == (200, 2, [TOO_MUCH])
    assert refusal(server.post(plan, "approve", by="ada", revision=1)) == (409, "pending")
    assert server.post(plan, "approve", by="ada", revision=2).status_code == 200


def test_an_edit_of_what_another_has_edited_is_refused(server: Server, engine: Engine) -> None:
    plan = server.pending(MOVE)
    server.client.put(f"{plan}/actions", json={"actions": [NOTE], "revision": 1})
    late = server.client.put(f"{plan}/actions", json={"actions": [PAY], "revision": 1})
    assert refusal(late) == (409, "pending")
    assert server.get(plan)["actions"] == [NOTE]


@pytest.mark.parametrize("actions", [[NOTE], [MOVE]])
def test_an_edit_after_the_approval_is_refused_even_one_that_changes_nothing(
    server: Server, engine: Engine, actions: list[dict[str, Any]]
) -> None:
    plan = server.approved(MOVE)
    before = server.get(plan)
    assert refusal(server.client.put(f"{plan}/actions", json={"actions": actions, "revision": 1})) == (409, "approved")
    assert server.get(plan) == before


def test_an_edit_that_waits_while_the_plan_is_approved_is_refused(server: Server, engine: Engine) -> None:
    plan = server.pending(MOVE)
    with plan_locked(engine, plan) as session:
        edit = Background(lambda: server.client.put(f"{plan}/actions", json={"actions": [NOTE], "revision": 1}))
        wait_until_blocked(engine)
        session.execute(text("UPDATE approved_plan SET status = 'approved' WHERE id = :id"), {"id": ident(plan)})
    assert refusal(edit.result()) == (409, "approved")
    assert server.get(plan)["actions"] == [MOVE]


# executing


def test_an_approved_plan_is_executed_and_every_further_request_gets_the_same_answer(
    server: Server, engine: Engine
) -> None:
    plan = server.approved(MOVE, PAY, NOTE)
    first = server.post(plan, "execute")
    assert first.status_code == 200
    assert summary(first.json()) == EXECUTED
    assert effects(engine) == DONE
    for _ in range(3):
        again = server.post(plan, "execute")
        assert (again.status_code, again.content) == (200, first.content)
    assert server.client.get(plan).content == first.content
    assert effects(engine) == DONE


def test_a_step_that_fails_leaves_the_ones_before_it_done_and_is_not_tried_again(
    server: Server, engine: Engine
) -> None:
    plan = server.approved(MOVE, TOO_MUCH, NOTE)
    first = server.post(plan, "execute")
    assert first.status_code == 200
    assert summary(first.json()) == ("failed", [(0, "succeeded", 76), (1, "failed", None)])
    refused = {"reason": "refused", "detail": "shop does not have 5000"}
    assert first.json()["failure"] == first.json()["receipts"][1]["failure"] == refused
    with Session(engine) as session, session.begin():
        session.execute(text("UPDATE approved_account SET balance = 9999 WHERE name = 'shop'"))
    again = server.post(plan, "execute")
    assert (again.status_code, again.content) == (200, first.content)
    assert effects(engine)[0] == MOVED[0]
    assert effects(engine)[1] == {"shop": Decimal(9999), "Elbe Haulage": Decimal(0)}


@pytest.mark.parametrize(
    "action",
    [
        {**MOVE, "quantity": 101},
        {**MOVE, "source": "Kiel"},
        {**MOVE, "target": "Kiel"},
        {**PAY, "payer": "nobody"},
        {**PAY, "payee": "nobody"},
    ],
)
def test_an_action_that_cannot_be_done_has_no_effect(server: Server, engine: Engine, action: dict[str, Any]) -> None:
    answer = server.post(server.approved(action), "execute").json()
    assert summary(answer) == ("failed", [(0, "failed", None)])
    assert answer["failure"]["reason"] == "refused"
    assert effects(engine) == UNTOUCHED


def test_of_several_requests_to_execute_one_does_and_the_others_are_told_so(server: Server, engine: Engine) -> None:
    plan = server.approved(MOVE, PAY, NOTE)
    with payee_locked(engine):
        first = Background(lambda: server.post(plan, "execute"))
        wait_until_blocked(engine)
        others = [Background(lambda: server.post(plan, "execute")) for _ in range(4)]
        for answer in (each.result() for each in others):
            assert answer.status_code == 202
            assert summary(answer.json()) == ("executing", [(0, "succeeded", 76)])
            assert answer.headers["Location"] == plan
    assert summary(first.result().json()) == EXECUTED
    assert effects(engine) == DONE


def test_requests_to_execute_at_the_same_moment_execute_once(server: Server, engine: Engine) -> None:
    plan = server.approved(MOVE, PAY, NOTE)
    with plan_locked(engine, plan):
        every = [Background(lambda: server.post(plan, "execute")) for _ in range(5)]
        wait_until_blocked(engine, 5)
    assert {each.result().status_code for each in every} <= {200, 202}
    assert summary(server.get(plan)) == EXECUTED
    assert effects(engine) == DONE


def test_a_server_killed_in_a_step_leaves_a_plan_that_has_failed_and_is_never_taken_up_again(
    server: Server, engine: Engine, database_url: str
) -> None:
    plan = server.approved(MOVE, PAY, NOTE)
    with Server(database_url) as doomed:
        with payee_locked(engine):
            request = Background(lambda: doomed.post(plan, "execute"))
            wait_until_blocked(engine)
            doomed.kill()
            with pytest.raises(httpx.TransportError):
                request.result()
            assert summary(server.get(plan)) == ("executing", [(0, "succeeded", 76)])
            assert server.post(plan, "execute").status_code == 202
        let_lapse(engine, plan)
    healed = server.get(plan)
    assert summary(healed) == ("failed", [(0, "succeeded", 76)])
    assert healed["failure"]["reason"] == "interrupted"
    assert effects(engine) == MOVED
    again = server.post(plan, "execute")
    assert (again.status_code, again.json()) == (200, healed)
    assert effects(engine) == MOVED


def test_a_worker_executes_what_is_approved_and_stops_when_it_is_told_to(
    server: Server, engine: Engine, database_url: str
) -> None:
    with Process("approved_plan.worker", database_url) as worker:
        worker.wait_for("working on Plan")
        plan = server.approved(MOVE, PAY, NOTE)
        executed = eventually(lambda: (shown := server.get(plan))["status"] == "executed" and shown, "the execution")
        assert worker.stop() == 0
    assert summary(executed) == EXECUTED
    assert server.post(plan, "execute").json() == executed
    assert effects(engine) == DONE


# cancelling


@pytest.mark.parametrize("status", ["pending", "approved"])
def test_a_plan_that_waits_is_cancelled_at_once(server: Server, engine: Engine, status: str) -> None:
    plan = getattr(server, status)(MOVE)
    first, again = server.post(plan, "cancel"), server.post(plan, "cancel")
    assert (first.status_code, summary(first.json())) == (200, ("cancelled", []))
    assert (again.status_code, again.json()) == (200, first.json())
    assert summary(server.post(plan, "execute").json()) == ("cancelled", [])
    assert refusal(server.post(plan, "approve", by="ada", revision=1)) == (409, "cancelled")
    assert effects(engine) == UNTOUCHED


def test_a_plan_that_is_cancelled_between_two_steps_keeps_the_first_and_does_not_do_the_second(
    server: Server, engine: Engine, database_url: str
) -> None:
    plan = server.approved(MOVE, NOTE)
    cancelled: list[httpx.Response] = []

    async def interrupted(run: AsyncRun[Plan]) -> None:
        first, second = run.row.actions
        await run.step(0, move_stock, first)
        cancelled.append(await asyncio.to_thread(server.post, plan, "cancel"))
        await run.step(1, write_note, second)

    async def execute() -> Outcome:
        executing = create_async_engine(database_url)
        outcome = await AsyncRuns(async_sessionmaker(executing), Plan, PlanStep).execute(ident(plan), interrupted)
        await executing.dispose()
        return outcome

    outcome = asyncio.run(execute())
    (answer,) = cancelled
    assert answer.status_code == 202
    assert summary(answer.json()) == ("executing", [(0, "succeeded", 76)])
    assert answer.json()["cancel_requested"]
    assert outcome.status == "cancelled"
    assert summary(server.get(plan)) == ("cancelled", [(0, "succeeded", 76)])
    assert effects(engine) == MOVED


def test_a_plan_that_has_ended_is_not_cancelled(server: Server, engine: Engine) -> None:
    plan = server.approved(MOVE)
    server.post(plan, "execute")
    assert refusal(server.post(plan, "cancel")) == (409, "executed")
    assert not server.get(plan)["cancel_requested"]


# the database


def test_a_request_whose_connection_is_cut_off_may_be_sent_again(server: Server, engine: Engine) -> None:
    plan = server.pending(MOVE)
    with plan_locked(engine, plan) as session:
        approval = Background(lambda: server.post(plan, "approve", by="ada", revision=1))
        wait_until_blocked(engine)
        session.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                " AND datname = current_database()"
            )
        )
        answer = approval.result()
    assert answer.status_code == answer.json()["status"] == 503
    assert answer.headers["Retry-After"] == "1"
    assert server.post(plan, "approve", by="ada", revision=1).status_code == 200


# the page


def session() -> list[tuple[str, str]]:
    """Each command of the page that talks to the server, and what it shows as the output."""
    shown = "\n".join(block.text for block in blocks(EXAMPLES / "approved_plan" / "README.md", "console"))
    found = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", shown, re.MULTILINE)
    return [(command, output.strip()) for command, output in found if command.startswith(("curl", "export"))]


class Lasting:
    """Replaces what is different each time, an id or an instant, by when it came up for the first time."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def __call__(self, output: str) -> str:
        changing = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:\d\d)"
        return re.sub(changing, lambda found: self.names.setdefault(found[0], f"#{len(self.names)}"), output)


@pytest.mark.skipif(shutil.which("curl") is None, reason="the session of the page is one with curl")
def test_the_session_of_the_page_is_what_the_server_answers(server: Server, engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "approved_plan").symlink_to(EXAMPLES / "approved_plan")
    exports: list[str] = []
    expected, actual = Lasting(), Lasting()
    assert len(session()) == 11
    for command, output in session():
        wanted = expected(output)
        here = command.replace("localhost:8000", server.address)
        for shown, name in expected.names.items():
            here = here.replace(shown, next((mine for mine, same in actual.names.items() if same == name), shown))
        if here.startswith("export"):
            exports.append(here)
            continue
        script = "\n".join(["set -e", *exports, here])
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True
        )
        assert actual(done.stdout.strip()) == wanted, command


def test_the_page_explains_every_code_that_the_application_answers_with() -> None:
    folder = EXAMPLES / "approved_plan"
    explained = re.findall(r"^\|[^|]*\| (\d{3}) \|", (folder / "README.md").read_text(), re.MULTILINE)
    source = (folder / "api.py").read_text() + (folder / "problems.py").read_text()
    answered = {HTTPStatus[name] for name in re.findall(r"HTTPStatus\.([A-Z_]+)", source)}
    assert {HTTPStatus(int(code)) for code in explained} == answered - {HTTPStatus.INTERNAL_SERVER_ERROR}
