"""The example of branch resets: whatever dies, a reset is issued at most once, and never silently not at all."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from sqla_durable import Ending, RunInFlight, StepOutcome
from tests.support import eventually
from tests.support_branch_reset import EXAMPLES, NAME, App, Deaf, Process, Service, full
from tests.test_docs import blocks
from tests.test_docs_command_line import lasting

PAGE = EXAMPLES / NAME / "README.md"
MODULES = "models", "database", "hosting", "handler", "worker", "request", "resolve"
FOR_EVER = 3600


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("hosting"))
    yield service
    service.close()


@pytest.fixture
def app(empty_url: str, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    monkeypatch.setenv("DATABASE_URL", empty_url)
    monkeypatch.setenv("HOSTING_URL", service.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    modules = {name: importlib.import_module(f"{NAME}.{name}") for name in MODULES}
    if not service.running:
        service.start()
    engine = create_engine(empty_url)
    yield App(empty_url, engine, service.url, tmp_path, modules)
    engine.dispose()
    for name in list(sys.modules):
        if name.partition(".")[0] == NAME:
            del sys.modules[name]


@pytest.fixture
def project(request: pytest.FixtureRequest) -> str:
    """A project that no other test knows."""
    return re.sub(r"\W+", "-", request.node.name).strip("-")


def check_success(app: App, service: Service, ident: int, project: str) -> None:
    """The reset has succeeded, was issued once, and its outcome is in the branch's row, once."""
    assert app.status(ident) == "succeeded", app.reset(ident).error
    assert service.counts(project)["issued"] == 1
    (operation,) = service.operations(project)
    branch = app.branch(project)
    assert (branch.resets, branch.problem) == (1, None)
    assert branch.reset_at == datetime.fromisoformat(operation["ended_at"])
    issued, noted = app.runs.receipts(ident)
    assert (issued.step, issued.effect, issued.outcome) == ("reset", "operation", StepOutcome.SUCCEEDED)
    assert issued.ids == {"operation": operation["id"]}
    assert (noted.step, noted.effect, noted.outcome) == ("note success", "transactional", StepOutcome.SUCCEEDED)
    assert app.reset(ident).error is None


def asked(service: Service, project: str, more: int) -> None:
    """Wait until the service was asked some times more."""
    before = service.counts(project)["asked"]
    eventually(lambda: service.counts(project)["asked"] >= before + more, f"{more} more polls")


# the operation


def test_a_reset_is_issued_once_and_polled_and_its_outcome_is_written_into_the_branch(
    app: App, service: Service, project: str
) -> None:
    service.conduct(project, takes=1.2)
    with app.worker():
        ident = app.request(project)
        app.wait_for(ident, "succeeded")
    check_success(app, service, ident, project)
    assert service.counts(project)["asked"] >= 2
    assert app.request(project) == ident, "the same key is the same run, also when it has ended"


def test_a_reset_that_fails_at_the_service_fails_and_says_why_in_the_branch(
    app: App, service: Service, project: str
) -> None:
    service.conduct(project, takes=0, fails=True)
    with app.worker():
        ident = app.request(project)
        app.wait_for(ident, "failed")
    assert service.counts(project) == {"issued": 1, "asked": 1}
    assert (app.branch(project).resets, app.branch(project).problem) == (0, "the disk is full")
    receipt = app.receipt(ident)
    assert receipt is not None
    assert receipt.outcome is StepOutcome.FAILED
    assert app.runs.execute(ident, never).replayed


def never(_: object) -> None:
    raise AssertionError("the handler was called")


def test_a_slow_reset_holds_no_slot_of_the_worker_while_it_is_polled(app: App, service: Service, project: str) -> None:
    others = [f"{project}-{number}" for number in range(3)]
    service.conduct(project, takes=FOR_EVER)
    for other in others:
        service.conduct(other, takes=0)
    with app.worker(concurrency=1):
        slow = app.request(project)
        app.wait_for_outcome(slow, "pending")
        for other in others:
            app.wait_for(app.request(other), "succeeded")
        asked(service, project, 2)
        app.wait_for_outcome(slow, "pending")
        with app.engine.connect() as connection:
            owners = "SELECT count(*) FROM reset WHERE id = :id AND status = 'queued' AND lease_owner IS NULL"
            eventually(lambda: connection.scalar(text(owners), {"id": slow}), "a reset that nobody holds")
        service.conduct(project, takes=0)
        app.wait_for(slow, "succeeded")
    check_success(app, service, slow, project)
    assert app.reset(slow).fence >= 4, "each poll was a claim of its own"
    assert app.reset(slow).attempts == 1, "and waiting used no attempts up"


