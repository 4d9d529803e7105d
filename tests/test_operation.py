"""An operation: issued at most once, then only polled, and every state of it can be seen and resolved."""

from __future__ import annotations

import logging
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, event, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import (
    PENDING,
    Cancelled,
    ConfigurationError,
    DatabaseUnavailable,
    Ending,
    LostLease,
    NestedStep,
    NotIssued,
    OperationFailed,
    OperationUnknown,
    Outcome,
    Pending,
    ReceiptMismatch,
    ResultError,
    Retry,
    Run,
    Runs,
    StepFailed,
    StepOutcome,
    StepReused,
    Suspended,
    UsageError,
)
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, column, entries, let_lapse, write_entry
from tests.support_brief import errands
from tests.support_service import KEY, Batch, Service, due, state
from tests.support_statements import statements

IDS = {"number": 1, "queue": ["main"]}
RESULT = {"rows": 3}


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep)


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


@pytest.fixture
def ident(session_factory: sessionmaker[Session]) -> UUID:
    return approved_plan(session_factory)


def claimed(plans: Runs[Plan], ident: UUID) -> Run[Plan]:
    run = plans.claim(ident, run_now=True)
    assert run is not None
    return run


def seconds_until_due(engine: Engine, ident: UUID) -> float:
    with engine.connect() as connection:
        query = text("SELECT EXTRACT(EPOCH FROM available_at - clock_timestamp()) FROM plan WHERE id = :ident")
        return float(connection.execute(query, {"ident": ident}).scalar_one())


# --- how it goes


def test_an_operation_that_has_ended_at_the_first_poll_is_a_step_like_any_other(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    service.finish(RESULT)
    results: list[object] = []
    outcome = plans.execute(ident, lambda run: results.append(service.carry_out(run)))
    assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.EXECUTED)
    assert results == [RESULT]
    (receipt,) = outcome.receipts
    assert (receipt.effect, receipt.outcome, receipt.ids, receipt.result) == (
        "operation",
        StepOutcome.SUCCEEDED,
        IDS,
        RESULT,
    )
    assert plans.receipts(ident) == outcome.receipts
    assert plans.execute(ident, lambda run: pytest.fail("ran")) == outcome
    assert (service.issues, service.polls) == (1, 1)


