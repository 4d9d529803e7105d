"""``sqla-durable show``: one run with its columns, failures and receipts, and nothing written."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, LargeBinary, Numeric, create_engine, event, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker, with_loader_criteria
from sqlalchemy.schema import CreateSchema

from sqla_durable import PENDING, ReceiptMixin, Run, RunMixin, Runs
from tests.support import Plan, PlanStep, approved_plan, let_lapse
from tests.support_cli import FORMS, answered, importable, lines, made, refused
from tests.support_models import JobStatus, jobs, lifecycle
from tests.test_listing import Own, Renamed, RenamedStep
from tests.test_models_inheritance import Joined, JoinedFetch, JoinedJob, JoinedStep
from tests.test_models_keys import Base as Keys
from tests.test_models_keys import Coloured, ColouredStep, Pair, PairStep


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep, owner="me")


@pytest.fixture(params=FORMS)
def target(request: pytest.FixtureRequest, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> str:
    return f"{importable(monkeypatch, plans=made(request.param, engine))}:plans"


def pairs(shown: str) -> dict[str, str]:
    """The names and values in the first part of what is shown."""
    block = shown.split("\n\n")[1]
    return {name: value for name, _, value in (re.split(r"(\s{2,})", line, maxsplit=1) for line in block.splitlines())}


def part(shown: str, title: str) -> list[list[str]]:
    """The cells of one table of what is shown."""
    (block,) = (block for block in shown.split("\n\n") if block.startswith(f"{title}\n"))
    return [re.split(r"\s{2,}", line) for line in block.splitlines()[1:]]


def carry_out(run: Run[Any]) -> None:
    run.step("first", lambda session: {"left": [90, "東京\x1b"]})
    run.external("call", lambda: "x" * 300)
    run.step("last", lambda session: session.execute(text("SELECT 1 / 0")))


def test_a_run_is_shown_with_its_columns_failures_and_receipts(
    target: str, plans: Runs[Plan], session_factory: sessionmaker[Session]
) -> None:
    ident = approved_plan(session_factory, actions=[1, "two"], note="mine")
    outcome = plans.execute(ident, carry_out)
    assert outcome.failure is not None
    shown = answered("show", target, ident)
    assert shown.startswith(f"Plan {ident} is failed.\n\n")
    found = pairs(shown)
    assert list(found) == ["attempts", "fence", "created", "started", "finished", "error", ".actions", ".note"]
    assert (found["attempts"], found["fence"]) == ("1", "1")
    assert (found[".actions"], found[".note"]) == ('[1, "two"]', "mine")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}\+\d\d:\d\d, [\d.]+s ago", found["created"])
    assert found["error"].startswith("sqlalchemy.exc.DataError: (psycopg.errors.DivisionByZero) division by zero")
    header, (at, attempt, step, error) = part(shown, "Failures")
    assert header == ["at", "attempt", "step", "error"]
    assert (attempt, step) == ("1", "last")
    assert at.endswith("s ago")
    assert found["error"].startswith(error.removesuffix("..."))
    assert "SELECT 1 / 0" in found["error"], "it is shown in full, on one line"
    header, first, call, last = part(shown, "Receipts")
    assert header == ["step", "at", "effect", "fence", "outcome", "result"]
    assert first[0] == "first"
    assert first[1].endswith("s ago")
    assert first[2:] == ["transactional", "1", "succeeded", r'{"left": [90, "東京\u001b"]}']
    assert re.fullmatch(r"\+[\d.]+s", call[1])
    assert call[2:] == ["external", "1", "succeeded", f"{'x' * 200} ..."]
    assert last[2:5] == ["transactional", "1", "failed"]
    assert last[5] == error


def test_its_json_has_everything(target: str, plans: Runs[Plan], session_factory: sessionmaker[Session]) -> None:
    ident = approved_plan(session_factory, actions=[1, "two"], note="mine")
    plans.execute(ident, carry_out)
    (listed,), (shown,) = lines("runs", target), lines("show", target, ident)
    ages = listed.pop("age_seconds"), shown["age_seconds"]
    assert 0 < ages[0] < ages[1]
    assert {name: shown[name] for name in listed} == listed
    assert list(shown)[-3:] == ["columns", "failures", "receipts"]
    assert shown["columns"] == {"actions": [1, "two"], "note": "mine"}
    (failure,) = shown["failures"]
    assert (failure["attempt"], failure["step"]) == (1, "last")
    assert datetime.fromisoformat(failure["at"])
    assert failure["type"] == shown["error"]["type"] == "sqlalchemy.exc.DataError"
    first, call, last = shown["receipts"]
    recorded = datetime.fromisoformat(first.pop("recorded_at"))
    assert recorded == plans.receipts(ident)[0].recorded_at
    assert first == {
        "step": "first",
        "effect": "transactional",
        "outcome": "succeeded",
        "result": {"left": [90, "東京\x1b"]},
        "error": None,
        "ids": None,
        "fence": 1,
    }
    assert call["result"] == "x" * 300
    assert (last["outcome"], last["result"], last["error"]) == ("failed", None, shown["error"])
    assert list(shown["error"]) == ["type", "message"]


def test_a_failure_outside_of_steps_has_none(
    target: str, plans: Runs[Plan], session_factory: sessionmaker[Session]
) -> None:
    def fails(run: Run[Plan]) -> None:
        run.step("first", lambda session: None)
        raise ValueError("no")

    ident = approved_plan(session_factory)
    plans.execute(ident, fails)
    with session_factory.begin() as session:
        session.execute(text("""UPDATE plan SET failures = failures || (failures -> 0) - 'step'"""))
    header, *failures = part(answered("show", target, ident), "Failures")
    assert header == ["at", "attempt", "step", "error"]
    assert [failure[1:] for failure in failures] == [["1", "ValueError: no"]] * 2


def test_an_operation_that_has_not_ended_is_shown_with_its_ids(
    target: str, plans: Runs[Plan], session_factory: sessionmaker[Session]
) -> None:
    def wait(run: Run[Plan]) -> None:
        run.operation("batch", start=lambda: {"number": 7}, poll=lambda ids: PENDING)

    def lose(run: Run[Plan]) -> None:
        run.operation("batch", start=lambda: 1 / 0, poll=lambda ids: PENDING)

    waiting, unknown = approved_plan(session_factory), approved_plan(session_factory)
    plans.execute(waiting, wait)
    plans.execute(unknown, lose)
    _, row = part(answered("show", target, waiting), "Receipts")
    assert row[2:] == ["operation", "1", "pending", 'ids {"number": 7}']
    _, row = part(answered("show", target, unknown), "Receipts")
    assert row[2:] == ["operation", "1", "issued", "no ids recorded"]
    (record,) = lines("show", target, waiting)
    assert (record["receipts"][0]["ids"], record["receipts"][0]["result"]) == ({"number": 7}, None)


def test_tracebacks_come_on_request(target: str, plans: Runs[Plan], session_factory: sessionmaker[Session]) -> None:
    ident = approved_plan(session_factory)
    plans.execute(ident, carry_out)
    assert "Traceback" not in answered("show", target, ident)
    shown = answered("show", target, ident, "--traceback")
    assert "\n\nTraceback of the error\nTraceback (most recent call last):\n  File" in shown
    assert "\n\nTraceback of the step last\nTraceback (most recent call last):\n  File" in shown
    (record,) = lines("show", target, ident, "--traceback")
    assert record["error"]["traceback"].startswith("Traceback")
    assert record["receipts"][-1]["error"]["traceback"].startswith("Traceback")
    assert record["receipts"][0]["error"] is None


def test_a_look_at_a_lapsed_run_says_so_and_heals_nothing(
    target: str, plans: Runs[Plan], session_factory: sessionmaker[Session]
) -> None:
    ident = approved_plan(session_factory)
    plans.claim(ident)
    shown = answered("show", target, ident)
    assert shown.startswith(f"Plan {ident} is executing.")
    found = pairs(shown)
    assert found["holder"] == "me"
    assert re.fullmatch(r"until \S+ \S+, in [\d.]+s", found["lease"])
    let_lapse(session_factory, ident)
    for _ in range(2):
        shown = answered("show", target, ident)
        assert shown.startswith(f"Plan {ident} is executing (lapsed).")
        assert re.fullmatch(r"lapsed \S+ \S+, [\d.]+s ago; nobody has reaped it yet", pairs(shown)["lease"])
    (record,) = lines("show", target, ident)
    assert (record["status"], record["lapsed"]) == ("executing", True)


def test_a_run_that_was_reaped_has_no_holder(
    target: str, plans: Runs[Plan], session_factory: sessionmaker[Session]
) -> None:
    ident = approved_plan(session_factory)
    plans.claim(ident)
    assert "  me" in answered("runs", target)
    let_lapse(session_factory, ident)
    plans.reap()
    assert "holder" not in pairs(answered("show", target, ident))
    assert "  me" not in answered("runs", target)
    (record,) = lines("runs", target)
    assert record["lease_owner"] == "me", "its last owner is there for programs"


def test_a_run_that_waits_says_when_it_is_due(
    target: str, plans: Runs[Plan], session_factory: sessionmaker[Session]
) -> None:
    ident = approved_plan(session_factory, available_at=text("now() + interval '2 hours 30 seconds'"))
    with session_factory.begin() as session:
        session.execute(text("UPDATE plan SET cancel_requested_at = now() - interval '3 days 1 minute'"))
    shown = answered("show", target, ident)
    assert shown.startswith(f"Plan {ident} is approved (cancel requested).")
    assert pairs(shown)["due"].endswith(", in 2h")
    assert pairs(shown)["cancel requested"].endswith(", 3d ago")
    assert "Receipts" not in shown
    assert "Failures" not in shown


def test_a_run_that_is_not_there_is_one_line(target: str) -> None:
    ident = uuid4()
    assert refused("show", target, ident) == (1, f"sqla-durable show: there is no Plan with the key {ident}.")


@pytest.mark.parametrize(
    ("idents", "said"),
    [
        (["7"], "'7' cannot be the id of a Plan: Input should be a valid UUID"),
        ([str(UUID(int=1)), str(UUID(int=2))], "show takes one run, not 2."),
        (["\udcff"], "is not text"),
    ],
)
def test_a_key_that_is_none_is_one_line(target: str, idents: list[str], said: str) -> None:
    exit_code, line = refused("show", target, *idents)
    assert exit_code == 2
    assert said in line


def test_a_run_that_the_session_hides_is_not_called_missing(
    engine: Engine, session_factory: sessionmaker[Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    ident = approved_plan(session_factory)
    factory = sessionmaker(engine)

    @event.listens_for(factory, "do_orm_execute")
    def hide(state: Any) -> None:
        state.statement = state.statement.options(with_loader_criteria(Plan, Plan.note == "visible"))

    module = importable(monkeypatch, plans=Runs(factory, Plan, PlanStep))
    exit_code, line = refused("show", f"{module}:plans", ident)
    assert exit_code == 1
    assert line.endswith("is hidden from the session, by loader criteria for one.")


# models


class Wide(DeclarativeBase):
    pass


class Rich(RunMixin, Wide):
    """With columns of many types."""

    __tablename__ = "rich"
    __lifecycle__ = lifecycle()
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[JobStatus] = jobs.column("the state")
    amount: Mapped[Decimal] = mapped_column("how much", Numeric(10, 2), default=Decimal("9.90"))
    data: Mapped[bytes] = mapped_column(LargeBinary, default=b"\xff\x00")
    wait: Mapped[timedelta] = mapped_column(default=timedelta(hours=1))
    ratio: Mapped[float] = mapped_column(default=float("nan"))
    empty: Mapped[str | None]


class RichStep(ReceiptMixin[Rich], Wide):
    __tablename__ = "rich_step"


@pytest.fixture
def bare(empty_url: str) -> Any:
    engine = create_engine(empty_url)
    yield engine
    engine.dispose()


def shown_as_json(monkeypatch: pytest.MonkeyPatch, engine: Engine, entity: Any, step: Any, *ident: object) -> Any:
    target = f"{importable(monkeypatch, runs=made('sync', engine, entity, step))}:runs"
    answered("show", target, *ident)
    (shown,) = lines("show", target, *ident)
    return shown


def add(engine: Engine, base: Any, row: Any) -> None:
    with engine.begin() as connection:
        connection.execute(CreateSchema("app", if_not_exists=True))
    base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        session.add(row)


def test_columns_of_any_type_are_shown(bare: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    add(bare, Wide, Rich(id=1))
    assert shown_as_json(monkeypatch, bare, Rich, RichStep, 1)["columns"] == {
        "amount": "9.90",
        "data": "_wA=",
        "wait": "PT1H",
        "ratio": "NaN",
        "empty": None,
    }


def test_renamed_columns_and_schemas_are_followed(bare: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    add(bare, Own, Renamed(number=7, status="own"))
    shown = shown_as_json(monkeypatch, bare, Renamed, RenamedStep, 7)
    assert (shown["ident"], shown["key"], shown["status"]) == ("7", {"number": 7}, "not yet")
    assert shown["columns"] == {"status": "own"}


def test_a_subclass_is_shown_with_its_own_columns(bare: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    add(bare, Joined, JoinedFetch(address="home"))
    for entity in (JoinedJob, JoinedFetch):
        shown = shown_as_json(monkeypatch, bare, entity, JoinedStep, 1)
        assert (shown["key"], shown["columns"]) == ({"id": 1}, {"kind": "fetch", "address": "home"})


@pytest.mark.parametrize("given", [[f"{UUID(int=7)},a b"], [str(UUID(int=7)), "a b"], [f'{UUID(int=7)},"a b"']])
def test_a_composite_key_is_given_with_commas_or_as_several_arguments(
    bare: Engine, monkeypatch: pytest.MonkeyPatch, given: list[str]
) -> None:
    add(bare, Keys, Pair(tenant=UUID(int=7), name="a b"))
    assert shown_as_json(monkeypatch, bare, Pair, PairStep, *given)["ident"] == f"{UUID(int=7)},a b"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["a"], "'a' does not identify a Pair; its key is (tenant,name): write the parts with commas between them."),
        (["a,b,c"], "does not identify a Pair"),
        (["a", "b", "c"], "does not identify a Pair"),
        (['"a'], "does not identify a Pair"),
        (["a,b"], "'a' cannot be the tenant of a Pair: Input should be a valid UUID"),
        ([f"{UUID(int=7)},b", f"{UUID(int=7)},c"], "show takes one run, not 2."),
    ],
)
def test_a_composite_key_that_is_none_is_one_line(
    bare: Engine, monkeypatch: pytest.MonkeyPatch, given: list[str], said: str
) -> None:
    target = f"{importable(monkeypatch, runs=made('sync', bare, Pair, PairStep))}:runs"
    exit_code, line = refused("show", target, *given)
    assert exit_code == 2
    assert said in line


def test_a_key_of_an_enumeration_is_its_value(bare: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    add(bare, Keys, Coloured(id=5))
    assert shown_as_json(monkeypatch, bare, Coloured, ColouredStep, "l,5")["key"] == {"size": "l", "id": 5}


def test_a_number_below_zero_comes_after_two_dashes(bare: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    add(bare, Wide, Rich(id=-1))
    assert shown_as_json(monkeypatch, bare, Rich, RichStep, "--", -1)["key"] == {"id": -1}
