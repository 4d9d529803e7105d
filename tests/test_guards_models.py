"""Guards on models of every shape: names, schemas, keys, inheritance and partitions; and what create_all makes."""

# ruff: noqa: RUF012 - mapper and table arguments are written as SQLAlchemy's documentation writes them

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID, uuid4

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import (
    DDL,
    JSON,
    BigInteger,
    Column,
    DateTime,
    Engine,
    ForeignKey,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    create_mock_engine,
    delete,
    event,
    select,
    text,
    update,
)
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, MappedAsDataclass, mapped_column
from sqlalchemy.schema import CreateSchema

from sqla_durable import ConfigurationError, ReceiptMixin, RunMixin, guard_of, guard_violation
from sqla_durable.guard import overrides_of
from sqla_durable.receipt import ReceiptRows
from sqla_durable.run import RunRows
from tests.support_models import JobStatus, drive, job_machine, leave, lifecycle

Classes = tuple[type[Any], type[Any]]
LONG = "a_table_whose_name_is_as_long_as_postgresql_allows_it_to_be_"
ODD = 'Job "50%" of Ada\'s: (a) \\ $guard$ ${x} %s :y'
SCHEMA = 'Ada\'s "own" 100%'


@pytest.fixture
def bare(empty_url: str) -> Iterator[Engine]:
    """An engine on a database with some schemas."""
    engine = create_engine(empty_url)
    with engine.begin() as connection:
        for schema in ("app", "north", SCHEMA):
            connection.execute(CreateSchema(schema))
    yield engine
    engine.dispose()


def classes(
    table: str = "job",
    step: str | None = None,
    *,
    schema: str | None = None,
    columns: dict[str, Any] | None = None,
    of_receipt: dict[str, Any] | None = None,
) -> Classes:
    machine = job_machine()

    class Base(DeclarativeBase):
        metadata = MetaData(schema=schema)

    class Job(RunMixin, Base):
        __tablename__ = table
        __guard__ = True
        __lifecycle__ = lifecycle(machine)
        id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
        status: Mapped[JobStatus] = machine.column()
        locals().update(columns or {})

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = step or f"{table}_step"
        locals().update(of_receipt or {})

    return Job, JobStep


def renamed() -> Classes:
    machine = job_machine()

    class Base(DeclarativeBase):
        pass

    class Job(RunMixin, Base):
        __tablename__ = "job"
        __lifecycle__ = lifecycle(machine, guard=True)
        id: Mapped[UUID] = mapped_column('The "Key": 1%', primary_key=True, default=uuid4)
        status: Mapped[JobStatus] = machine.column("a status's name")
        fence: Mapped[int] = mapped_column("FENCE", BigInteger, server_default=text("0"))
        attempts: Mapped[int] = mapped_column("problem", Integer, server_default=text("0"))
        lease_owner: Mapped[str | None] = mapped_column("code", String)
        lease_expires_at: Mapped[Any | None] = mapped_column("fence", DateTime(timezone=True))

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"
        outcome: Mapped[str | None] = mapped_column("reason", String(20))
        result: Mapped[Any | None] = mapped_column("old", JSON(none_as_null=True))

    return Job, JobStep


def composite() -> Classes:
    machine = job_machine()

    class Base(DeclarativeBase):
        pass

    class Job(RunMixin, Base):
        __tablename__ = "job"
        __guard__ = True
        __lifecycle__ = lifecycle(machine)
        tenant: Mapped[str] = mapped_column(primary_key=True, default="t")
        number: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
        status: Mapped[JobStatus] = machine.column()

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    return Job, JobStep


def partitioned() -> Classes:
    machine = job_machine()

    class Base(DeclarativeBase):
        pass

    class Job(RunMixin, Base):
        __tablename__ = "job"
        __guard__ = True
        __lifecycle__ = lifecycle(machine)
        __table_args__ = {"postgresql_partition_by": "HASH (id)"}
        id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
        status: Mapped[JobStatus] = machine.column()

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"
        __table_args__ = {"postgresql_partition_by": "HASH (job_id)"}

    for table in Job.__table__, JobStep.__table__:
        for rest in range(2):
            values = f"FOR VALUES WITH (MODULUS 2, REMAINDER {rest})"
            event.listen(
                table, "after_create", DDL(f"CREATE TABLE {table.name}_{rest} PARTITION OF {table.name} {values}")
            )
    return Job, JobStep


