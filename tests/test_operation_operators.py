"""What an operator says about an operation whose outcome is unknown, and what becomes of its run then."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from sqla_durable import (
    Ending,
    OperationFailed,
    OperationUnknown,
    ResultError,
    Run,
    Runs,
    StepFailed,
    StepOutcome,
    Suspended,
    UsageError,
)
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, column, let_lapse, write_entry
from tests.support_async import carried_out, sessions
from tests.support_service import KEY, Batch, Service, state

IDS = {"number": 1, "queue": ["main"]}
RESULT = {"rows": 3}


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep)


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


@pytest.fixture
def unknown(session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service) -> UUID:
    """A failed run with an operation that the service has, without ids."""

    def start() -> Batch:
        service.start()
        raise ConnectionError

    ident = approved_plan(session_factory)
    outcome = plans.execute(ident, lambda run: run.operation(KEY, start=start, poll=service.poll))
    assert isinstance(outcome.exception, OperationUnknown)
    assert outcome.status is PlanStatus.FAILED
    return ident


def said(factory: sessionmaker[Session], verb: Any, *args: Any, **kwargs: Any) -> bool:
    with factory.begin() as session:
        answer: bool = verb(session, *args, **kwargs)
    return answer


def test_ids_that_are_attached_by_hand_are_polled_with_once_the_run_is_requeued(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, unknown: UUID
) -> None:
    assert said(session_factory, plans.attach_ids, unknown, KEY, Batch(1), type_=Batch)
    assert state(engine, unknown) == ("pending", IDS, 1)
    assert column(engine, unknown, "status") is PlanStatus.FAILED
    service.finish(RESULT)
    assert plans.requeue(unknown)
    outcome = plans.execute(unknown, service.carry_out)
    assert outcome.status is PlanStatus.EXECUTED
    assert outcome.receipts[0].result == RESULT
    assert (service.issues, service.polls) == (1, 1)


def test_ids_are_stored_as_plain_json_where_no_type_is_given(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], unknown: UUID
) -> None:
    assert said(session_factory, plans.attach_ids, unknown, KEY, IDS)
    assert state(engine, unknown) == ("pending", IDS, 1)
    assert plans.receipts(unknown)[0].ids == IDS


def test_ids_that_would_not_come_back_equal_are_refused(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], unknown: UUID
) -> None:
    with pytest.raises(ResultError):
        said(session_factory, plans.attach_ids, unknown, KEY, (1, 2))
    assert state(engine, unknown) == ("issued", None, 1)


def test_ids_are_attached_once_only(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], unknown: UUID
) -> None:
    assert said(session_factory, plans.attach_ids, unknown, KEY, "first")
    assert not said(session_factory, plans.attach_ids, unknown, KEY, "second")
    assert not said(session_factory, plans.never_issued, unknown, KEY), "it is known to have been issued"
    assert state(engine, unknown) == ("pending", "first", 1)


def test_an_operation_that_never_happened_is_issued_anew_once_the_run_is_requeued(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, unknown: UUID
) -> None:
    service.reset()
    assert said(session_factory, plans.never_issued, unknown, KEY)
    assert not said(session_factory, plans.never_issued, unknown, KEY)
    assert state(engine, unknown) is None
    assert column(engine, unknown, "status") is PlanStatus.FAILED
    service.finish(RESULT)
    assert plans.requeue(unknown)
    assert plans.execute(unknown, service.carry_out).status is PlanStatus.EXECUTED
    assert service.issues == 1
    assert state(engine, unknown) == ("succeeded", IDS, 2)


def test_an_operation_that_has_failed_is_issued_anew_only_where_an_operator_says_so(
    session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service
) -> None:
    def poll(batch: Batch) -> int:
        raise OperationFailed("rejected")

    ident = approved_plan(session_factory)
    plans.execute(ident, lambda run: run.operation(KEY, start=service.start, poll=poll))
    plans.requeue(ident)
    assert isinstance(plans.execute(ident, service.carry_out).exception, StepFailed)
    assert said(session_factory, plans.never_issued, ident, KEY)
    plans.requeue(ident)
    assert plans.execute(ident, service.carry_out).ending is Ending.SUSPENDED
    assert service.issues == 2


def test_what_was_resolved_after_the_claim_counts_for_that_execution(
    session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, unknown: UUID
) -> None:
    plans.requeue(unknown)
    run = plans.claim(unknown)
    assert run is not None
    assert run.receipts[0].outcome is StepOutcome.ISSUED
    assert said(session_factory, plans.attach_ids, unknown, KEY, IDS)
    service.finish(RESULT)
    assert service.carry_out(run) == RESULT
    run.finish()
    assert service.issues == 1


def test_what_never_happened_is_issued_by_the_execution_that_was_under_way(
    session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, unknown: UUID
) -> None:
    plans.requeue(unknown)
    run = plans.claim(unknown)
    assert run is not None
    service.reset()
    assert said(session_factory, plans.never_issued, unknown, KEY)
    with pytest.raises(Suspended):
        service.carry_out(run)
    assert service.issues == 1


def test_while_its_issuer_is_at_it_nobody_can_say_that_it_never_happened(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service
) -> None:
    ident = approved_plan(session_factory)

    def start() -> Batch:
        assert not said(session_factory, plans.never_issued, ident, KEY)
        let_lapse(session_factory, ident)
        assert not said(session_factory, plans.never_issued, ident, KEY), "lapsed is not lost"
        return service.start()

    plans.execute(ident, lambda run: run.operation(KEY, start=start, poll=service.poll))
    assert state(engine, ident) == ("pending", IDS, 1)


def test_who_says_by_mistake_that_it_never_happened_is_told_the_ids_of_what_did(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service
) -> None:
    ident = approved_plan(session_factory)

    def start() -> Batch:
        let_lapse(session_factory, ident)
        assert plans.heal(ident)
        assert said(session_factory, plans.never_issued, ident, KEY)
        return service.start()

    outcome = plans.execute(ident, lambda run: run.operation(KEY, start=start, poll=service.poll))
    assert isinstance(outcome.exception, OperationUnknown)
    assert '"number":1' in str(outcome.exception).replace(" ", "")
    assert "said that it was never issued" in str(outcome.exception)
    assert outcome.status is PlanStatus.FAILED
    assert state(engine, ident) is None


def test_the_ids_of_an_issue_that_was_disowned_are_not_taken_for_those_of_the_next_one(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service
) -> None:
    ident = approved_plan(session_factory)

    def start() -> Batch:
        let_lapse(session_factory, ident)
        assert plans.heal(ident)
        assert said(session_factory, plans.never_issued, ident, KEY)
        run = plans.claim(ident)
        assert run is not None
        with pytest.raises(KeyboardInterrupt):
            run.operation(KEY, start=interrupted, poll=service.poll)
        return service.start()

    def interrupted() -> Batch:
        raise KeyboardInterrupt

    outcome = plans.execute(ident, lambda run: run.operation(KEY, start=start, poll=service.poll))
    assert outcome.ending is Ending.LOST_LEASE or isinstance(outcome.exception, OperationUnknown)
    assert state(engine, ident) == ("issued", None, 2)


def test_who_attaches_other_ids_than_the_issuer_was_given_is_told_both(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service
) -> None:
    ident = approved_plan(session_factory)

    def start() -> Batch:
        assert said(session_factory, plans.attach_ids, ident, KEY, {"number": 9, "queue": ["main"]})
        return service.start()

    outcome = plans.execute(ident, lambda run: run.operation(KEY, start=start, poll=service.poll))
    assert isinstance(outcome.exception, OperationUnknown)
    assert "other ids were attached meanwhile" in str(outcome.exception)
    assert state(engine, ident) == ("pending", {"number": 9, "queue": ["main"]}, 1)


def test_who_attaches_the_very_ids_that_the_issuer_is_given_disturbs_nobody(
    session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service
) -> None:
    ident = approved_plan(session_factory)
    service.finish(RESULT)

    def start() -> Batch:
        assert said(session_factory, plans.attach_ids, ident, KEY, IDS)
        return service.start()

    outcome = plans.execute(ident, lambda run: run.operation(KEY, start=start, poll=service.poll))
    assert outcome.status is PlanStatus.EXECUTED
    assert outcome.receipts == plans.receipts(ident)


def test_nothing_is_said_of_what_is_not_there_or_no_operation(
    session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service
) -> None:
    ident = approved_plan(session_factory)
    service.finish(RESULT)

    def carry_out(run: Run[Plan]) -> None:
        service.carry_out(run)
        run.step("done", write_entry, "done")
        run.external("failed", lambda: 1 / 0)

    before = plans.execute(ident, carry_out).receipts
    for key in KEY, "done", "failed", "missing", 5:
        for other in ident, uuid4():
            assert not said(session_factory, plans.attach_ids, other, key, IDS)
            assert not said(session_factory, plans.never_issued, other, key)
    with pytest.raises(UsageError):
        said(session_factory, plans.never_issued, ident, "5")
    with pytest.raises(UsageError):
        said(session_factory, plans.attach_ids, (ident, 1), KEY, IDS)
    assert plans.receipts(ident) == before


def test_what_an_operator_says_is_a_part_of_the_transaction_it_is_said_in(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], unknown: UUID
) -> None:
    with session_factory() as session:
        assert plans.attach_ids(session, unknown, KEY, IDS)
        assert state(engine, unknown) == ("issued", None, 1)
        session.rollback()
        assert plans.never_issued(session, unknown, KEY)
        session.rollback()
    assert state(engine, unknown) == ("issued", None, 1)
    scoped = scoped_session(session_factory)
    assert plans.attach_ids(scoped, unknown, KEY, IDS)  # type: ignore[arg-type]
    scoped.commit()
    scoped.remove()
    assert state(engine, unknown) == ("pending", IDS, 1)


@pytest.mark.past_guards
def test_the_asyncio_verbs_say_the_same(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], unknown: UUID
) -> None:
    async def scenario(async_plans: Any) -> None:
        async with sessions(engine) as factory:
            async with factory.begin() as session:
                assert await async_plans.attach_ids(session, unknown, KEY, Batch(1), type_=Batch)
                assert not await async_plans.never_issued(session, unknown, KEY)
            async with factory.begin() as session:
                await session.execute(text("UPDATE plan_step SET outcome = 'issued', ids = NULL"))
                assert await async_plans.never_issued(session, unknown, KEY)

    carried_out(engine, scenario)
    assert state(engine, unknown) is None
