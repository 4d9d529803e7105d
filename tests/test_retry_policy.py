"""Which failures are tried again, when, and what is remembered of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import (
    ConfigurationError,
    DatabaseUnavailable,
    Ending,
    Failure,
    LostLease,
    Outcome,
    ResultError,
    Retry,
    RetryableError,
    Run,
    Runs,
    StepFailed,
)
from sqla_durable.retry import LONGEST
from tests.support import Entry, Plan, PlanStatus, PlanStep, approved_plan, column, entries, let_lapse, write_entry
from tests.support_async import as_async_call, as_async_step, carried_out
from tests.support_brief import Errands, ErrandStatus, errands

NOW = timedelta(0)


class Busy(Exception):
    """What a service says that is to be asked later."""


# --- what may be declared


def undecided(error: Exception) -> bool:
    return False


async def asynchronous(error: Exception) -> bool:
    return True


class Unhashable:
    __hash__ = None  # type: ignore[assignment]

    def __call__(self, error: Exception) -> bool:
        return True


@pytest.mark.parametrize(
    ("on", "message"),
    [
        (KeyboardInterrupt, "is not a subclass of Exception"),
        (int, "is not a subclass of Exception"),
        ((OSError, BaseException), "BaseException'> is not a subclass"),
        ((OSError, "timeout"), "'timeout' is not a subclass"),
        (((OSError,),), "is not a subclass"),
        ([OSError], "a tuple of them"),
        ("OSError", "a tuple of them"),
        (None, "a plain function"),
        (asynchronous, "a plain function"),
        (Unhashable(), "must be hashable"),
    ],
)
def test_a_policy_that_could_not_decide_is_refused(on: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"Retry\(on=.*{message}"):
        Retry(on=on)


@pytest.mark.parametrize("on", [OSError, (OSError, Busy), (), undecided])
def test_a_retry_with_a_policy_is_still_a_value(on: Any) -> None:
    assert Retry(on=on) == Retry(on=on)
    assert hash(Retry(on=on)) == hash(Retry(on=on))
    assert Retry(on=on) != Retry()
    with pytest.raises(AttributeError):
        Retry().on = on  # type: ignore[misc]


# --- which failures are retryable


class Ground:
    """Errands with a policy of their own, and what one of them came to."""

    def __init__(self, engine: Engine, factory: sessionmaker[Session], **options: Any) -> None:
        options = {"backoff": NOW, "cap": NOW, "max_attempts": 3, **options}
        self.kind: Errands = errands(retry=Retry(**options))
        self.kind.create(engine)
        self.engine = engine
        self.runs: Runs[Any] = self.kind.runs(factory)
        self.ident: UUID = self.kind.new(factory)

    def execute(self, handler: Callable[[Run[Any]], object], **options: Any) -> Outcome:
        return self.runs.execute(self.ident, handler, **options)

    def failing(self, *errors: Exception) -> Outcome:
        """Carry out a handler with a step that raises these together."""

        def body(session: Session) -> None:
            write_entry(session, "undone")
            raise errors[0] if len(errors) == 1 else ExceptionGroup("several", list(errors))

        return self.execute(lambda run: run.step("only", body), run_now=True)

    @property
    def row(self) -> Any:
        row = self.runs.get(self.ident)
        assert row is not None
        return row

    def wait(self) -> float:
        """In how many seconds the run is due."""
        with self.engine.connect() as connection:
            query = text("SELECT EXTRACT(EPOCH FROM available_at - clock_timestamp()) FROM errand WHERE id = :ident")
            return float(connection.execute(query, {"ident": self.ident}).scalar_one())


Make = Callable[..., Ground]


@pytest.fixture
def ground(engine: Engine, session_factory: sessionmaker[Session]) -> Make:
    return lambda **options: Ground(engine, session_factory, **options)


def check_given_back(ground: Ground, outcome: Outcome) -> None:
    assert (outcome.ending, outcome.status) == (Ending.INTERRUPTED, ErrandStatus.READY), outcome
    assert outcome.receipts == ground.runs.receipts(ground.ident) == ()
    assert outcome.failure is not None
    assert ground.row.error["type"] == outcome.failure.type
    assert entries(ground.engine) == []


def check_failed(ground: Ground, outcome: Outcome) -> None:
    assert (outcome.ending, outcome.status) == (Ending.LANDED, ErrandStatus.FAILED), outcome
    assert entries(ground.engine) == []


GROUP = ExceptionGroup("inner", [Busy(), RetryableError()])


@pytest.mark.parametrize(
    ("on", "errors", "retryable"),
    [
        (RetryableError, [RetryableError()], True),
        (RetryableError, [DatabaseUnavailable()], True),
        (RetryableError, [Busy()], False),
        (Busy, [Busy()], True),
        (Busy, [RetryableError()], True),
        (Busy, [ValueError()], False),
        ((OSError, Busy), [ConnectionResetError()], True),
        ((OSError, Busy), [ValueError()], False),
        ((), [RetryableError()], True),
        ((), [Busy()], False),
        (Exception, [ValueError()], True),
        (lambda error: "again" in str(error), [ValueError("again")], True),
        (lambda error: "again" in str(error), [ValueError("never")], False),
        (lambda error: False, [RetryableError()], True),
        (Busy, [Busy(), Busy()], True),
        (Busy, [Busy(), GROUP], True),
        (Busy, [Busy(), ValueError()], False),
        (Exception, [ResultError("of use")], False),
        (lambda error: True, [StepFailed("other", Failure("E", "m", None))], False),
        (Exception, [Busy(), ResultError("of use")], False),
    ],
)
def test_a_retryable_failure_of_a_step_writes_no_receipt_and_any_other_fails_the_run(
    ground: Make, on: Any, errors: list[Exception], retryable: bool
) -> None:
    made = ground(on=on)
    outcome = made.failing(*errors)
    (check_given_back if retryable else check_failed)(made, outcome)
    ours = any(isinstance(error, ResultError | StepFailed) for error in errors) and len(errors) == 1
    assert len(made.runs.receipts(made.ident)) == (not retryable and not ours)


def test_a_retryable_failure_reaches_the_handler_as_it_is(ground: Make) -> None:
    made = ground(on=Busy)
    raised = Busy("later")

    def body(session: Session) -> None:
        raise raised

    def call(*_: str) -> None:
        raise raised

    def carry_out(run: Run[Any]) -> None:
        steps = lambda: run.step("a", body), lambda: run.external("b", call), lambda: run.keyed("c", call)
        for step in steps:
            with pytest.raises(Busy) as caught:
                step()
            assert caught.value is raised
        assert run.receipts == ()
        run.step("a", write_entry, "in place")

    assert made.execute(carry_out).status is ErrandStatus.DONE
    assert entries(made.engine) == ["in place"]


def test_the_next_attempt_does_what_failed_and_replays_the_rest(ground: Make) -> None:
    made = ground(on=Busy)
    refusals = [Busy("1"), Busy("2")]

    def call() -> str:
        if refusals:
            raise refusals.pop(0)
        return "sent"

    def carry_out(run: Run[Any]) -> None:
        run.step("first", write_entry, "first")
        run.external("second", call)

    for expected in ErrandStatus.READY, ErrandStatus.READY, ErrandStatus.DONE:
        outcome = made.execute(carry_out)
        assert outcome.status is expected
    assert entries(made.engine) == ["first"]
    assert [failure["message"] for failure in made.row.failures] == ["1", "2"]
    assert made.row.error is None


def test_a_retryable_failure_that_uses_the_attempts_up_lands_the_run_as_dead(ground: Make) -> None:
    made = ground(on=Busy)
    outcomes = [made.failing(Busy(f"{attempt}")).status for attempt in (1, 2, 3)]
    assert outcomes == [ErrandStatus.READY, ErrandStatus.READY, ErrandStatus.DEAD]
    assert made.row.error["message"] == "3"
    assert made.row.finished_at is not None


def test_a_failure_of_the_handler_outside_steps_follows_the_same_policy(ground: Make) -> None:
    made = ground(on=Busy)

    def carry_out(run: Run[Any]) -> None:
        raise Busy

    check_given_back(made, made.execute(carry_out))

    def fail(run: Run[Any]) -> None:
        raise ValueError

    check_failed(made, made.execute(fail))


def test_a_step_that_failed_for_good_stays_failed_whatever_the_policy_says(ground: Make) -> None:
    made = ground(on=lambda error: "later" in str(error))

    def body(session: Session) -> None:
        raise ValueError("for good")

    def carry_out(run: Run[Any]) -> None:
        try:
            run.step("only", body)
        except ValueError as error:
            raise Busy("later") from error

    assert made.execute(carry_out).status is ErrandStatus.READY
    outcome = made.execute(lambda run: run.step("only", lambda session: pytest.fail("ran again")))
    assert isinstance(outcome.exception, StepFailed)
    assert outcome.status is ErrandStatus.FAILED


def test_a_policy_is_asked_once_about_each_failure_of_a_step(ground: Make) -> None:
    asked: list[Exception] = []

    def policy(error: Exception) -> bool:
        asked.append(error)
        return len(asked) % 2 == 1

    made = ground(on=policy)
    check_given_back(made, made.failing(ValueError("a")))
    assert [str(error) for error in asked] == ["a"]
    check_failed(made, made.failing(ValueError("b")))
    assert [str(error) for error in asked] == ["a", "b"]
    assert len(made.runs.receipts(made.ident)) == 1


def test_a_policy_is_not_asked_about_what_it_has_no_say_in(ground: Make) -> None:
    made = ground(on=lambda error: pytest.fail("asked"))
    made.failing(ResultError("of use"))
    assert made.row.status is ErrandStatus.FAILED


# --- a policy that is broken


def broken(error: Exception) -> bool:
    raise LookupError("no such header")


@pytest.mark.parametrize(
    ("on", "note"),
    [
        (broken, r"raised LookupError: no such header; taken as final"),
        (lambda error: None, r"returned None, not a bool or a timedelta"),
        (lambda error: 5, r"returned 5, not a bool"),
    ],
)
def test_where_the_policy_fails_the_failure_is_final_and_says_so(ground: Make, on: Any, note: str) -> None:
    made = ground(on=on)
    outcome = made.failing(ValueError("the true reason"))
    check_failed(made, outcome)
    assert outcome.failure is not None
    assert outcome.failure.message == "the true reason"
    assert note in (outcome.failure.traceback or "")
    (receipt,) = outcome.receipts
    assert receipt.failure is not None
    assert note in (receipt.failure.traceback or "")


def test_where_the_policy_fails_an_error_that_is_always_retryable_stays_so(ground: Make) -> None:
    made = ground(on=broken)
    check_given_back(made, made.failing(RetryableError("away")))


# --- when


def test_the_next_start_is_due_after_the_backoff(ground: Make) -> None:
    made = ground(on=Busy, backoff=timedelta(minutes=10), cap=timedelta(hours=1), jitter=0)
    made.failing(Busy())
    assert 590 < made.wait() <= 600
    assert made.execute(lambda run: None).ending is Ending.NOT_CLAIMABLE
    made.failing(Busy())
    assert 1190 < made.wait() <= 1200


@pytest.mark.parametrize("error", [ValueError("429"), RetryableError("429")])
def test_a_policy_may_name_the_delay_itself(ground: Make, error: Exception) -> None:
    made = ground(
        on=lambda error: timedelta(seconds=333, microseconds=5), backoff=timedelta(minutes=1), cap=timedelta(hours=1)
    )
    check_given_back(made, made.failing(error))
    assert 325 < made.wait() <= 333.1


def test_of_several_delays_the_longest_counts(ground: Make) -> None:
    delays = {"a": timedelta(minutes=5), "b": timedelta(minutes=50), "c": True}
    made = ground(on=lambda error: delays[str(error)])
    made.failing(ValueError("a"), ExceptionGroup("inner", [ValueError("b"), ValueError("c")]))
    assert 2990 < made.wait() <= 3000


@pytest.mark.parametrize(
    ("named", "expected"),
    [(timedelta(seconds=-5), 0), (timedelta.min, 0), (timedelta.max, LONGEST.total_seconds())],
    ids=str,
)
def test_a_delay_out_of_all_bounds_is_brought_within_them(ground: Make, named: timedelta, expected: float) -> None:
    made = ground(on=lambda error: named)
    check_given_back(made, made.failing(ValueError()))
    assert expected - 10 < made.wait() <= expected


def test_a_named_delay_does_not_outlive_the_attempts(ground: Make) -> None:
    made = ground(on=lambda error: timedelta(hours=1), max_attempts=1)
    assert made.failing(ValueError()).status is ErrandStatus.DEAD


def test_a_run_that_cannot_be_handed_back_is_left_to_its_lease(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    kind = errands(releases=False, retry=Retry(on=Busy))
    kind.create(engine)
    runs = kind.runs(session_factory)
    ident = kind.new(session_factory)

    def carry_out(run: Run[Any]) -> None:
        raise Busy

    outcome = runs.execute(ident, carry_out)
    assert (outcome.ending, outcome.status, outcome.failure) == (Ending.INTERRUPTED, ErrandStatus.RUNNING, None)
    assert isinstance(outcome.exception, Busy)


def test_a_retryable_failure_of_a_holder_that_lost_its_lease_writes_nothing(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    plans = Runs(session_factory, Plan, PlanStep)
    ident = approved_plan(session_factory)

    def call() -> None:
        let_lapse(session_factory, ident)
        assert plans.claim(ident) is not None
        raise RetryableError

    outcome = plans.execute(ident, lambda run: run.external("call", call))
    assert outcome.ending is Ending.LOST_LEASE
    assert column(engine, ident, "status") is PlanStatus.EXECUTING
    assert [failure["type"] for failure in column(engine, ident, "failures")] == ["LeaseLapsed"]


# --- what is remembered


def history(ground: Ground) -> list[tuple[str | None, str]]:
    return [(failure["step"], failure["type"]) for failure in ground.row.failures]


def not_found(session: Session) -> None:
    raise LookupError


def test_the_history_says_in_which_step_a_failure_happened(ground: Make) -> None:
    made = ground(on=Exception, max_attempts=20)

    def grouped(run: Run[Any]) -> None:
        try:
            run.step(7, not_found)
        except LookupError as error:
            raise ExceptionGroup("several", [Busy(), error]) from None

    def with_cause(run: Run[Any]) -> None:
        try:
            run.external("call", lambda: 1 / 0)
        except ZeroDivisionError as error:
            raise Busy from error

    def with_context(run: Run[Any]) -> None:
        try:
            run.keyed("charge", lambda key: 1 / 0)
        except ZeroDivisionError:
            raise Busy  # noqa: B904 - the context is what is tested

    def outside(run: Run[Any]) -> None:
        with suppress(LookupError):
            run.step(7, not_found)
        raise Busy

    made.execute(lambda run: run.step(7, not_found))
    made.execute(with_cause)
    made.execute(with_context)
    made.execute(outside)
    made.execute(grouped)
    made.execute(lambda run: 1 / 0)
    assert history(made) == [
        ("7", "LookupError"),
        ("call", "tests.test_retry_policy.Busy"),
        ("charge", "tests.test_retry_policy.Busy"),
        (None, "tests.test_retry_policy.Busy"),
        ("7", "ExceptionGroup"),
        (None, "ZeroDivisionError"),
    ]
    assert [failure["attempt"] for failure in made.row.failures] == [1, 2, 3, 4, 5, 6]


def test_the_history_says_so_of_final_failures_and_replayed_ones_too(ground: Make) -> None:
    made = ground()
    made.failing(ValueError("for good"))
    assert history(made) == [("only", "ValueError")]


def test_a_replayed_failure_is_of_its_step_and_one_recorded_by_hand_is_of_none(ground: Make) -> None:
    made = ground(max_attempts=20)

    def carry_out(run: Run[Any]) -> None:
        with pytest.raises(ZeroDivisionError):
            run.external("call", lambda: 1 / 0)
        run.release()

    made.execute(carry_out)
    made.execute(lambda run: run.external("call", lambda: None))
    assert history(made) == [("call", "sqla_durable.exc.StepFailed")]

    other = ground()

    def by_hand(run: Run[Any]) -> None:
        run.fail(Failure("E", "by hand", None))

    other.execute(by_hand)
    assert history(other) == [(None, "E")]


def test_a_failure_that_the_handler_lands_itself_is_of_its_step(ground: Make) -> None:
    made = ground()

    def carry_out(run: Run[Any]) -> None:
        try:
            run.external("call", lambda: 1 / 0)
        except ZeroDivisionError as error:
            run.fail(error)

    made.execute(carry_out)
    assert history(made) == [("call", "ZeroDivisionError")]


def test_a_lapse_is_of_no_step(engine: Engine, session_factory: sessionmaker[Session]) -> None:
    plans = Runs(session_factory, Plan, PlanStep)
    ident = approved_plan(session_factory)
    assert plans.claim(ident) is not None
    let_lapse(session_factory, ident)
    assert plans.heal(ident)
    (entry,) = column(engine, ident, "failures")
    assert (entry["step"], entry["type"]) == (None, "LeaseLapsed")


def test_one_exception_object_raised_by_two_steps_is_of_the_later_one(ground: Make) -> None:
    made = ground(on=Busy)
    singleton = Busy()

    def call() -> None:
        raise singleton

    def carry_out(run: Run[Any]) -> None:
        with pytest.raises(Busy):
            run.external("first", call)
        run.external("second", call)

    made.execute(carry_out)
    assert history(made) == [("second", "tests.test_retry_policy.Busy")]


# --- asyncio


def test_the_asyncio_form_decides_alike(engine: Engine, session_factory: sessionmaker[Session]) -> None:
    kind = errands(retry=Retry(on=Busy, backoff=NOW, cap=NOW, max_attempts=3))
    kind.create(engine)
    ident = kind.new(session_factory)
    runs = kind.runs(session_factory)

    def body(session: Session) -> None:
        session.add(Entry(label="undone"))
        session.flush()
        raise Busy("later")

    def call() -> None:
        raise Busy("later, too")

    async def scenario(_: Any) -> None:
        from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine

        from sqla_durable.asyncio import AsyncRun, AsyncRuns

        async_engine = create_async_engine(engine.url)
        async_runs: Any = AsyncRuns(async_sessionmaker(async_engine), kind.run, kind.receipt)

        async def carry_out(run: AsyncRun[Any]) -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run.step("one", as_async_step(body)))
                tasks.create_task(run.external("two", as_async_call(call)))

        outcome = await async_runs.execute(ident, carry_out)
        assert (outcome.ending, outcome.status) == (Ending.INTERRUPTED, ErrandStatus.READY)
        await async_engine.dispose()

    carried_out(engine, scenario)
    assert runs.receipts(ident) == ()
    assert entries(engine) == []
    row = runs.get(ident)
    assert row is not None
    assert row.failures[0]["step"] in {"one", "two"}


# --- fairness


@pytest.mark.past_guards
def test_runs_never_tried_and_runs_tried_again_are_claimed_in_the_order_they_are_due(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    plans = Runs(session_factory, Plan, PlanStep)
    order = ["fresh", "retried", "fresh", "fresh", "retried", "retried"]
    idents = [approved_plan(session_factory) for _ in order]
    with session_factory.begin() as session:
        for position, (ident, kind) in enumerate(zip(idents, order, strict=True)):
            session.execute(
                text(
                    "UPDATE plan SET available_at = now() - make_interval(mins => :minutes), attempts = :attempts,"
                    " fence = :attempts WHERE id = :ident"
                ),
                {"minutes": 60 - position, "attempts": 2 * (kind == "retried"), "ident": ident},
            )
    claimed = [run.row.id for _ in range(3) for run in plans.claim_due(2)]
    assert claimed == idents


def test_a_run_that_always_fails_does_not_keep_others_from_being_claimed(
    session_factory: sessionmaker[Session],
) -> None:
    plans = Runs(session_factory, Plan, PlanStep)
    failing = approved_plan(session_factory)
    others = [approved_plan(session_factory) for _ in range(3)]
    claimed: list[UUID] = []

    def carry_out(run: Run[Plan]) -> None:
        claimed.append(run.row.id)
        if run.row.id == failing:
            raise RetryableError

    while runs := plans.claim_due(1):
        plans.execute(runs[0], carry_out)
    assert claimed[0] == failing
    assert set(claimed[1:4]) == set(others), "the failing one went to the end of the queue"
    assert claimed[4:] == [failing, failing]


def test_a_lost_lease_is_not_in_the_history(engine: Engine, session_factory: sessionmaker[Session]) -> None:
    plans = Runs(session_factory, Plan, PlanStep)
    ident = approved_plan(session_factory)

    def carry_out(run: Run[Plan]) -> None:
        let_lapse(session_factory, ident)
        assert plans.claim(ident) is not None
        with pytest.raises(LostLease):
            run.step("only", write_entry, "never")
        raise Busy

    assert plans.execute(ident, carry_out).ending is Ending.LOST_LEASE
    assert [failure["type"] for failure in column(engine, ident, "failures")] == ["LeaseLapsed"]
