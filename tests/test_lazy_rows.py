"""The object of a claimed run is what an ORM query would load, however it is made."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, StrEnum
from ipaddress import IPv4Address
from typing import Any, ClassVar
from uuid import UUID, uuid4

import pytest
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Date,
    DateTime,
    Engine,
    Float,
    ForeignKey,
    Integer,
    Interval,
    LargeBinary,
    Numeric,
    String,
    Table,
    Time,
    Uuid,
    event,
    func,
    inspect,
    select,
)
from sqlalchemy import Enum as EnumType
from sqlalchemy.dialects.postgresql import ARRAY, BYTEA, INET, INT4RANGE, JSONB, Range
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.ext.hybrid import hybrid_property
from sqlalchemy.ext.mutable import MutableDict, MutableList
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Session,
    column_property,
    composite,
    deferred,
    mapped_column,
    reconstructor,
    relationship,
    sessionmaker,
    synonym,
    validates,
    with_loader_criteria,
)
from sqlalchemy.orm.exc import DetachedInstanceError
from sqlalchemy.types import TypeDecorator

from sqla_durable import ReceiptMixin, RunMixin, Runs
from sqla_durable.asyncio import AsyncRuns
from sqla_durable.loading import Loading
from tests.support import Background
from tests.support_jobs import JobStatus, job_lifecycle

CET = timezone(timedelta(hours=1))


class Colour(Enum):
    RED = "r"
    BLUE = "b"


class Size(StrEnum):
    S = "small"
    L = "large"


class Reversed(TypeDecorator[str]):
    """Stored backwards."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        return None if value is None else value[::-1]

    def process_result_value(self, value: Any, dialect: Any) -> str | None:
        return None if value is None else value[::-1]


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customer"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


class Wide(RunMixin, Base):
    """A column of nearly every type, and attributes that are named otherwise than their columns."""

    __tablename__ = "wide"
    __lifecycle__ = job_lifecycle()
    id: Mapped[UUID] = mapped_column(Uuid, primary_key=True, default=uuid4)
    status: Mapped[JobStatus] = __lifecycle__.machine.column()
    colour: Mapped[Colour] = mapped_column(EnumType(Colour))
    size: Mapped[Size] = mapped_column(
        EnumType(Size, native_enum=False, values_callable=lambda e: [m.value for m in e])
    )
    sizes: Mapped[list[Size]] = mapped_column(ARRAY(EnumType(Size, name="sizes")))
    payload: Mapped[dict[str, Any]] = mapped_column(JSONB)
    plain_json: Mapped[Any] = mapped_column(JSON)
    json_null: Mapped[Any] = mapped_column(JSONB, default=JSON.NULL)
    amount: Mapped[Decimal] = mapped_column(Numeric(20, 4))
    as_float: Mapped[float] = mapped_column(Numeric(10, 2, asdecimal=False))
    ratio: Mapped[float] = mapped_column(Float)
    exact: Mapped[Decimal] = mapped_column(Float(asdecimal=True))
    big: Mapped[int] = mapped_column(BigInteger)
    flag: Mapped[bool] = mapped_column(Boolean)
    took: Mapped[timedelta] = mapped_column(Interval)
    day: Mapped[date] = mapped_column(Date)
    at: Mapped[time] = mapped_column(Time)
    instant: Mapped[datetime] = mapped_column(DateTime(timezone=True))
    naive: Mapped[datetime] = mapped_column(DateTime)
    blob: Mapped[bytes] = mapped_column(LargeBinary)
    more: Mapped[bytes] = mapped_column(BYTEA)
    numbers: Mapped[list[int]] = mapped_column(ARRAY(Integer))
    grid: Mapped[list[list[int]]] = mapped_column(ARRAY(Integer, dimensions=2))
    as_tuple: Mapped[tuple[str, ...]] = mapped_column(ARRAY(String, as_tuple=True))
    address: Mapped[Any] = mapped_column(INET)
    span: Mapped[Range[int]] = mapped_column(INT4RANGE)
    secret: Mapped[str] = mapped_column(Reversed)
    nothing: Mapped[str | None] = mapped_column(Reversed)
    renamed: Mapped[str] = mapped_column("legacy_name", String)
    keyed: Mapped[str] = mapped_column("Odd Name", String, key="odd")
    customer_id: Mapped[int | None] = mapped_column(ForeignKey("customer.id"))
    customer: Mapped[Customer | None] = relationship()
    also = synonym("renamed")

    @validates("renamed")
    def _shout(self, _: str, value: str) -> str:
        return value.upper()

    @hybrid_property
    def total(self) -> Decimal:
        return self.amount * 2


