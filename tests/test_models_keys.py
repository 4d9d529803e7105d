"""Run models by their keys: composite, natural, converted by a type, renamed; and keys as callers give them."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, StrEnum
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import BigInteger, Engine, Integer, String, TypeDecorator, create_engine
from sqlalchemy import Enum as EnumType
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from sqla_durable import ReceiptMixin, RunMixin, Runs, UsageError
from tests.support_models import Driver, JobStatus, drive, jobs, lifecycle, make_effects


@pytest.fixture
def bare(empty_url: str) -> Iterator[Engine]:
    """An engine on a database without tables."""
    engine = create_engine(empty_url)
    yield engine
    engine.dispose()


class Base(DeclarativeBase):
    pass


class Number:
    """A key that is not what the database stores."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Number) and other.value == self.value

    def __hash__(self) -> int:
        return hash(self.value)


class NumberType(TypeDecorator[Number]):
    impl = String
    cache_ok = True

    def process_bind_param(self, value: Number | None, dialect: Any) -> str | None:
        return None if value is None else f"N{value.value:05}"

    def process_result_value(self, value: str | None, dialect: Any) -> Number | None:
        return None if value is None else Number(int(value[1:]))


class Colour(Enum):
    RED = 1
    BLUE = 2


class Size(StrEnum):
    SMALL = "s"
    LARGE = "l"


numbers = iter(range(1, 100_000))


class Pair(RunMixin, Base):
    __tablename__ = "pair"
    __lifecycle__ = lifecycle()
    tenant: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    name: Mapped[str] = mapped_column(String, primary_key=True, default=lambda: f"it's %s :name {next(numbers)}")
    status: Mapped[JobStatus] = jobs.column()


class PairStep(ReceiptMixin[Pair], Base):
    __tablename__ = "pair_step"


class LongBase(DeclarativeBase):
    pass


class Triple(RunMixin, LongBase):
    __tablename__ = "triple"
    __lifecycle__ = lifecycle()
    tenant: Mapped[UUID] = mapped_column("tenant_id", primary_key=True, default=uuid4)
    number: Mapped[Number] = mapped_column(NumberType, primary_key=True, default=lambda: Number(next(numbers)))
    colour: Mapped[Colour] = mapped_column(primary_key=True, default=Colour.BLUE)
    status: Mapped[JobStatus] = jobs.column()


class TripleStep(ReceiptMixin[Triple], LongBase):
    __tablename__ = "triple_step"


class Decorated(RunMixin, Base):
    __tablename__ = "decorated"
    __lifecycle__ = lifecycle()
    id: Mapped[Number] = mapped_column(NumberType, primary_key=True, default=lambda: Number(next(numbers)))
    status: Mapped[JobStatus] = jobs.column()


class DecoratedStep(ReceiptMixin[Decorated], Base):
    __tablename__ = "decorated_step"


class Coloured(RunMixin, Base):
    __tablename__ = "coloured"
    __lifecycle__ = lifecycle()
    size: Mapped[Size] = mapped_column(
        EnumType(Size, values_callable=lambda sizes: [size.value for size in sizes]),
        primary_key=True,
        default=Size.LARGE,
    )
    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    status: Mapped[JobStatus] = jobs.column()


class ColouredStep(ReceiptMixin[Coloured], Base):
    __tablename__ = "coloured_step"


class Counted(RunMixin, Base):
    __tablename__ = "counted"
    __lifecycle__ = lifecycle()
    number: Mapped[int] = mapped_column("no", BigInteger, primary_key=True)
    status: Mapped[JobStatus] = jobs.column()


class CountedStep(ReceiptMixin[Counted], Base):
    __tablename__ = "counted_step"


class Versioned(RunMixin, Base):
    """The mapper's key is not in the table's order of columns."""

    __tablename__ = "versioned"
    __lifecycle__ = lifecycle()
    status: Mapped[JobStatus] = jobs.column()
    second: Mapped[str] = mapped_column(primary_key=True, default="b", sort_order=5)
    first: Mapped[int] = mapped_column(Integer, primary_key=True, default=lambda: next(numbers), sort_order=-5)


