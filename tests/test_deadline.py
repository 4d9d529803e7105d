"""A run that is past its deadline lands as timed out, whatever its handler does, and as nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, func, select, text, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import (
    PENDING,
    Cancelled,
    Ending,
    LostLease,
    Pending,
    Run,
    RunNotFound,
    Runs,
    StepOutcome,
    TimedOut,
    UsageError,
)
from sqla_durable.testing import lapse, make_due, overrun
from tests.support import Background, Plan, eventually, wait_until_blocked
from tests.support_deadline import (
    HOUR,
    Beating,
    BeatingStep,
    Status,
    Timed,
    TimedBase,
    TimedStep,
    add,
    pass_deadline,
    row,
)
from tests.support_processes import Program
from tests.support_statements import statements

SOON = timedelta(milliseconds=300)
LATER = timedelta(seconds=2)


@pytest.fixture
def engine(empty_url: str) -> Iterator[Engine]:
    engine = create_engine(empty_url)
    TimedBase.metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE effect (label text)"))
    yield engine
    engine.dispose()


@pytest.fixture
def runs(engine: Engine) -> Runs[Timed]:
    return Runs(sessionmaker(engine), Timed, TimedStep)


@pytest.fixture
def beating(engine: Engine) -> Runs[Beating]:
    return Runs(sessionmaker(engine), Beating, BeatingStep)


def leave(session: Session, label: str) -> str:
    """A step's body, whose effect can be counted."""
    session.execute(text("INSERT INTO effect VALUES (:label)"), {"label": label})
    return label


def effects(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(text("SELECT label FROM effect ORDER BY label")))


def late(engine: Engine, runs: Runs[Timed]) -> Run[Timed]:
    """A claimed run that is past its deadline, of which its holder has not been told."""
    run = runs.claim(add(engine, HOUR))
    assert run is not None
    pass_deadline(engine, run.row.id)
    return run


def request_cancel(engine: Engine, runs: Runs[Any], ident: int) -> bool:
    with Session(engine) as session, session.begin():
        return runs.request_cancel(session, ident)


def wait_for_the_deadline(engine: Engine, ident: int) -> None:
    """Return when it has passed on the database clock."""
    passed = select(Timed.started_at + Timed.max_duration < func.clock_timestamp()).where(Timed.id == ident)

    def look() -> bool | None:
        with engine.connect() as connection:
            return connection.scalar(passed)

    eventually(look, "the deadline")


def assert_timed_out(engine: Engine, ident: int, kind: type[Any] = Timed) -> Any:
    """It has landed as timed out, with everything that belongs to that."""
    found = row(engine, ident, kind)
    assert found.status == Status.TIMED_OUT
    assert (found.lease_owner, found.lease_expires_at) == (None, None)
    deadline = found.started_at + found.max_duration
    assert found.finished_at >= deadline
    assert (found.error["type"], found.error["traceback"]) == ("TimedOut", None)
    assert found.error["message"].startswith("ran past its deadline: started at ")
    assert "with a max_duration of" in found.error["message"]
    assert found.failures[-1]["type"] == "TimedOut"
    assert found.failures[-1]["step"] is None
    return found


# what the holder is told