class WideStep(ReceiptMixin[Wide], Base):
    __tablename__ = "wide_step"


VALUES: dict[str, Any] = {
    "colour": Colour.BLUE,
    "size": Size.L,
    "sizes": [Size.S, Size.L],
    "payload": {"a": [1, None, {"b": 1.5}]},
    "plain_json": [1, "zwei"],
    "amount": Decimal("12345678.9012"),
    "as_float": 2.25,
    "ratio": 0.1,
    "exact": Decimal("0.5"),
    "big": 2**40,
    "flag": True,
    "took": timedelta(days=400, microseconds=1),
    "day": date(2024, 2, 29),
    "at": time(23, 59, 59, 999999),
    "instant": datetime(2024, 3, 31, 2, 30, tzinfo=CET),
    "naive": datetime(2024, 3, 31, 2, 30),
    "blob": b"\x00\xff",
    "more": b"",
    "numbers": [1, 2],
    "grid": [[1, 2], [3, 4]],
    "as_tuple": ("a", "b"),
    "address": IPv4Address("192.0.2.1"),
    "span": Range(1, 5),
    "secret": "abc",
    "renamed": "upper",
    "keyed": "key",
}


@pytest.fixture
def factory(empty_url: str, engine: Engine) -> Iterator[sessionmaker[Session]]:
    Base.metadata.create_all(engine)
    yield sessionmaker(engine)
    Base.metadata.drop_all(engine)


@pytest.fixture
def wide(factory: sessionmaker[Session]) -> UUID:
    with factory.begin() as session:
        run = Wide(**VALUES, customer=Customer(id=1, name="ada"))
        session.add(run)
        session.flush()
        return run.id


def claimed(factory: sessionmaker[Session], run: Any = Wide, receipt: Any = WideStep) -> Any:
    runs: Runs[Any] = Runs(factory, run, receipt)
    (claimed,) = runs.claim_due(1)
    return claimed


def is_plain(run: Any) -> bool:
    """Whether the row was made of what the claim returned."""
    made_by = getattr(run.holder._make, "func", None)
    return getattr(made_by, "__func__", None) is Loading.instance


def columns_of(row: Any) -> dict[str, Any]:
    return {attribute.key: inspect(row).dict.get(attribute.key, "unloaded") for attribute in inspect(row).mapper.attrs}


def kinds(values: dict[str, Any]) -> dict[str, type[Any]]:
    return {name: type(value) for name, value in values.items()}


def test_every_attribute_is_what_a_query_would_load(factory: sessionmaker[Session], wide: UUID) -> None:
    run = claimed(factory)
    assert is_plain(run)
    with factory() as session:
        loaded = session.get_one(Wide, wide)
        expected = columns_of(loaded)
    assert columns_of(run.row) == expected
    assert kinds(columns_of(run.row)) == kinds(expected)
    assert (run.row.also, run.row.total, run.row.renamed) == ("UPPER", VALUES["amount"] * 2, "UPPER")


def test_its_state_is_that_of_a_detached_object(factory: sessionmaker[Session], wide: UUID) -> None:
    state = inspect(claimed(factory).row)
    assert state.detached
    assert not state.modified
    assert state.identity == (wide,)
    assert state.unloaded - {"also"} == {"customer"}  # which is a synonym
    assert not any(attribute.history.has_changes() for attribute in state.attrs if attribute.key != "customer")


