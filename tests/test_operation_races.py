"""Two at once about one operation, on real connections: one of them wins, and it is never issued twice."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import (
    Cancelled,
    Ending,
    LostLease,
    OperationUnknown,
    Outcome,
    Runs,
    Suspended,
    TransactionConflict,
)
from tests.support import Background, Plan, PlanStatus, PlanStep, approved_plan, column, let_lapse, wait_until_blocked
from tests.support_service import KEY, Batch, Service, state

IDS = {"number": 1, "queue": ["main"]}
OTHER = {"number": 2, "queue": ["main"]}
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


def issuing(plans: Runs[Plan], service: Service, ident: UUID, before: Callable[[], None]) -> Background:
    """Execute a run in a thread, and do something between the issue and the return of its ids."""

    def start() -> Batch:
        ids = service.start()
        before()
        return ids

    return Background(lambda: plans.execute(ident, lambda run: run.operation(KEY, start=start, poll=service.poll)))


def test_an_operator_who_is_about_to_attach_ids_makes_the_issuer_wait_and_wins(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    with session_factory() as session:

        def attach() -> None:
            assert plans.attach_ids(session, ident, KEY, OTHER)

        executing = issuing(plans, service, ident, attach)
        wait_until_blocked(engine)
        session.commit()
        outcome: Outcome = executing.result()
    assert isinstance(outcome.exception, OperationUnknown)
    assert state(engine, ident) == ("pending", OTHER, 1)
    assert service.issues == 1


def test_an_operator_who_thinks_better_of_it_leaves_the_issuers_ids(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    with session_factory() as session:

        def attach() -> None:
            assert plans.attach_ids(session, ident, KEY, OTHER)

        executing = issuing(plans, service, ident, attach)
        wait_until_blocked(engine)
        session.rollback()
        assert executing.result().ending is Ending.SUSPENDED
    assert state(engine, ident) == ("pending", IDS, 1)


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("verb", ["attach_ids", "never_issued"])
def test_an_operator_who_comes_second_is_told_so(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID, isolation: str, verb: str
) -> None:
    operators = create_engine(engine.url, isolation_level=isolation)
    factory = sessionmaker(operators)

    def say(session: Session) -> bool:
        if verb == "attach_ids":
            return plans.attach_ids(session, ident, KEY, OTHER)
        return plans.never_issued(session, ident, KEY)

    # The issuer's attaching, which has not committed yet.
    with engine.connect() as connection, factory() as session:
        issued(engine, plans, ident)
        attaching = connection.begin()
        connection.execute(text("""UPDATE plan_step SET outcome = 'pending', ids = '{"number": 1}'"""))
        saying = Background(lambda: say(session))
        wait_until_blocked(engine)
        attaching.commit()
        if isolation == "READ COMMITTED":
            assert saying.result() is False
        else:
            with pytest.raises(TransactionConflict):
                saying.result()
    operators.dispose()
    assert state(engine, ident) == ("pending", {"number": 1}, 1)


def issued(engine: Engine, plans: Runs[Plan], ident: UUID) -> None:
    """A run that was interrupted between its intent and its ids."""

    def start() -> Batch:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        plans.execute(ident, lambda run: run.operation(KEY, start=start, poll=lambda ids: 1))
    assert state(engine, ident) == ("issued", None, 1)


def test_ids_that_wait_for_who_says_that_it_never_happened_are_told_in_the_error(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    with session_factory() as session:

        def never() -> None:
            let_lapse(session_factory, ident)
            assert plans.heal(ident)
            assert plans.never_issued(session, ident, KEY)

        executing = issuing(plans, service, ident, never)
        wait_until_blocked(engine)
        session.commit()
        outcome: Outcome = executing.result()
    assert isinstance(outcome.exception, OperationUnknown)
    assert '"number":1' in str(outcome.exception).replace(" ", "")
    assert outcome.status is PlanStatus.FAILED


def test_ids_are_kept_while_another_holder_takes_the_run_over(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    with session_factory() as session:

        def taken_over() -> None:
            let_lapse(session_factory, ident)
            assert plans.heal(ident)
            # A claim that has not committed yet. Attaching locks no run, so it does not wait for it.
            session.execute(
                text(
                    "UPDATE plan SET status = 'executing', fence = fence + 1, attempts = attempts + 1,"
                    " lease_owner = 'other', lease_expires_at = now() + interval '1 hour' WHERE id = :ident"
                ),
                {"ident": ident},
            )

        executing = issuing(plans, service, ident, taken_over)
        wait_until_blocked(engine)
        assert state(engine, ident) == ("pending", IDS, 1), "it waits with what comes after the ids"
        session.commit()
        outcome: Outcome = executing.result()
    assert outcome.ending is Ending.LOST_LEASE
    assert isinstance(outcome.exception, LostLease)
    assert state(engine, ident) == ("pending", IDS, 1)


def test_ids_are_kept_while_somebody_asks_for_the_run_to_be_cancelled(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    with session_factory() as session:

        def cancel() -> None:
            assert plans.request_cancel(session, ident)

        executing = issuing(plans, service, ident, cancel)
        wait_until_blocked(engine)
        assert state(engine, ident) == ("pending", IDS, 1)
        session.commit()
        outcome: Outcome = executing.result()
    assert outcome.status is PlanStatus.CANCELLED
    assert isinstance(outcome.exception, Cancelled)


def test_of_two_holders_of_one_lease_the_one_that_records_the_intent_issues(
    engine: Engine, session_factory: sessionmaker[Session], plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    run = plans.claim(ident)
    assert run is not None
    twins = [run, *(Runs(session_factory, Plan, PlanStep).hold(run.lease) for _ in range(5))]

    def carry_out(twin: Any) -> str:
        try:
            service.carry_out(twin)
        except (Suspended, OperationUnknown, LostLease) as error:
            return type(error).__name__
        return "ended"

    with ThreadPoolExecutor(len(twins)) as pool:
        told = list(pool.map(carry_out, twins))
    assert service.issues == 1
    assert "ended" not in told
    assert state(engine, ident) == ("pending", IDS, 1)


def test_of_two_holders_of_one_lease_that_see_the_end_one_records_it_and_both_return_it(
    engine: Engine, plans: Runs[Plan], service: Service, ident: UUID
) -> None:
    assert plans.execute(ident, service.carry_out).ending is Ending.SUSPENDED
    run = plans.claim(ident, run_now=True)
    assert run is not None
    twin = plans.hold(run.lease)
    answers = [1, 2]

    def poll(batch: Batch) -> int:
        if len(answers) == 2:
            answers.pop()
            assert twin.operation(KEY, start=service.start, poll=lambda batch: 2) == 2
        return 1

    assert run.operation(KEY, start=service.start, poll=poll) == 2
    run.finish()
    assert plans.receipts(ident)[0].result == 2


@pytest.mark.parametrize("isolation", ["REPEATABLE READ", "SERIALIZABLE"])
def test_an_operation_goes_its_way_under_stricter_isolation(
    engine: Engine, service: Service, ident: UUID, isolation: str
) -> None:
    strict = create_engine(engine.url, isolation_level=isolation)
    plans = Runs(sessionmaker(strict), Plan, PlanStep)
    assert plans.execute(ident, service.carry_out).ending is Ending.SUSPENDED
    service.finish(RESULT)
    assert plans.execute(ident, service.carry_out, run_now=True).status is PlanStatus.EXECUTED
    assert service.issues == 1
    assert column(engine, ident, "attempts") == 1
    strict.dispose()


def test_many_workers_that_poll_many_operations_issue_each_once(
    engine: Engine, session_factory: sessionmaker[Session], tmp_path: Path
) -> None:
    services = {}
    for number in range(6):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        services[approved_plan(session_factory)] = Service(folder)

    def work(_: int) -> None:
        plans = Runs(session_factory, Plan, PlanStep)
        for round_ in range(6):
            for ident, service in services.items():
                plans.execute(ident, service.carry_out, run_now=True)
                if round_ == 3:
                    service.finish(RESULT)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    for ident, service in services.items():
        assert service.issues == 1
        assert column(engine, ident, "status") is PlanStatus.EXECUTED
        assert len(column(engine, ident, "failures")) == 0
