"""The command line on functions: started, waited for, listed, shown, requeued, cancelled, reaped and purged."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

from sqla_durable import FunctionRun, Functions, FunctionStatus, InputError
from sqla_durable.asyncio import AsyncFunctions
from sqla_durable.testing import lapse
from tests.support import Background, eventually
from tests.support_cli import FORMS, answered, call, importable, lines, refused
from tests.support_observe import Job, JobStep, awaited, double, functions_on, started, tables

HOUR = timedelta(hours=1)


@dataclass
class Order:
    number: int


def ship(run: FunctionRun[Any], order: Order) -> Order:
    return Order(order.number + 1)


def nothing(run: FunctionRun[Any]) -> None:
    run.publish("half")
    run.step("one", lambda session: 1)


@pytest.fixture
def jobs(engine: Engine) -> Functions[Job]:
    tables(engine)
    made = functions_on(engine)
    made.function("ship")(ship)
    made.function("nothing")(nothing)
    return made


@pytest.fixture(params=FORMS)
def target(
    request: pytest.FixtureRequest, engine: Engine, jobs: Functions[Job], monkeypatch: pytest.MonkeyPatch
) -> str:
    functions: Any = jobs
    if request.param == "asyncio":
        functions = AsyncFunctions(async_sessionmaker(create_async_engine(engine.url)), Job, JobStep)

        @functions.function("ship")
        async def ship(run: Any, order: Order) -> Order:
            return order

        @functions.function("nothing")
        async def nothing(run: Any) -> None: ...

        @functions.function("double")
        async def double(run: Any, given: int) -> int:
            return given * 2

        @functions.function("refuse")
        async def refuse(run: Any, given: int) -> int:
            return given

    return f"{importable(monkeypatch, functions=functions)}:functions"


def test_a_run_is_started_with_json_and_its_result_is_waited_for(
    engine: Engine, target: str, jobs: Functions[Job]
) -> None:
    ident = answered("start", target, "ship", '{"number": 4}', "--key", "k", "--tenant", "acme").strip()
    (summary,) = jobs.find()
    assert (str(summary.identity[0]), summary.key, summary.tenant) == (ident, "k", "acme")
    assert json.loads(
        answered("start", target, "ship", '{"number": 4}', "--key", "k", "--tenant", "acme", "--json")
    ) == {
        "ident": ident,
        "function": "ship",
        "idempotency_key": "k",
        "tenant": "acme",
        "status": "ready",
    }
    waiter = Background(lambda: call("result", target, ident))
    eventually(awaited(engine, summary.identity[0]), "the command waits")
    jobs.execute(summary.handle)
    done = waiter.result()
    assert (done.exit_code, json.loads(done.stdout)) == (0, {"number": 5})
    assert done.stderr == f"{ident} is ready: waiting until it ends, without a --timeout.\n"
    assert json.loads(answered("result", target, ident)) == {"number": 5}


def test_a_start_that_starts_nothing_as_its_key_was_used_says_so(target: str, jobs: Functions[Job]) -> None:
    ident = answered("start", target, "ship", '{"number": 4}', "--key", "k").strip()
    jobs.execute(UUID(ident))
    again = call("start", target, "ship", '{"number": 4}', "--key", "k")
    assert (again.exit_code, again.stdout) == (0, f"{ident}\n")
    assert again.stderr == "This run was started before, with the same key, and is done; nothing was started.\n"


def test_a_function_without_input_is_started_so_and_later(target: str, jobs: Functions[Job]) -> None:
    answered("start", target, "nothing", "--delay", "1h", "--priority", "7")
    (summary,) = jobs.find()
    assert (summary.waiting, summary.priority) == (True, 7)


def test_what_cannot_be_started_is_refused_in_one_line(target: str, jobs: Functions[Job]) -> None:
    for arguments, status, said in (
        (("ship", '{"number": "x"}'), 1, "function 'ship' takes"),
        (("ship",), 1, "takes an input, and was given none"),
        (("nothing", "1"), 1, "takes no input"),
        (("ship", "{"), 2, "'{' is not JSON"),
        (("unknown",), 1, "'unknown' is no function"),
    ):
        code, line = refused("start", target, *arguments)
        assert (code, said in line) == (status, True), line
    assert jobs.find() == []


def test_a_result_that_is_not_there_says_why(target: str, jobs: Functions[Job]) -> None:
    failed, waiting = started(jobs, "refuse"), started(jobs, run_at=HOUR)
    jobs.execute(failed)
    code, line = refused("result", target, failed.id)
    assert (code, "is failed: " in line, "Refused: no 1" in line) == (1, True, True)
    code, line = refused("result", target, waiting.id, "--timeout", "0.1s")
    late = f"{waiting.id} has not ended after 0.1s, and is ready; it goes on, and sqla-durable show says how far it is."
    assert (code, line) == (1, f"sqla-durable result: {late}")
    code, line = refused("result", target, uuid4())
    assert (code, "there is no Job" in line) == (1, True)


def test_runs_are_listed_by_function_key_and_tenant(target: str, jobs: Functions[Job]) -> None:
    one, other = started(jobs, key="k", tenant="acme"), started(jobs, "refuse", run_at=HOUR)
    assert [each["ident"] for each in lines("runs", target)] == [str(other.id), str(one.id)]
    for options in (["--function", "double"], ["--key", "k"], ["--tenant", "acme"], ["--not-waiting"]):
        (found,) = lines("runs", target, *options)
        assert found["ident"] == str(one.id)
    (found,) = lines("runs", target, "--waiting")
    assert (found["function"], found["waiting"], found["steps"], found["state"]) == ("refuse", True, 0, None)
    head, *rows = answered("runs", target).splitlines()
    titles = ["id", "function", "key", "status", "attempts", "age", "waits for", "holder", "error"]
    assert re.split(r"\s{2,}", head) == titles
    assert [row.split()[1:3] for row in rows] == [["refuse", "ready"], ["double", "k"]]
    code, line = refused("runs", target, "--status", "gone")
    assert (code, "'gone' is not a status of Job" in line) == (2, True)


def test_a_function_that_this_process_does_not_know_is_said_to_be_one(target: str, jobs: Functions[Job]) -> None:
    """It is no error, as its runs may be there all the same."""
    for command, written in (
        (("runs", target), ""),
        (("cancel", target), "0 runs asked to be cancelled\n"),
        (("requeue", target), "0 runs requeued\n"),
        (("runs", target, "--counts"), "function  status  runs\n"),
    ):
        done = call(*command, "--function", "nope")
        assert (done.exit_code, done.stdout) == (0, written)
        assert "This process knows no function 'nope'; only runs that other code has started are of it." in done.stderr


def test_counts_are_by_function_and_take_conditions(target: str, jobs: Functions[Job]) -> None:
    started(jobs)
    failed = started(jobs, "refuse")
    jobs.execute(failed)
    (counted,) = lines("runs", target, "--counts")
    assert {name: {status: n for status, n in of.items() if n} for name, of in counted.items()} == {
        "double": {"ready": 1},
        "refuse": {"failed": 1},
    }
    assert answered("runs", target, "--counts", "--function", "refuse").splitlines()[1].split() == [
        "refuse",
        "failed",
        "1",
    ]


def test_a_run_is_shown_with_its_steps(target: str, jobs: Functions[Job]) -> None:
    with jobs.session_factory.begin() as session:
        handle = jobs.start(session, nothing, key="k")
    jobs.execute(handle)
    shown = json.loads(answered("show", target, handle.id, "--json"))
    assert (shown["function"], shown["last_step"], shown["state"]) == ("nothing", "one", "half")
    assert [receipt["step"] for receipt in shown["receipts"]] == ["one"]
    text = answered("show", target, handle.id)
    assert f"Job {handle.id} is done." in text
    assert {("function", "nothing"), ("key", "k"), ("state", "half")} <= {
        tuple(line.split()) for line in text.splitlines()
    }


def test_one_is_requeued_or_cancelled_by_its_key(target: str, jobs: Functions[Job]) -> None:
    handle = started(jobs, "refuse")
    jobs.execute(handle)
    assert answered("requeue", target, handle.id) == f"{handle.id}: requeued; it is ready\n"
    assert answered("cancel", target, handle.id) == f"{handle.id}: cancel requested; it is cancelled\n"
    missing = call("cancel", target, uuid4())
    assert (missing.exit_code, "there is no such Job" in missing.stdout) == (1, True)


def test_many_are_requeued_or_cancelled_by_what_they_have_in_common(target: str, jobs: Functions[Job]) -> None:
    for given in range(3):
        jobs.execute(started(jobs, "refuse", given, tenant="acme"))
    started(jobs, run_at=HOUR)
    assert answered("requeue", target, "--function", "refuse", "--limit", "2") == "2 runs requeued\n"
    assert lines("requeue", target, "--status", "failed", "--error", "no 2") == [{"requeued": 1}]
    assert lines("cancel", target, "--tenant", "acme") == [{"asked_to_be_cancelled": 3}]
    assert answered("cancel", target, "--all") == "1 run asked to be cancelled\n"
    assert jobs.counts(status=FunctionStatus.READY) == {}


def test_nothing_is_done_to_runs_that_nobody_named(target: str, jobs: Functions[Job]) -> None:
    handle = started(jobs)
    for arguments, said in (
        (("cancel", target), "nothing says which runs"),
        (("requeue", target, "--limit", "3"), "nothing says which runs"),
        (("cancel", target, handle.id, "--tenant", "acme"), "leave the conditions out"),
    ):
        code, line = refused(*arguments)
        assert (code, said in line) == (2, True), line
    assert jobs.describe(handle).status is FunctionStatus.READY


def test_lapsed_ones_are_reaped_and_old_ones_purged(target: str, jobs: Functions[Job]) -> None:
    lapsed, done = started(jobs), started(jobs)
    assert jobs._verbs.claim(lapsed.id, run_now=True)
    with jobs.session_factory.begin() as session:
        lapse(session, Job, lapsed.id)
    assert answered("reap", target) == "1 run reaped\n"
    jobs.execute(done)
    assert answered("purge", target, "--older-than", "30d") == "0 runs purged\n"
    assert lines("purge", target, "--older-than", "0s", "--status", "done", "--limit", "5") == [{"purged": 1}]
    assert [summary.identity for summary in jobs.find()] == [(lapsed.id,)]


def test_conditions_on_functions_are_refused_for_other_runs(engine: Engine) -> None:
    for option, what in (
        ("--function", "a Functions"),
        ("--tenant", "a Functions"),
        ("--key", "runs that have idempotency"),
    ):
        code, line = refused("runs", "tests.support:Plan", "--url", engine.url.render_as_string(False), option, "x")
        assert (code, f"{option} goes with {what}" in line) == (2, True)


def test_json_of_a_request_is_decoded_as_the_input(jobs: Functions[Job]) -> None:
    assert jobs.decode_input("ship", {"number": 4}) == Order(4)
    assert jobs.decode_input(double, 4) == 4
    with pytest.raises(InputError, match=r"function 'ship' takes .*Order.*number"):
        jobs.decode_input(ship, {"number": "x"})