def test_a_relationship_is_not_loaded_outside_of_a_session_and_is_inside(
    factory: sessionmaker[Session], wide: UUID
) -> None:
    row = claimed(factory).row
    with pytest.raises(DetachedInstanceError):
        _ = row.customer
    with factory() as session:
        session.add(row)
        assert row.customer.name == "ada"


def test_it_can_be_merged_and_changed_in_a_session(factory: sessionmaker[Session], wide: UUID) -> None:
    run = claimed(factory)
    with factory.begin() as session:
        merged = session.merge(run.row)
        assert merged.customer.name == "ada"
        merged.payload = {"changed": True}
    with factory.begin() as session:
        session.add(run.row)
        run.row.keyed = "changed too"
    run.finish()
    with factory() as session:
        found = session.get_one(Wide, wide)
        assert (found.payload, found.keyed, found.status) == ({"changed": True}, "changed too", JobStatus.DONE)


@pytest.mark.parametrize("first", ["looked at before", "looked at after"])
def test_after_the_landing_it_shows_what_has_landed(factory: sessionmaker[Session], wide: UUID, first: str) -> None:
    run = claimed(factory)
    if first == "looked at before":
        assert run.row.status is JobStatus.RUNNING
    run.finish()
    with factory() as session:
        assert columns_of(run.row) == columns_of(session.get_one(Wide, wide))
    assert (run.row.status, run.row.lease_owner) == (JobStatus.DONE, None)
    assert run.row.finished_at is not None


def test_threads_that_look_at_once_get_one_object(factory: sessionmaker[Session], wide: UUID) -> None:
    for _ in range(20):
        run = claimed(factory)
        barrier = threading.Barrier(4)

        def look(run: Any = run, barrier: threading.Barrier = barrier) -> Any:
            barrier.wait()
            return run.row

        rows = [each.result() for each in [Background(look) for _ in range(4)]]
        assert len({id(row) for row in rows}) == 1
        run.release()


def test_over_asyncio_it_is_the_same(engine: Engine, factory: sessionmaker[Session], wide: UUID) -> None:
    async def main() -> Any:
        async_engine = create_async_engine(engine.url)
        (run,) = await AsyncRuns(async_sessionmaker(async_engine), Wide, WideStep).claim_due(1)
        await async_engine.dispose()
        return run

    run = asyncio.run(main())
    assert is_plain(run)
    with factory() as session:
        assert columns_of(run.row) == columns_of(session.get_one(Wide, wide))


# what needs a query


@dataclass
class Point:
    x: int
    y: int


def declared(base: type[Any], name: str, **attributes: Any) -> tuple[type[Any], type[Any]]:
    """A run class with attributes of its own, and its receipts."""
    lifecycle = job_lifecycle()
    own = {
        "__tablename__": name,
        "__lifecycle__": lifecycle,
        "__module__": __name__,
        "id": mapped_column(Integer, primary_key=True),
        "status": lifecycle.machine.column(),
        **attributes,
    }
    run = type(name.title(), (RunMixin, base), own)
    receipt = type(f"{name.title()}Step", (ReceiptMixin[run], base), {"__tablename__": f"{name}_step"})  # type: ignore[valid-type]
    return run, receipt


def base() -> type[Any]:
    class Own(DeclarativeBase):
        pass

    return Own


def with_relationship(lazy: Any) -> tuple[type[Any], type[Any]]:
    own = base()
    whole = mapped_column(ForeignKey("whole.id"))
    part = type(
        "Part", (own,), {"__tablename__": "part", "id": mapped_column(Integer, primary_key=True), "whole_id": whole}
    )
    return declared(own, "whole", parts=relationship(lambda: part, lazy=lazy))


def with_reconstructor() -> tuple[type[Any], type[Any]]:
    def made(self: Any) -> None:
        self.reconstructed = True

    return declared(base(), "remade", made=reconstructor(made))