def test_an_operation_that_has_ended_is_never_polled_again_and_its_end_stays_when_it_was(
    app: App, service: Service, project: str
) -> None:
    service.conduct(project, takes=0)
    with app.worker() as worker:
        ident = app.request(project)
        with app.engine.begin() as connection:
            connection.execute(text("SELECT FROM branch WHERE project = :project FOR UPDATE"), {"project": project})
            app.wait_for_outcome(ident, "succeeded")
            worker.kill()  # it is about to write the outcome, and waits for the row
    before, polls = app.receipt(ident), service.counts(project)
    app.let_lapse(ident)
    with app.worker():
        app.wait_for(ident, "succeeded")
    check_success(app, service, ident, project)
    finished_at = app.reset(ident).finished_at
    with app.factory.begin() as session:
        assert not app.runs.attach_ids(session, ident, "reset", {"operation": "another"})
        assert not app.runs.never_issued(session, ident, "reset")
    assert not app.requeue(ident)
    outcome = app.runs.execute(ident, never)
    assert (outcome.ending, outcome.replayed) == (Ending.LANDED, True)
    assert app.reset(ident).finished_at == finished_at
    assert app.receipt(ident) == before
    assert service.counts(project) == polls


# one in flight


def test_a_second_reset_of_a_project_is_refused_while_one_is_in_flight(
    app: App, service: Service, project: str
) -> None:
    service.conduct(project, takes=FOR_EVER)
    with app.worker():
        ident = app.request(project, key="first")
        for state in "at once", "pending":
            with pytest.raises(RunInFlight) as refused:
                app.request(project, key="second")
            assert refused.value.identity == (ident,)
            assert app.request(project, key="first") == ident, f"the same key is the same run, {state}"
            app.wait_for_outcome(ident, "pending")
        service.conduct(project, takes=0)
        app.wait_for(ident, "succeeded")
        second = app.request(project, key="second")
        assert second != ident
        app.wait_for(second, "succeeded")
    assert service.counts(project)["issued"] == 2
    assert app.branch(project).resets == 2


def test_a_reset_that_is_cancelled_while_it_is_pending_keeps_its_ids_and_is_not_polled_any_more(
    app: App, service: Service, project: str
) -> None:
    service.conduct(project, takes=FOR_EVER)
    with app.worker():
        ident = app.request(project)
        app.wait_for_outcome(ident, "pending")
        with app.factory.begin() as session:
            assert app.runs.request_cancel(session, ident)
        app.wait_for(ident, "canceled")
        polls, other = service.counts(project), f"{project}-other"
        service.conduct(other, takes=1.5)
        app.wait_for(app.request(other), "succeeded")  # meanwhile it would have been polled again
    assert service.counts(project) == polls
    (operation,) = service.operations(project)
    (receipt,) = app.runs.receipts(ident)
    assert (receipt.outcome, receipt.ids) == (StepOutcome.PENDING, {"operation": operation["id"]})
    assert (app.branch(project).resets, app.branch(project).reset_at) == (0, None)


# outcomes that are not known


def check_unknown(app: App, service: Service, ident: int, project: str) -> None:
    """The reset shows that its outcome is unknown, and no other one of the project gets past it."""
    assert app.status(ident) == "failed"
    assert app.reset(ident).error["type"].endswith("OperationUnknown")
    (receipt,) = app.runs.receipts(ident)
    assert (receipt.outcome, receipt.ids) == (StepOutcome.ISSUED, None)
    before = service.counts(project)
    assert before["issued"] <= 1
    with pytest.raises(app.modules["request"].Unresolved, match=f"reset {ident} is unknown"):
        app.request(project, key="another")
    assert app.requeue(ident)
    app.wait_for(ident, "failed")
    assert service.counts(project) == before, "a requeue alone neither issues nor polls"


def resolve(app: App, service: Service, ident: int, project: str) -> None:
    """Do what the page tells an operator to do."""
    resolving = app.modules["resolve"]

    async def found() -> list[str]:
        async with app.modules["hosting"].Hosting(service.url) as hosting:
            return [operation.id for operation in await resolving.unclaimed(hosting, ident)]

    known = app.call(found)
    assert known == [operation["id"] for operation in service.operations(project)]
    assert app.call(lambda: resolving.attach(ident, known[0]) if known else resolving.never_issued(ident))
    assert not app.call(found)
    assert app.requeue(ident)