def test_while_it_is_pending_the_run_is_ready_and_due_at_the_next_poll_and_nobody_holds_it(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    outcome = plans.execute(ident, service.carry_out)
    assert (outcome.ending, outcome.status, outcome.failure) == (Ending.SUSPENDED, PlanStatus.APPROVED, None)
    assert isinstance(outcome.exception, Suspended)
    assert [(receipt.outcome, receipt.ids) for receipt in outcome.receipts] == [(StepOutcome.PENDING, IDS)]
    assert outcome.receipts == plans.receipts(ident)
    plan = plans.get(ident)
    assert plan is not None
    assert (plan.status, plan.lease_owner, plan.lease_expires_at) == (PlanStatus.APPROVED, None, None)
    assert (plan.attempts, plan.fence, plan.error, plan.failures) == (0, 1, None, [])
    assert 3590 < seconds_until_due(engine, ident) <= 3600
    assert plans.execute(ident, service.carry_out).ending is Ending.NOT_CLAIMABLE
    due(session_factory, ident)
    assert plans.execute(ident, service.carry_out).ending is Ending.SUSPENDED
    service.finish(RESULT)
    due(session_factory, ident)
    outcome = plans.execute(ident, service.carry_out)
    assert outcome.status is PlanStatus.EXECUTED
    assert (service.issues, service.polls) == (1, 3)
    assert plans.receipts(ident) == outcome.receipts
    assert outcome.receipts[0].fence == 3, "the holder that recorded its end"


def test_what_comes_before_it_is_replayed_and_what_comes_after_it_waits(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def carry_out(run: Run[Plan]) -> None:
        run.step("before", write_entry, "before")
        assert service.carry_out(run) == RESULT
        run.step("after", write_entry, "after")

    assert plans.execute(ident, carry_out).ending is Ending.SUSPENDED
    assert entries(engine) == ["before"]
    service.finish(RESULT)
    due(session_factory, ident)
    assert plans.execute(ident, carry_out).status is PlanStatus.EXECUTED
    assert entries(engine) == ["before", "after"]
    assert [receipt.step for receipt in plans.receipts(ident)] == ["before", KEY, "after"]


def test_no_transaction_is_open_and_no_lock_is_held_during_its_calls(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    seen: list[tuple[str, str]] = []

    def look(when: str) -> None:
        with engine.begin() as connection:
            connection.execute(select(Plan.__table__.c.id).with_for_update(nowait=True))
            connection.execute(select(PlanStep.__table__.c.step).with_for_update(nowait=True))
            outcome = connection.scalar(text("SELECT outcome FROM plan_step"))
            open_ones = connection.scalar(
                text(
                    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                    " AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%'"
                )
            )
        assert open_ones == 0
        seen.append((when, str(outcome)))

    def start() -> Batch:
        look("start")
        return service.start()

    def poll(batch: Batch) -> int:
        look("poll")
        return batch.number

    plans.execute(ident, lambda run: run.operation(KEY, start=start, poll=poll))
    assert seen == [("start", "issued"), ("poll", "pending")]
    assert column(engine, ident, "status") is PlanStatus.EXECUTED


@pytest.mark.parametrize(
    ("pending", "expected"),
    [
        (PENDING, 3600),
        (Pending(timedelta(minutes=2)), 120),
        (Pending(after=timedelta(0)), 0),
        (Pending(timedelta(days=-1)), 0),
        (Pending(timedelta.max), timedelta(days=36500).total_seconds()),
        (Pending(timedelta.min), 0),
    ],
    ids=str,
)
def test_a_poll_may_say_when_the_next_one_is_due(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID, pending: Pending, expected: float
) -> None:
    def poll(batch: Batch) -> int | Pending:
        return pending

    every = timedelta(hours=1)
    plans.execute(ident, lambda run: run.operation(KEY, start=service.start, poll=poll, every=every))
    assert expected - 10 < seconds_until_due(engine, ident) <= expected


def test_polls_come_every_ten_seconds_where_nothing_else_is_said(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    plans.execute(ident, lambda run: run.operation(KEY, start=service.start, poll=service.poll))
    assert 5 < seconds_until_due(engine, ident) <= 10


def test_polling_for_longer_than_any_number_of_attempts_uses_none_up(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    for _ in range(10):
        assert plans.execute(ident, service.carry_out, run_now=True).ending is Ending.SUSPENDED
        assert column(engine, ident, "attempts") == 0
    assert (service.issues, service.polls) == (1, 10)


def test_a_replay_of_an_operation_that_has_ended_sends_no_statement(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    service.finish(RESULT)
    run = claimed(plans, ident)
    service.carry_out(run)
    run.release()
    again = claimed(plans, ident)
    with statements(engine) as sent:
        assert service.carry_out(again) == RESULT
    assert sent == []


def test_several_operations_of_one_run_are_apart(plans: Runs[Plan], service: Service, ident: UUID) -> None:
    service.finish(RESULT)

    def carry_out(run: Run[Plan]) -> None:
        for key in range(3):
            run.operation(key, start=service.start, poll=service.poll)
        with pytest.raises(StepReused):
            run.operation(2, start=service.start, poll=service.poll)

    outcome = plans.execute(ident, carry_out)
    assert outcome.status is PlanStatus.EXECUTED
    assert [receipt.ids["number"] for receipt in outcome.receipts] == [1, 2, 3]


# --- a handler that does not let Suspended pass


def test_a_handler_that_swallows_the_suspension_can_do_nothing_more(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def carry_out(run: Run[Plan]) -> None:
        with pytest.raises(Suspended):
            service.carry_out(run)
        with pytest.raises(Suspended):
            run.step("other", write_entry, "other")
        with pytest.raises(Suspended):
            run.external("call", lambda: pytest.fail("called"))
        with pytest.raises(Suspended):
            service.carry_out(run)
        for verb in run.renew, run.finish:
            with pytest.raises(Suspended):
                verb()
        with pytest.raises(Suspended):
            run.fail(ValueError())

    outcome = plans.execute(ident, carry_out)
    assert outcome.exception is None
    assert (outcome.ending, outcome.status) == (Ending.SUSPENDED, PlanStatus.APPROVED)
    assert entries(engine) == []
    assert service.polls == 1


def test_an_error_that_takes_the_place_of_the_suspension_is_not_recorded(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def carry_out(run: Run[Plan]) -> None:
        try:
            service.carry_out(run)
        except Suspended:
            raise ValueError("of the handler's") from None

    outcome = plans.execute(ident, carry_out)
    assert (outcome.ending, outcome.failure) == (Ending.SUSPENDED, None)
    assert isinstance(outcome.exception, ValueError)
    assert column(engine, ident, "failures") == []


def test_an_interruption_after_the_suspension_passes_and_the_run_stays_parked(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def carry_out(run: Run[Plan]) -> None:
        try:
            service.carry_out(run)
        finally:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plans.execute(ident, carry_out)
    assert column(engine, ident, "status") is PlanStatus.APPROVED
    assert seconds_until_due(engine, ident) > 3000


def test_the_handle_of_a_suspended_run_that_was_claimed_by_hand_is_spent(
    plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    run = claimed(plans, ident)
    with pytest.raises(Suspended, match=r"Plan .* waits for operation 'batch'; it is approved, and due in 1:00:00"):
        service.carry_out(run)
    with pytest.raises(LostLease):
        plans.hold(run.lease)


# --- never issued twice


def test_an_intent_without_ids_is_never_issued_again_and_fails_the_run_for_all_to_see(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def start() -> Batch:
        service.start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plans.execute(ident, lambda run: run.operation(KEY, start=start, poll=service.poll))
    assert state(engine, ident) == ("issued", None, 1)
    assert column(engine, ident, "status") is PlanStatus.APPROVED
    outcome = plans.execute(ident, service.carry_out)
    assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.FAILED)
    assert isinstance(outcome.exception, OperationUnknown)
    assert outcome.exception.step == KEY
    assert outcome.failure is not None
    for word in "runs.attach_ids(session, UUID(", "runs.never_issued(session, UUID(", "requeue", "'batch'", "fence 1":
        assert word in outcome.failure.message
    assert outcome.receipts[0].outcome is StepOutcome.ISSUED
    assert column(engine, ident, "failures")[0]["step"] == KEY
    assert plans.execute(ident, service.carry_out) == outcome
    assert (service.issues, service.polls) == (1, 0)


def test_requeueing_alone_does_not_issue_again(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    test_an_intent_without_ids_is_never_issued_again_and_fails_the_run_for_all_to_see(engine, plans, service, ident)
    assert plans.requeue(ident)
    assert isinstance(plans.execute(ident, service.carry_out).exception, OperationUnknown)
    assert (service.issues, service.polls) == (1, 0)


def test_a_start_that_raises_leaves_the_outcome_unknown_and_says_what_it_raised(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def start() -> Batch:
        service.start()
        raise ConnectionError("reset by peer")

    def carry_out(run: Run[Plan]) -> None:
        for _ in range(2):
            with pytest.raises(OperationUnknown):
                run.operation(KEY, start=start, poll=service.poll)
        run.operation(KEY, start=start, poll=service.poll)

    outcome = plans.execute(ident, carry_out)
    assert outcome.status is PlanStatus.FAILED
    assert outcome.failure is not None
    assert "OperationUnknown" in outcome.failure.type
    assert state(engine, ident) == ("issued", None, 1)
    (entry,) = column(engine, ident, "failures")
    assert entry["step"] == KEY
    assert service.issues == 1


def test_what_start_raised_is_in_the_message_and_in_the_traceback(
    plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def start() -> Batch:
        raise ConnectionError("reset by peer")

    outcome = plans.execute(ident, lambda run: run.operation(KEY, start=start, poll=service.poll))
    assert outcome.failure is not None
    assert "ConnectionError: reset by peer" in outcome.failure.message
    assert "in start" in (outcome.failure.traceback or "")


def test_the_service_that_certainly_does_not_have_it_is_asked_anew_by_the_retry_policy(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    refusals = [NotIssued("429"), ExceptionGroup("both", [NotIssued("dns"), NotIssued("dns")])]

    def start() -> Batch:
        if refusals:
            raise refusals.pop(0)
        return service.start()

    def carry_out(run: Run[Plan]) -> None:
        run.operation(KEY, start=start, poll=service.poll)

    for expected in 1, 2:
        outcome = plans.execute(ident, carry_out)
        assert (outcome.ending, outcome.status) == (Ending.INTERRUPTED, PlanStatus.APPROVED)
        assert state(engine, ident) is None
        assert outcome.receipts == ()
        assert column(engine, ident, "attempts") == expected
    assert [failure["step"] for failure in column(engine, ident, "failures")] == [KEY, KEY]
    assert plans.execute(ident, carry_out).ending is Ending.SUSPENDED
    assert service.issues == 1


def test_a_group_in_which_something_else_went_wrong_too_is_not_taken_for_not_issued(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def start() -> Batch:
        raise ExceptionGroup("both", [NotIssued("dns"), TimeoutError("slow")])

    outcome = plans.execute(ident, lambda run: run.operation(KEY, start=start, poll=service.poll))
    assert isinstance(outcome.exception, OperationUnknown)
    assert state(engine, ident) == ("issued", None, 1)


def test_a_service_that_never_takes_it_uses_the_attempts_up(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def start() -> Batch:
        raise NotIssued("429")

    for _ in range(3):
        outcome = plans.execute(ident, lambda run: run.operation(KEY, start=start, poll=service.poll))
    assert outcome.status is PlanStatus.DEAD
    assert state(engine, ident) is None


def test_nothing_is_issued_for_a_run_that_cannot_be_handed_back(
    engine: Engine, session_factory: sessionmaker[Session], service: Service
) -> None:
    kind = errands(releases=False)
    kind.create(engine)
    runs = kind.runs(session_factory)
    ident = kind.new(session_factory)
    outcome = runs.execute(ident, service.carry_out)
    assert isinstance(outcome.exception, ConfigurationError)
    assert "running -> ready" in str(outcome.exception)
    assert (service.issues, runs.receipts(ident)) == (0, ())


@pytest.mark.parametrize("every", [5, 0.5, None, timedelta(seconds=-1), timedelta.max])
def test_nothing_is_issued_where_the_interval_is_none(
    plans: Runs[Plan], service: Service, ident: UUID, every: Any
) -> None:
    run = claimed(plans, ident)
    with pytest.raises(UsageError, match=r"operation\(every="):
        run.operation(KEY, start=service.start, poll=service.poll, every=every)
    assert (service.issues, plans.receipts(ident)) == (0, ())


def test_nothing_is_issued_where_what_is_to_be_stored_cannot_be(
    plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def poll(batch: Batch) -> "Missing | Pending":  # type: ignore[name-defined]  # noqa: F821, UP037
        return PENDING

    async def start() -> Batch:
        return service.start()

    run = claimed(plans, ident)
    with pytest.raises(UsageError, match="cannot be resolved"):
        run.operation(KEY, start=service.start, poll=poll)
    with pytest.raises(UsageError, match="coroutine function"):
        run.operation(KEY, start=start, poll=lambda batch: PENDING)
    assert (service.issues, plans.receipts(ident)) == (0, ())


def test_a_duration_that_is_none_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Pending\(30\)"):
        Pending(30)  # type: ignore[arg-type]


def test_a_step_inside_its_calls_is_refused(plans: Runs[Plan], service: Service, ident: UUID) -> None:
    run = claimed(plans, ident)

    def poll(batch: Batch) -> int:
        with pytest.raises(NestedStep):
            run.step("inner", write_entry, "inner")
        with pytest.raises(NestedStep):
            service.carry_out(run)
        return 1

    assert run.operation(KEY, start=service.start, poll=poll) == 1


# --- ids


def test_ids_that_would_not_come_back_equal_are_kept_all_the_same_and_fail_the_run(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def start():  # type: ignore[no-untyped-def]
        service.start()
        return ("a", 1)

    outcome = plans.execute(ident, lambda run: run.operation(KEY, start=start, poll=lambda ids: PENDING))
    assert outcome.status is PlanStatus.FAILED
    assert isinstance(outcome.exception, ResultError)
    assert state(engine, ident) == ("pending", ["a", 1], 1)

    def mended() -> tuple[str, int]:
        pytest.fail("issued again")

    plans.requeue(ident)
    results: list[object] = []
    poll = results.append
    outcome = plans.execute(ident, lambda run: run.operation(KEY, start=mended, poll=poll))
    assert outcome.status is PlanStatus.EXECUTED
    assert results == [("a", 1)]
    assert service.issues == 1


def test_ids_that_cannot_be_stored_at_all_are_in_the_error(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def start() -> str:
        service.start()
        return "nul\0"

    outcome = plans.execute(ident, lambda run: run.operation(KEY, start=start, poll=lambda ids: PENDING))
    assert isinstance(outcome.exception, OperationUnknown)
    assert r"nul\x00" in str(outcome.exception)
    assert state(engine, ident) == ("issued", None, 1)


def test_an_operation_without_ids_of_its_own_is_pending_all_the_same(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def start() -> None:
        service.start()

    def poll(ids: None) -> str | Pending:
        return PENDING if service.issues == 1 else "done"

    outcome = plans.execute(ident, lambda run: run.operation(KEY, start=start, poll=poll))
    assert outcome.ending is Ending.SUSPENDED
    assert state(engine, ident) == ("pending", None, 1)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT ids = 'null'::jsonb FROM plan_step"))


def test_ids_that_are_lost_to_an_outage_are_logged_and_noted(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID, caplog: pytest.LogCaptureFixture
) -> None:
    run = claimed(plans, ident)

    def start() -> Batch:
        ids = service.start()
        event.listen(engine, "before_cursor_execute", cut_off)
        return ids

    def cut_off(connection: Any, cursor: Any, sql: str, *_: object) -> None:
        if "attached" in sql:
            with engine.connect() as other:
                other.execute(text("SELECT 1"))
            connection.connection.dbapi_connection.close()

    try:
        with caplog.at_level(logging.ERROR, "sqla_durable"), pytest.raises(DatabaseUnavailable) as raised:
            run.operation(KEY, start=start, poll=service.poll)
    finally:
        event.remove(engine, "before_cursor_execute", cut_off)
    assert '"number":1' in caplog.text.replace(" ", "")
    assert any('"number":1' in note.replace(" ", "") for note in raised.value.__notes__)
    assert state(engine, ident) == ("issued", None, 1)


def test_an_interruption_while_the_ids_are_recorded_does_not_lose_them(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    interruptions = [KeyboardInterrupt()]

    def interrupt(connection: Any, cursor: Any, sql: str, *_: object) -> None:
        if "attached" in sql and interruptions:
            raise interruptions.pop()

    event.listen(engine, "before_cursor_execute", interrupt)
    with pytest.raises(KeyboardInterrupt):
        plans.execute(ident, service.carry_out)
    event.remove(engine, "before_cursor_execute", interrupt)
    assert state(engine, ident) == ("pending", IDS, 1)
    assert column(engine, ident, "status") is PlanStatus.APPROVED


# --- polls that raise


def test_an_outage_of_the_service_however_long_never_fails_a_live_operation(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def poll(batch: Batch) -> int:
        raise ConnectionError("no route to host")

    for number in range(1, 8):
        outcome = plans.execute(
            ident,
            lambda run: run.operation(KEY, start=service.start, poll=poll, every=timedelta(hours=1)),
            run_now=True,
        )
        assert (outcome.ending, outcome.status) == (Ending.SUSPENDED, PlanStatus.APPROVED)
        assert outcome.failure is not None
        assert outcome.failure.type == "ConnectionError"
        assert isinstance(outcome.exception, Suspended)
        assert isinstance(outcome.exception.__cause__, ConnectionError)
        failures = column(engine, ident, "failures")
        assert [(failure["step"], failure["attempt"]) for failure in failures] == [(KEY, 1)] * number
        assert column(engine, ident, "attempts") == 0
        assert column(engine, ident, "error")["message"] == "no route to host"
        assert seconds_until_due(engine, ident) > 3590
    service.finish(RESULT)
    outcome = plans.execute(ident, service.carry_out, run_now=True)
    assert outcome.status is PlanStatus.EXECUTED
    assert column(engine, ident, "error") is None
    assert service.issues == 1


def test_a_poll_that_succeeds_again_clears_the_error_and_keeps_the_history(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def poll(batch: Batch) -> int:
        raise ConnectionError("no route to host")

    plans.execute(ident, lambda run: run.operation(KEY, start=service.start, poll=poll))
    plans.execute(ident, service.carry_out, run_now=True)
    assert column(engine, ident, "error") is None
    assert len(column(engine, ident, "failures")) == 1


def test_an_operation_that_has_failed_is_a_failed_receipt_with_its_ids_and_is_replayed_as_one(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def poll(batch: Batch) -> int:
        raise OperationFailed("rejected by the bank")

    outcome = plans.execute(ident, lambda run: run.operation(KEY, start=service.start, poll=poll))
    assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.FAILED)
    assert isinstance(outcome.exception, OperationFailed)
    assert state(engine, ident) == ("failed", IDS, 1)
    assert outcome.receipts == plans.receipts(ident)
    assert plans.requeue(ident)
    assert state(engine, ident) == ("failed", IDS, 1)
    outcome = plans.execute(ident, service.carry_out)
    assert isinstance(outcome.exception, StepFailed)
    assert outcome.exception.failure.message == "rejected by the bank"
    assert outcome.status is PlanStatus.FAILED
    assert (service.issues, service.polls) == (1, 0)


def test_an_operation_that_has_failed_is_never_live_again_within_an_execution(
    plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def poll(batch: Batch) -> int:
        raise ExceptionGroup("of a task group", [OperationFailed("rejected")])

    def carry_out(run: Run[Plan]) -> None:
        with pytest.raises(ExceptionGroup):
            run.operation(KEY, start=service.start, poll=poll)
        for _ in range(3):
            with pytest.raises(StepFailed):
                service.carry_out(run)
        run.step("instead", write_entry, "instead")

    assert plans.execute(ident, carry_out).status is PlanStatus.EXECUTED
    assert (service.issues, service.polls) == (1, 0)


def test_a_result_that_would_not_come_back_equal_is_final_and_the_operation_stays_as_it_is(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def poll(batch: Batch):  # type: ignore[no-untyped-def]
        return (1, 2)

    outcome = plans.execute(ident, lambda run: run.operation(KEY, start=service.start, poll=poll))
    assert isinstance(outcome.exception, ResultError)
    assert outcome.status is PlanStatus.FAILED
    assert state(engine, ident) == ("pending", IDS, 1)
    service.finish(RESULT)
    plans.requeue(ident)
    assert plans.execute(ident, service.carry_out).status is PlanStatus.EXECUTED
    assert service.issues == 1


def test_a_policy_that_names_a_delay_sets_the_next_poll(
    engine: Engine, session_factory: sessionmaker[Session], service: Service
) -> None:
    kind = errands(retry=Retry(on=lambda error: timedelta(minutes=7)))
    kind.create(engine)
    runs = kind.runs(session_factory)
    ident = kind.new(session_factory)

    def poll(batch: Batch) -> int:
        raise ConnectionError("429")

    outcome = runs.execute(ident, lambda run: run.operation(KEY, start=service.start, poll=poll))
    assert outcome.ending is Ending.SUSPENDED
    with engine.connect() as connection:
        query = text("SELECT EXTRACT(EPOCH FROM available_at - clock_timestamp()) FROM errand")
        assert 410 < float(connection.execute(query).scalar_one()) <= 420


def test_an_interruption_of_a_poll_gives_the_run_back_at_once(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def poll(batch: Batch) -> int:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plans.execute(ident, lambda run: run.operation(KEY, start=service.start, poll=poll))
    assert column(engine, ident, "status") is PlanStatus.APPROVED
    assert seconds_until_due(engine, ident) <= 0
    assert state(engine, ident) == ("pending", IDS, 1)


# --- cancel requests and lost leases


def request_cancel(plans: Runs[Plan], factory: sessionmaker[Session], ident: UUID) -> None:
    with factory.begin() as session:
        assert plans.request_cancel(session, ident)


def test_ids_that_arrive_after_a_cancel_request_are_kept(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def start() -> Batch:
        request_cancel(plans, session_factory, ident)
        return service.start()

    outcome = plans.execute(ident, lambda run: run.operation(KEY, start=start, poll=service.poll))
    assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.CANCELLED)
    assert isinstance(outcome.exception, Cancelled)
    assert state(engine, ident) == ("pending", IDS, 1)
    assert outcome.receipts == plans.receipts(ident)
    assert service.polls == 0


def test_ids_that_arrive_after_the_landing_as_cancelled_are_kept(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    run = claimed(plans, ident)

    def start() -> Batch:
        request_cancel(plans, session_factory, ident)
        let_lapse(session_factory, ident)
        assert plans.heal(ident)
        assert column(engine, ident, "status") is PlanStatus.CANCELLED
        return service.start()

    with pytest.raises(LostLease):
        run.operation(KEY, start=start, poll=service.poll)
    assert state(engine, ident) == ("pending", IDS, 1)
    assert service.polls == 0


def test_ids_that_arrive_after_the_lease_was_lost_are_kept_and_the_next_holder_polls(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    taken: list[Run[Plan]] = []

    def start() -> Batch:
        let_lapse(session_factory, ident)
        taken.append(claimed(plans, ident))
        return service.start()

    outcome = plans.execute(ident, lambda run: run.operation(KEY, start=start, poll=service.poll))
    assert outcome.ending is Ending.LOST_LEASE
    assert isinstance(outcome.exception, LostLease)
    assert state(engine, ident) == ("pending", IDS, 1)
    service.finish(RESULT)
    assert service.carry_out(taken[0]) == RESULT, "it looked again, and found the ids"
    assert (service.issues, service.polls) == (1, 1)
    assert state(engine, ident) == ("succeeded", IDS, 2)


def test_the_next_holder_that_finds_no_ids_yet_does_not_issue_and_the_ids_arrive_in_a_failed_run(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def start() -> Batch:
        let_lapse(session_factory, ident)
        assert plans.execute(ident, service.carry_out).status is PlanStatus.FAILED
        return service.start()

    outcome = plans.execute(ident, lambda run: run.operation(KEY, start=start, poll=service.poll))
    assert outcome.ending is Ending.LOST_LEASE
    assert state(engine, ident) == ("pending", IDS, 1)
    service.finish(RESULT)
    assert plans.requeue(ident)
    assert plans.execute(ident, service.carry_out).status is PlanStatus.EXECUTED
    assert service.issues == 1


def test_a_run_that_was_reaped_during_the_call_and_not_claimed_since_goes_on(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    service.finish(RESULT)

    def start() -> Batch:
        let_lapse(session_factory, ident)
        assert plans.heal(ident)
        return service.start()

    outcome = plans.execute(ident, lambda run: run.operation(KEY, start=start, poll=service.poll))
    assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.EXECUTED)
    assert column(engine, ident, "fence") == 1


def test_a_lease_that_is_lost_during_a_poll_records_nothing(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    answers: list[Any] = [1, PENDING, OperationFailed("no"), ConnectionError("no")]
    run = claimed(plans, ident)
    with pytest.raises(Suspended):
        service.carry_out(run)

    def poll(batch: Batch) -> int | Pending:
        let_lapse(session_factory, ident)
        run = claimed(plans, ident)
        answer = answers.pop(0)
        run.release()
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, int | Pending)
        return answer

    while answers:
        with session_factory.begin() as session:
            session.execute(text("UPDATE plan SET attempts = 0"))
        outcome = plans.execute(ident, lambda run: run.operation(KEY, start=service.start, poll=poll), run_now=True)
        assert outcome.ending is Ending.LOST_LEASE
        assert state(engine, ident) == ("pending", IDS, 1)


def test_a_cancel_request_during_a_poll_lands_the_run_as_cancelled_with_its_ids(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def poll(batch: Batch) -> Pending | int:
        request_cancel(plans, session_factory, ident)
        return PENDING

    outcome = plans.execute(ident, lambda run: run.operation(KEY, start=service.start, poll=poll))
    assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.CANCELLED)
    assert isinstance(outcome.exception, Cancelled)
    assert state(engine, ident) == ("pending", IDS, 1)
    assert column(engine, ident, "finished_at") is not None


def test_a_parked_run_that_is_asked_to_be_cancelled_lands_at_once_and_keeps_its_ids(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    plans.execute(ident, service.carry_out)
    request_cancel(plans, session_factory, ident)
    outcome = plans.execute(ident, service.carry_out)
    assert (outcome.status, outcome.replayed) == (PlanStatus.CANCELLED, True)
    assert [(receipt.outcome, receipt.ids) for receipt in outcome.receipts] == [(StepOutcome.PENDING, IDS)]
    assert service.polls == 1


def test_nothing_is_issued_for_a_run_that_was_asked_to_be_cancelled(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    run = claimed(plans, ident)
    request_cancel(plans, session_factory, ident)
    with pytest.raises(Cancelled):
        service.carry_out(run)
    assert (service.issues, state(engine, ident)) == (0, None)


def test_an_intent_is_withdrawn_under_the_fence_only(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def start() -> Batch:
        let_lapse(session_factory, ident)
        claimed(plans, ident)
        raise NotIssued("429")

    outcome = plans.execute(ident, lambda run: run.operation(KEY, start=start, poll=service.poll))
    assert outcome.ending is Ending.LOST_LEASE
    assert state(engine, ident) == ("issued", None, 1)


# --- another kind of step


def test_the_receipt_of_an_operation_fits_no_other_kind_of_step_and_is_never_overwritten_by_one(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    def poll(batch: Batch) -> int:
        raise OperationFailed("rejected")

    plans.execute(ident, lambda run: run.operation(KEY, start=service.start, poll=poll))
    plans.requeue(ident)

    def carry_out(run: Run[Plan]) -> None:
        for _ in range(3):
            with pytest.raises(ReceiptMismatch):
                run.step(KEY, write_entry, "other")
            with pytest.raises(ReceiptMismatch):
                run.external(KEY, lambda: None)
            with pytest.raises(ReceiptMismatch):
                run.keyed(KEY, lambda key: None)

    assert plans.execute(ident, carry_out).status is PlanStatus.EXECUTED
    assert state(engine, ident) == ("failed", IDS, 1)
    assert entries(engine) == []


@pytest.mark.parametrize("failing", [False, True])
def test_the_receipt_of_another_step_does_not_fit_an_operation(
    plans: Runs[Plan], service: Service, ident: UUID, failing: bool
) -> None:
    def call() -> None:
        if failing:
            raise ValueError

    run = claimed(plans, ident)
    with suppress(ValueError):
        run.external(KEY, call)
    run.release()
    with pytest.raises(ReceiptMismatch, match=r"recorded as external and is now operation"):
        service.carry_out(claimed(plans, ident))
    assert service.issues == 0


# --- what PostgreSQL itself allows

ROWS = {
    "issued": ("'issued'", "NULL", "NULL", "NULL", "'operation'", True),
    "issued with ids": ("'issued'", "NULL", "NULL", "'1'", "'operation'", False),
    "issued with a result": ("'issued'", "'1'", "NULL", "NULL", "'operation'", False),
    "issued with an error": ("'issued'", "NULL", "'{}'", "NULL", "'operation'", False),
    "issued, of another kind": ("'issued'", "NULL", "NULL", "NULL", "'external'", False),
    "pending": ("'pending'", "NULL", "NULL", "'1'", "'operation'", True),
    "pending with JSON null": ("'pending'", "NULL", "NULL", "'null'", "'operation'", True),
    "pending without ids": ("'pending'", "NULL", "NULL", "NULL", "'operation'", False),
    "pending with a result": ("'pending'", "'1'", "NULL", "'1'", "'operation'", False),
    "pending, of another kind": ("'pending'", "NULL", "NULL", "'1'", "'transactional'", False),
    "succeeded with ids": ("'succeeded'", "'1'", "NULL", "'1'", "'operation'", True),
    "failed with ids": ("'failed'", "NULL", """'{"type": "E", "message": "m"}'""", "'1'", "'operation'", True),
}


@pytest.mark.past_guards
@pytest.mark.parametrize("case", ROWS)
def test_the_states_of_an_operation_are_checked_whoever_writes_them(
    engine: Engine, plans: Runs[Plan], ident: UUID, case: str
) -> None:
    outcome, result, error, ids, effect, allowed = ROWS[case]
    insert = text(
        "INSERT INTO plan_step (plan_id, step, outcome, result, error, ids, effect, fence)"
        f" VALUES (:ident, 'raw', {outcome}, {result}, {error}, {ids}, {effect}, 1)"
    )
    if allowed:
        with engine.begin() as connection:
            connection.execute(insert, {"ident": ident})
        assert len(plans.receipts(ident)) == 1
    else:
        with pytest.raises(IntegrityError), engine.begin() as connection:
            connection.execute(insert, {"ident": ident})


# --- an outcome is an Outcome


def test_two_suspensions_of_one_run_compare_by_what_happened(plans: Runs[Plan], service: Service, ident: UUID) -> None:
    first = plans.execute(ident, service.carry_out)
    second = plans.execute(ident, service.carry_out, run_now=True)
    assert first == second
    assert first == Outcome(Ending.SUSPENDED, PlanStatus.APPROVED, plans.receipts(ident))