VERBS: dict[str, Callable[[Run[Timed]], object]] = {
    "step": lambda run: run.step("late", leave, "late"),
    "operation": lambda run: run.operation("late", start=lambda: "ids", poll=lambda ids: ids),
    "finish": lambda run: run.finish(),
    "finish with values": lambda run: run.finish(note="late"),
    "fail": lambda run: run.fail(ValueError("late")),
    "renew": lambda run: run.renew(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_whatever_a_holder_writes_after_the_deadline_it_is_told_and_nothing_is_written(
    engine: Engine, runs: Runs[Timed], verb: str
) -> None:
    run = late(engine, runs)
    with pytest.raises(TimedOut, match="ran past its deadline; it can only land as timed out now") as told:
        VERBS[verb](run)
    assert told.value.lease == run.lease
    found = row(engine, run.row.id)
    assert (found.status, found.note, found.error, found.finished_at) == (Status.RUNNING, None, None, None)
    assert (effects(engine), runs.receipts(run.row.id)) == ([], ())
    with statements(engine) as sent, pytest.raises(TimedOut):
        run.step("another", leave, "another")
    assert sent == []


def test_what_has_happened_outside_by_the_deadline_is_recorded_and_then_the_holder_is_told(
    engine: Engine, runs: Runs[Timed]
) -> None:
    run = runs.claim(add(engine, HOUR))
    assert run is not None

    def sent() -> str:
        pass_deadline(engine, run.row.id)
        return "sent"

    assert run.external("mail", sent) == "sent"
    with statements(engine) as told, pytest.raises(TimedOut):
        run.keyed("charge", lambda key: key)
    assert told == []
    assert [receipt.result for receipt in runs.receipts(run.row.id)] == ["sent"]


def test_an_operation_is_not_issued_after_the_deadline(engine: Engine, runs: Runs[Timed]) -> None:
    run = late(engine, runs)
    started: list[int] = []
    with pytest.raises(TimedOut):
        run.operation("load", start=lambda: started.append(1), poll=lambda _: "loaded")
    assert (started, runs.receipts(run.row.id)) == ([], ())


def test_ids_that_arrive_after_the_deadline_are_kept(engine: Engine, runs: Runs[Timed]) -> None:
    run = runs.claim(add(engine, HOUR))
    assert run is not None

    def start() -> str:
        pass_deadline(engine, run.row.id)
        return "the ids"

    def poll(ids: str) -> str | Pending:
        raise AssertionError("polled")

    with pytest.raises(TimedOut):
        run.operation("load", start=start, poll=poll)
    (receipt,) = runs.receipts(run.row.id)
    assert (receipt.outcome, receipt.ids) == (StepOutcome.PENDING, "the ids")


def test_a_result_that_arrives_after_the_deadline_is_kept(engine: Engine, runs: Runs[Timed]) -> None:
    run = runs.claim(add(engine, HOUR))
    assert run is not None

    def poll(ids: int) -> str:
        pass_deadline(engine, run.row.id)
        return "loaded"

    assert run.operation("load", start=lambda: 1, poll=poll) == "loaded"
    assert isinstance(run.holder.lost, TimedOut)


def test_a_failure_after_the_deadline_is_the_steps_and_the_run_times_out(engine: Engine, runs: Runs[Timed]) -> None:
    ident = add(engine, HOUR)

    def fails(session: Session) -> None:
        with Session(engine) as other, other.begin():
            other.execute(text("INSERT INTO effect VALUES ('other')"))
        raise ValueError("no")

    def carry_out(run: Run[Timed]) -> None:
        try:
            run.step("fails", fails)
        finally:
            pass_deadline(engine, ident)

    outcome = runs.execute(ident, carry_out)
    assert (outcome.status, type(outcome.exception)) == (Status.TIMED_OUT, ValueError)
    (receipt,) = outcome.receipts
    assert receipt.outcome is StepOutcome.FAILED
    assert_timed_out(engine, ident)


# how a run lands that is past its deadline


def goes_on(run: Run[Timed]) -> None:
    with suppress(TimedOut):
        run.step("late", leave, "late")


def goes_on_for_long(run: Run[Timed]) -> None:
    for key in ("late", "later"):
        with suppress(Exception):
            run.step(key, leave, key)
        with suppress(Exception):
            run.finish()


def does_not_notice(run: Run[Timed]) -> None:
    pass


def fails_for_good(run: Run[Timed]) -> None:
    raise ValueError("of its own")


def fails_for_now(run: Run[Timed]) -> None:
    raise OSError("of its own")


def lets_it_pass(run: Run[Timed]) -> None:
    run.step("late", leave, "late")


def hands_it_back(run: Run[Timed]) -> None:
    run.release()


def waits_for_a_service(run: Run[Timed]) -> None:
    run.operation("load", start=lambda: 1, poll=lambda _: PENDING)


def lands_it_by_itself(run: Run[Timed]) -> None:
    run.fail(ValueError("of its own"))


@pytest.mark.parametrize(
    "handler",
    [
        goes_on,
        goes_on_for_long,
        does_not_notice,
        fails_for_good,
        fails_for_now,
        lets_it_pass,
        hands_it_back,
        waits_for_a_service,
        lands_it_by_itself,
    ],
)
def test_a_run_whose_handler_ends_after_the_deadline_lands_as_timed_out_however_it_ends(
    engine: Engine, runs: Runs[Timed], handler: Callable[[Run[Timed]], None]
) -> None:
    ident = add(engine, HOUR)

    def carry_out(run: Run[Timed]) -> None:
        assert run.step("early", leave, "early") == "early"
        pass_deadline(engine, ident)
        handler(run)

    outcome = runs.execute(ident, carry_out)
    assert (outcome.ending, outcome.status) == (Ending.LANDED, Status.TIMED_OUT)
    found = assert_timed_out(engine, ident)
    assert outcome.failure is not None
    assert outcome.failure.to_json() == found.error
    assert [receipt.step for receipt in outcome.receipts] == ["early"]
    assert effects(engine) == ["early"]
    replayed = runs.execute(ident, carry_out)
    assert replayed.replayed
    if handler is not waits_for_a_service:
        assert len(found.failures) == 1
    assert (replayed.status, replayed.failure, replayed.receipts) == (outcome.status, outcome.failure, outcome.receipts)


def test_a_poll_that_finds_its_operation_pending_after_the_deadline_does_not_wait_for_it_any_longer(
    engine: Engine, runs: Runs[Timed]
) -> None:
    ident = add(engine, HOUR)

    def poll(ids: int) -> str | Pending:
        pass_deadline(engine, ident)
        return PENDING

    outcome = runs.execute(ident, lambda run: run.operation("load", start=lambda: 1, poll=poll))
    assert (outcome.ending, outcome.status) == (Ending.LANDED, Status.TIMED_OUT)
    assert isinstance(outcome.exception, TimedOut)
    assert_timed_out(engine, ident)


def test_a_handle_shows_how_its_run_has_ended(engine: Engine, runs: Runs[Timed]) -> None:
    run = late(engine, runs)
    run.release()
    assert run.row.status is Status.TIMED_OUT
    assert run.row.error is not None
    assert run.row.error["type"] == "TimedOut"
    with pytest.raises(UsageError, match="has ended as timed out"):
        run.finish()


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_run_that_is_past_its_deadline_is_not_carried_out_again(
    engine: Engine, runs: Runs[Timed], interruption: type[BaseException]
) -> None:
    ident = add(engine, HOUR)

    def carry_out(run: Run[Timed]) -> None:
        pass_deadline(engine, ident)
        raise interruption

    with pytest.raises(interruption):
        runs.execute(ident, carry_out)
    assert_timed_out(engine, ident)


def test_of_a_group_that_lands_together_those_in_time_land_as_done(engine: Engine, runs: Runs[Timed]) -> None:
    for limit in (HOUR, HOUR, None):
        add(engine, limit)
    claimed = runs.claim_due(3)
    pass_deadline(engine, claimed[1].row.id)
    landings = runs._verbs.claims.landings
    gates = threading.Barrier(3)

    def finish(run: Run[Timed]) -> Any:
        gates.wait()
        with suppress(TimedOut):
            run.finish()
        return row(engine, run.row.id).status

    landings._led = True  # nobody leads, until all of them wait
    each = [Background(lambda run=run: finish(run)) for run in claimed]  # type: ignore[misc]
    eventually(lambda: len(landings._waiting) == 3, "all of them to wait")
    landings._hand_over()
    assert [done.result() for done in each] == [Status.DONE, Status.RUNNING, Status.DONE]


# the database decides


@pytest.mark.parametrize("verb", ["finish", "finish with values", "fail", "release"])
def test_a_landing_that_waits_for_a_lock_until_after_the_deadline_comes_too_late(
    engine: Engine, runs: Runs[Timed], verb: str
) -> None:
    run = runs.claim(add(engine, SOON))
    assert run is not None
    ident = run.row.id
    writes = {**VERBS, "release": lambda run: run.release()}
    with engine.begin() as connection:
        connection.execute(select(Timed.id).where(Timed.id == ident).with_for_update())
        writing = Background(lambda: writes[verb](run))
        wait_until_blocked(engine)
        wait_for_the_deadline(engine, ident)
    if verb == "release":
        writing.result()
        assert_timed_out(engine, ident)
    else:
        with pytest.raises(TimedOut):
            writing.result()
        assert row(engine, ident).status == Status.RUNNING


def test_a_step_that_waits_for_a_lock_until_after_the_deadline_is_not_begun(engine: Engine, runs: Runs[Timed]) -> None:
    run = runs.claim(add(engine, SOON))
    assert run is not None
    with engine.begin() as connection:
        connection.execute(select(Timed.id).where(Timed.id == run.row.id).with_for_update())
        step = Background(lambda: run.step("late", leave, "late"))
        wait_until_blocked(engine)
        wait_for_the_deadline(engine, run.row.id)
    with pytest.raises(TimedOut):
        step.result()
    assert effects(engine) == []


def test_a_run_that_ends_about_its_deadline_ends_on_one_side_of_it(engine: Engine, runs: Runs[Timed]) -> None:
    for step in range(60):
        ident = add(engine, timedelta(milliseconds=2 * 1.1**step))
        runs.execute(ident, lambda run: time.sleep(0.008))
    with engine.connect() as connection:
        found = connection.execute(select(Timed.__table__)).all()
    for each in found:
        deadline = each.started_at + each.max_duration
        if each.status == Status.DONE:
            assert each.finished_at <= deadline
            assert each.error is None
        else:
            assert_timed_out(engine, each.id)
    assert {each.status for each in found} == {Status.DONE, Status.TIMED_OUT}


@pytest.mark.parametrize("seconds", [3600, -3600], ids=["an hour ahead", "an hour behind"])
def test_a_wrong_clock_of_the_worker_has_no_say(engine: Engine, seconds: int) -> None:
    brief, long = add(engine, SOON), add(engine, HOUR)
    with Program("wrong_clock", engine.url.render_as_string(hide_password=False), str(seconds)) as program:
        assert program.ask(["carry_out_timed", long]) == [Status.DONE, False]
        assert program.ask(["carry_out_timed", brief]) == [Status.TIMED_OUT, True]
        assert program.ask(["suspicious", None]) == []


def test_a_timer_that_goes_off_early_times_nothing_out(engine: Engine, runs: Runs[Timed]) -> None:
    run = runs.claim(add(engine, HOUR))
    assert run is not None
    run.holder.ask_at = 0.0

    def carry_out(run: Run[Timed]) -> None:
        eventually(lambda: run.holder.ask_at != 0.0 and run.holder.ask_at is not None, "the question")

    assert runs.execute(run, carry_out).status is Status.DONE


def test_a_day_is_as_long_as_24_hours_in_every_time_zone(engine: Engine) -> None:
    rows = Runs(sessionmaker(engine), Timed, TimedStep)._verbs.runs
    ident = add(engine, timedelta(days=1))
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL TimeZone = 'Europe/Berlin'"))
        connection.execute(
            text("UPDATE timed SET started_at = '2026-03-28 12:00+01'")
        )  # the day before the clocks change
        over = connection.scalar(select(rows.deadline - rows.started_at).where(rows.key[0] == ident))
    assert over == timedelta(hours=24)


def test_a_run_without_a_limit_is_never_late(engine: Engine, runs: Runs[Timed]) -> None:
    ident = add(engine, None)

    def carry_out(run: Run[Timed]) -> None:
        with engine.begin() as connection:
            connection.execute(update(Timed).values(started_at=func.now() - timedelta(days=1000)))
        run.renew()
        assert run.step("only", leave, "only") == "only"

    assert runs.execute(ident, carry_out).status is Status.DONE
    assert row(engine, ident).error is None


# what the time counts for


def test_a_run_that_waits_in_the_database_uses_none_of_its_time(engine: Engine, runs: Runs[Timed]) -> None:
    ident = add(engine, timedelta(minutes=1))
    with engine.begin() as connection:
        connection.execute(text("SET LOCAL sqla_durable.override = 'a run of some age'"))
        connection.execute(update(Timed).values(created_at=func.now() - HOUR, available_at=func.now() - HOUR))
    assert runs.execute(ident, lambda run: run.step("only", leave, "only")).status is Status.DONE


def test_each_execution_has_the_whole_time(engine: Engine, runs: Runs[Timed]) -> None:
    ident = add(engine, HOUR)

    def nearly_over(run: Run[Timed]) -> None:
        with engine.begin() as connection:
            connection.execute(update(Timed).values(started_at=func.now() - timedelta(minutes=59)))

    def first(run: Run[Timed]) -> None:
        nearly_over(run)
        raise OSError("once")

    assert runs.execute(ident, first).ending is Ending.INTERRUPTED
    with engine.begin() as connection:
        connection.execute(update(Timed).values(started_at=func.now() - timedelta(hours=3)))
    assert runs.execute(ident, lambda run: run.step("only", leave, "only")).status is Status.DONE


def test_a_run_that_waits_for_an_operation_uses_none_of_its_time(engine: Engine, runs: Runs[Timed]) -> None:
    ident = add(engine, HOUR)
    answers: list[Any] = [PENDING, "loaded"]

    def carry_out(run: Run[Timed]) -> None:
        run.operation("load", start=lambda: 1, poll=lambda _: answers.pop(0))

    assert runs.execute(ident, carry_out).ending is Ending.SUSPENDED
    with Session(engine) as session, session.begin():
        session.execute(update(Timed).values(started_at=func.now() - timedelta(days=3)))
        make_due(session, Timed, ident)
    assert runs.execute(ident, carry_out).status is Status.DONE


def test_the_run_of_a_dead_holder_has_the_whole_time_again(engine: Engine, runs: Runs[Timed]) -> None:
    run = late(engine, runs)
    with Session(engine) as session, session.begin():
        lapse(session, Timed, run.row.id)
    assert runs.execute(run.row.id, lambda run: None).status is Status.DONE
    with pytest.raises(LostLease):
        run.finish()


def test_the_holder_of_a_reaped_run_that_is_past_its_deadline_may_only_land_it_so(
    engine: Engine, runs: Runs[Timed]
) -> None:
    run = late(engine, runs)
    with Session(engine) as session, session.begin():
        lapse(session, Timed, run.row.id)
    assert runs.heal(run.row.id)
    outcome = runs.execute(run, lambda run: run.step("late", leave, "late"))
    assert outcome.status is Status.TIMED_OUT
    assert_timed_out(engine, run.row.id)


def test_a_requeued_run_has_the_whole_time_again(engine: Engine, runs: Runs[Timed]) -> None:
    ident = add(engine, HOUR)

    def carry_out(run: Run[Timed]) -> None:
        run.step("early", leave, "early")
        if run.lease.fence == 1:
            pass_deadline(engine, ident)
        run.step("late", leave, "late")

    assert runs.execute(ident, carry_out).status is Status.TIMED_OUT
    assert runs.requeue(ident)
    assert runs.execute(ident, carry_out).status is Status.DONE
    assert effects(engine) == ["early", "late"]
    found = row(engine, ident)
    assert (found.error, [entry["type"] for entry in found.failures]) == (None, ["TimedOut"])


def test_an_operator_may_move_a_deadline_before_it_passes(engine: Engine, runs: Runs[Timed]) -> None:
    ident = add(engine, LATER)

    def carry_out(run: Run[Timed]) -> None:
        first = row(engine, ident).max_duration
        with engine.begin() as connection:
            connection.execute(update(Timed).values(max_duration=HOUR))
        time.sleep(1.1 * first.total_seconds())
        run.step("only", leave, "only")

    assert runs.execute(ident, carry_out).status is Status.DONE


def test_a_deadline_that_is_moved_after_its_holder_was_told_leaves_the_run_to_its_lease(
    engine: Engine, runs: Runs[Timed]
) -> None:
    ident = add(engine, HOUR)

    def carry_out(run: Run[Timed]) -> None:
        pass_deadline(engine, ident)
        with suppress(TimedOut):
            run.step("late", leave, "late")
        with engine.begin() as connection:
            connection.execute(update(Timed).values(max_duration=timedelta(days=1)))

    outcome = runs.execute(ident, carry_out)
    assert (outcome.ending, outcome.status) == (Ending.INTERRUPTED, Status.RUNNING)
    assert row(engine, ident).status == Status.RUNNING


# what outweighs what


@pytest.mark.parametrize(
    "handler", [goes_on, does_not_notice, fails_for_good, fails_for_now, hands_it_back, waits_for_a_service]
)
@pytest.mark.parametrize("asked_first", [True, False])
def test_a_cancel_request_outweighs_a_deadline(
    engine: Engine, runs: Runs[Timed], handler: Callable[[Run[Timed]], None], asked_first: bool
) -> None:
    ident = add(engine, HOUR)

    def carry_out(run: Run[Timed]) -> None:
        if asked_first:
            assert request_cancel(engine, runs, ident)
        pass_deadline(engine, ident)
        if not asked_first:
            with suppress(TimedOut):
                run.step("late", leave, "late")
            assert request_cancel(engine, runs, ident)
        handler(run)

    outcome = runs.execute(ident, carry_out)
    assert (outcome.ending, outcome.status) == (Ending.LANDED, Status.CANCELLED)
    found = row(engine, ident)
    assert found.status == Status.CANCELLED
    assert "TimedOut" not in {entry["type"] for entry in found.failures}
    assert found.error is None or found.error["type"] != "TimedOut"
    assert effects(engine) == []


def test_a_lost_lease_outweighs_a_deadline(engine: Engine, runs: Runs[Timed]) -> None:
    other: Runs[Timed] = Runs(sessionmaker(engine), Timed, TimedStep, owner="other")
    ident = add(engine, HOUR)

    def carry_out(run: Run[Timed]) -> None:
        pass_deadline(engine, ident)
        with suppress(TimedOut):
            run.step("late", leave, "late")
        with Session(engine) as session, session.begin():
            lapse(session, Timed, ident)
        assert other.claim(ident) is not None

    outcome = runs.execute(ident, carry_out)
    assert (outcome.ending, outcome.status) == (Ending.LOST_LEASE, Status.RUNNING)
    assert row(engine, ident).lease_owner == "other"


# a handler that blocks


def test_a_run_whose_handler_blocks_in_its_thread_is_landed_while_it_blocks(engine: Engine, runs: Runs[Timed]) -> None:
    ident = add(engine, LATER)
    go_on = threading.Event()
    told: list[Any] = []

    def carry_out(run: Run[Timed]) -> None:
        run.step("early", leave, "early")
        assert go_on.wait(20)
        with statements(engine) as sent:
            for verb in VERBS.values():
                with pytest.raises(TimedOut):
                    verb(run)
        told.append(list(sent))

    carried_out = Background(lambda: runs.execute(ident, carry_out))
    eventually(lambda: row(engine, ident).status == Status.TIMED_OUT, "the landing")
    found = assert_timed_out(engine, ident)
    assert found.finished_at - found.started_at < timedelta(seconds=10), "the heartbeat comes every 100 seconds"
    go_on.set()
    outcome = carried_out.result()
    assert (outcome.ending, outcome.status, told) == (Ending.LANDED, Status.TIMED_OUT, [[]])
    assert outcome == runs.execute(ident, carry_out)
    assert row(engine, ident) == found
    assert effects(engine) == ["early"]


def test_a_run_whose_handler_sleeps_past_the_deadline_and_returns_has_landed_by_then(
    engine: Engine, runs: Runs[Timed]
) -> None:
    ident = add(engine, SOON)
    outcome = runs.execute(ident, lambda run: time.sleep(0.8))
    assert (outcome.ending, outcome.status) == (Ending.LANDED, Status.TIMED_OUT)
    assert outcome.failure is not None
    assert_timed_out(engine, ident)


def test_a_handler_that_notices_by_itself_and_then_blocks_cannot_keep_its_run(
    engine: Engine, runs: Runs[Timed]
) -> None:
    ident = add(engine, LATER)

    def carry_out(run: Run[Timed]) -> None:
        assert run.holder.ask_at is not None
        run.holder.ask_at += 1  # the heartbeat is later than the handler
        runs._verbs.heartbeat._changed.set()
        wait_for_the_deadline(engine, ident)
        with suppress(TimedOut):
            run.renew()
        assert not run.holder.ended
        eventually(lambda: run.holder.ended, "the landing")

    outcome = runs.execute(ident, carry_out)
    assert (outcome.status, outcome.exception) == (Status.TIMED_OUT, None)
    assert_timed_out(engine, ident)


def test_who_is_told_of_a_deadline_that_has_passed_finds_the_run_landed(engine: Engine, runs: Runs[Timed]) -> None:
    ident = add(engine, LATER)
    run = runs.claim(ident)
    assert run is not None
    holder, seen, told = run.holder, list[Any](), threading.Event()

    def on_lost() -> None:
        seen.append((holder.ended, holder.status, row(engine, ident).status))
        told.set()

    outcome = runs._verbs.execute(holder, lambda _: told.wait(20), on_lost=on_lost)
    assert seen == [(True, Status.TIMED_OUT, Status.TIMED_OUT)]
    assert outcome.ending is Ending.LANDED
    assert run.row.status is Status.TIMED_OUT
    assert run.row.error is not None


def test_a_step_under_way_at_the_deadline_may_end_and_is_the_last(engine: Engine, beating: Runs[Beating]) -> None:
    ident = add(engine, LATER, Beating)
    beats: list[Any] = []

    def long(session: Session) -> str:
        leave(session, "under way")
        eventually(lambda: isinstance(holder.lost, TimedOut), "the heartbeat to notice")
        assert row(engine, ident, Beating).status == Status.RUNNING
        return "under way"

    def carry_out(run: Run[Beating]) -> None:
        assert run.step("under way", long) == "under way"
        with pytest.raises(TimedOut):
            run.step("late", leave, "late")

    run = beating.claim(ident)
    assert run is not None
    holder = run.holder
    outcome = beating._verbs.execute(holder, lambda _: carry_out(run), on_lost=lambda: beats.append(holder.ended))
    assert outcome.status is Status.TIMED_OUT
    assert [receipt.step for receipt in outcome.receipts] == ["under way"]
    assert effects(engine) == ["under way"]
    assert_timed_out(engine, ident, Beating)
    assert beats[0] is False, "told at once, though the row was locked"


def test_a_run_that_could_not_be_landed_for_a_step_is_landed_at_a_later_heartbeat(
    engine: Engine, beating: Runs[Beating]
) -> None:
    ident = add(engine, LATER, Beating)
    run = beating.claim(ident)
    assert run is not None
    holder, told = run.holder, list[bool]()

    def long(session: Session) -> None:
        eventually(lambda: told, "the heartbeat to notice")
        with engine.begin() as connection:  # it lasts for longer than its lease
            connection.execute(text("SELECT pg_sleep(0.5)"))

    def carry_out() -> None:
        run.step("under way", long)
        eventually(lambda: holder.ended, "the landing")

    outcome = beating._verbs.execute(holder, lambda _: carry_out(), on_lost=lambda: told.append(holder.ended))
    assert told == [False, True]
    assert (outcome.ending, outcome.status, outcome.exception) == (Ending.LANDED, Status.TIMED_OUT, None)
    assert_timed_out(engine, ident, Beating)


def test_a_reaped_run_is_taken_back_and_landed_by_the_heartbeat_of_its_holder(
    engine: Engine, beating: Runs[Beating]
) -> None:
    ident = add(engine, HOUR, Beating)

    def carry_out(run: Run[Beating]) -> None:
        pass_deadline(engine, ident, Beating)
        with Session(engine) as session, session.begin():
            lapse(session, Beating, ident)
        beating.heal(ident)
        eventually(lambda: run.holder.ended, "the landing")

    outcome = beating.execute(ident, carry_out)
    assert (outcome.status, outcome.exception) == (Status.TIMED_OUT, None)
    assert_timed_out(engine, ident, Beating)


def test_a_write_that_meets_the_landing_of_the_heartbeat_is_told_of_the_deadline(
    engine: Engine, runs: Runs[Timed]
) -> None:
    """The landing commits while the write waits for its lock, and before the heartbeat has noted it."""
    run = late(engine, runs)
    holder = run.holder
    with pytest.raises(TimedOut):
        run.renew()
    holder.lost = None
    copy = runs.hold(run.lease).holder
    copy.lost = None
    with pytest.raises(TimedOut):
        copy.renew()
    with engine.begin() as connection:
        assert copy.overtake(connection)
        writing = Background(lambda: run.fail(ValueError("late")))
        wait_until_blocked(engine)
    with pytest.raises(TimedOut):
        writing.result()
    outcome = runs._verbs.conclude(holder)
    assert (outcome.ending, outcome.status) == (Ending.LANDED, Status.TIMED_OUT)
    assert outcome.failure is not None
    assert outcome.failure.to_json() == assert_timed_out(engine, run.row.id).error


def test_a_run_that_waits_for_its_turn_in_a_batch_until_after_its_deadline_is_not_begun(
    engine: Engine, runs: Runs[Timed]
) -> None:
    add(engine, None)
    waits = add(engine, SOON)
    first, second = runs.claim_due(2)
    assert second.row.id == waits
    waited = runs.execute(first, lambda _: eventually(lambda: second.holder.ended, "the landing"))
    assert waited.status is Status.DONE
    outcome = runs.execute(second, lambda run: run.step("late", leave, "late"))
    assert (outcome.ending, outcome.status) == (Ending.LANDED, Status.TIMED_OUT)
    assert_timed_out(engine, waits)
    assert effects(engine) == []


def test_a_batch_of_which_one_waits_with_a_deadline_is_heeded_while_the_heartbeat_sleeps(
    engine: Engine, runs: Runs[Timed]
) -> None:
    add(engine, None)
    (ahead,) = runs.claim_due(1)
    end, begun = threading.Event(), threading.Event()
    other = Background(lambda: runs.execute(ahead, lambda _: begun.set() or end.wait(20)))  # type: ignore[func-returns-value]
    assert begun.wait(20)
    sleeping = runs._verbs.heartbeat._changed
    eventually(lambda: not sleeping.is_set(), "the heartbeat to sleep")
    time.sleep(0.1)
    for limit in (None, SOON):
        add(engine, limit)
    first, second = runs.claim_due(2)
    waited = runs.execute(first, lambda _: eventually(lambda: second.holder.ended, "the landing"))
    assert waited.status is Status.DONE
    end.set()
    assert other.result().status is Status.DONE
    assert_timed_out(engine, second.row.id)


def test_a_run_that_another_process_has_claimed_is_landed_in_time_too(engine: Engine, runs: Runs[Timed]) -> None:
    run = runs.claim(add(engine, timedelta(seconds=1)))
    assert run is not None
    other: Runs[Timed] = Runs(sessionmaker(engine), Timed, TimedStep)
    held = other.hold(run.lease)
    outcome = other.execute(held, lambda run: eventually(lambda: run.holder.ended, "the landing"))
    assert (outcome.status, outcome.exception) == (Status.TIMED_OUT, None)


def test_a_deadline_that_cannot_be_asked_about_is_asked_about_at_the_next_heartbeat(
    engine: Engine, beating: Runs[Beating]
) -> None:
    ident = add(engine, timedelta(milliseconds=100), Beating)
    asked: list[float] = []

    def refuse(connection: Any, *_: Any) -> None:
        asked.append(time.monotonic())
        if asked[-1] < asked[0] + 0.2:
            raise RuntimeError("a hook of the user's")

    def carry_out(run: Run[Beating]) -> None:
        eventually(lambda: run.holder.ended, "the landing")

    store = beating._verbs.store
    own_engine = store.own_engine

    def watched() -> Engine:
        made = own_engine()
        event.listen(made, "before_cursor_execute", refuse)
        return made

    store.own_engine = watched  # type: ignore[method-assign]
    outcome = beating.execute(ident, carry_out)
    assert (outcome.status, outcome.exception) == (Status.TIMED_OUT, None)
    assert 3 <= len(asked) < 10, "it does not ask again and again in between"


def test_runs_without_a_deadline_cost_their_heartbeat_nothing(engine: Engine, runs: Runs[Timed]) -> None:
    ident = add(engine, None)

    def carry_out(run: Run[Timed]) -> None:
        assert run.holder.ask_at is None
        time.sleep(0.1)

    with statements(engine) as sent:
        assert runs.execute(ident, carry_out).status is Status.DONE
    assert not [statement for statement in sent if "time_left" in statement]


# declaring


def test_a_run_is_started_with_its_limit(engine: Engine, runs: Runs[Timed]) -> None:
    with Session(engine) as session, session.begin():
        ident = runs.start(session, max_duration=timedelta(minutes=5)).id
        unlimited = runs.start(session).id
    assert row(engine, ident).max_duration == timedelta(minutes=5)
    assert row(engine, unlimited).max_duration is None


@pytest.mark.parametrize("limit", [timedelta(0), timedelta(-1), timedelta(days=36501), 5, "1 hour"])
def test_a_limit_that_cannot_be_right_is_refused_before_any_statement(
    engine: Engine, runs: Runs[Timed], limit: Any
) -> None:
    with Session(engine) as session, statements(engine) as sent:
        with pytest.raises(
            UsageError, match=r"max_duration=.*a timedelta of more than 0 and up to 36500 days, or None"
        ):
            runs.start(session, max_duration=limit)
        assert sent == []


@pytest.mark.parametrize("limit", [timedelta(0), timedelta(-1), timedelta(days=36501)])
def test_postgresql_refuses_a_limit_out_of_its_range(engine: Engine, limit: timedelta) -> None:
    with pytest.raises(IntegrityError, match="ck_timed_max_duration"):
        add(engine, limit)


def test_a_deadline_is_passed_in_a_test_for_a_running_run_of_a_class_that_has_them(
    engine: Engine, runs: Runs[Timed]
) -> None:
    ident = add(engine, HOUR)
    with Session(engine) as session:
        with pytest.raises(RunNotFound, match="is running"):
            overrun(session, Timed, ident)
        with pytest.raises(UsageError, match="Plan has no deadlines"):
            overrun(session, Plan, ident)


def test_a_run_past_its_deadline_that_was_asked_to_be_cancelled_says_so(engine: Engine, runs: Runs[Timed]) -> None:
    run = late(engine, runs)
    assert request_cancel(engine, runs, run.row.id)
    for verb in VERBS.values():
        run.holder.lost = None
        with pytest.raises(Cancelled):
            verb(run)