@pytest.mark.parametrize("conduct", [{"loses_answers": True}, {"dawdles": 2.5}, {"is_away": True}], ids=str)
def test_a_lost_answer_leaves_an_unknown_outcome_that_an_operator_resolves(
    app: App, service: Service, project: str, conduct: dict[str, object]
) -> None:
    service.conduct(project, takes=0, **conduct)
    with app.worker():
        ident = app.request(project)
        app.wait_for(ident, "failed")
        service.conduct(project, takes=0)
        check_unknown(app, service, ident, project)
        assert service.counts(project)["issued"] == (0 if "is_away" in conduct else 1)
        resolve(app, service, ident, project)
        app.wait_for(ident, "succeeded")
    check_success(app, service, ident, project)


def test_a_request_that_was_made_before_is_answered_while_another_outcome_is_unknown(
    app: App, service: Service, project: str
) -> None:
    service.conduct(project, takes=0)
    with app.worker():
        first = app.request(project, key="first")
        app.wait_for(first, "succeeded")
        service.conduct(project, takes=0, loses_answers=True)
        second = app.request(project, key="second")
        app.wait_for(second, "failed")
    assert [app.request(project, key=key) for key in ("first", "second")] == [first, second]
    with pytest.raises(app.modules["request"].Unresolved, match=f"reset {second} is unknown"):
        app.request(project, key="third")


@pytest.mark.parametrize("command", ["operations 99", "attach 99 op-3", "never-issued 99"])
def test_a_reset_that_there_is_not_is_said(app: App, command: str) -> None:
    assert app.shell(f"python -m {NAME} {command}") == "there is no reset 99\n"