def with_composite() -> tuple[type[Any], type[Any]]:
    x, y = mapped_column("x", Integer, default=1), mapped_column("y", Integer, default=2)
    return declared(base(), "placed", x=x, y=y, place=composite(Point, "x", "y"))


def excluded() -> tuple[type[Any], type[Any]]:
    """A run class that does not map a column of its table."""
    own = base()
    lifecycle = job_lifecycle()

    class Full(RunMixin, own):  # type: ignore[misc, valid-type]
        __tablename__ = "partly"
        __lifecycle__ = lifecycle
        __mapper_args__: ClassVar[dict[str, Any]] = {"exclude_properties": ["hidden"]}
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[JobStatus] = lifecycle.machine.column()

    table: Table = Full.__table__
    table.append_column(Column("hidden", String, server_default="x"))

    class FullStep(ReceiptMixin[Full], own):  # type: ignore[misc, valid-type]
        __tablename__ = "partly_step"

    return Full, FullStep


NEED_A_QUERY: dict[str, Callable[[], tuple[type[Any], type[Any]]]] = {
    "deferred": lambda: declared(base(), "heavy", body=deferred(mapped_column(String, default="long"))),
    "column_property": lambda: declared(base(), "computed", two=column_property(func.abs(-2))),
    "composite": with_composite,
    "mutable dict": lambda: declared(
        base(), "mutable", data=mapped_column(MutableDict.as_mutable(JSONB), default=lambda: {"a": 1})
    ),
    "mutable list": lambda: declared(
        base(), "mutable", data=mapped_column(MutableList.as_mutable(JSONB), default=lambda: [1])
    ),
    "reconstructor": with_reconstructor,
    "joined": lambda: with_relationship("joined"),
    "selectin": lambda: with_relationship("selectin"),
    "subquery": lambda: with_relationship("subquery"),
    "immediate": lambda: with_relationship("immediate"),
}
NEED_NONE: dict[str, Callable[[], tuple[type[Any], type[Any]]]] = {
    "lazy": lambda: with_relationship("select"),
    "raise": lambda: with_relationship("raise"),
    "write only": lambda: with_relationship("write_only"),
    "an unmapped column": excluded,
}


def compared(engine: Engine, run: type[Any], receipt: type[Any]) -> Any:
    """Claim a run of a class, and compare it with what a query loads; return the handle."""
    run.metadata.create_all(engine)
    factory = sessionmaker(engine)
    with factory.begin() as session:
        session.add(run(id=1))
    handle = claimed(factory, run, receipt)
    with factory() as session:
        loaded = session.get_one(run, 1)
        expected = columns_of(loaded)
        assert columns_of(handle.row) == expected
        assert kinds(columns_of(handle.row)) == kinds(expected)
        assert inspect(handle.row).unloaded == inspect(loaded).unloaded
    return handle


@pytest.mark.parametrize("name", NEED_A_QUERY)
def test_where_a_row_is_not_all_there_is_to_load_it_is_queried(engine: Engine, name: str) -> None:
    handle = compared(engine, *NEED_A_QUERY[name]())
    assert not is_plain(handle)
    if name == "mutable dict":
        handle.row.data["b"] = 2
        assert inspect(handle.row).modified
    if name == "reconstructor":
        assert handle.row.reconstructed
    if name == "composite":
        assert handle.row.place == Point(1, 2)


@pytest.mark.parametrize("name", NEED_NONE)
def test_where_nothing_more_would_be_loaded_it_is_not_queried(engine: Engine, name: str) -> None:
    assert is_plain(compared(engine, *NEED_NONE[name]()))


def test_a_dataclass_base_is_not_initialised_anew(engine: Engine) -> None:
    class DataBase(MappedAsDataclass, DeclarativeBase):
        pass

    class Task(RunMixin, DataBase):
        __tablename__ = "task"
        __lifecycle__ = job_lifecycle()
        id: Mapped[int] = mapped_column(primary_key=True)
        title: Mapped[str] = mapped_column(default="untitled")
        status: Mapped[JobStatus] = __lifecycle__.machine.column(init=False)

        def __post_init__(self) -> None:
            self.title += "!"

    class TaskStep(ReceiptMixin[Task], DataBase):
        __tablename__ = "task_step"

    handle = compared(engine, Task, TaskStep)
    assert is_plain(handle)
    assert handle.row.title == "untitled!"