def joined() -> Classes:
    machine = job_machine()

    class Base(DeclarativeBase):
        pass

    class Job(RunMixin, Base):
        __tablename__ = "job"
        __guard__ = True
        __lifecycle__ = lifecycle(machine)
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "job"}
        id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
        kind: Mapped[str]
        status: Mapped[JobStatus] = machine.column()

    class Fetch(Job):
        __tablename__ = "fetch"
        __mapper_args__ = {"polymorphic_identity": "fetch"}
        id: Mapped[UUID] = mapped_column(ForeignKey(Job.id, ondelete="CASCADE"), primary_key=True)

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    return Fetch, JobStep


def single() -> Classes:
    machine = job_machine()

    class Base(DeclarativeBase):
        pass

    class Job(RunMixin, Base):
        __tablename__ = "job"
        __guard__ = True
        __lifecycle__ = lifecycle(machine)
        __mapper_args__ = {"polymorphic_on": "kind", "polymorphic_identity": "job"}
        id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
        kind: Mapped[str]
        status: Mapped[JobStatus] = machine.column()

    class Fetch(Job):
        __mapper_args__ = {"polymorphic_identity": "fetch"}

    class JobStep(ReceiptMixin[Fetch], Base):
        __tablename__ = "job_step"

    return Fetch, JobStep


def dataclasses() -> Classes:
    machine = job_machine()

    class Base(MappedAsDataclass, DeclarativeBase):
        pass

    class Job(RunMixin, Base):
        __tablename__ = "job"
        __guard__ = True
        __lifecycle__ = lifecycle(machine)
        id: Mapped[UUID] = mapped_column(primary_key=True, default_factory=uuid4)
        status: Mapped[JobStatus] = machine.column(kw_only=True)

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    return Job, JobStep


