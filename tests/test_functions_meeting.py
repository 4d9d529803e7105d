"""Where several features of functions meet: failures, requeues, waits, keys, and columns of the user's own."""

from __future__ import annotations

import json
from datetime import timedelta
from decimal import Decimal
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel
from sqlalchemy import Engine, String, create_engine
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, Session, mapped_column, sessionmaker

from sqla_durable import (
    Ending,
    FunctionHandle,
    FunctionMixin,
    FunctionRun,
    Functions,
    FunctionStatus,
    InputMismatch,
    ReceiptMixin,
    RunFailed,
    SignalTimeout,
    Worker,
)
from sqla_durable.testing import let_pass
from tests.support_functions import DurableRun, DurableSignal, DurableStep, tables

HOUR = timedelta(hours=1)


@pytest.fixture
def functions(engine: Engine) -> Functions[DurableRun]:
    tables(engine)
    return Functions(sessionmaker(engine), DurableRun, DurableStep, signals=DurableSignal)


def started(functions: Functions[Any], function: Any, /, *given: Any, **options: Any) -> FunctionHandle[Any]:
    with functions.session_factory.begin() as session:
        handle: FunctionHandle[Any] = functions.start(session, function, *given, **options)
        return handle


def sent(functions: Functions[Any], handle: FunctionHandle[Any], name: str, payload: object = None) -> None:
    with functions.session_factory.begin() as session:
        assert functions.signal(session, handle, name, payload)


def nothing(_: Session) -> None:
    """A body without an effect."""


