"""The command line on runs with an idempotency key and signals: listed, and named by their key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker
from typer.testing import CliRunner

from sqla_durable import (
    FunctionMixin,
    FunctionRun,
    Functions,
    FunctionStatus,
    KeyMixin,
    ReceiptMixin,
    Run,
    RunMixin,
    Runs,
    SignalMixin,
    UsageError,
    WaitMixin,
)
from sqla_durable.asyncio import AsyncFunctions, AsyncRuns
from sqla_durable.cli import make_app
from tests.support import Plan, PlanStep, approved_plan
from tests.support_cli import FORMS, answered, call, importable, lines, refused
from tests.support_models import JobStatus, jobs, lifecycle
from tests.test_cli_show import pairs, part


class Base(DeclarativeBase):
    pass


class Ticket(KeyMixin, WaitMixin, RunMixin, Base):
    __tablename__ = "ticket"
    __key_scope__ = ("shop",)
    __lifecycle__ = lifecycle()
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[JobStatus] = jobs.column()
    shop: Mapped[str]


class TicketStep(ReceiptMixin[Ticket], Base):
    __tablename__ = "ticket_step"


class TicketSignal(SignalMixin[Ticket], Base):
    __tablename__ = "ticket_signal"


class Job(FunctionMixin, Base):
    __tablename__ = "waiting_job"


class JobStep(ReceiptMixin[Job], Base):
    __tablename__ = "waiting_job_step"


class JobSignal(SignalMixin[Job], Base):
    __tablename__ = "waiting_job_signal"


def pay(run: FunctionRun[Any]) -> int:
    return run.wait("paid", int)


def later(run: FunctionRun[Any], given: int) -> int:
    return given


def fails(run: Run[Any]) -> None:
    raise ValueError("no")


def await_payment(run: Run[Any]) -> None:
    run.wait("paid", Any)


@pytest.fixture
def engine(empty_url: str) -> Iterator[Engine]:
    engine = create_engine(empty_url)
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def tickets(engine: Engine) -> Runs[Ticket]:
    return Runs(sessionmaker(engine), Ticket, TicketStep, signals=TicketSignal)


@pytest.fixture
def functions(engine: Engine) -> Functions[Job]:
    made = Functions(sessionmaker(engine), Job, JobStep, signals=JobSignal)
    made.function("pay")(pay)
    made.function("later")(later)
    return made


@pytest.fixture(params=FORMS)
def app(request: pytest.FixtureRequest, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with tickets and functions of one form."""
    if request.param == "sync":
        runs: Any = Runs(sessionmaker(engine), Ticket, TicketStep, signals=TicketSignal)
        functions: Any = Functions(sessionmaker(engine), Job, JobStep, signals=JobSignal)
        functions.function("pay")(pay)
        functions.function("later")(later)
    else:
        factory = async_sessionmaker(create_async_engine(engine.url))
        runs = AsyncRuns(factory, Ticket, TicketStep, signals=TicketSignal)
        functions = AsyncFunctions(factory, Job, JobStep, signals=JobSignal)

        @functions.function("pay")
        async def pay_async(run: Any) -> int:
            return int(await run.wait("paid", int))

        @functions.function("later")
        async def later_async(run: Any, given: int) -> int:
            return given

    return importable(monkeypatch, tickets=runs, functions=functions)


def ticket(tickets: Runs[Ticket], key: str | None, shop: str = "north") -> int:
    with tickets.session_factory.begin() as session:
        return tickets.start(session, key=key, shop=shop, status=JobStatus.READY).id


def job(functions: Functions[Job], key: str | None, name: str = "pay", tenant: str | None = None) -> UUID:
    inputs = (1,) if name == "later" else ()
    with functions.session_factory.begin() as session:
        ident = functions.start(session, name, *inputs, key=key, tenant=tenant).id
    assert ident is not None
    return ident


def table(*arguments: object) -> list[dict[str, str]]:
    """The rows of what a command lists, by title."""
    head, *rows = answered(*arguments).splitlines()
    starts = [found.start() for found in re.finditer(r"(?<!\S)(?<!\S )\S", head)]
    ends = [*starts[1:], None]
    cut = [[line[start:end].strip() for start, end in zip(starts, ends, strict=True)] for line in (head, *rows)]
    return [dict(zip(cut[0], row, strict=True)) for row in cut[1:]]


# listed