SHAPES: dict[str, tuple[Callable[[], Classes], dict[str | None, str] | None]] = {
    "plain": (classes, None),
    "odd names": (lambda: classes(ODD, "A Step of 'it'"), None),
    "names as long as may be": (lambda: classes(LONG + "xyz", LONG + "yzz"), None),
    "a schema": (lambda: classes(schema="app"), None),
    "an odd schema": (lambda: classes(schema=SCHEMA), None),
    "a translated schema": (lambda: classes(schema="tenant"), {"tenant": "north"}),
    "no schema, translated": (classes, {None: SCHEMA}),
    "columns renamed": (renamed, None),
    "a composite key": (composite, None),
    "partitions": (partitioned, None),
    "joined inheritance": (joined, None),
    "one table for several classes": (single, None),
    "dataclasses": (dataclasses, None),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_verb_passes_and_forbidden_writes_do_not(bare: Engine, shape: str) -> None:
    made, translation = SHAPES[shape]
    job, step = made()
    engine = bare.execution_options(schema_translate_map=translation) if translation else bare
    driver = drive(engine, job, step)
    ident = driver.add()
    driver.runs.execute(ident, lambda run: run.step("a", leave, "a"))
    runs, receipts = RunRows(job), ReceiptRows(step)
    last = receipts.of_run(), runs.parameters(runs.identity(ident))
    attacks: dict[str, Any] = {
        "SD001": update(runs.table).values({runs.status: JobStatus.READY}).where(runs.matches()),
        "SD002": update(runs.table).values({runs.fence: runs.fence + 1}).where(runs.matches()),
        "SD003": update(runs.table).values({runs.lease_owner: "x"}).where(runs.matches()),
        "SD012": update(receipts.table).values({receipts.result: 2}).where(*last[0]),
        "SD013": delete(receipts.table).where(*last[0]),
    }
    for code, attack in attacks.items():
        with engine.connect() as connection, pytest.raises(DBAPIError) as caught:
            connection.execute(attack, last[1])
        refused = guard_violation(caught.value)
        assert refused is not None, caught.value
        assert refused.sqlstate == code
        assert "\n" not in str(refused)
        assert (receipts if code > "SD01" else runs).table.name in str(refused)
    with engine.connect() as connection:
        connection.execute(text("SET LOCAL sqla_durable.override = 'a test'"))
        for attack in attacks.values():
            assert connection.execute(attack, last[1]).rowcount == 1
        overrides = overrides_of(runs.table)
        recorded = connection.execute(
            select(overrides.c.problem, overrides.c.table_name).order_by(overrides.c.id)
        ).all()
        assert [problem[:5] for problem, _ in recorded] == list(attacks)
        assert {name for _, name in recorded} == {runs.table.name, receipts.table.name}


@pytest.mark.parametrize("shape", SHAPES)
def test_create_all_and_drop_all_leave_exactly_what_a_guard_tells(bare: Engine, shape: str) -> None:
    made, translation = SHAPES[shape]
    job, step = made()
    engine = bare.execution_options(schema_translate_map=translation) if translation else bare
    tables = RunRows(job).table, step.__table__
    for _ in range(2):
        job.metadata.create_all(engine)
        for table in tables:
            guard = guard_of(table)
            assert guard is not None
            assert len(guard.function.encode()) <= 63
            with engine.connect() as connection:
                functions = connection.execute(FUNCTIONS, {"name": guard.function}).all()
                schema = connection.schema_for_object(table) or "public"
                assert [tuple(row) for row in functions] == [(schema, guard.source(connection.schema_for_object))]
                triggers = set(connection.scalars(TRIGGERS, {"name": table.name, "schema": schema}))
                assert triggers == set(guard.triggers)
                # Once more over what is there, and again where there is none.
                for statement in (
                    *guard.create(connection.schema_for_object),
                    *guard.drop(connection.schema_for_object),
                    *guard.create(connection.schema_for_object),
                ):
                    connection.execute(DDL(statement.replace("%", "%%")))
                assert set(connection.scalars(TRIGGERS, {"name": table.name, "schema": schema})) == triggers
        job.metadata.create_all(engine)
        job.metadata.drop_all(engine)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM pg_proc WHERE proname LIKE 'durable%'")) == 0
        assert connection.scalar(text("SELECT count(*) FROM pg_class WHERE relname LIKE 'durable%'")) == 0


FUNCTIONS = text(
    "SELECT n.nspname, p.prosrc FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace WHERE p.proname = :name"
)
TRIGGERS = text(
    "SELECT t.tgname FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid"
    " JOIN pg_namespace n ON n.oid = c.relnamespace"
    " WHERE NOT t.tgisinternal AND c.relname = :name AND n.nspname = :schema"
)


def test_functions_of_tables_with_long_names_have_names_of_their_own(bare: Engine) -> None:
    one, two = (classes(LONG + end, end)[0] for end in ("aaa", "aab"))
    guards = [guard_of(table.__table__) for table in (one, two)]
    assert len({guard.function for guard in guards if guard is not None}) == 2
    for base in (one, two):
        base.metadata.create_all(bare, tables=[t for t in base.metadata.sorted_tables if t.name != "durable_override"])


def test_a_copy_of_the_tables_in_another_schema_has_a_guard_of_its_own(bare: Engine) -> None:
    job, _ = classes()
    copy = MetaData()
    for table in job.metadata.sorted_tables:
        table.to_metadata(copy, schema="app")
    copy.create_all(bare)
    with bare.begin() as connection:
        connection.execute(text("INSERT INTO app.job (id, status) VALUES (gen_random_uuid(), 'may start')"))
        with pytest.raises(DBAPIError, match="without a claim"), connection.begin_nested():
            connection.execute(text("UPDATE app.job SET fence = 7"))
        connection.execute(text("SET LOCAL sqla_durable.override = 'a test'"))
        connection.execute(text("UPDATE app.job SET fence = 7"))
        assert connection.scalar(text("SELECT count(*) FROM app.durable_override")) == 1
    with bare.begin() as connection:
        receipt = """INSERT INTO app.job_step (job_id, step, outcome, result, effect, fence)
            SELECT id, 's', 'succeeded', '1', 'external', fence FROM app.job"""
        refused = "under fence 7, and its run is not under way: it is may start, under fence 7"
        with pytest.raises(DBAPIError, match=refused), connection.begin_nested():
            connection.execute(text(receipt))
    copy.drop_all(bare)


def test_tables_in_the_search_path_are_those_of_their_creator(bare: Engine) -> None:
    """Two tenants, each in the search path of its own, and a writer to both."""
    job, _ = classes()
    for schema in "app", "north":
        with bare.begin() as connection:
            connection.execute(text(f"SET LOCAL search_path TO {schema}"))
            job.metadata.create_all(connection)
    with bare.begin() as connection:
        connection.execute(text("SET LOCAL search_path TO app"))
        connection.execute(
            text(
                "INSERT INTO north.job (id, status, fence, attempts, lease_owner, lease_expires_at)"
                " VALUES (gen_random_uuid(), 'under way', 1, 1, 'x', now())"
            )
        )
        receipt = """INSERT INTO north.job_step (job_id, step, outcome, result, effect, fence)
            SELECT id, 's', 'succeeded', '1', 'external', fence FROM north.job"""
        assert connection.execute(text(receipt)).rowcount == 1


def test_the_statements_can_be_written_to_a_file_and_are_the_same_in_every_process(bare: Engine) -> None:
    def dumped() -> str:
        program = f"""
import sys; sys.path.insert(0, {str(sys.path[0])!r})
from tests.test_guards_models import *
job, step = classes(ODD)
print(guard_of(job.__table__).create(), guard_of(step.__table__).create())
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        return done.stdout

    assert dumped() == dumped() != ""
    job, _ = classes(ODD)
    statements: list[str] = []
    mock = create_mock_engine("postgresql+psycopg://", lambda sql, *_, **__: statements.append(str(sql.compile(bare))))
    job.metadata.create_all(mock, checkfirst=False)
    with bare.begin() as connection:
        for statement in statements:
            connection.execute(DDL(statement.replace("%%", "%").replace("%", "%%")))


def test_receipts_in_a_schema_of_their_own_find_runs_in_none(bare: Engine) -> None:
    machine = job_machine()

    class Base(DeclarativeBase):
        pass

    class Job(RunMixin, Base):
        __tablename__ = "job"
        __guard__ = True
        __lifecycle__ = lifecycle(machine)
        id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
        status: Mapped[JobStatus] = machine.column()

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"
        __table_args__ = {"schema": "app"}

    drive(bare, Job, JobStep)
    receipt = """INSERT INTO app.job_step (job_id, step, outcome, result, effect, fence)
        SELECT id, 's', 'succeeded', '1', 'external', 7 FROM public.job LIMIT 1"""
    with bare.connect() as connection:
        connection.execute(text("SET search_path TO north"))
        with pytest.raises(DBAPIError, match="under fence 7"):
            connection.execute(text(receipt))


@pytest.mark.parametrize("shape", ["plain", "odd names", "an odd schema"])
def test_autogenerate_has_nothing_to_say_of_what_create_all_made(bare: Engine, shape: str) -> None:
    job, _ = SHAPES[shape][0]()
    job.metadata.create_all(bare)
    with bare.connect() as connection:
        options: dict[str, Any] = {"compare_type": True, "compare_server_default": True, "include_schemas": True}
        context = MigrationContext.configure(connection, opts=options)
        assert compare_metadata(context, job.metadata) == []


# --- how it is asked for


def test_a_class_that_asks_for_none_has_none() -> None:
    assert all(guard_of(table) is None for table in unguarded().metadata.sorted_tables)
    assert "durable_override" not in unguarded().metadata.tables


def unguarded(**options: Any) -> type[Any]:
    class Base(DeclarativeBase):
        pass

    class Job(RunMixin, Base):
        __tablename__ = "job"
        __guard__ = False
        __lifecycle__ = lifecycle(job_machine(), **options)
        id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
        status: Mapped[JobStatus] = __lifecycle__.machine.column()

    class JobStep(ReceiptMixin[Job], Base):
        __tablename__ = "job_step"

    return Job


def test_the_lifecycle_may_ask_for_it_as_well() -> None:
    tables = unguarded(guard=True).metadata.sorted_tables
    assert {table.name for table in tables if guard_of(table)} == {"job", "job_step"}
    assert "durable_override" in {table.name for table in tables}


def test_several_classes_and_schemas_share_what_records_overrides() -> None:
    class Base(DeclarativeBase):
        pass

    for name, schema in (("a", None), ("b", None), ("c", "app")):
        machine = job_machine()
        type(
            name,
            (RunMixin, Base),
            {
                "__tablename__": name,
                "__table_args__": {"schema": schema},
                "__guard__": True,
                "__lifecycle__": lifecycle(machine),
                "id": mapped_column(Integer, primary_key=True),
                "status": machine.column(),
            },
        )
    assert {name for name in Base.metadata.tables if "durable" in name} == {"durable_override", "app.durable_override"}


def test_a_table_of_the_users_own_that_has_that_name_is_refused() -> None:
    class Base(DeclarativeBase):
        pass

    Table("durable_override", Base.metadata, Column("id", Integer, primary_key=True))
    with pytest.raises(ConfigurationError, match="is one of your own"):

        class Job(RunMixin, Base):
            __tablename__ = "job"
            __guard__ = True
            __lifecycle__ = lifecycle(job_machine())
            id: Mapped[int] = mapped_column(primary_key=True)
            status: Mapped[JobStatus] = __lifecycle__.machine.column()


def test_anything_but_yes_or_no_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Job\.__lifecycle__\.guard is 'no'; write True or False\."):
        unguarded(guard="no")

    class Base(DeclarativeBase):
        pass

    with pytest.raises(ConfigurationError, match=r"Job\.__guard__ is 'yes'; write True or False\."):

        class Job(RunMixin, Base):
            __tablename__ = "job"
            __guard__: Any = "yes"
            __lifecycle__ = lifecycle(job_machine())
            id: Mapped[int] = mapped_column(primary_key=True)
            status: Mapped[JobStatus] = __lifecycle__.machine.column()


def test_a_subclass_has_the_guard_of_its_base_class() -> None:
    job = unguarded()
    with pytest.raises(ConfigurationError, match="so its __guard__"):

        class Fetch(job):  # type: ignore[misc, valid-type]
            __guard__ = True