class Flaky:
    """A call that fails the first time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.calls == 1:
            raise ValueError("declined")
        return "paid"


def test_a_requeued_run_whose_failure_does_not_come_again_takes_the_other_way(functions: Functions[DurableRun]) -> None:
    flaky = Flaky()

    @functions.function("pay")
    def pay(run: FunctionRun) -> str:
        try:
            return run.external("charge", flaky)
        except ValueError:
            run.step("give the stock back", nothing)
            raise

    handle = started(functions, pay)
    assert functions.execute(handle).status is FunctionStatus.FAILED
    assert functions.requeue(handle)
    assert functions.execute(handle).status is FunctionStatus.DONE
    assert (functions.result(handle), flaky.calls) == ("paid", 2)


def test_a_retry_in_place_after_a_durable_pause_takes_the_short_way_from_then_on(
    functions: Functions[DurableRun],
) -> None:
    flaky = Flaky()

    @functions.function("pay")
    def pay(run: FunctionRun) -> str:
        for attempt in range(3):
            try:
                got = run.external("charge", flaky)
                break
            except Exception:  # noqa: BLE001 - its own the first time, and StepFailed after that
                run.sleep(f"pause {attempt}", HOUR)
        run.wait("go")
        return got

    handle = started(functions, pay)
    assert functions.execute(handle).ending is Ending.SUSPENDED
    with functions.session_factory.begin() as session:
        let_pass(session, DurableStep, handle.id, "pause 0")
    assert functions.execute(handle).ending is Ending.SUSPENDED
    sent(functions, handle, "go")
    assert functions.execute(handle).status is FunctionStatus.DONE


def test_what_is_done_while_nobody_answers_is_no_changed_code(functions: Functions[DurableRun]) -> None:
    @functions.function("remind")
    def remind(run: FunctionRun) -> str:
        for number in range(3):
            try:
                return str(run.wait("go", str, timeout=HOUR))
            except SignalTimeout:
                run.step(f"reminder {number}", nothing)
        return "nobody"

    handle = started(functions, remind)
    assert functions.execute(handle).ending is Ending.SUSPENDED
    with functions.session_factory.begin() as session:
        let_pass(session, DurableStep, handle.id, "go")
    assert functions.execute(handle).ending is Ending.SUSPENDED
    sent(functions, handle, "go", "yes")
    assert functions.execute(handle).status is FunctionStatus.DONE
    assert functions.result(handle) == "yes"


def test_a_step_that_notes_why_another_failed_is_not_held_against_the_code(functions: Functions[DurableRun]) -> None:
    def note(_: Session, why: str) -> None: ...

    def decline() -> None:
        raise ValueError("declined")

    @functions.function("note")
    def noting(run: FunctionRun) -> str:
        try:
            run.external("charge", decline)
        except Exception as error:  # noqa: BLE001 - its own the first time, and StepFailed after that
            run.step("note", note, str(error))
        return str(run.wait("go", str))

    handle = started(functions, noting)
    functions.execute(handle)
    sent(functions, handle, "go", "on")
    assert functions.execute(handle).status is FunctionStatus.DONE


class Old(BaseModel):
    a: int


class New(BaseModel):
    a: int
    b: str | None = None


def ship(_: Session, order: Any) -> None: ...


@pytest.mark.parametrize(("given", "fits"), [(New(a=1), True), (New(a=1, b="x"), False)])
def test_a_field_with_a_default_may_be_added_to_what_steps_are_given(
    functions: Functions[DurableRun], given: New, fits: bool
) -> None:
    versions: list[BaseModel] = [Old(a=1), given]

    @functions.function("ship")
    def shipping(run: FunctionRun) -> str:
        run.step("ship", ship, versions.pop(0))
        return str(run.wait("go", str))

    handle = started(functions, shipping)
    functions.execute(handle)
    sent(functions, handle, "go", "on")
    functions.execute(handle)
    if fits:
        assert functions.result(handle) == "on"
    else:
        with pytest.raises(RunFailed, match=InputMismatch.__name__):
            functions.result(handle)


def test_a_run_that_was_cancelled_while_it_waited_waits_anew_when_it_is_requeued(
    functions: Functions[DurableRun],
) -> None:
    functions.function("wait")(lambda run: run.wait("go", timeout=HOUR))
    handle = started(functions, "wait")
    functions.execute(handle)
    with functions.session_factory.begin() as session:
        let_pass(session, DurableStep, handle.id, "go")
        assert functions.request_cancel(session, handle)
    assert functions.requeue(handle)
    assert functions.execute(handle).ending is Ending.SUSPENDED
    assert functions.describe(handle).waits_for == "go"


def test_an_engine_that_parses_json_its_own_way_changes_no_input(engine: Engine) -> None:
    tables(engine)
    own = create_engine(engine.url, json_deserializer=lambda text: json.loads(text, parse_float=Decimal))
    functions: Functions[DurableRun] = Functions(sessionmaker(own), DurableRun, DurableStep)
    seen: list[Any] = []

    @functions.function("see")
    def see(run: FunctionRun, given: dict[str, Any]) -> None:
        seen.append(given)

    functions.execute(started(functions, see, {"a": 1.5}))
    own.dispose()
    assert seen == [{"a": 1.5}]
    assert type(seen[0]["a"]) is float


class OwnBase(DeclarativeBase):
    pass


class Referred(FunctionMixin, OwnBase):
    __tablename__ = "referred"
    ref: Mapped[str | None] = mapped_column(String, unique=True)


class ReferredStep(ReceiptMixin[Referred], OwnBase):
    __tablename__ = "referred_step"


@pytest.fixture
def referred(engine: Engine) -> Functions[Referred]:
    OwnBase.metadata.create_all(engine)
    functions = Functions(sessionmaker(engine), Referred, ReferredStep)
    functions.function("f")(lambda run: run.external("s", lambda: 1))
    return functions


@pytest.mark.parametrize("keys", [{}, {"key": "k"}])
def test_a_conflict_of_ones_own_unique_column_is_not_taken_for_one_of_keys(
    referred: Functions[Referred], keys: dict[str, Any]
) -> None:
    handle = started(referred, "f", ref="x")
    referred.execute(handle)
    many = {name: lambda _: "k" for name in keys}
    referred.function("g")(lambda run, number: None)
    with referred.session_factory() as session, pytest.raises(IntegrityError, match="ref"):
        referred.start_many(session, "g", [1], ref="x", **many)
    with referred.session_factory() as session, pytest.raises(IntegrityError, match="ref"):
        referred.fork(session, handle, from_step="s", **keys)


def test_a_fork_answers_to_its_key_whatever_becomes_of_its_source(functions: Functions[DurableRun]) -> None:
    flaky = Flaky()
    functions.function("f")(lambda run: run.external("s", flaky))
    source = started(functions, "f")
    functions.execute(source)
    with functions.session_factory.begin() as session:
        fork = functions.fork(session, source, from_step="s", key="k")
    assert functions.requeue(source)  # which forgets the failed receipt
    with functions.session_factory.begin() as session:
        assert functions.fork(session, source, from_step="s", key="k") == fork


class DataBase(MappedAsDataclass, DeclarativeBase):
    pass


class Versioned(FunctionMixin, OwnBase):
    __tablename__ = "versioned"
    version: Mapped[int] = mapped_column()
    __mapper_args__: ClassVar[dict[str, Any]] = {"version_id_col": version}


class VersionedStep(ReceiptMixin[Versioned], OwnBase):
    __tablename__ = "versioned_step"


class Parent(FunctionMixin, OwnBase):
    __tablename__ = "parent"
    kind: Mapped[str]
    __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_on": "kind", "polymorphic_identity": "parent"}


class ParentStep(ReceiptMixin[Parent], OwnBase):
    __tablename__ = "parent_step"


class Child(Parent):
    __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": "child"}


class Listed(FunctionMixin, DataBase):
    __tablename__ = "listed"
    tags: Mapped[list[str]] = mapped_column(JSONB, default_factory=list)


class ListedStep(ReceiptMixin[Listed], DataBase):
    __tablename__ = "listed_step"


@pytest.mark.parametrize(
    ("run", "step"), [(Versioned, VersionedStep), (Parent, ParentStep), (Child, ParentStep), (Listed, ListedStep)]
)
def test_start_many_inserts_what_start_does(engine: Engine, run: Any, step: Any) -> None:
    for base in (OwnBase, DataBase):
        base.metadata.create_all(engine)
    functions: Functions[Any] = Functions(sessionmaker(engine), run, step)
    functions.function("f")(lambda run, number: number)
    one = started(functions, "f", 1)
    with functions.session_factory.begin() as session:
        [other] = functions.start_many(session, "f", [1])
    for handle in (one, other):
        functions.execute(handle)
        assert functions.result(handle) == 1
    with functions.session_factory() as session:
        rows = [session.get_one(run, handle.id) for handle in (one, other)]
        own = [{name: vars(row).get(name) for name in ("kind", "version", "tags")} for row in rows]
    assert own[0] == own[1]


class Odd(FunctionMixin, OwnBase):
    __tablename__ = 'Durable%Run\'s "own"'


class OddStep(ReceiptMixin[Odd], OwnBase):
    __tablename__ = "odd%step"


def test_limits_hold_on_a_table_of_an_odd_name(engine: Engine) -> None:
    OwnBase.metadata.create_all(engine)
    functions: Functions[Odd] = Functions(sessionmaker(engine), Odd, OddStep)
    functions.function("f", concurrency=1)(lambda run: "done")
    handle = started(functions, "f")
    Worker(functions).run_due(timedelta(seconds=10))
    assert functions.result(handle) == "done"
