"""A run whose receipts are not those of the code that carries it out: never silently done again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel, Field
from sqlalchemy import Engine, func, orm, select
from sqlalchemy.orm import DeclarativeBase, MappedAsDataclass, Session, sessionmaker

from sqla_durable import (
    PENDING,
    Call,
    ConfigurationError,
    Ending,
    FunctionStatus,
    InputMismatch,
    OnMismatch,
    ReceiptMismatch,
    ResultMismatch,
    RetryableError,
    RunFailed,
    RunInputMismatch,
    Runs,
    SignalTimeout,
    StepOutcome,
    StepReused,
    StepUnreached,
    Suspended,
    call,
)
from sqla_durable.fingerprint import fingerprint, of_call
from sqla_durable.testing import lapse
from tests.support import Plan, PlanStep, approved_plan
from tests.support_functions import DurableRun, Entry, Order, labels, tables
from tests.support_processes import Program
from tests.support_versions import FORMS, Version, versions

Versions = tuple[Version, Version]


@pytest.fixture(params=FORMS)
def old_and_new(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Versions]:
    """Two versions of one program on the same database."""
    tables(engine)
    with versions(request.param, engine.url.render_as_string(hide_password=False)) as (old, new):
        yield old, new


def write(session: Session, label: str) -> str:
    session.add(Entry(label=label))
    return label


def crash() -> None:
    raise RetryableError("the process went away")


def left_half_way(version: Version, body: Any, *given: Any, **options: Any) -> Any:
    """Start a run whose body ends with a crash, and carry it out once."""
    version.function("job", body, **options)
    handle = version.start("job", *given)
    assert version.execute(handle).ending is Ending.INTERRUPTED
    return handle


def recorded(run: Any) -> None:
    run.step("one", write, "first")
    crash()


# a changed input


def test_a_step_that_is_called_with_another_input_fails_the_run_and_is_not_done_again(
    old_and_new: Versions, engine: Engine
) -> None:
    old, new = old_and_new
    handle = left_half_way(old, recorded)
    new.function("job", lambda run: run.step("one", write, "other"))
    outcome = new.execute(handle)
    assert outcome.status is FunctionStatus.FAILED
    assert isinstance(outcome.exception, InputMismatch)
    assert "step 'one' was recorded when it was called with another input" in str(outcome.exception)
    assert labels(engine) == ["first"]


def test_a_failed_run_goes_on_from_its_receipts_once_the_code_is_right(old_and_new: Versions, engine: Engine) -> None:
    old, new = old_and_new
    handle = left_half_way(old, recorded)
    new.function("job", lambda run: run.step("one", write, "other"))
    assert new.execute(handle).status is FunctionStatus.FAILED
    with versions(old.form, old.engine.url.render_as_string(hide_password=False), 1) as (right,):
        right.function("job", lambda run: [run.step("one", write, "first"), run.step("two", write, "second")][-1])
        assert right.functions.requeue(handle)
        assert right.execute(handle).status is FunctionStatus.DONE
    assert labels(engine) == ["first", "second"]


@pytest.mark.parametrize("kind", ["step", "external", "keyed", "operation", "gather"])
def test_every_kind_of_step_minds_its_input(old_and_new: Versions, kind: str) -> None:
    old, new = old_and_new
    calls: list[int] = []

    def echo(value: int) -> int:
        calls.append(value)
        return value

    def body(value: int, run: Any) -> None:
        steps = {
            "step": lambda: run.step("one", lambda session, value: echo(value), value),
            "external": lambda: run.external("one", echo, value),
            "keyed": lambda: run.keyed("one", lambda key, value: echo(value), value),
            "operation": lambda: run.operation("one", start=partial(echo, value), poll=lambda ids: ids),
            "gather": lambda: run.gather(call("one", echo, value)),
        }
        steps[kind]()
        crash()

    handle = left_half_way(old, partial(body, 1))
    (receipt,) = old.functions.steps(handle)
    assert receipt.input_fingerprint is not None
    new.function("job", partial(body, 2))
    outcome = new.execute(handle)
    assert outcome.status is FunctionStatus.FAILED, outcome
    assert isinstance(outcome.exception, InputMismatch)
    assert calls == [1]


def test_an_operation_that_waits_minds_its_input_before_it_is_polled(old_and_new: Versions) -> None:
    old, new = old_and_new

    def issue(value: int) -> int:
        return value

    def body(value: int, run: Any) -> None:
        def poll(ids: int) -> Any:
            return PENDING if value == 1 else pytest.fail("polled")

        run.operation("one", start=partial(issue, value), poll=poll, every=timedelta(0))

    old.function("job", partial(body, 1))
    handle = old.start("job")
    assert old.execute(handle).ending is Ending.SUSPENDED
    new.function("job", partial(body, 2))
    assert isinstance(new.execute(handle).exception, InputMismatch)


def test_a_recorded_failure_does_not_answer_for_another_input(old_and_new: Versions) -> None:
    old, new = old_and_new

    def divide(session: Any, number: int) -> None:
        raise ZeroDivisionError(number)

    def body(number: int, run: Any) -> None:
        try:
            run.step("one", divide, number)
        except ZeroDivisionError:
            crash()

    handle = left_half_way(old, partial(body, 1))
    new.function("job", partial(body, 2))
    assert isinstance(new.execute(handle).exception, InputMismatch)


def test_a_body_that_swallows_a_mismatch_neither_does_the_step_nor_lands_as_done(
    old_and_new: Versions, engine: Engine
) -> None:
    old, new = old_and_new

    def body(run: Any) -> None:
        for _ in range(2):
            with pytest.raises(ReceiptMismatch):
                run.external("one", lambda value: pytest.fail("called"), 2)

    handle = left_half_way(old, lambda run: [run.external("one", lambda value: value, 1), crash()])
    new.function("job", body)
    outcome = new.execute(handle)
    assert outcome.status is FunctionStatus.FAILED
    assert isinstance(outcome.exception, InputMismatch)


def test_an_input_that_its_body_changes_is_known_as_it_was_given(old_and_new: Versions) -> None:
    old, _ = old_and_new

    def take(session: Any, items: list[int]) -> int:
        return items.pop()

    def body(run: Any) -> None:
        run.step("one", take, [1, 2])
        if run.lease.attempt == 1:
            crash()

    handle = left_half_way(old, body)
    assert old.execute(handle).status is FunctionStatus.DONE


def test_core_runs_record_no_fingerprint(engine: Engine) -> None:
    factory = sessionmaker(engine)
    plans = Runs(factory, Plan, PlanStep)
    outcome = plans.execute(approved_plan(factory), lambda run: run.external("one", lambda value: value, 1))
    assert outcome.receipts[0].input_fingerprint is None


class Client:
    pass


class DataclassBase(MappedAsDataclass, DeclarativeBase):
    pass


class Mapped(DataclassBase):
    __tablename__ = "mapped"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)


@dataclass
class Parcel:
    weight: int
    items: list[str]


def test_a_fingerprint_is_of_the_values_and_of_the_type_of_what_json_cannot_hold() -> None:
    def fn() -> None: ...

    def of(*args: Any, **kwargs: Any) -> str:
        return of_call(fn, args, kwargs)

    assert of(Parcel(1, ["a"]), note="x") == of(Parcel(1, ["a"]), note="x")
    assert of(Parcel(1, ["a"])) != of(Parcel(1, ["b"]))
    assert of(Client()) == of(Client()) != of(object())
    assert of(1) != of(True) != of("1")
    assert of({1, 2}) == of({2, 1})
    assert of_call(partial(fn, 1, note="x"), (2,), {}) == of(1, 2, note="x")
    assert of([Mapped(id=1)]) == of([Mapped(id=2)]), "a mapped object changes with its row"


def test_a_fingerprint_uses_up_no_iterator() -> None:
    given = iter([1, 2])
    of_call(print, (given,), {})
    assert list(given) == [1, 2]


class OldParcel(BaseModel):
    weight: int


class NewParcel(BaseModel):
    weight: int
    fragile: bool = False
    labels: list[str] = Field(default_factory=list)


@dataclass
class OldBox:
    weight: int


@dataclass
class NewBox:
    weight: int
    fragile: bool = False
    labels: list[str] = field(default_factory=list)


@pytest.mark.parametrize(("old", "new"), [(OldParcel, NewParcel), (OldBox, NewBox)], ids=["model", "dataclass"])
def test_a_field_that_is_added_with_a_default_is_no_other_input(engine: Engine, old: Any, new: Any) -> None:
    def step(version: Any, **given: Any) -> Any:
        return lambda run: [run.external("one", lambda box: None, version(weight=1, **given)), crash()]

    tables(engine)
    with versions("sync", engine.url.render_as_string(hide_password=False), 3) as (before, after, other):
        handle = left_half_way(before, step(old))
        after.function("job", step(new))
        assert isinstance(after.execute(handle).exception, RetryableError), "the crash, and no mismatch"
        other.function("job", step(new, fragile=True))
        assert isinstance(other.execute(handle).exception, InputMismatch)
    values = {"input": old(weight=1)}, {"input": new(weight=1)}, {"input": new(weight=1, labels=["a"])}
    first, same, different = map(fingerprint, values)
    assert first == same != different, "likewise for what a run is started with under a key"


# another way after a failure


@pytest.mark.parametrize("again", [False, True])
def test_a_step_that_follows_a_failure_is_neither_compared_nor_missed(old_and_new: Versions, again: bool) -> None:
    """The failure is not final, so another attempt may meet another one, or none."""
    old, _ = old_and_new
    left = ["the first", "the second"] if again else ["the first"]

    def ask() -> str:
        if left:
            raise RetryableError(left.pop(0))
        return "answered"

    def body(run: Any) -> None:
        try:
            run.external("ask", ask)
        except RetryableError as error:
            run.external("make do", lambda reason: reason, str(error))
            if run.lease.attempt == 1:
                crash()

    handle = left_half_way(old, body)
    assert old.functions.steps(handle)[0].input_fingerprint is None
    outcome = old.execute(handle)
    assert (outcome.status, outcome.exception) == (FunctionStatus.DONE, None)
    assert set(old.steps(handle)) == ({"make do"} if again else {"ask", "make do"})


# a result, an input of the whole run


def number(session: Any) -> int:
    return 1


def text(session: Any) -> list[str]:
    return ["a"]


@pytest.mark.parametrize("policy", [OnMismatch.FAIL, OnMismatch.KEEP])
def test_a_result_that_does_not_decode_any_more_fails_the_run(old_and_new: Versions, policy: OnMismatch) -> None:
    old, new = old_and_new
    handle = left_half_way(old, lambda run: [run.step("one", number), crash()])
    new.function("job", lambda run: run.step("one", text), on_mismatch=policy)
    outcome = new.execute(handle)
    assert outcome.status is FunctionStatus.FAILED
    assert isinstance(outcome.exception, ResultMismatch)


def plain_input(run: Any, given: int) -> int:
    return given


def order_input(run: Any, given: Order) -> int:
    return given.id


@pytest.mark.parametrize("policy", [OnMismatch.FAIL, OnMismatch.KEEP])
def test_an_input_of_the_run_that_does_not_decode_any_more_fails_it(old_and_new: Versions, policy: OnMismatch) -> None:
    old, new = old_and_new
    old.function("job", plain_input)
    handle = old.start("job", 1)
    new.function("job", order_input, on_mismatch=policy)
    outcome = new.execute(handle)
    assert outcome.status is FunctionStatus.FAILED
    assert isinstance(outcome.exception, RunInputMismatch)
    assert "function 'job': the run was started with an input that does not decode" in str(outcome.exception)
    with pytest.raises(RunFailed, match="RunInputMismatch"):
        new.functions.result(handle)


def test_an_input_that_does_not_decode_is_left_to_other_code_where_that_is_said(old_and_new: Versions) -> None:
    old, new = old_and_new
    old.function("job", plain_input)
    handle = old.start("job", 1)
    new.function("job", order_input, on_mismatch=OnMismatch.PARK)
    assert new.execute(handle).ending is Ending.SUSPENDED
    assert old.execute(handle, run_now=True).status is FunctionStatus.DONE


def test_a_receipt_of_another_kind_of_step_fails_the_run_as_before(old_and_new: Versions) -> None:
    old, new = old_and_new
    handle = left_half_way(old, recorded)
    new.function("job", lambda run: run.external("one", write, None, "first"), on_mismatch=OnMismatch.KEEP)
    outcome = new.execute(handle)
    assert type(outcome.exception) is ReceiptMismatch
    assert outcome.status is FunctionStatus.FAILED


# a step that is not reached


def test_a_body_that_returns_without_reaching_a_recorded_step_does_not_land_as_done(old_and_new: Versions) -> None:
    old, new = old_and_new
    handle = left_half_way(old, recorded)
    new.function("job", lambda run: run.step("two", write, "second"))
    outcome = new.execute(handle)
    assert outcome.status is FunctionStatus.FAILED
    assert isinstance(outcome.exception, StepUnreached)
    assert "step 'one' has a receipt and was not reached" in str(outcome.exception)


def test_a_failed_step_that_was_caught_and_is_not_reached_again_counts_too(old_and_new: Versions) -> None:
    old, new = old_and_new

    def body(run: Any) -> None:
        with pytest.raises(ZeroDivisionError):
            run.step("one", lambda session: 1 / 0)
        crash()

    handle = left_half_way(old, body)
    new.function("job", lambda run: None)
    assert isinstance(new.execute(handle).exception, StepUnreached)


def test_steps_of_every_kind_that_are_reached_let_the_run_land(old_and_new: Versions) -> None:
    old, _ = old_and_new

    def body(run: Any) -> int:
        run.step(1, write, "first")
        run.external("two", lambda: 2)
        run.keyed("three", lambda key: 3)
        run.operation("four", start=lambda: 4, poll=lambda ids: ids)
        run.gather(call("five", lambda: 5), call("six", lambda: 6))
        try:
            run.external("seven", lambda: 1 / 0)
        except Exception:  # noqa: BLE001 - it is another one in a replay
            run.external("eight", lambda: 8)
        if run.lease.attempt == 1:
            crash()
        return 9

    handle = left_half_way(old, body)
    assert old.execute(handle).status is FunctionStatus.DONE
    assert old.functions.result(handle) == 9


# the policies


def test_a_function_that_keeps_answers_in_spite_of_a_changed_input_and_lets_unreached_steps_be(
    old_and_new: Versions, engine: Engine
) -> None:
    old, new = old_and_new

    def both(run: Any) -> None:
        run.step("zero", write, "zeroth")
        recorded(run)

    handle = left_half_way(old, both)
    new.function("job", lambda run: run.step("one", write, "other"), on_mismatch=OnMismatch.KEEP)
    assert new.execute(handle).status is FunctionStatus.DONE
    assert new.functions.result(handle) == "first"
    assert labels(engine) == ["zeroth", "first"]


@pytest.mark.parametrize("what", ["input", "result", "unreached", "kind"])
def test_a_function_that_parks_hands_the_run_to_other_code_and_counts_no_attempt(
    old_and_new: Versions, engine: Engine, what: str
) -> None:
    old, new = old_and_new
    handle = left_half_way(old, recorded)
    bodies = {
        "input": lambda run: run.step("one", write, "other"),
        "result": lambda run: run.step("one", listed, "first"),
        "unreached": lambda run: None,
        "kind": lambda run: run.external("one", write, None, "first"),
    }
    new.function("job", bodies[what], on_mismatch=OnMismatch.PARK)
    for _ in range(7):
        outcome = new.execute(handle, run_now=True)
        assert outcome.ending is Ending.SUSPENDED
    row = new.row(handle)
    assert (row.status, row.attempts) == (FunctionStatus.READY, 1)
    assert row.error is not None
    with Session(engine) as session:
        wait = session.scalars(select(DurableRun.available_at - func.clock_timestamp())).one()
    assert timedelta(seconds=40) < wait < timedelta(seconds=80)
    with versions(old.form, old.engine.url.render_as_string(hide_password=False), 1) as (right,):
        right.function("job", lambda run: run.step("one", write, "first"))
        assert right.execute(handle, run_now=True).status is FunctionStatus.DONE
    assert labels(engine) == ["first"]


def listed(session: Session, label: str) -> list[int]:
    return []


def test_a_body_that_swallows_being_parked_does_not_go_on(old_and_new: Versions) -> None:
    old, new = old_and_new

    def body(run: Any) -> None:
        with pytest.raises(Suspended):
            run.step("one", write, "other")
        with pytest.raises(Suspended):
            run.external("two", lambda: pytest.fail("called"))

    handle = left_half_way(old, recorded)
    new.function("job", body, on_mismatch=OnMismatch.PARK)
    assert new.execute(handle).ending is Ending.SUSPENDED


def test_a_run_that_is_to_be_cancelled_lands_as_cancelled_instead_of_being_parked(old_and_new: Versions) -> None:
    old, new = old_and_new
    handle = left_half_way(old, recorded)

    def body(run: Any) -> None:
        with new.factory.begin() as session:
            assert new.functions.request_cancel(session, handle)
        run.step("one", write, "other")

    new.function("job", body, on_mismatch=OnMismatch.PARK)
    assert new.execute(handle).status is FunctionStatus.CANCELLED


# renamed steps


@pytest.mark.parametrize("kind", ["step", "external", "keyed", "operation", "gather"])
def test_a_renamed_step_finds_its_receipt_under_its_former_key(old_and_new: Versions, kind: str) -> None:
    old, new = old_and_new
    calls: list[int] = []

    def made(*_: Any) -> int:
        calls.append(1)
        return len(calls)

    def body(key: Any, run: Any) -> int:
        gathered: Call[int] = call(key, made)
        steps = {
            "step": lambda: run.step(key, made),
            "external": lambda: run.external(key, made),
            "keyed": lambda: run.keyed(key, made),
            "operation": lambda: run.operation(key, start=made, poll=lambda ids: ids),
            "gather": lambda: run.gather(gathered)[0],
        }
        result: int = steps[kind]()
        if key == 3:
            crash()
        return result

    handle = left_half_way(old, partial(body, 3))
    new.function("job", partial(body, "charge-card"), aliases={"charge-card": ("charge", 3), "other": "else"})
    assert new.execute(handle).status is FunctionStatus.DONE
    assert new.functions.result(handle) == 1
    assert list(new.steps(handle)) == ["3"]


def test_a_renamed_step_that_failed_is_replayed_and_done_again_as_one(old_and_new: Versions) -> None:
    old, new = old_and_new

    def body(key: str, run: Any) -> str:
        try:
            run.external(key, lambda: 1 / 0)
        except Exception:  # noqa: BLE001 - it is another one in a replay
            if key == "old":
                crash()
        return str(run.external(key, lambda: "done"))

    handle = left_half_way(old, partial(body, "old"))
    new.function("job", partial(body, "new"), aliases={"new": "old"})
    assert new.execute(handle).status is FunctionStatus.DONE
    assert new.steps(handle) == {"old": "done"}


def test_a_renamed_keyed_step_is_called_with_the_idempotency_key_that_it_had_at_first(old_and_new: Versions) -> None:
    old, new = old_and_new
    keys: list[str] = []

    def charge(key: str) -> None:
        keys.append(key)
        if len(keys) == 1:
            crash()  # after the call, and before its receipt

    handle = left_half_way(old, lambda run: run.keyed("charge", charge))

    def body(run: Any) -> str:
        run.keyed("pay", charge)
        return str(run.idempotency_key("pay"))

    new.function("job", body, aliases={"pay": ("charge-card", "charge")})
    assert new.execute(handle).status is FunctionStatus.DONE
    assert keys[0] == keys[1] == new.functions.result(handle)


def test_a_former_key_may_not_be_used_by_another_step(old_and_new: Versions) -> None:
    _, new = old_and_new
    new.function("job", lambda run: run.step("old", write, "x"), aliases={"new": "old"})
    outcome = new.execute(new.start("job"))
    assert isinstance(outcome.exception, StepReused)
    assert "former key of step 'new'" in str(outcome.exception)


@pytest.mark.parametrize(
    ("aliases", "said"),
    [
        ({"a": "c", "b": "c"}, "'c' for two steps"),
        ({"a": "b", "b": "c"}, "'b' for two steps"),
        ({"a": ("c", "c")}, "'c' for two steps"),
        ({"a": "a"}, "'a' for two steps"),
        ({"7": "a"}, "digits only"),
        ({"a": ""}, "from 1 to 200 printable characters"),
        ({"a": "x" * 201}, "from 1 to 200 printable characters"),
        ({"a": 1.5}, "a key is a str or an int"),
    ],
)
def test_aliases_that_cannot_work_are_refused(old_and_new: Versions, aliases: Any, said: str) -> None:
    _, new = old_and_new
    with pytest.raises(ConfigurationError, match=f"function 'job'.*{said}"):
        new.function("job", recorded, aliases=aliases)


def test_a_policy_that_there_is_not_is_refused(old_and_new: Versions) -> None:
    _, new = old_and_new
    with pytest.raises(ConfigurationError, match=r"function 'job'.*'ignore' is not a valid OnMismatch"):
        new.function("job", recorded, on_mismatch="ignore")


# processes


@pytest.mark.parametrize("form", FORMS)
def test_a_renamed_step_is_not_done_again_by_the_new_code_after_the_old_process_was_killed(
    form: str, engine: Engine
) -> None:
    tables(engine)
    url = engine.url.render_as_string(hide_password=False)
    with Program("changed_code", url, form, "old") as old, Program("changed_code", url, form, "renamed") as new:
        ident = old.ask("start")
        old.send(ident)
        assert old.receive() == ["charged", "charge"]
        assert old.receive() == ["mailing"]
        old.kill()
        lapse_all(engine)
        assert new.ask(ident) == ["mailing"]
        assert new.ask("go on") == ["landed", "done"]
    with versions(form, url, 1) as (version,):
        assert list(version.steps(UUID(ident))) == ["charge", "mail"]


@pytest.mark.parametrize("form", FORMS)
def test_an_old_process_leaves_a_run_of_the_new_code_alone_and_the_new_one_finishes_it(
    form: str, engine: Engine
) -> None:
    tables(engine)
    url = engine.url.render_as_string(hide_password=False)
    with Program("changed_code", url, form, "old") as old, Program("changed_code", url, form, "new") as new:
        ident = new.ask("start")
        new.send(ident)
        assert new.receive() == ["charged", "new-charge"]
        assert new.receive() == ["mailing"]
        new.kill()
        lapse_all(engine)
        assert old.ask(ident) == ["suspended", "ready"]
        with versions(form, url, 1) as (version,):
            assert version.row(UUID(ident)).attempts == 1
        with Program("changed_code", url, form, "new") as another:
            assert another.ask(ident) == ["mailing"]
            assert another.ask("go on") == ["landed", "done"]


def lapse_all(engine: Engine) -> None:
    """The holders of all runs have shown no sign of life for longer than their leases."""
    with Session(engine) as session, session.begin():
        for ident in session.scalars(select(DurableRun.id).where(DurableRun.status == FunctionStatus.RUNNING)):
            lapse(session, DurableRun, ident)


# waits and sleeps


def wait_for(name: str, type_: Any = int, **options: Any) -> Any:
    return lambda run: run.wait(name, type_, **options)


def answer_to(name: str, **options: Any) -> Any:
    return lambda run: run.answer(name, double, **options)


def double(session: Any, number: int) -> int:
    return 2 * number


def sleep_for(key: str, duration: timedelta = timedelta(hours=1)) -> Any:
    return lambda run: run.sleep(key, duration)


WAITS: dict[str, Any] = {"wait": wait_for("paid"), "answer": answer_to("paid"), "sleep": sleep_for("paid")}


def waiting(version: Version, body: Any) -> Any:
    """Start a run that waits, and carry it out once."""
    version.function("job", body)
    handle = version.start("job")
    assert version.execute(handle).ending is Ending.SUSPENDED
    return handle


def waited(version: Version, kind: str) -> Any:
    """The same, with what it waits for there, and a crash afterwards."""
    body = sleep_for("paid", timedelta(0)) if kind == "sleep" else WAITS[kind]
    version.function("job", lambda run: [body(run), crash()])
    handle = version.start("job")
    if kind != "sleep":
        version.signal(handle, "paid", 1)
    assert version.execute(handle).ending is Ending.INTERRUPTED
    assert [receipt.outcome for receipt in version.functions.steps(handle)] == [StepOutcome.SUCCEEDED]
    return handle


@pytest.mark.parametrize("begin", [waiting, waited])
@pytest.mark.parametrize("kind", WAITS)
def test_a_wait_or_sleep_that_was_taken_out_is_missed(old_and_new: Versions, kind: str, begin: Any) -> None:
    old, new = old_and_new
    handle = begin(old, kind if begin is waited else WAITS[kind])
    new.function("job", lambda run: run.step("two", write, "second"))
    outcome = new.execute(handle, run_now=True)
    assert outcome.status is FunctionStatus.FAILED
    assert isinstance(outcome.exception, StepUnreached)
    assert "step 'paid' has a receipt and was not reached" in str(outcome.exception)


@pytest.mark.parametrize("begin", [waiting, waited])
@pytest.mark.parametrize("kind", WAITS)
def test_one_that_was_taken_out_on_purpose_is_let_be(old_and_new: Versions, kind: str, begin: Any) -> None:
    old, new = old_and_new
    handle = begin(old, kind if begin is waited else WAITS[kind])
    new.function("job", lambda run: None, on_mismatch=OnMismatch.KEEP)
    assert new.execute(handle, run_now=True).status is FunctionStatus.DONE


@pytest.mark.parametrize("begin", [waiting, waited])
@pytest.mark.parametrize("kind", ["wait", "answer"])
@pytest.mark.parametrize("policy", OnMismatch)
def test_a_signal_of_another_name_is_another_input(
    old_and_new: Versions, kind: str, policy: OnMismatch, begin: Any
) -> None:
    old, new = old_and_new
    handle = begin(old, kind if begin is waited else WAITS[kind])
    body = {"wait": wait_for, "answer": answer_to}[kind]("settled", key="paid")
    new.function("job", body, on_mismatch=policy)
    outcome = new.execute(handle, run_now=True)
    if policy is OnMismatch.FAIL:
        assert isinstance(outcome.exception, InputMismatch)
        assert outcome.status is FunctionStatus.FAILED
    elif policy is OnMismatch.PARK:
        assert outcome.ending is Ending.SUSPENDED
        assert "another input" in new.row(handle).error["message"]
    elif begin is waited:
        assert outcome.status is FunctionStatus.DONE
    else:
        assert new.row(handle).waits_for == "settled"


@pytest.mark.parametrize("begin", [waiting, waited])
def test_a_wait_that_has_become_an_answer_is_another_input(old_and_new: Versions, begin: Any) -> None:
    """What the one records is the payload, and the other the reply."""
    old, new = old_and_new
    handle = begin(old, "wait" if begin is waited else WAITS["wait"])
    new.function("job", answer_to("paid"))
    assert isinstance(new.execute(handle, run_now=True).exception, InputMismatch)


def test_a_payload_that_does_not_decode_as_what_is_waited_for_now_fails_the_run(old_and_new: Versions) -> None:
    old, new = old_and_new
    handle = waited(old, "wait")
    new.function("job", wait_for("paid", list[str]))
    assert isinstance(new.execute(handle).exception, ResultMismatch)


@pytest.mark.parametrize("begin", [waiting, waited])
@pytest.mark.parametrize(
    ("kind", "renamed"),
    [
        ("wait", wait_for("payment")),
        ("wait", wait_for("paid", key="payment")),
        ("answer", answer_to("payment")),
        ("sleep", sleep_for("payment")),
    ],
    ids=["signal", "key", "answer", "sleep"],
)
def test_a_renamed_wait_or_sleep_goes_on_from_its_receipt(
    old_and_new: Versions, kind: str, renamed: Any, begin: Any
) -> None:
    old, new = old_and_new
    handle = begin(old, kind if begin is waited else WAITS[kind])
    (before,) = old.functions.steps(handle)
    new.function("job", renamed, aliases={"payment": "paid"})
    outcome = new.execute(handle, run_now=True)
    assert (outcome.status is FunctionStatus.DONE) == (begin is waited), outcome
    (after,) = new.functions.steps(handle)
    assert (after.step, after.input_fingerprint, after.ids) == ("paid", before.input_fingerprint, before.ids)
    assert before.input_fingerprint is not None


@pytest.mark.parametrize("kind", WAITS)
def test_one_whose_time_has_changed_needs_nothing(old_and_new: Versions, kind: str) -> None:
    """The instant of the first attempt stands."""
    old, new = old_and_new
    bodies = {
        "wait": lambda hours: wait_for("paid", timeout=timedelta(hours=hours)),
        "answer": lambda hours: answer_to("paid", timeout=timedelta(hours=hours)),
        "sleep": lambda hours: sleep_for("paid", timedelta(hours=hours)),
    }
    handle = waiting(old, bodies[kind](1))
    (before,) = old.functions.steps(handle)
    new.function("job", bodies[kind](2))
    assert new.execute(handle, run_now=True).ending is Ending.SUSPENDED
    (after,) = new.functions.steps(handle)
    assert after.ids == before.ids


def test_a_wait_that_timed_out_and_was_taken_out_is_missed(old_and_new: Versions) -> None:
    old, new = old_and_new

    def body(run: Any) -> None:
        with pytest.raises(SignalTimeout):
            run.wait("paid", int, timeout=timedelta(0))
        crash()

    old.function("job", body)
    handle = old.start("job")
    assert old.execute(handle).ending is Ending.SUSPENDED
    assert old.execute(handle).ending is Ending.INTERRUPTED
    new.function("job", lambda run: None)
    assert isinstance(new.execute(handle).exception, StepUnreached)


def test_an_answer_that_failed_and_was_taken_out_is_missed(old_and_new: Versions) -> None:
    old, new = old_and_new

    def refuse(session: Any, number: int) -> int:
        raise ZeroDivisionError

    def body(run: Any) -> None:
        with pytest.raises(ZeroDivisionError):
            run.answer("paid", refuse)
        crash()

    old.function("job", body)
    handle = old.start("job")
    old.signal(handle, "paid", 1)
    assert old.execute(handle).ending is Ending.INTERRUPTED
    new.function("job", lambda run: None)
    assert isinstance(new.execute(handle).exception, StepUnreached)