@pytest.mark.parametrize("kind", ["single", "joined"])
def test_of_a_class_with_subclasses_each_row_is_of_its_own_class(engine: Engine, kind: str) -> None:
    own = base()
    lifecycle = job_lifecycle()

    class Job(RunMixin, own):  # type: ignore[misc, valid-type]
        __tablename__ = "job"
        __lifecycle__ = lifecycle
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[JobStatus] = lifecycle.machine.column()
        kind: Mapped[str]
        __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_on": "kind", "polymorphic_identity": "job"}

    class JobStep(ReceiptMixin[Job], own):  # type: ignore[misc, valid-type]
        __tablename__ = "job_step"

    own_table = {} if kind == "single" else {
        "__tablename__": "mail", "id": mapped_column(ForeignKey("job.id"), primary_key=True)
    }  # fmt: skip
    letter = mapped_column(String, nullable=kind == "single")
    mail = type("Mail", (Job,), {**own_table, "letter": letter, "__mapper_args__": {"polymorphic_identity": "mail"}})
    own.metadata.create_all(engine)
    factory = sessionmaker(engine)
    with factory.begin() as session:
        session.add(mail(id=1, letter="dear"))
    handle = claimed(factory, Job, JobStep)
    assert type(handle.row) is mail
    assert handle.row.letter == "dear"


def test_load_events_of_a_class_are_fired(engine: Engine) -> None:
    run, receipt = declared(base(), "watched")
    seen: list[Any] = []
    event.listen(run, "load", lambda row, _: seen.append(row))
    run.metadata.create_all(engine)
    factory = sessionmaker(engine)
    with factory.begin() as session:
        session.add(run(id=1))
    handle = claimed(factory, run, receipt)
    assert seen == [handle.row]


def test_loader_criteria_that_hide_a_row_are_heard(engine: Engine) -> None:
    run, receipt = declared(base(), "hidden", secret=mapped_column(Boolean, default=True))
    run.metadata.create_all(engine)
    factory = sessionmaker(engine)
    with factory.begin() as session:
        session.add(run(id=1))

    def visible_only(state: Any) -> None:
        if state.is_select:
            state.statement = state.statement.options(with_loader_criteria(run, run.secret.is_(False)))

    event.listen(factory, "do_orm_execute", visible_only)
    with pytest.raises(Exception, match="hidden from the session"):
        claimed(factory, run, receipt)
    with engine.connect() as connection:
        assert connection.scalar(select(run.__table__.c.status)) == JobStatus.READY, "the claim was undone"


def test_a_session_class_that_changes_what_is_loaded_is_heard(engine: Engine) -> None:
    run, receipt = declared(base(), "own")
    run.metadata.create_all(engine)
    asked: list[Any] = []

    class OwnSession(Session):
        def execute(self, statement: Any, *arguments: Any, **options: Any) -> Any:
            asked.append(statement)
            return super().execute(statement, *arguments, **options)

    factory = sessionmaker(engine, class_=OwnSession)
    with sessionmaker(engine).begin() as session:
        session.add(run(id=1))
    assert not is_plain(claimed(factory, run, receipt))


def test_events_of_a_session_that_are_about_loaded_objects_are_fired(engine: Engine) -> None:
    run, receipt = declared(base(), "seen")
    run.metadata.create_all(engine)
    factory = sessionmaker(engine)
    seen: list[Any] = []
    event.listen(factory, "loaded_as_persistent", lambda _, row: seen.append(row))
    with factory.begin() as session:
        session.add(run(id=1))
    handle = claimed(factory, run, receipt)
    assert seen == [handle.row]
