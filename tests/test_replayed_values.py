"""A step's result is equal in value and type on its first run and on each replay, through the real database."""

from __future__ import annotations

import asyncio
import enum
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, NamedTuple
from uuid import UUID

import pytest
from pydantic import BaseModel
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import ResultError, Run, Runs
from sqla_durable.asyncio import AsyncRuns
from tests.support import Plan, PlanStep, approved_plan, entries, write_entry


@pytest.fixture
def plans(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    return Runs(session_factory, Plan, PlanStep)


@pytest.fixture
def run(session_factory: sessionmaker[Session], plans: Runs[Plan]) -> Run[Plan]:
    claimed = plans.claim(approved_plan(session_factory))
    assert claimed is not None
    return claimed


def again(plans: Runs[Plan], run: Run[Plan]) -> Run[Plan]:
    """The next execution of the same run."""
    run.release()
    claimed = plans.claim(run.row.id)
    assert claimed is not None
    return claimed


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Point(NamedTuple):
    x: int
    y: float


@dataclass(frozen=True)
class Parcel:
    number: int
    weight: Decimal
    at: datetime


class Shipment(BaseModel):
    parcels: list[Parcel]
    colour: Colour
    when: date | None = None


BERLIN = timezone(timedelta(hours=2))
PARCEL = Parcel(2**63, Decimal("1.50"), datetime(2026, 3, 1, 12, 30, 0, 123456, BERLIN))
VALUES: list[tuple[Any, Any]] = [
    (None, None),
    (bool, True),
    (int, 2**63),
    (int, -(10**40)),
    (float, 0.1),
    (float, 1e300),
    (str, 'ключ " \\ % 🔑'),
    (bytes, b"\x00\xff"),
    (Decimal, Decimal("12.500")),
    (UUID, UUID(int=7)),
    (datetime, datetime(2026, 1, 1, 1, 2, 3, 4, UTC)),
    (datetime, datetime(2026, 1, 1, 1, 2, 3, 4)),
    (date, date(2026, 2, 28)),
    (time, time(1, 2, 3)),
    (timedelta, timedelta(days=-1, microseconds=1)),
    (tuple[int, str], (1, "a")),
    (tuple[int, ...], (1, 2)),
    (set[int], {1, 2}),
    (frozenset[str], frozenset({"a"})),
    (deque[int], deque([1, 2])),
    (dict[int, str], {1: "a"}),
    (dict[UUID, Decimal], {UUID(int=1): Decimal("0.10")}),
    (Colour, Colour.RED),
    (Level, Level.HIGH),
    (Point, Point(1, 2.0)),
    (Parcel, PARCEL),
    (Shipment, Shipment(parcels=[PARCEL], colour=Colour.RED, when=date(2026, 1, 1))),
    (list[Shipment] | None, [Shipment(parcels=[], colour=Colour.RED)]),
    (Any, {"a": [1, 2.5, None, {"b": "c"}], "": {}}),
    (Any, []),
]


def returning(annotation: Any, value: Any) -> tuple[Callable[[Session], Any], Callable[[], Any]]:
    def body(session: Session) -> Any:
        return value

    def call() -> Any:
        return value

    body.__annotations__["return"] = call.__annotations__["return"] = annotation
    return body, call


def types(value: Any) -> Any:
    """The types of a value and of all it holds."""
    if isinstance(value, dict):
        return dict, {key: (types(key), types(part)) for key, part in value.items()}
    if isinstance(value, list | tuple | deque):
        return type(value), [types(part) for part in value]
    if isinstance(value, set | frozenset):
        return type(value), {part: types(part) for part in value}
    if isinstance(value, Parcel | Shipment):
        return type(value), types(vars(value))
    return type(value)


def same(a: Any, b: Any) -> None:
    assert a == b
    assert types(a) == types(b)


def test_the_first_run_equals_each_replay_in_value_and_type(plans: Runs[Plan], run: Run[Plan]) -> None:
    first: list[Any] = []
    for position, (annotation, value) in enumerate(VALUES):
        body, call = returning(annotation, value)
        for result in (run.step(position, body), run.external(f"e{position}", call)):
            same(result, value)
            first.append(result)
    in_another_process = Runs(plans._verbs.store.sessions._factory, Plan, PlanStep)  # type: ignore[attr-defined]
    run.release()
    following = in_another_process.claim(run.row.id)
    assert following is not None
    replayed: list[Any] = []
    for position, (annotation, _) in enumerate(VALUES):
        body, call = returning(annotation, "not returned")
        replayed += [following.step(position, body), following.external(f"e{position}", call)]
    for one, other in zip(first, replayed, strict=True):
        same(one, other)
    assert plans.receipts(run.row.id) == run.receipts


def test_the_same_over_asyncio(engine: Engine, session_factory: sessionmaker[Session]) -> None:
    ident = approved_plan(session_factory)

    async def carry_out() -> None:
        async_engine = create_async_engine(engine.url)
        plans = AsyncRuns(async_sessionmaker(async_engine), Plan, PlanStep)
        try:
            await first_and_replay(plans)
        finally:
            await async_engine.dispose()

    async def first_and_replay(plans: AsyncRuns[Plan]) -> None:
        for attempt in ("first", "replay"):
            run = await plans.claim(ident)
            assert run is not None
            for position, (annotation, value) in enumerate(VALUES):
                returned = value if attempt == "first" else "not returned"

                async def body(session: Any, returned: Any = returned) -> Any:
                    return returned

                async def call(returned: Any = returned) -> Any:
                    return returned

                body.__annotations__["return"] = call.__annotations__["return"] = annotation
                same(await run.step(position, body), value)
                same(await run.external(f"e{position}", call), value)
            await run.release()

    asyncio.run(carry_out())


REFUSED: list[tuple[Any, Any]] = [
    (Any, (1, 2)),
    (Any, {1: "a"}),
    (Any, {1, 2}),
    (Any, Decimal(1)),
    (Any, UUID(int=1)),
    (Any, datetime(2026, 1, 1, tzinfo=UTC)),
    (Any, Colour.RED),
    (Any, PARCEL),
    (list[int], (1, 2)),
    (float, math.nan),
    (float, math.inf),
    (int, True),
    (int, 1.5),
    (Decimal, Decimal("NaN")),
    (str, "a\0"),
    (str, Colour.RED),
    (datetime, date(2026, 1, 1)),
]


@pytest.mark.parametrize(("annotation", "value"), REFUSED, ids=lambda value: ascii(value)[:30])
def test_what_would_not_come_back_equal_is_refused_on_the_first_run(
    engine: Engine, plans: Runs[Plan], run: Run[Plan], annotation: Any, value: Any
) -> None:
    body, call = returning(annotation, value)

    def with_effect(session: Session) -> Any:
        write_entry(session, "never")
        return body(session)

    with_effect.__annotations__["return"] = annotation
    with pytest.raises(ResultError, match="step 'only'"):
        run.step("only", with_effect)
    with pytest.raises(ResultError, match="step 'only'"):
        run.external("only", call)
    assert entries(engine) == []
    assert plans.receipts(run.row.id) == ()