class VersionedStep(ReceiptMixin[Versioned], Base):
    __tablename__ = "versioned_step"


KEYS = [
    (Pair, PairStep),
    (Triple, TripleStep),
    (Decorated, DecoratedStep),
    (Coloured, ColouredStep),
    (Counted, CountedStep),
    (Versioned, VersionedStep),
]


@pytest.mark.parametrize(("entity", "step"), KEYS)
def test_every_verb_on_a_run_with_the_key_of(bare: Engine, entity: type[Any], step: type[Any]) -> None:
    drive(bare, entity, step)


def driver_of(bare: Engine, entity: type[Any], step: type[Any]) -> Driver:
    entity.metadata.create_all(bare)
    make_effects(bare)
    factory = sessionmaker(bare)
    return Driver(Runs(factory, entity, step), bare, factory, entity, lambda status: entity(status=status))


def test_a_receipt_has_the_runs_key_and_goes_with_the_run(bare: Engine) -> None:
    driver = driver_of(bare, Triple, TripleStep)
    ident = driver.add()
    driver.runs.claim(ident).external("only", lambda: 1)
    with driver.factory.begin() as session:
        (receipt,) = session.query(TripleStep).all()
        assert (receipt.triple_tenant_id, receipt.triple_number, receipt.triple_colour) == ident
        session.delete(session.get_one(Triple, ident))
    with driver.factory() as session:
        assert session.query(TripleStep).count() == 0


@pytest.mark.parametrize("form", ["tuple", "list", "mapping", "object"])
def test_a_composite_key_is_taken_as_session_get_takes_it_and_as_an_object(bare: Engine, form: str) -> None:
    driver = driver_of(bare, Pair, PairStep)
    tenant, name = driver.add()
    with driver.factory() as session:
        row = session.get_one(Pair, (tenant, name))
    given = {
        "tuple": (tenant, name),
        "list": [tenant, name],
        "mapping": {"name": name, "tenant": tenant},
        "object": row,
    }
    run = driver.runs.claim(given[form])
    assert run.lease.identity == (tenant, name)
    assert driver.runs.get(given[form]).name == name
    run.finish()
    assert driver.runs.receipts(given[form]) == ()


def test_a_key_that_sqlalchemy_converts_is_taken_by_every_verb_as_session_get_takes_it(bare: Engine) -> None:
    driver = driver_of(bare, Pair, PairStep)
    tenant, name = driver.add()
    ident = (str(tenant), name)
    with driver.factory.begin() as session:
        loaded = session.get_one(Pair, (tenant, name))
        assert jobs.transition(session, (Pair, ident), JobStatus.CANCELLED)
        assert loaded.status is JobStatus.CANCELLED
    assert driver.runs.get(ident) is not None
    other, name = driver.add()
    assert driver.runs.claim((str(other), name)) is not None


@pytest.mark.parametrize("ident", [None, (1, None), (1,), (1, 2, 3), 1, "a", {"tenant": uuid4()}, {}])
def test_what_does_not_identify_a_run_is_refused_naming_the_key(bare: Engine, ident: object) -> None:
    driver = driver_of(bare, Pair, PairStep)
    with pytest.raises(UsageError, match="tenant, name"):
        driver.runs.claim(ident)


def test_an_object_that_is_not_in_the_database_yet_is_refused(bare: Engine) -> None:
    driver = driver_of(bare, Pair, PairStep)
    with pytest.raises(UsageError, match="flush"):
        driver.runs.claim(Pair(status=JobStatus.READY))


def test_a_lease_goes_through_pickle_with_any_key(bare: Engine) -> None:
    import pickle

    driver = driver_of(bare, Triple, TripleStep)
    run = driver.runs.claim(driver.add())
    lease = pickle.loads(pickle.dumps(run.lease))
    assert lease == run.lease
    driver.runs.hold(lease).finish()
