"""What a function costs on the wire."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import sessionmaker

from sqla_durable import Functions, FunctionStatus
from sqla_durable.functions.verbs import FunctionVerbs
from tests.support_functions import DurableRun, Order, made, tables
from tests.support_wire import Wire

# psycopg prepares a statement when it is executed for the sixth time, which costs one more round trip, once.
WARM_UP = 8
BEGIN = COMMIT = STATEMENT = 1


@pytest.fixture
def wire(engine: Engine) -> Iterator[Wire]:
    wire = Wire(engine.url)
    yield wire
    wire.close()


@pytest.fixture
def functions(engine: Engine, wire: Wire) -> Iterator[Functions[DurableRun]]:
    tables(engine)
    through = create_engine(wire.url)
    yield made(sessionmaker(through))
    through.dispose()


def life(functions: Functions[DurableRun], wire: Wire) -> dict[str, int]:
    """Each verb once, as a worker calls them."""
    verbs: FunctionVerbs[Any] = functions._verbs
    costs: dict[str, int] = {}
    with functions.session_factory.begin() as session:
        session.connection()
        with wire.counting() as count:
            handle = functions.start(session, "fulfil", Order(id=1))
        costs["start"] = count.round_trips
    with wire.counting() as count:
        [holder] = verbs.claim_due(1)
    costs["claim"] = count.round_trips
    with wire.counting() as count:
        assert functions.works()[0].execute(holder, lambda: None) is None
    costs["body with one step"] = count.round_trips
    with wire.counting() as count:
        assert verbs.conclude(holder).status is FunctionStatus.DONE
    costs["landing with the result"] = count.round_trips
    with wire.counting() as count:
        functions.result(handle)
    costs["result of a landed run"] = count.round_trips
    return costs


def test_start_claim_and_landing_cost_one_round_trip_each_and_a_step_four(
    functions: Functions[DurableRun], wire: Wire
) -> None:
    for _ in range(WARM_UP):
        costs = life(functions, wire)
    assert costs == {
        "start": STATEMENT + BEGIN,  # of the caller's transaction
        "claim": STATEMENT,
        "body with one step": BEGIN + 2 * STATEMENT + STATEMENT + COMMIT,  # the third inserts the effect
        "landing with the result": STATEMENT,
        "result of a landed run": STATEMENT,
    }
