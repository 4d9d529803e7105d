"""What each verb costs in round trips, counted on the wire, in both forms."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import PENDING, Pending, Run, Runs, Suspended
from sqla_durable.asyncio import AsyncRun, AsyncRuns
from tests.support import Entry, Plan, PlanStep, approved_plan, write_entry
from tests.support_wire import Wire

# psycopg prepares a statement when it is executed for the sixth time, which costs one more round trip, once.
WARM_UP = 8
BEGIN = COMMIT = STATEMENT = 1
STEP = BEGIN + 2 * STATEMENT + COMMIT
CLAIM = BEGIN + 3 * STATEMENT + COMMIT


@pytest.fixture
def wire(engine: Engine) -> Iterator[Wire]:
    wire = Wire(engine.url)
    yield wire
    wire.close()


class Costs(dict[str, int]):
    """The round trips of each verb in one life of a run."""

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self._wire = wire

    def of(self, name: str, call: Callable[[], Any]) -> Any:
        with self._wire.counting() as count:
            result = call()
        self[name] = count.round_trips
        return result

    async def of_awaiting(self, name: str, call: Callable[[], Awaitable[Any]]) -> Any:
        with self._wire.counting() as count:
            result = await call()
        self[name] = count.round_trips
        return result


def nothing(session: Session) -> None:
    """A body without a statement."""


def life(costs: Costs, plans: Runs[Plan], factory: sessionmaker[Session]) -> None:
    """Every verb once, on runs of its own."""
    ident, other = approved_plan(factory), approved_plan(factory)
    run: Run[Plan] = costs.of("claim", lambda: plans.claim(ident))
    costs.of("step", lambda: run.step("empty", nothing))
    costs.of("step with an effect", lambda: run.step("effect", write_entry, "a"))
    costs.of("external step", lambda: run.external("sent", lambda: 1))
    costs.of("renewal", run.renew)
    costs.of("release", run.release)
    again: Run[Plan] = costs.of("second claim", lambda: plans.claim(ident))
    costs.of("replayed step", lambda: again.step("effect", write_entry, "a"))
    costs.of("replayed external step", lambda: again.external("sent", lambda: 1))
    costs.of("landing", again.finish)
    costs.of("answer of an ended run", lambda: plans.execute(ident, lambda run: None))
    costs.of("execution without steps", lambda: plans.execute(other, lambda run: None))
    batch = [approved_plan(factory) for _ in range(3)]
    assert len(costs.of("batch of three", lambda: plans.claim_due(3))) == len(batch)
    costs.of("reaping", plans.reap)


EXPECTED = {
    "claim": CLAIM,
    "step": STEP,
    "step with an effect": STEP + STATEMENT,
    "external step": STATEMENT,
    "renewal": STATEMENT,
    "release": STATEMENT,
    "second claim": CLAIM + STATEMENT,
    "replayed step": 0,
    "replayed external step": 0,
    "landing": STATEMENT,
    "answer of an ended run": BEGIN + 4 * STATEMENT + COMMIT,
    "execution without steps": CLAIM + STATEMENT,
    "batch of three": STATEMENT,
    "reaping": BEGIN + STATEMENT + COMMIT,
}


def test_a_step_costs_four_round_trips_a_replayed_one_none_and_an_external_one_one(
    engine: Engine, wire: Wire, session_factory: sessionmaker[Session]
) -> None:
    through = create_engine(wire.url)
    plans: Runs[Plan] = Runs(sessionmaker(through), Plan, PlanStep)
    costs = Costs(wire)
    for _ in range(WARM_UP):
        life(costs, plans, session_factory)
    through.dispose()
    assert costs == EXPECTED


def test_asyncio_costs_the_same(engine: Engine, wire: Wire, session_factory: sessionmaker[Session]) -> None:
    costs = Costs(wire)

    async def body(session: AsyncSession) -> None:
        pass

    async def effect(session: AsyncSession) -> str:
        session.add(Entry(label="a"))
        return "a"

    async def send() -> int:
        return 1

    async def handler(run: AsyncRun[Plan]) -> None:
        pass

    async def life(plans: AsyncRuns[Plan], ident: UUID, other: UUID) -> None:
        run: AsyncRun[Plan] = await costs.of_awaiting("claim", lambda: plans.claim(ident))
        await costs.of_awaiting("step", lambda: run.step("empty", body))
        await costs.of_awaiting("step with an effect", lambda: run.step("effect", effect))
        await costs.of_awaiting("external step", lambda: run.external("sent", send))
        await costs.of_awaiting("renewal", run.renew)
        await costs.of_awaiting("release", run.release)
        again: AsyncRun[Plan] = await costs.of_awaiting("second claim", lambda: plans.claim(ident))
        await costs.of_awaiting("replayed step", lambda: again.step("effect", effect))
        await costs.of_awaiting("replayed external step", lambda: again.external("sent", send))
        await costs.of_awaiting("landing", again.finish)
        await costs.of_awaiting("answer of an ended run", lambda: plans.execute(ident, handler))
        await costs.of_awaiting("execution without steps", lambda: plans.execute(other, handler))
        batch = [approved_plan(session_factory) for _ in range(3)]
        assert len(await costs.of_awaiting("batch of three", lambda: plans.claim_due(3))) == len(batch)
        await costs.of_awaiting("reaping", plans.reap)

    async def main() -> None:
        through = create_async_engine(wire.url)
        plans: AsyncRuns[Plan] = AsyncRuns(async_sessionmaker(through), Plan, PlanStep)
        for _ in range(WARM_UP):
            ident, other = approved_plan(session_factory), approved_plan(session_factory)
            await life(plans, ident, other)
        await through.dispose()

    asyncio.run(main())
    assert costs == EXPECTED


def outside(costs: Costs, plans: Runs[Plan], factory: sessionmaker[Session]) -> None:
    """A keyed step, and an operation that is pending at first."""
    answers: list[int | Pending] = [PENDING, 5]
    ident = approved_plan(factory)

    def operation(run: Run[Plan]) -> int:
        return run.operation("batch", start=lambda: 1, poll=lambda ids: answers.pop(0))

    def suspended() -> None:
        with pytest.raises(Suspended):
            operation(run)

    run: Run[Plan] = claimed(plans, ident)
    costs.of("keyed step", lambda: run.keyed("charge", lambda key: 1))
    costs.of("operation, issued and parked", suspended)
    again = claimed(plans, ident)
    costs.of("replayed keyed step", lambda: again.keyed("charge", lambda key: 1))
    assert costs.of("operation, ended", lambda: operation(again)) == 5
    again.release()
    last = claimed(plans, ident)
    assert costs.of("replayed operation", lambda: operation(last)) == 5
    last.finish()


def claimed(plans: Runs[Plan], ident: UUID) -> Run[Plan]:
    run = plans.claim(ident, run_now=True)
    assert run is not None
    return run


def test_an_operation_costs_a_round_trip_for_each_arrow_and_a_keyed_step_one(
    wire: Wire, session_factory: sessionmaker[Session]
) -> None:
    through = create_engine(wire.url)
    plans: Runs[Plan] = Runs(sessionmaker(through), Plan, PlanStep)
    costs = Costs(wire)
    for _ in range(WARM_UP):
        outside(costs, plans, session_factory)
    through.dispose()
    assert costs == {
        "keyed step": STATEMENT,
        "operation, issued and parked": 3 * STATEMENT,
        "replayed keyed step": 0,
        "operation, ended": STATEMENT,
        "replayed operation": 0,
    }
