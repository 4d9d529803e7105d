"""A few independent calls at once: each with a receipt of its own, whatever becomes of the others."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, select, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import (
    Ending,
    FunctionStatus,
    LostLease,
    NestedStep,
    ReceiptMismatch,
    Retry,
    RetryableError,
    Runs,
    StepFailed,
    StepOutcome,
    StepReused,
    UsageError,
    call,
    keyed_call,
)
from sqla_durable.asyncio import AsyncRun, AsyncRuns
from sqla_durable.testing import lapse
from tests.support import DEADLINE, Background, Plan, PlanStatus, PlanStep, approved_plan, eventually
from tests.support_functions import DurableRun, tables
from tests.support_processes import Program
from tests.support_versions import FORMS, Version, versions


@pytest.fixture(params=FORMS)
def version(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Version]:
    tables(engine)
    with versions(request.param, engine.url.render_as_string(hide_password=False), 1) as (made,):
        yield made


def carried_out(version: Version, body: Any, **options: Any) -> Any:
    """Carry a new run out once."""
    name = f"job {len(version._bodies)}"
    version.function(name, body, **options)
    handle = version.start(name)
    return handle, version.execute(handle)


def crash() -> None:
    raise RetryableError("the process went away")


def test_results_come_in_the_order_of_the_calls_and_each_has_a_receipt(version: Version) -> None:
    def body(run: Any) -> list[Any]:
        calls = call("a", lambda: 1), keyed_call(2, lambda key, note: [key, note], note="x"), call("c", lambda: "z")
        found = run.gather(*calls)
        assert found[1] == [run.idempotency_key(2), "x"]
        assert type(found) is tuple
        return list(found)

    handle, outcome = carried_out(version, body)
    assert outcome.status is FunctionStatus.DONE, outcome
    assert version.functions.result(handle)[0] == 1
    assert {receipt.step: receipt.effect.value for receipt in version.functions.steps(handle)} == {
        "a": "external",
        "2": "keyed",
        "c": "external",
    }


def test_nothing_is_gathered_from_nothing(version: Version) -> None:
    _, outcome = carried_out(version, lambda run: run.gather() == () or crash())
    assert outcome.status is FunctionStatus.DONE


def test_calls_are_under_way_at_the_same_time_in_threads(engine: Engine) -> None:
    tables(engine)
    met = threading.Barrier(32, timeout=DEADLINE)
    with versions("sync", engine.url.render_as_string(hide_password=False), 1) as (version,):

        def body(run: Any) -> int:
            # As many at a time as may be, and the others after them.
            first = [call(at, lambda: met.wait() and None) for at in range(32)]
            return len(run.gather(*first, *(call(at, lambda: None) for at in range(32, 40))))

        handle, outcome = carried_out(version, body)
        assert outcome.status is FunctionStatus.DONE
        assert version.functions.result(handle) == 40


def test_calls_are_under_way_at_the_same_time_in_tasks(engine: Engine) -> None:
    ident = approved_plan(sessionmaker(engine))

    async def main() -> Any:
        async_engine = create_async_engine(engine.url)
        started: list[int] = []
        both = asyncio.Event()

        async def meet(position: int) -> int:
            started.append(position)
            if len(started) == 2:
                both.set()
            await asyncio.wait_for(both.wait(), DEADLINE)
            return position

        async def carry_out(run: AsyncRun[Plan]) -> None:
            assert await run.gather(call("a", meet, 1), call("b", meet, 2)) == (1, 2)

        try:
            return await AsyncRuns(async_sessionmaker(async_engine), Plan, PlanStep).execute(ident, carry_out)
        finally:
            await async_engine.dispose()

    assert asyncio.run(main()).status is PlanStatus.EXECUTED


def test_core_runs_gather_too(engine: Engine) -> None:
    factory = sessionmaker(engine)
    plans = Runs(factory, Plan, PlanStep)
    ident = approved_plan(factory)
    outcome = plans.execute(ident, lambda run: run.gather(call("a", lambda: 1), call("b", lambda: 2)))
    assert outcome.status is PlanStatus.EXECUTED
    assert all(receipt.input_fingerprint is None for receipt in outcome.receipts)
    assert sorted(receipt.step for receipt in outcome.receipts) == ["a", "b"]


def test_a_call_that_is_answered_is_not_made_again(version: Version) -> None:
    made: list[str] = []

    def body(run: Any) -> list[int]:
        calls = [call(key, lambda key=key: made.append(key)) for key in ("a", "b")]
        if run.lease.attempt == 1:
            run.gather(calls[0])
            crash()
        run.gather(*calls)
        return []

    handle, _ = carried_out(version, body)
    assert version.execute(handle).status is FunctionStatus.DONE
    assert made == ["a", "b"]


# failures


def test_one_failure_lets_the_others_end_and_be_recorded_and_is_raised_as_it_is(version: Version) -> None:
    after = threading.Event()

    def fail() -> None:
        raise ZeroDivisionError("no")

    def slow() -> str:
        assert after.wait(0.2) is False
        return "slow"

    handle, outcome = carried_out(version, lambda run: run.gather(call("a", fail), call("b", slow)))
    assert outcome.status is FunctionStatus.FAILED
    assert type(outcome.exception) is ZeroDivisionError
    assert {receipt.step: receipt.outcome for receipt in version.functions.steps(handle)} == {
        "a": StepOutcome.FAILED,
        "b": StepOutcome.SUCCEEDED,
    }
    assert version.row(handle).failures[0]["step"] == "a"


def test_several_failures_are_a_group_in_the_order_of_the_calls(version: Version) -> None:
    def fail(what: str) -> None:
        raise ValueError(what)

    calls = call("a", fail, "one"), call("b", lambda: 2), call("c", fail, "three")
    _, outcome = carried_out(version, lambda run: run.gather(*calls))
    assert isinstance(outcome.exception, ExceptionGroup)
    assert [str(leaf) for leaf in outcome.exception.exceptions] == ["one", "three"]
    assert "2 of 3 calls failed" in str(outcome.exception)


@pytest.mark.parametrize("final", [False, True])
def test_several_failures_are_retried_where_each_of_them_is_retryable(version: Version, final: bool) -> None:
    def fail(error: Exception) -> None:
        raise error

    second = ValueError("final") if final else TimeoutError("later")
    calls = call("a", fail, OSError("later")), call("b", fail, second), call("c", lambda: 3)
    handle, outcome = carried_out(
        version, lambda run: run.gather(*calls), retry=Retry(on=OSError, backoff=timedelta(0))
    )
    recorded = {receipt.step for receipt in version.functions.steps(handle)}
    if final:
        assert outcome.status is FunctionStatus.FAILED
        assert recorded == {"b", "c"}, "what is retryable has no receipt"
    else:
        assert (outcome.ending, recorded) == (Ending.INTERRUPTED, {"c"})


def test_the_same_calls_may_be_gathered_again_and_only_what_has_failed_is_made_anew(version: Version) -> None:
    made: list[str] = []

    def once(key: str) -> str:
        made.append(key)
        if key == "a" and made.count("a") == 1:
            raise ZeroDivisionError
        return key

    def body(run: Any) -> str:
        calls = call("a", once, "a"), call("b", once, "b")
        with pytest.raises(ZeroDivisionError):
            run.gather(*calls)
        found = run.gather(*calls)
        with pytest.raises(StepReused):
            run.gather(*calls)
        return "".join(found)

    handle, outcome = carried_out(version, body)
    assert outcome.status is FunctionStatus.DONE, outcome
    assert version.functions.result(handle) == "ab"
    assert sorted(made) == ["a", "a", "b"]


def test_a_gather_that_succeeded_in_place_after_a_failure_is_not_made_a_third_time(version: Version) -> None:
    made: list[str] = []

    def fails_at(key: str, *times: int) -> str:
        made.append(key)
        if made.count(key) in times:
            raise ZeroDivisionError(key)
        return key

    def body(run: Any) -> str:
        calls = call("a", fails_at, "a", 1), call("b", fails_at, "b", 1, 2)
        with pytest.raises(ExceptionGroup):
            run.gather(*calls)
        with pytest.raises(ZeroDivisionError):
            run.gather(*calls)
        return "".join(run.gather(*calls))

    _, outcome = carried_out(version, body)
    assert outcome.status is FunctionStatus.DONE, outcome
    assert (made.count("a"), made.count("b")) == (2, 3)


def test_a_recorded_failure_is_replayed_beside_calls_that_are_made(version: Version) -> None:
    made: list[str] = []

    def fail() -> None:
        made.append("a")
        raise ZeroDivisionError

    def note() -> str:
        made.append("b")
        return "b"

    def body(run: Any) -> None:
        if run.lease.attempt == 1:
            with pytest.raises(ZeroDivisionError):
                run.gather(call("a", fail))
            crash()
        run.gather(call("a", fail), call("b", note))

    handle, _ = carried_out(version, body)
    outcome = version.execute(handle)
    assert type(outcome.exception) is StepFailed
    assert made == ["a", "b"]


def test_nothing_is_called_where_one_of_the_receipts_does_not_fit(version: Version) -> None:
    def body(run: Any) -> None:
        run.step("a", lambda session: 1)
        if run.lease.attempt == 1:
            crash()

    def other(run: Any) -> None:
        run.gather(call("b", lambda: pytest.fail("called")), call("a", lambda: 1))

    handle, _ = carried_out(version, lambda run: (other if run.lease.attempt > 1 else body)(run))
    outcome = version.execute(handle)
    assert type(outcome.exception) is ReceiptMismatch


def test_keys_are_distinct_and_not_used_before(version: Version) -> None:
    def forbidden() -> None:
        pytest.fail("called")

    def body(run: Any) -> None:
        with pytest.raises(StepReused, match="gathered twice"):
            run.gather(call("a", forbidden), call("a", forbidden))
        run.external("b", lambda: 1)
        with pytest.raises(StepReused, match="'b' was used twice"):
            run.gather(call("a", forbidden), call("b", forbidden))
        with pytest.raises(UsageError, match="digits only"):
            run.gather(call("1", forbidden))
        run.gather(call("a", lambda: 1))
        with pytest.raises(StepReused):
            run.external("a", forbidden)

    _, outcome = carried_out(version, body)
    assert outcome.status is FunctionStatus.DONE, outcome.exception


@pytest.mark.parametrize("verb", ["external", "step", "keyed", "operation", "gather", "publish"])
def test_a_step_inside_a_call_is_refused_and_does_not_wait_for_itself(engine: Engine, verb: str) -> None:
    tables(engine)
    with versions("sync", engine.url.render_as_string(hide_password=False), 1) as (version,):

        def body(run: Any) -> None:
            verbs: dict[str, Any] = {
                "external": lambda: run.external("in", lambda: 1),
                "step": lambda: run.step("in", lambda session: 1),
                "keyed": lambda: run.keyed("in", lambda key: 1),
                "operation": lambda: run.operation("in", start=lambda: 1, poll=lambda ids: ids),
                "gather": lambda: run.gather(call("in", lambda: 1)),
                "publish": lambda: run.publish(1),
            }
            run.gather(call("out", verbs[verb]), call("other", run.renew))

        _, outcome = Background(lambda: carried_out(version, body)).result()
        assert isinstance(outcome.exception, NestedStep)


def test_a_call_sees_the_context_of_the_body(version: Version) -> None:
    var: contextvars.ContextVar[str] = contextvars.ContextVar("var", default="outside")

    def read() -> str:
        before = var.get()
        var.set("changed")
        return before

    def body(run: Any) -> list[str]:
        var.set("inside")
        return [*run.gather(call("a", read), call("b", read)), var.get()]

    handle, _ = carried_out(version, body)
    assert version.functions.result(handle) == ["inside"] * 3


def test_a_coroutine_function_is_refused_before_anything_is_called(engine: Engine) -> None:
    tables(engine)

    async def later() -> None: ...

    with versions("sync", engine.url.render_as_string(hide_password=False), 1) as (version,):
        calls: Any = call("a", lambda: pytest.fail("called")), call("b", later)
        _, outcome = carried_out(version, lambda run: run.gather(*calls))
        assert isinstance(outcome.exception, UsageError)
        assert "coroutine function" in str(outcome.exception)


# interruptions and lost leases


def test_an_interruption_leaves_at_once_and_the_next_one_calls_again(engine: Engine) -> None:
    tables(engine)
    made: list[str] = []
    never = threading.Event()
    with versions("sync", engine.url.render_as_string(hide_password=False), 1) as (version,):

        def interrupted() -> str:
            made.append("a")
            if len(made) == 1:
                raise KeyboardInterrupt
            return "a"

        def endless() -> str:
            if len(made) < 2:
                never.wait()
            return "b"

        def body(run: Any) -> list[str]:
            return list(run.gather(call("a", interrupted), call("b", endless)))

        version.function("job", body)
        handle = version.start("job")
        with pytest.raises(KeyboardInterrupt):
            version.execute(handle)
        row = version.row(handle)
        assert (row.status, row.lease_owner, version.steps(handle)) == (FunctionStatus.READY, None, {})
        assert version.execute(handle).status is FunctionStatus.DONE
        assert version.functions.result(handle) == ["a", "b"]
        never.set()


def test_a_cancelled_handler_cancels_its_calls_and_records_nothing(engine: Engine) -> None:
    factory = sessionmaker(engine)
    ident = approved_plan(factory)
    cancelled: list[str] = []

    async def main() -> None:
        async_engine = create_async_engine(engine.url)
        started = asyncio.Barrier(3)

        async def endless(key: str) -> None:
            try:
                await started.wait()
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                cancelled.append(key)
                raise

        async def carry_out(run: AsyncRun[Plan]) -> None:
            await run.gather(call("a", endless, "a"), call("b", endless, "b"))

        plans = AsyncRuns(async_sessionmaker(async_engine), Plan, PlanStep)
        task = asyncio.create_task(plans.execute(ident, carry_out))
        await asyncio.wait_for(started.wait(), DEADLINE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert sorted(cancelled) == ["a", "b"]
        assert async_engine.pool.checkedout() == 0  # type: ignore[attr-defined]
        await async_engine.dispose()

    asyncio.run(main())
    plans = Runs(factory, Plan, PlanStep)
    assert plans.receipts(ident) == ()
    row = plans.get(ident)
    assert row is not None
    assert row.status is PlanStatus.APPROVED


@pytest.mark.past_guards
def test_calls_that_end_after_the_lease_was_lost_are_not_recorded(version: Version, engine: Engine) -> None:
    made: list[str] = []

    def fail() -> None:
        made.append("c")
        raise RetryableError("which is not recorded, and not why the gather ends")

    def steal() -> None:
        eventually(lambda: "c" in made)
        made.append("a")
        with engine.begin() as connection:
            connection.execute(text("UPDATE durable_run SET fence = fence + 1"))

    def after() -> None:
        eventually(lambda: "a" in made)
        eventually(lambda: stolen(engine))
        made.append("b")

    seen: list[type[BaseException]] = []

    def body(run: Any) -> None:
        try:
            run.gather(call("c", fail), call("a", steal), call("b", after))
        except Exception as error:
            seen.append(type(error))
            raise

    version.function("job", body)
    handle = version.start("job")
    outcome = version.execute(handle)
    assert outcome.ending is Ending.LOST_LEASE
    assert version.steps(handle) == {}
    assert (made, seen) == (["c", "a", "b"], [LostLease]), "the others have ended by then"


def stolen(engine: Engine) -> bool:
    with engine.connect() as connection:
        return connection.scalar(select(DurableRun.fence)) == 2


def test_calls_that_end_after_a_cancel_request_are_recorded(version: Version) -> None:
    handles: list[Any] = []

    def ask() -> None:
        with version.factory.begin() as session:
            assert version.functions.request_cancel(session, handles[0])

    version.function("job", lambda run: run.gather(call("a", ask), call("b", lambda: 2)))
    handles.append(version.start("job"))
    outcome = version.execute(handles[0])
    assert outcome.status is FunctionStatus.CANCELLED
    assert sorted(version.steps(handles[0])) == ["a", "b"]


@pytest.mark.parametrize("form", FORMS)
def test_a_process_that_is_killed_within_a_gather_has_recorded_what_had_ended(form: str, engine: Engine) -> None:
    tables(engine)
    url = engine.url.render_as_string(hide_password=False)
    with (
        Program("gatherer", url, form) as first,
        Program("gatherer", url, form) as second,
        versions(form, url, 1) as (version,),
    ):
        ident = first.ask("start")
        first.send(ident)
        assert sorted([first.receive(), first.receive()]) == [["called", "a"], ["called", "b"]]
        eventually(lambda: version.steps(UUID(ident)) == {"a": "a"}, "the receipt of the first")
        first.kill()
        with Session(version.engine) as session, session.begin():
            lapse(session, DurableRun, UUID(ident))
        assert second.ask(ident) == ["called", "b"], "and a is not called again"
        assert second.ask("go on") == ["landed", "done"]
        assert version.steps(UUID(ident)) == {"a": "a", "b": "b"}