def test_an_address_that_is_not_set_is_asked_for(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOSTING_URL")
    with pytest.raises(SystemExit, match="set HOSTING_URL to where"):
        app.modules["hosting"].Hosting()


def test_what_was_certainly_not_issued_is_issued_later(app: App, service: Service, project: str) -> None:
    service.conduct(project, takes=0)
    service.kill()
    with app.worker():
        ident = app.request(project)
        eventually(lambda: app.reset(ident).failures, "a refused connection")
        assert app.runs.receipts(ident) == ()
        assert app.status(ident) in {"queued", "running"}
        service.start()
        app.wait_for(ident, "succeeded")
    check_success(app, service, ident, project)
    assert {each["type"].rpartition(".")[2] for each in app.reset(ident).failures} == {"NotIssued"}


# outages


@contextmanager
def outage(service: Service, project: str, kind: str) -> Iterator[None]:
    if kind == "killed":
        service.kill()
        yield
        service.start()
    else:
        service.conduct(project, takes=FOR_EVER, is_away=True)
        yield
    service.conduct(project, takes=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["killed", "answering 503"])
def test_a_service_that_is_away_for_longer_than_the_lease_fails_no_reset_that_is_under_way(
    app: App, service: Service, project: str, kind: str
) -> None:
    lease: timedelta = app.modules["models"].Reset.__lifecycle__.lease
    service.conduct(project, takes=FOR_EVER)
    with app.worker():
        ident = app.request(project)
        app.wait_for_outcome(ident, "pending")
        with outage(service, project, kind):
            eventually(lambda: length_of_outage(app, ident) > lease, "an outage longer than the lease")
            assert app.status(ident) in {"queued", "running"}
        app.wait_for(ident, "succeeded")
    check_success(app, service, ident, project)
    assert app.reset(ident).attempts == 1


def length_of_outage(app: App, ident: int) -> timedelta:
    times = [datetime.fromisoformat(failure["at"]) for failure in app.reset(ident).failures]
    return times[-1] - times[0] if times else timedelta(0)


# a worker that is killed


def kill_before_the_request_is_sent(app: App, project: str) -> int:
    with full() as url, app.worker(url=url) as worker:
        ident = app.request(project)
        app.wait_for_outcome(ident, "issued")
        worker.kill()
    return ident


def kill_before_the_request_is_taken(app: App, project: str) -> int:
    with Deaf() as deaf, app.worker(url=deaf.url) as worker:
        ident = app.request(project)
        assert deaf.hear() == f"POST /projects/{project}/branches/main/reset HTTP/1.1"
        worker.kill()
    return ident


@pytest.mark.slow
@pytest.mark.parametrize("kill", [kill_before_the_request_is_sent, kill_before_the_request_is_taken])
def test_a_worker_killed_between_the_intent_and_the_request_leaves_an_unknown_outcome(
    app: App, service: Service, project: str, kill: Callable[[App, str], int]
) -> None:
    service.conduct(project, takes=0)
    ident = kill(app, project)
    app.let_lapse(ident)
    with app.worker():
        app.wait_for(ident, "failed")
        assert service.counts(project)["issued"] == 0
        check_unknown(app, service, ident, project)
        resolve(app, service, ident, project)
        app.wait_for(ident, "succeeded")
    check_success(app, service, ident, project)


@pytest.mark.slow
def test_a_worker_killed_after_the_request_was_accepted_leaves_an_unknown_outcome(
    app: App, service: Service, project: str
) -> None:
    service.conduct(project, takes=0, dawdles=1.5)
    with app.worker() as worker:
        ident = app.request(project)
        eventually(lambda: service.counts(project)["issued"], "the request")
        worker.kill()
    service.conduct(project, takes=0)
    app.let_lapse(ident)
    with app.worker():
        app.wait_for(ident, "failed")
        assert service.counts(project)["issued"] == 1
        check_unknown(app, service, ident, project)
        resolve(app, service, ident, project)
        app.wait_for(ident, "succeeded")
    check_success(app, service, ident, project)


@pytest.mark.slow
@pytest.mark.parametrize("while_polling", [False, True], ids=["between two polls", "while polling"])
def test_a_worker_killed_after_the_ids_were_recorded_loses_nothing(
    app: App, service: Service, project: str, while_polling: bool
) -> None:
    service.conduct(project, takes=FOR_EVER)
    with app.worker() as worker:
        ident = app.request(project)
        app.wait_for_outcome(ident, "pending")
        if while_polling:
            service.conduct(project, takes=FOR_EVER, dawdles=1.5)
            asked(service, project, 1)
        else:
            app.wait_for(ident, "queued")
        worker.kill()
    service.conduct(project, takes=0)
    if while_polling:
        assert app.status(ident) == "running"
        app.let_lapse(ident)
    with app.worker():
        app.wait_for(ident, "succeeded")
    check_success(app, service, ident, project)


@pytest.mark.slow
def test_the_service_killed_while_it_takes_a_request_leaves_an_unknown_outcome(
    app: App, service: Service, project: str
) -> None:
    service.conduct(project, takes=0, dawdles=1.5)
    with app.worker():
        ident = app.request(project)
        eventually(lambda: service.counts(project)["issued"], "the request")
        service.kill()
        app.wait_for(ident, "failed")
        service.start()
        service.conduct(project, takes=0)
        check_unknown(app, service, ident, project)
        resolve(app, service, ident, project)
        app.wait_for(ident, "succeeded")
    check_success(app, service, ident, project)


# the page


def session() -> list[tuple[str, str]]:
    """Each command of the page that ends, and what it shows as the output."""
    shown = "\n".join(block.text for block in blocks(PAGE, "console"))
    found = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", shown, re.MULTILINE)
    others = "pip ", "cd ", "export ", "uvicorn ", "sqla-durable worker "
    return [(command, output.rstrip("\n")) for command, output in found if not command.startswith(others)]


def same_each_time(output: str) -> list[str]:
    return lasting(re.sub(r"issued at \S+ \S+", "issued at TIME", output).replace("is running", "is queued"))


@pytest.mark.slow
def test_the_output_of_each_command_is_what_the_page_shows(app: App, tmp_path: Path) -> None:
    commands = session()
    assert len(commands) == 14
    with closing(Service(tmp_path)) as service, app.worker(url=service.url):
        service.start()
        service.conduct("acme", takes=FOR_EVER)
        for number, (command, output) in enumerate(commands):
            if number == 3:
                service.conduct("acme", takes=0)
            if " request " not in command:  # who reads and types is slower than a reset
                eventually(lambda: is_idle(app, service), "the end of all resets")
            here = command.replace("http://127.0.0.1:8070", service.url)
            assert same_each_time(app.shell(here, HOSTING_URL=service.url)) == same_each_time(output), command


def is_idle(app: App, service: Service) -> bool:
    machine = app.modules["models"].reset_statuses
    in_flight = sum(count for status, count in app.runs.counts().items() if status not in machine.terminal)
    return not in_flight and all(each["ended_at"] for each in service.operations("acme"))


def test_the_command_of_the_page_is_a_worker_that_stops_when_it_is_told_to(app: App, project: str) -> None:
    assert f"$ sqla-durable worker {NAME}.worker:worker\n" in PAGE.read_text()
    command = "-m", "sqla_durable.cli", "worker", f"{NAME}.worker:worker"
    with Process(*command, log=app.folder / "worker.log") as worker:
        app.wait_for(app.request(project), "succeeded")
        assert worker.stop() == 0, worker.log
