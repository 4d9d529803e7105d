"""A start inserts what a flush would, whatever the model: compared with a flush of the same object."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar
from uuid import UUID, uuid4

import pytest
from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Computed,
    DateTime,
    Engine,
    ForeignKey,
    ForeignKeyConstraint,
    MetaData,
    Sequence,
    String,
    Table,
    TypeDecorator,
    create_engine,
    event,
    func,
    inspect,
    select,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.ext.hybrid import hybrid_property
from sqlalchemy.ext.mutable import MutableDict
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    MappedAsDataclass,
    Session,
    column_property,
    composite,
    mapped_column,
    relationship,
    sessionmaker,
    synonym,
    validates,
)
from sqlalchemy.schema import CreateSchema

from sqla_durable import KeyConflict, KeyMixin, PriorityMixin, ReceiptMixin, RunInFlight, RunMixin, Runs, UsageError
from tests.support_models import JobStatus, jobs, lifecycle
from tests.support_statements import statements


@pytest.fixture
def bare(empty_url: str) -> Iterator[Engine]:
    engine = create_engine(empty_url)
    yield engine
    engine.dispose()


class Model:
    """A run class with its tables, and starts of it."""

    def __init__(self, engine: Engine, job: type[Any], step: type[Any]) -> None:
        job.metadata.create_all(engine)
        self.engine = engine
        self.job = job
        self.factory = sessionmaker(engine, expire_on_commit=False)
        self.runs: Runs[Any] = Runs(self.factory, job, step)
        self.status = jobs.attribute_of(job)

    def start(self, **values: Any) -> Any:
        with self.factory.begin() as session:
            return self.runs.start(session, **values)

    def flushed(self, **values: Any) -> Any:
        with self.factory.begin() as session:
            session.add(row := self.job(**values))
            session.flush()
            session.refresh(row)
            return row

    def stored(self, ident: Any) -> dict[str, Any]:
        with self.factory() as session:
            row = session.get_one(self.job, ident)
            return {attribute.key: getattr(row, attribute.key) for attribute in inspect(self.job).column_attrs}

    def round(self, *, ident: str = "id", statements_of_a_win: int = 1, **values: Any) -> Any:
        """A start, what it holds compared with the row; a replay; another payload; a run without a key."""
        with self.factory.begin() as session:
            session.connection()
            with statements(self.engine) as sent:
                row = self.runs.start(session, key="a", **{self.status: JobStatus.READY}, **values)
                held = {attribute.key: getattr(row, attribute.key) for attribute in inspect(self.job).column_attrs}
            assert len(sent) == statements_of_a_win
            assert not session.dirty
        assert held == self.stored(inspect(row).identity)
        with self.factory.begin() as session:
            again = self.runs.start(session, key="a", **values)
            assert type(again) is type(row)
            assert inspect(again).identity == inspect(row).identity
            with pytest.raises(KeyConflict):
                self.runs.start(session, key="a", **{**values, "note": "other"})
            assert inspect(self.runs.start(session)).identity != inspect(row).identity
            assert not session.dirty
        assert self.runs.execute(inspect(row).identity, lambda run: None).status is JobStatus.DONE
        return row


# --- columns


class Shouted(TypeDecorator[str]):
    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        return None if value is None else value.upper()

    def process_result_value(self, value: str | None, dialect: Any) -> str | None:
        return None if value is None else value.lower()


def everything() -> tuple[type[Any], type[Any]]:
    class Base(DeclarativeBase):
        pass

    class Job(KeyMixin, PriorityMixin, RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = lifecycle(one_in_flight=("kind",))
        id: Mapped[UUID] = mapped_column("the key", primary_key=True, default=uuid4)
        state: Mapped[JobStatus] = jobs.column("the status")
        version: Mapped[int] = mapped_column()
        note: Mapped[str | None] = mapped_column("a %s note", String)
        kind: Mapped[str | None] = mapped_column(Shouted)
        scalar: Mapped[int] = mapped_column(default=3)
        call: Mapped[str] = mapped_column(default=lambda: "called")
        context: Mapped[str] = mapped_column(
            default=lambda context: str(context.get_current_parameters().get("scalar"))
        )
        by_sql: Mapped[int] = mapped_column(default=func.length("four"))
        by_server: Mapped[str] = mapped_column(server_default="it's")
        by_sequence: Mapped[int] = mapped_column(BigInteger, Sequence("of_job"))
        computed: Mapped[int] = mapped_column(Computed("scalar * 2"))
        changed: Mapped[datetime | None] = mapped_column(DateTime(timezone=True), onupdate=func.now())
        mutable: Mapped[dict[str, Any]] = mapped_column(MutableDict.as_mutable(JSONB), default=dict)
        json: Mapped[Any | None] = mapped_column(JSON)
        late: Mapped[str | None] = mapped_column(deferred=True)
        name: Mapped[str | None] = synonym("note")
        __mapper_args__: ClassVar[dict[str, Any]] = {"version_id_col": version}

        @hybrid_property
        def loud(self) -> str | None:
            return self.note

        @loud.inplace.setter
        def _set_loud(self, value: str) -> None:
            self.note = value + "!"

        @validates("kind")
        def _strip(self, _: str, value: str) -> str:
            return value.strip()

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    return Job, JobStep


UNLIKE = {"id", "available_at", "created_at", "by_sequence", "idempotency_key", "key_fingerprint"}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"note": "n", "kind": " k ", "scalar": 5, "mutable": {"a": 1}, "json": {"b": [2]}, "late": "l"},
        {"name": "by a synonym"},
        {"loud": "by a hybrid"},
        {"json": None, "note": None},
        {"scalar": func.length("seven"), "by_server": func.upper("x")},
        {"by_sql": 7, "by_sequence": 70, "context": "given"},
    ],
)
def test_a_start_inserts_what_a_flush_does(bare: Engine, values: dict[str, Any]) -> None:
    model = Model(bare, *everything())
    started = model.start(**values)
    found = model.stored(started.id)
    with model.factory.begin() as session:
        session.delete(session.get_one(model.job, started.id))
    flushed = model.flushed(**values)
    expected = model.stored(flushed.id)
    assert {name: found[name] for name in found if name not in UNLIKE} == {
        name: expected[name] for name in expected if name not in UNLIKE
    }
    with model.engine.connect() as connection:
        nulls = connection.execute(text("SELECT json::text FROM job")).scalar()
    assert nulls == ("null" if values.get("json", 0) is None else nulls)
    for name in found:
        assert getattr(started, name) == found[name]


def test_every_kind_of_column_through_a_round(bare: Engine) -> None:
    model = Model(bare, *everything())
    row = model.round(kind=" k ", note="n", mutable={"a": [1]}, json=[None])
    assert (row.version, row.kind, row.context, row.computed) == (1, "k", "3", 6)


def test_the_group_is_compared_as_the_columns_type_writes_it(bare: Engine) -> None:
    model = Model(bare, *everything())
    first = model.start(kind="k")
    with pytest.raises(RunInFlight) as caught:
        model.start(kind=" K ")
    assert caught.value.identity == (first.id,)


def test_a_mutable_value_is_watched_given_or_by_default(bare: Engine) -> None:
    model = Model(bare, *everything())
    with model.factory.begin() as session:
        given, default = model.runs.start(session, mutable={"a": 1}), model.runs.start(session)
        given.mutable["b"] = 2
        default.mutable["c"] = 3
    assert model.stored(given.id)["mutable"] == {"a": 1, "b": 2}
    assert model.stored(default.id)["mutable"] == {"c": 3}


def test_the_first_version_is_the_mappers(bare: Engine) -> None:
    model = Model(bare, *everything())
    with model.factory.begin() as session:
        row = model.runs.start(session)
        assert row.version == 1
        row.note = "changed"
        session.flush()
        assert row.version == 2


def test_listeners_of_the_mapper_and_the_session_are_told_as_by_a_flush(bare: Engine) -> None:
    told: list[str] = []

    def model_that_tells(*makers: Callable[[Model], Any]) -> list[list[str]]:
        model = Model(bare, *everything())
        for name in ("before_insert", "after_insert"):

            def note(mapper: Any, connection: Any, row: Any, name: str = name) -> None:
                assert connection.in_transaction()
                told.append(f"{name} {row in Session.object_session(row)} {row.note}")
                if name == "before_insert":
                    row.note = "by the listener"

            event.listen(model.job, name, note)
        for name in ("before_attach", "transient_to_pending", "pending_to_persistent"):
            event.listen(model.factory, name, lambda session, row, name=name: told.append(name))
        event.listen(
            model.job, "refresh_flush", lambda row, context, names: told.append(f"refresh_flush {sorted(names)}")
        )
        heard = []
        for make in makers:
            told.clear()
            assert model.stored(make(model).id)["note"] == "by the listener"
            heard.append([each for each in told if each != "loaded"])
        return heard

    started, flushed = model_that_tells(lambda model: model.start(note="n"), lambda model: model.flushed(note="n"))
    # A flush leaves the value of a sequence to be loaded later; with asyncio that would be too late.
    assert [each.replace("'by_sequence', ", "") for each in started] == flushed
    assert "before_insert True n" in started


# --- constructors


def test_a_dataclass_base_with_what_is_no_field_of_it(bare: Engine) -> None:
    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Job(KeyMixin, PriorityMixin, RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = lifecycle()
        id: Mapped[UUID] = mapped_column(primary_key=True, init=False, insert_default=uuid4)
        status: Mapped[JobStatus] = jobs.column(init=False)
        note: Mapped[str | None] = mapped_column(default="a default")
        size: Mapped[int] = mapped_column(default_factory=lambda: 4)
        raw: InitVar[int] = 0

        def __post_init__(self, raw: int) -> None:
            self.size += raw

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    model = Model(bare, Job, JobStep)
    row = model.round(raw=3, available_at=timedelta(hours=-1), priority=4)
    assert (row.size, row.note, row.priority, row.status) == (7, "a default", 4, JobStatus.READY)
    assert row.available_at < row.created_at
    with pytest.raises(KeyConflict):
        model.start(key="a", raw=4)


def test_a_constructor_of_the_users_own(bare: Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Job(KeyMixin, RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = lifecycle()
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[JobStatus] = jobs.column()
        cents: Mapped[int]
        note: Mapped[str | None]

        def __init__(self, euros: int = 0, note: str | None = None, *, begin_as: JobStatus | None = None) -> None:
            self.cents = euros * 100
            self.note = note
            if begin_as is not None:
                self.status = begin_as

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    model = Model(bare, Job, JobStep)
    assert model.round(euros=3).cents == 300
    with pytest.raises(UsageError, match="cannot be started as all done"):
        model.start(begin_as=JobStatus.DONE)


def test_a_constructor_that_takes_what_the_mixins_map_is_given_it(bare: Engine) -> None:
    class Base(DeclarativeBase):
        pass

    class Job(PriorityMixin, RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = lifecycle()
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[JobStatus] = jobs.column()

        def __init__(self, status: JobStatus, available_at: Any, priority: int) -> None:
            self.status, self.available_at, self.priority = status, available_at, priority + 1

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    row = Model(bare, Job, JobStep).start(status=JobStatus.READY, available_at=timedelta(hours=1), priority=3)
    assert (row.status, row.priority) == (JobStatus.READY, 4)
    assert row.available_at > row.created_at


# --- relationships


def related() -> tuple[type[Any], type[Any], type[Any]]:
    class Base(DeclarativeBase):
        pass

    class Place(Base):
        __tablename__ = "place"
        country: Mapped[str] = mapped_column(primary_key=True)
        city: Mapped[str] = mapped_column("the city", String, primary_key=True)
        job: Mapped[Any] = relationship("Job", back_populates="place", uselist=False)

    class Job(KeyMixin, RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = lifecycle()
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[JobStatus] = jobs.column()
        note: Mapped[str | None]
        land: Mapped[str | None] = mapped_column("c")
        town: Mapped[str | None] = mapped_column("t")
        parent_id: Mapped[int | None] = mapped_column(ForeignKey("job.id"))
        place: Mapped[Any] = relationship(Place, back_populates="job")
        __table_args__ = (ForeignKeyConstraint(["c", "t"], [Place.country, Place.__table__.c["the city"]]),)
        parent: Mapped[Any] = relationship("Job", remote_side=lambda: Job.id, back_populates="children")
        children: Mapped[list[Any]] = relationship("Job", back_populates="parent")

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    return Job, JobStep, Place


def test_a_relationship_over_several_columns_and_one_to_the_class_itself(bare: Engine) -> None:
    job, step, place = related()
    model = Model(bare, job, step)
    with model.factory.begin() as session:
        session.add(here := place(country="de", city="Berlin"))
        parent = model.runs.start(session, place=here)
        child = model.runs.start(session, key="a", parent=parent)
        assert (parent.land, parent.town, child.parent_id) == ("de", "Berlin", parent.id)
        assert parent.children == [child]
        with statements(bare) as sent:
            session.flush()
        assert sent == []
        assert model.runs.start(session, key="a", parent_id=parent.id) is child
        with pytest.raises(UsageError, match=r"Job.children cannot be given"):
            model.runs.start(session, children=[child])


def test_what_a_failed_start_displaced_in_a_one_to_one_relationship_is_put_back(bare: Engine) -> None:
    job, step, place = related()
    model = Model(bare, job, step)
    with model.factory.begin() as session:
        session.add(here := place(country="de", city="Berlin"))
        first = model.runs.start(session, key="a", place=here)
    for values in ({}, {"note": "other"}):
        with model.factory.begin() as session:
            here = session.get_one(place, ("de", "Berlin"))
            assert here.job.place is here
            try:
                model.runs.start(session, key="a", place=here, **values)
            except KeyConflict:
                assert values
            assert here.job.id == first.id
            assert here.job.place is here
        assert model.stored(first.id)["land"] == "de"


def test_composites_and_expressions_of_the_mapper(bare: Engine) -> None:
    class Base(DeclarativeBase):
        pass

    @dataclass
    class Point:
        x: int
        y: int

    class Job(KeyMixin, RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = lifecycle()
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[JobStatus] = jobs.column()
        note: Mapped[str | None]
        x: Mapped[int | None] = mapped_column()
        y: Mapped[int | None] = mapped_column()
        at: Mapped[Point | None] = composite(Point, "x", "y")
        twice: Mapped[int] = column_property(x * 2, deferred=True)

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    model = Model(bare, Job, JobStep)
    with model.factory.begin() as session:
        row = model.runs.start(session, key="a", at=Point(1, 2))
        assert row.twice == 2
        assert model.runs.start(session, key="a", at=Point(1, 2)) is row
        with pytest.raises(KeyConflict):
            model.runs.start(session, key="a", at=Point(2, 2))


# --- inheritance


def family(kind: str) -> tuple[type[Any], type[Any], type[Any], type[Any]]:
    class Base(DeclarativeBase):
        pass

    class Job(KeyMixin, RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = lifecycle()
        id: Mapped[int] = mapped_column(primary_key=True)
        status: Mapped[JobStatus] = jobs.column()
        type: Mapped[str] = mapped_column()
        note: Mapped[str | None]
        __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_on": "type", "polymorphic_identity": "job"}

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    if kind == "single":

        class Special(Job):
            extra: Mapped[str | None]
            filled: Mapped[int | None] = mapped_column(default=5)
            __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": "special"}

        class Other(Job):
            __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": "other"}

        return Job, Special, Other, JobStep

    class JoinedSpecial(Job):
        __tablename__ = "special"
        special_id: Mapped[int] = mapped_column(ForeignKey(Job.id), primary_key=True)
        extra: Mapped[str | None]
        filled: Mapped[int] = mapped_column(server_default=text("5"))
        __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": "special"}

    class JoinedOther(JoinedSpecial):
        __tablename__ = "other"
        other_id: Mapped[int] = mapped_column(ForeignKey(JoinedSpecial.special_id), primary_key=True)
        more: Mapped[str | None]
        __mapper_args__: ClassVar[dict[str, Any]] = {"polymorphic_identity": "other"}

    return Job, JoinedSpecial, JoinedOther, JobStep


@pytest.mark.parametrize("kind", ["single", "joined"])
def test_classes_that_inherit(bare: Engine, kind: str) -> None:
    job, special, other, step = family(kind)
    model = Model(bare, special, step)
    row = model.round(extra="e", statements_of_a_win=2 if kind == "joined" else 1)
    assert (row.type, row.extra, row.filled) == ("special", "e", 5)
    base = Model(bare, job, step)
    assert base.start().type == "job"
    plain = model.start(key="b")
    for model_of in (base, Model(bare, other, step)):
        with pytest.raises(KeyConflict, match=rf"\({plain.id},\)"):
            model_of.start(key="b")
    assert model.start(key="b").id == plain.id


def test_a_class_two_tables_below_the_root(bare: Engine) -> None:
    _, _, other, step = family("joined")
    model = Model(bare, other, step)
    row = model.round(extra="e", more="m", statements_of_a_win=3)
    assert (row.type, row.filled, row.special_id) == ("other", 5, row.id)


# --- keys, schemas, tables


def placed(schema: str | None = None, *, composite_key: bool = False) -> tuple[type[Any], type[Any]]:
    class Base(DeclarativeBase):
        metadata = MetaData(schema=schema)

    class Job(KeyMixin, RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = lifecycle(one_in_flight=("note",))
        number: Mapped[UUID] = mapped_column("no", primary_key=True, default=uuid4)
        if composite_key:
            tenant: Mapped[str] = mapped_column(primary_key=True, default="north")
        status: Mapped[JobStatus] = jobs.column()
        note: Mapped[str | None]

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    return Job, JobStep


@pytest.mark.parametrize("composite_key", [False, True])
@pytest.mark.parametrize("schema", [None, "app"])
def test_keys_and_schemas(bare: Engine, schema: str | None, composite_key: bool) -> None:
    with bare.begin() as connection:
        connection.execute(CreateSchema("app"))
    Model(bare, *placed(schema, composite_key=composite_key)).round(note="n")


def test_a_translated_schema_is_the_one_that_is_written(bare: Engine) -> None:
    with bare.begin() as connection:
        for tenant in ("north", "south"):
            connection.execute(CreateSchema(tenant))
    job, step = placed("tenant")
    models = [
        Model(bare.execution_options(schema_translate_map={"tenant": tenant}), job, step)
        for tenant in ("north", "south")
    ]
    first, second = (model.round(note="n") for model in models)
    assert first.number != second.number
    with bare.connect() as connection:
        found = connection.execute(text("SELECT (SELECT count(*) FROM north.job), (SELECT count(*) FROM south.job)"))
        assert found.one() == (2, 2)


def test_a_class_on_a_table_of_the_users_own_with_columns_left_out(bare: Engine) -> None:
    class Base(DeclarativeBase):
        pass

    table = Table(
        "job",
        Base.metadata,
        Column("id", BigInteger, primary_key=True),
        Column("hidden", String, server_default="h"),
        Column("note", String),
        *(column._copy() for column in placed()[0].__table__.columns if column.name not in {"no", "note"}),
    )

    class Job(KeyMixin, RunMixin, Base):
        __table__ = table
        __lifecycle__ = lifecycle()
        __mapper_args__: ClassVar[dict[str, Any]] = {"exclude_properties": ["hidden"]}

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    row = Model(bare, Job, JobStep).round(note="n")
    with bare.connect() as connection:
        assert connection.scalar(select(table.c.hidden).where(table.c.id == row.id)) == "h"


# --- row security


def test_a_key_of_a_tenant_that_is_not_seen_is_a_conflict_that_says_what_to_do(bare: Engine) -> None:
    job, step = placed()
    job.metadata.create_all(bare)
    with bare.begin() as connection:
        connection.exec_driver_sql(
            """
            DROP ROLE IF EXISTS shop_tenant;
            CREATE ROLE shop_tenant;
            GRANT USAGE ON SCHEMA public TO shop_tenant;
            ALTER TABLE job ENABLE ROW LEVEL SECURITY;
            CREATE POLICY of_tenant ON job USING (note = current_setting('app.tenant', true));
            GRANT ALL ON ALL TABLES IN SCHEMA public TO shop_tenant;
            """
        )
    factory = sessionmaker(bare, expire_on_commit=False)
    runs = Runs(factory, job, step)

    def start(tenant: str) -> Any:
        with factory.begin() as session:
            session.execute(text("SET LOCAL ROLE shop_tenant"))
            session.execute(text("SELECT set_config('app.tenant', :tenant, true)"), {"tenant": tenant})
            return runs.start(session, key="a", note=tenant)

    first = start("north")
    assert start("north").number == first.number
    with pytest.raises(KeyConflict, match="__key_scope__") as caught:
        start("south")
    assert caught.value.identity is None
    with bare.begin() as connection:
        connection.exec_driver_sql("DROP OWNED BY shop_tenant; DROP ROLE shop_tenant")
