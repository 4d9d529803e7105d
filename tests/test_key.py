"""The key of a run: how it is declared, and the fingerprint of what it stands for."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum, StrEnum
from typing import Any
from uuid import UUID

import pytest
from pydantic import BaseModel
from sqlalchemy import Engine, Index, Integer, MetaData, create_engine, func, literal
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

from sqla_durable import ConfigurationError, KeyMixin, PriorityMixin, RunMixin, UndeclaredTransition, UsageError
from sqla_durable.fingerprint import fingerprint
from tests.support_models import JobStatus, definitions, jobs, lifecycle
from tests.support_start import Order, Shop, shop


@pytest.fixture
def store(empty_url: str) -> Iterator[Shop]:
    with shop(empty_url) as made:
        yield made


@pytest.fixture
def bare(empty_url: str) -> Iterator[Engine]:
    engine = create_engine(empty_url)
    yield engine
    engine.dispose()


# --- the fingerprint


class Colour(StrEnum):
    RED = "red"


class Level(Enum):
    HIGH = 3


class Line(BaseModel):
    amount: Decimal
    at: datetime
    tags: set[str] = set()


@dataclass
class Place:
    city: str
    codes: frozenset[int]


SUMMER = timezone(timedelta(hours=2))
NOON = datetime(2030, 6, 1, 12, tzinfo=UTC)
SAME: list[tuple[Any, Any]] = [
    (NOON, datetime(2030, 6, 1, 14, tzinfo=SUMMER)),
    ({"b": 1, "a": [NOON]}, {"a": [datetime(2030, 6, 1, 14, tzinfo=SUMMER)], "b": 1}),
    ({"x", "y", "z"}, {"z", "y", "x"}),
    ({frozenset({1, 2}), frozenset({3})}, {frozenset({3}), frozenset({2, 1})}),
    (Decimal("1.50"), Decimal("1.5")),
    (Decimal("-0.00"), Decimal(0)),
    (Decimal("1E+2"), Decimal(100)),
    (Colour.RED, "red"),
    (Line(amount=Decimal("1.0"), at=NOON, tags={"a", "b"}), Line(amount=Decimal(1), at=NOON, tags={"b", "a"})),
    (Place("x", frozenset({1, 2})), Place("x", frozenset({2, 1}))),
    ((1, 2), [1, 2]),
    (b"\xff\x00", bytearray(b"\xff\x00")),
]
DIFFERENT: list[Any] = [
    None,
    0,
    False,
    "",
    "0",
    [],
    {},
    1.5,
    Decimal("1.51"),
    Decimal(10),
    Decimal(100),
    Decimal("NaN"),
    NOON,
    NOON.replace(tzinfo=None),
    date(2030, 6, 1),
    timedelta(seconds=1),
    UUID(int=1),
    b"x",
    b"\xff",
    Colour.RED,
    Level.HIGH,
    {1: "a"},
    {"1": "a"},
    {"a": 1, "b": 2},
    {"a": 2, "b": 1},
    [["a"], "b"],
    [["a", "b"]],
    {1, 2},
    Line(amount=Decimal(1), at=NOON),
    Place("x", frozenset({1})),
    "\ud800",
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_equal_values_have_the_same_fingerprint(one: Any, other: Any) -> None:
    assert fingerprint({"value": one}) == fingerprint({"value": other})


def test_other_values_have_other_fingerprints() -> None:
    made = [fingerprint({"value": value}) for value in DIFFERENT]
    made += [fingerprint({}), fingerprint({"other": None}), fingerprint({"value": None}, "kind")]
    assert len(set(made)) == len(made)
    assert all(len(each) == 64 for each in made)


def test_the_order_in_which_values_are_given_does_not_matter() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})


def test_a_fingerprint_is_the_same_in_every_process_and_release() -> None:
    code = (
        "from sqla_durable.fingerprint import fingerprint\n"
        "from datetime import *\nfrom decimal import Decimal\n"
        "print(fingerprint({'b': {'x', 'y', 'z', 'w'}, 'a': [Decimal('1.0'), datetime(2030, 1, 1, tzinfo=UTC)]}))"
    )
    made = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": str(seed)}, capture_output=True, text=True, check=True
        ).stdout
        for seed in range(4)
    }
    text = '[null,{"a":["1","2030-01-01T00:00:00+00:00"],"b":["w","x","y","z"]}]'
    assert made == {hashlib.sha256(text.encode()).hexdigest() + "\n"}


@pytest.mark.parametrize("make", [object, lambda: [1, {"a": object()}], lambda: type, lambda: lambda: None])
def test_a_value_that_json_cannot_hold_is_refused_by_its_attribute(make: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match="details cannot be written as JSON"):
        fingerprint({"details": make()})


def test_a_value_that_contains_itself_is_refused() -> None:
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(UsageError, match="details cannot be written as JSON"):
        fingerprint({"details": circle})


@pytest.mark.parametrize("value", [func.now(), literal(3), Order.amount])
def test_an_sql_expression_has_no_fingerprint(store: Shop, value: Any) -> None:
    with pytest.raises(UsageError, match="amount is an SQL expression"):
        store.start(key="a", amount=value)


def test_an_sql_expression_will_do_without_a_key(store: Shop) -> None:
    assert store.start(amount=literal(3) + 4).amount == 7


# --- the declaration


def declare(*bases: type[Any], convention: dict[str, Any] | None = None, **members: Any) -> type[Any]:
    class Base(DeclarativeBase):
        metadata = MetaData(naming_convention=convention)

    return type(
        "Job",
        (*bases, Base),
        {
            "__tablename__": "job",
            "__lifecycle__": lifecycle(),
            "__annotations__": {"id": Mapped[int], "tenant": Mapped[str | None]},
            "id": mapped_column(primary_key=True),
            "status": jobs.column(),
            "tenant": mapped_column(index=True),
            **members,
        },
    )


@pytest.mark.parametrize("bases", [(KeyMixin, RunMixin), (RunMixin, KeyMixin)])
def test_the_order_of_the_mixins_does_not_matter(bare: Engine, bases: tuple[type[Any], ...]) -> None:
    job = declare(*bases, __key_scope__=("tenant",))
    job.metadata.create_all(bare)
    definition = definitions(bare, job.__table__)["ix_job_idempotency_key"]
    assert definition.startswith("CREATE UNIQUE INDEX")
    assert "(tenant, idempotency_key) NULLS NOT DISTINCT WHERE (idempotency_key IS NOT NULL)" in definition


CONVENTIONS: list[tuple[dict[str, Any] | None, str]] = [
    (None, "ix_job_idempotency_key"),
    ({"ix": "ix_%(column_0_label)s"}, "ix_job_idempotency_key"),
    ({"ix": "IX_%(table_name)s_%(constraint_name)s"}, "IX_job_idempotency_key"),
    ({Index: "i_%(table_name)s_%(column_0_N_name)s"}, "ix_job_idempotency_key"),
]


@pytest.mark.parametrize(("convention", "name"), CONVENTIONS)
def test_the_index_has_one_name_under_every_convention_beside_the_users_own(
    bare: Engine, convention: dict[str, Any] | None, name: str
) -> None:
    named = bool(convention) and any("constraint_name" in rule for rule in convention.values())
    own = {"tenant": mapped_column()} if named else {}
    job = declare(KeyMixin, RunMixin, convention=convention, __key_scope__=("tenant",), **own)
    job.metadata.create_all(bare)
    assert name in definitions(bare, job.__table__)


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        (lambda: declare(KeyMixin), "KeyMixin without RunMixin"),
        (lambda: declare(PriorityMixin), "PriorityMixin without RunMixin"),
        (lambda: declare(KeyMixin, RunMixin, __key_scope__="tenant"), r'as in \("tenant_id",\)'),
        (lambda: declare(KeyMixin, RunMixin, __key_scope__=["tenant"]), r'as in \("tenant_id",\)'),
        (lambda: declare(KeyMixin, RunMixin, __key_scope__=("nothing",)), "__key_scope__ names 'nothing'"),
        (lambda: declare(KeyMixin, RunMixin, idempotency_key=mapped_column(Integer)), "KeyMixin keeps a String"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused(declaration: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        declaration()


def test_the_mixin_goes_on_the_class_that_owns_the_root_table() -> None:
    base = declare(RunMixin)
    for mixin in KeyMixin, PriorityMixin:
        with pytest.raises(ConfigurationError, match="the class that owns the root table, here Job"):
            type(f"With{mixin.__name__}", (mixin, base), {"__tablename__": None})


@pytest.mark.parametrize("name", ["idempotency_key", "key_fingerprint"])
def test_a_key_is_not_set_along_with_a_transition(store: Shop, name: str) -> None:
    order = store.start(key="a")
    with store.factory.begin() as session, pytest.raises(UsageError, match=name):
        jobs.transition(session, (Order, order.id), JobStatus.READY, values={name: "b"})


def test_other_attributes_and_the_priority_are(store: Shop) -> None:
    order = store.start(key="a")
    with store.factory.begin() as session:
        assert jobs.transition(session, (Order, order.id), JobStatus.READY, values={"priority": 4, "kind": "x"})
        with pytest.raises(UndeclaredTransition):
            jobs.transition(session, (Order, order.id), JobStatus.WAITING)
        assert session.get_one(Order, order.id).priority == 4


def test_a_priority_is_a_number_from_0_to_9_and_leads_the_index_of_ready_runs(store: Shop) -> None:
    made = definitions(store.engine, Order.__table__)
    assert "(priority, available_at) WHERE" in made["ix_orders_priority"]
    assert "ck_orders_priority" in made
    assert "ix_orders_available_at" not in made
    for priority in (-1, 10):
        with Session(store.engine) as session:
            session.add(Order(priority=priority))
            with pytest.raises(IntegrityError, match="ck_orders_priority"):
                session.flush()