def test_a_list_has_the_key_and_what_a_run_waits_for(
    app: str, tickets: Runs[Ticket], functions: Functions[Job]
) -> None:
    waits, idle = ticket(tickets, "t-1"), ticket(tickets, None)
    tickets.execute(waits, await_payment)
    rows = table("runs", f"{app}:tickets")
    assert [(row["id"], row["key"], row["waits for"]) for row in rows] == [
        (str(idle), "", ""),
        (str(waits), "t-1", "paid"),
    ]
    assert [(each["idempotency_key"], each["waits_for"]) for each in lines("runs", f"{app}:tickets")] == [
        (None, None),
        ("t-1", "paid"),
    ]
    ident = job(functions, "o-1")
    functions.execute(ident)
    (row,) = table("runs", f"{app}:functions")
    assert (row["id"], row["function"], row["key"], row["waits for"]) == (str(ident), "pay", "o-1", "paid")
    (found,) = lines("runs", f"{app}:functions")
    assert (found["idempotency_key"], found["waits_for"]) == ("o-1", "paid")


def test_a_list_of_runs_without_key_and_signals_has_no_such_columns(
    monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    Plan.metadata.create_all(engine)
    plan_id = approved_plan(sessionmaker(engine))
    plans = Runs(sessionmaker(engine), Plan, PlanStep)
    target = f"{importable(monkeypatch, plans=plans)}:plans"
    (row,), (found,) = table("runs", target), lines("runs", target)
    assert not {"key", "waits for"} & set(row)
    assert not {"idempotency_key", "waits_for"} & set(found)
    (summary,) = plans.find()
    assert (summary.identity, summary.key, summary.waits_for) == ((plan_id,), None, None)
    with pytest.raises(UsageError, match=r"class Plan\(KeyMixin, RunMixin"):
        plans.find(key="k")


def test_runs_are_found_by_their_key(app: str, tickets: Runs[Ticket]) -> None:
    one, other = ticket(tickets, "t-1"), ticket(tickets, "t-1", "south")
    ticket(tickets, "t-2")
    assert [each["ident"] for each in lines("runs", f"{app}:tickets", "--key", "t-1")] == [str(other), str(one)]


# shown


def test_what_the_library_keeps_of_a_run_is_not_shown_as_a_column_of_the_users(
    app: str, tickets: Runs[Ticket], functions: Functions[Job]
) -> None:
    waits = ticket(tickets, "t-1")
    tickets.execute(waits, await_payment)
    shown = pairs(answered("show", f"{app}:tickets", waits))
    assert list(shown) == ["key", "waits for", "attempts", "fence", "created", "due", "started", ".shop"]
    assert (shown["key"], shown["waits for"], shown["due"]) == ("t-1", "paid", "when the signal comes")
    (record,) = lines("show", f"{app}:tickets", waits)
    assert record["columns"] == {"shop": "north"}
    ident = job(functions, "l-1", "later", "acme")
    functions.execute(ident)
    shown = pairs(answered("show", f"{app}:functions", ident))
    own = {"function": "later", "tenant": "acme", "key": "l-1", "input": "1", "output": "1"}
    assert {name: shown.get(name) for name in own} == own
    assert not [name for name in shown if name.startswith(".")]
    (record,) = lines("show", f"{app}:functions", ident)
    assert record["columns"] == {}


def test_a_step_that_waits_says_until_when(app: str, tickets: Runs[Ticket]) -> None:
    ident = ticket(tickets, None)
    tickets.execute(ident, await_payment)
    _, step = part(answered("show", f"{app}:tickets", ident), "Receipts")
    assert (step[0], step[2:]) == ("paid", ["signal", "1", "pending", "waits"])
    timed = ticket(tickets, None)
    tickets.execute(timed, lambda run: run.wait("paid", Any, timeout=timedelta(hours=1)))
    _, step = part(answered("show", f"{app}:tickets", timed), "Receipts")
    assert step[-1].startswith("waits until ")
    assert pairs(answered("show", f"{app}:tickets", timed))["due"].endswith(", in 59m 59s")


# one run, named by its key


def test_one_run_is_named_by_its_key(app: str, tickets: Runs[Ticket], functions: Functions[Job]) -> None:
    ident, other = ticket(tickets, "t-1"), ticket(tickets, "t-2")
    target = f"{app}:tickets"
    assert answered("show", target, "--key", "t-1").startswith(f"Ticket {ident} is ")
    assert answered("cancel", target, "--key", "t-1") == f"{ident}: cancel requested; it is {JobStatus.CANCELLED}\n"
    assert tickets.execute(other, fails).status is JobStatus.FAILED
    assert lines("requeue", target, "--key", "t-2") == [
        {"ident": str(other), "requeued": True, "status": JobStatus.READY}
    ]
    again = call("requeue", target, "--key", "t-2")
    assert again.exit_code == 1
    assert again.stdout.startswith(f"{other}: not requeued; it is {JobStatus.READY}; its lifecycle allows this from ")
    later_id = job(functions, "l-1", "later")
    functions.execute(later_id)
    assert answered("result", f"{app}:functions", "--key", "l-1", "--function", "later") == "1\n"


def test_a_key_that_several_runs_have_names_none_of_them(
    app: str, tickets: Runs[Ticket], functions: Functions[Job]
) -> None:
    north, south = ticket(tickets, "t-1"), ticket(tickets, "t-1", "south")
    code, line = refused("cancel", f"{app}:tickets", "--key", "t-1")
    assert code == 2
    assert line.endswith(
        f": more than one Ticket has the idempotency key 't-1': {south}, {north}; give one of these as IDENT."
    )
    target = f"{app}:functions"
    paying, acmes, another = job(functions, "k"), job(functions, "k", tenant="acme"), job(functions, "k", "later")
    code, line = refused("cancel", target, "--key", "k")
    listed = f"{another} (later), {acmes} (pay, tenant acme), {paying} (pay)"
    assert (code, listed in line, "add --function or --tenant" in line) == (2, True, True)
    code, line = refused("show", target, "--key", "k", "--function", "pay")
    assert (code, f"of function 'pay' has the idempotency key 'k': {acmes}" in line) == (2, True)
    assert {summary.status for summary in tickets.find()} == {JobStatus.READY}
    assert {summary.status for summary in functions.find()} == {FunctionStatus.READY}
    assert answered("show", target, "--key", "k", "--function", "pay", "--tenant", "acme").startswith(
        f"Job {acmes} is "
    )
    (asked,) = lines("cancel", target, "--key", "k", "--tenant", "acme")
    assert asked["ident"] == str(acmes)


@pytest.mark.parametrize("command", [["show"], ["cancel"], ["requeue"], ["result"], ["signal", "paid"]])
def test_a_key_that_no_run_has_is_said_to_be_so(app: str, functions: Functions[Job], command: list[str]) -> None:
    job(functions, "k")
    name, *arguments = command
    assert refused(name, f"{app}:functions", *arguments, "--key", "k", "--function", "later", "--tenant", "acme") == (
        1,
        f"sqla-durable {name}: there is no Job of function 'later' of tenant 'acme' with the idempotency key 'k'.",
    )


@pytest.mark.parametrize("command", ["show", "cancel", "requeue", "result"])
def test_what_does_not_say_which_run_is_meant_is_refused(app: str, functions: Functions[Job], command: str) -> None:
    ident = job(functions, "k")
    for arguments, said in (
        ([], "nothing says which run"),
        ([ident, "--key", "k"], "leave"),
        (
            [ident, "--function", "pay"],
            "leave the conditions out" if command in {"cancel", "requeue"} else "--function",
        ),
    ):
        code, line = refused(command, f"{app}:functions", *arguments)
        assert (code, said in line) == (2, True), line
    assert functions.describe(ident).status is FunctionStatus.READY


@pytest.mark.parametrize("command", ["cancel", "requeue"])
@pytest.mark.parametrize("more", [["--all"], ["--status", "failed"], ["--limit", "1"], ["--error", "x"]])
def test_a_key_stands_beside_no_condition(app: str, command: str, more: list[str]) -> None:
    code, line = refused(command, f"{app}:functions", "--key", "k", *more)
    assert (code, "--key says which run is meant" in line) == (2, True)


@pytest.mark.parametrize("command", ["show", "cancel", "requeue", "runs"])
def test_a_key_of_runs_that_have_none_is_refused(engine: Engine, command: str) -> None:
    code, line = refused(command, "tests.support:Plan", "--url", engine.url.render_as_string(False), "--key", "k")
    assert (code, "Plan is declared without KeyMixin; name a run by its primary key" in line) == (2, True)


# signals


def test_a_signal_is_sent_to_a_run_of_a_function(app: str, functions: Functions[Job]) -> None:
    target, ident = f"{app}:functions", job(functions, "o-1")
    functions.execute(ident)
    assert answered("signal", target, "payd", "--key", "o-1") == (
        f"{ident}: signal 'payd' sent; it is ready, and waits for 'paid'\n"
    )
    assert answered("signal", target, ident, "paid", "--payload", "7") == f"{ident}: signal 'paid' sent; it is ready\n"
    functions.execute(ident)
    assert answered("result", target, ident) == "7\n"
    late = call("signal", target, ident, "paid", "--payload", "8")
    assert (late.exit_code, late.stdout) == (1, f"{ident}: signal 'paid' not sent; it is done\n")
    late = call("signal", target, "paid", "--key", "o-1", "--json")
    said = {"ident": str(ident), "signal": "paid", "sent": False, "status": "done"}
    assert (late.exit_code, json.loads(late.stdout)) == (1, said)


def test_a_signal_is_sent_to_a_run_of_a_model(app: str, tickets: Runs[Ticket]) -> None:
    heard: list[Any] = []
    ident = ticket(tickets, "t-1")
    payload = '{"by": ["ada"]}'
    sent = {"ident": str(ident), "signal": "paid", "sent": True, "status": JobStatus.READY}
    assert lines("signal", f"{app}:tickets", ident, "paid", "--payload", payload) == [sent]
    assert tickets.execute(ident, lambda run: heard.append(run.wait("paid", Any))).status is JobStatus.DONE
    assert heard == [{"by": ["ada"]}]


def test_a_signal_to_a_run_that_is_not_there_is_not_sent(app: str, engine: Engine) -> None:
    missing = call("signal", f"{app}:tickets", 7, "paid")
    assert (missing.exit_code, missing.stdout) == (1, "7: signal 'paid' not sent; there is no such Ticket\n")


def test_what_is_no_signal_is_refused_in_one_line(app: str, functions: Functions[Job]) -> None:
    ident = job(functions, None)
    for arguments, status, said in (
        ([ident, "paid", "--payload", "{"], 2, "'{' is not JSON"),
        ([ident, "paid", "--payload", "NaN"], 1, "the payload of signal 'paid'"),
        ([ident, "x" * 201], 1, "a name is a str of 1 to 200 printable characters"),
        (["paid"], 2, "nothing says which run is meant"),
        ([ident, ident, "paid"], 2, "signal takes one run, not 2"),
    ):
        code, line = refused("signal", f"{app}:functions", *arguments)
        assert (code, said in line) == (status, True), line


def test_runs_without_a_table_of_signals_say_what_to_declare(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = Functions(sessionmaker(engine), Job, JobStep)
    code, line = refused("signal", f"{importable(monkeypatch, functions=functions)}:functions", UUID(int=7), "paid")
    assert (code, "pass it as signals=JobSignal" in line) == (1, True)


def test_the_signals_of_a_run_class_are_those_that_were_imported_for_it(engine: Engine, tickets: Runs[Ticket]) -> None:
    ident = ticket(tickets, "t-1")
    url = engine.url.render_as_string(False)
    assert answered("signal", "tests.test_cli_keys:Ticket", "--url", url, "paid", "--key", "t-1") == (
        f"{ident}: signal 'paid' sent; it is {JobStatus.READY}\n"
    )


def test_json_comes_from_standard_input_where_it_is_a_dash(app: str, functions: Functions[Job]) -> None:
    ident = job(functions, "o-1")
    environment = {"NO_COLOR": "1"}
    runner = CliRunner()
    target = f"{app}:functions"
    sent = runner.invoke(make_app(), ["signal", target, str(ident), "paid", "--payload", "-"], "7\n", env=environment)
    assert (sent.exit_code, sent.stderr) == (0, "")
    functions.execute(ident)
    assert answered("result", target, ident) == "7\n"
    refused_ = runner.invoke(make_app(), ["signal", target, str(ident), "paid", "--payload", "-"], "", env=environment)
    assert (refused_.exit_code, "what standard input has is not JSON" in refused_.stderr) == (2, True)
    started = runner.invoke(make_app(), ["start", target, "pay", "-"], "1", env=environment)
    assert (started.exit_code, "takes no input, and was given 1" in started.stderr) == (1, True)
