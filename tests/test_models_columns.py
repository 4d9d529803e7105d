"""What the user's model does (onupdate, version ids, eager loads, criteria), and what the library leaves alone."""

# ruff: noqa: RUF012 - mapper and table arguments are written as SQLAlchemy's documentation writes them

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import (
    Column,
    DateTime,
    Engine,
    ForeignKey,
    Index,
    Table,
    create_engine,
    event,
    false,
    func,
    select,
    text,
    update,
)
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    ORMExecuteState,
    Session,
    mapped_column,
    relationship,
    sessionmaker,
    with_loader_criteria,
)

from sqla_durable import ReceiptMixin, RunMixin, Runs, UsageError
from sqla_durable.run import RunRows
from tests.support import Background, wait_until_blocked
from tests.support_models import Driver, JobStatus, drive, jobs, leave, lifecycle, make_effects, statements


@pytest.fixture
def bare(empty_url: str) -> Iterator[Engine]:
    """An engine on a database without tables."""
    engine = create_engine(empty_url)
    yield engine
    engine.dispose()


calls = iter(range(1, 1_000_000))


class Base(DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customer"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str]


class Busy(RunMixin, Base):
    """A model that does something at every turn."""

    __tablename__ = "busy"
    __table_args__ = (Index(None, "touched"), Index(None, "counter"))
    __lifecycle__ = lifecycle()
    id: Mapped[UUID] = mapped_column(primary_key=True, default=uuid4)
    status: Mapped[JobStatus] = jobs.column()
    version: Mapped[int] = mapped_column(default=1)
    touched: Mapped[datetime | None] = mapped_column(DateTime(timezone=True), onupdate=func.now())
    counter: Mapped[int | None] = mapped_column(onupdate=lambda: next(calls))
    constant: Mapped[str | None] = mapped_column("a constant (%)", onupdate="changed")
    note: Mapped[str | None]
    customer_id: Mapped[int | None] = mapped_column(ForeignKey(Customer.id))
    customer: Mapped[Customer | None] = relationship(lazy="joined")
    lines: Mapped[list[Line]] = relationship(lazy="joined", cascade="all, delete-orphan")
    tags: Mapped[list[Tag]] = relationship(lazy="selectin", secondary=lambda: busy_tag)
    __mapper_args__ = {"version_id_col": version}


class Line(Base):
    __tablename__ = "line"
    id: Mapped[int] = mapped_column(primary_key=True)
    busy_id: Mapped[UUID] = mapped_column(ForeignKey(Busy.id, ondelete="CASCADE"))


class Tag(Base):
    __tablename__ = "tag"
    id: Mapped[int] = mapped_column(primary_key=True)


busy_tag = Table(
    "busy_tag",
    Base.metadata,
    Column("busy_id", ForeignKey(Busy.id, ondelete="CASCADE"), primary_key=True),
    Column("tag_id", ForeignKey(Tag.id), primary_key=True),
)


class BusyStep(ReceiptMixin[Busy], Base):
    __tablename__ = "busy_step"
    seen: Mapped[datetime | None] = mapped_column(DateTime(timezone=True), onupdate=func.now())
    looked: Mapped[int | None] = mapped_column(onupdate=lambda: next(calls))


WATCHED = "version", "touched", "counter", "constant", "note", "customer_id"


def busy(status: JobStatus) -> Busy:
    return Busy(
        status=status,
        note="mine",
        customer=Customer(name="a"),
        lines=[Line(), Line()],
        tags=[Tag(), Tag()],
    )


def bare_busy(status: JobStatus) -> Busy:
    return Busy(status=status, lines=[Line(), Line()])


@pytest.mark.parametrize("new", [busy, bare_busy], ids=["with a customer", "without one"])
def test_every_verb_on_a_busy_model_and_none_touches_the_users_columns(bare: Engine, new: Any) -> None:
    Base.metadata.create_all(bare)
    make_effects(bare)
    factory = sessionmaker(bare)
    driver = Driver(Runs(factory, Busy, BusyStep), bare, factory, Busy, new)
    driver.every_verb()
    with bare.connect() as connection:
        table = Busy.__table__
        rows = connection.execute(select(*(table.c[Busy.__mapper__.attrs[n].columns[0].name] for n in WATCHED))).all()
        receipts = connection.execute(select(BusyStep.seen, BusyStep.looked)).all()
    note = "mine" if new is busy else None
    assert {tuple(row[:5]) for row in rows} == {(1, None, None, None, note)}
    assert len(rows) > 10
    assert {tuple(row) for row in receipts} == {(None, None)}


def driver_of(bare: Engine) -> Driver:
    Base.metadata.create_all(bare)
    make_effects(bare)
    factory = sessionmaker(bare)
    return Driver(Runs(factory, Busy, BusyStep), bare, factory, Busy, busy)


def test_the_users_own_writes_still_move_their_columns(bare: Engine) -> None:
    driver = driver_of(bare)
    ident = driver.add()

    def body(session: Session) -> int:
        row = session.get_one(Busy, ident)
        row.note = "changed"
        session.flush()
        return row.version

    outcome = driver.runs.execute(ident, lambda run: run.step("only", body))
    assert outcome.status is JobStatus.DONE
    row = driver.row(ident)
    assert (row["version"], row["constant"], row["note"]) == (2, "changed", "changed")
    assert row["touched"] is not None


def test_landing_sets_the_values_given_and_nothing_else(bare: Engine) -> None:
    driver = driver_of(bare)
    ident = driver.add()
    run = driver.runs.claim(ident)
    run.finish(note="landed", customer_id=None)
    row = driver.row(ident)
    assert (row["note"], row["customer_id"], row["version"], row["touched"]) == ("landed", None, 1, None)
    assert run.row.note == "landed"
    assert run.row.status is JobStatus.DONE
    with pytest.raises(UsageError, match="lines"):
        driver.runs.claim(driver.add()).finish(lines=[])


def test_an_object_changed_in_the_callers_session_keeps_its_changes_and_version(bare: Engine) -> None:
    driver = driver_of(bare)
    ident = driver.add()
    with driver.factory.begin() as session:
        row = session.get_one(Busy, ident)
        row.note = "pending"
        assert driver.runs.request_cancel(session, row)
        assert row.note == "pending"
        assert row.status is JobStatus.CANCELLED
        row.note = "again"
    stored = driver.row(ident)
    assert (stored["note"], stored["version"], stored["status"]) == ("again", 3, JobStatus.CANCELLED)


def test_the_handle_shows_eagerly_loaded_relations_without_a_session(bare: Engine) -> None:
    driver = driver_of(bare)
    run = driver.runs.claim(driver.add())
    assert run.row.customer.name == "a"
    assert len(run.row.lines) == 2
    assert len(run.row.tags) == 2
    run.release()
    (again,) = driver.runs.claim_due(5)
    assert len(again.row.lines) == 2


@pytest.mark.parametrize("verb", ["claim", "claim_due", "step", "finish", "fence", "request_cancel", "transition"])
def test_only_the_runs_own_row_is_locked(bare: Engine, verb: str) -> None:
    driver = driver_of(bare)
    ident = driver.add()
    run = None if verb in {"claim", "claim_due", "transition"} else driver.runs.claim(ident)
    with bare.begin() as connection:
        # Somebody else is busy with what the run refers to, and with what refers to the run.
        connection.execute(update(Customer).values(name="b"))
        connection.execute(select(Line.id).with_for_update())
        connection.execute(select(Tag.id).with_for_update())
        match verb:
            case "claim":
                assert driver.runs.claim(ident) is not None
            case "claim_due":
                assert len(driver.runs.claim_due(1)) == 1
            case "step":
                assert run.step("only", leave, "a") == "a"
            case "finish":
                run.finish()
            case _:
                with driver.factory.begin() as session:
                    if verb == "fence":
                        driver.runs.fence(session, run.lease)
                    elif verb == "transition":
                        assert jobs.transition(session, (Busy, ident), JobStatus.CANCELLED)
                    else:
                        assert driver.runs.request_cancel(session, ident)


def test_rows_that_refer_to_a_run_can_be_inserted_while_its_step_is_under_way(bare: Engine) -> None:
    driver = driver_of(bare)
    ident = driver.add()

    def body(session: Session) -> None:
        with driver.factory.begin() as other:
            other.execute(text("SET LOCAL lock_timeout = '5s'"))
            other.add(Line(busy_id=ident))

    driver.runs.claim(ident).step("only", body)


def test_a_claim_waits_for_a_short_lock_on_the_row_by_the_users_code(bare: Engine) -> None:
    driver = driver_of(bare)
    ident = driver.add()
    with driver.factory.begin() as session:
        session.get_one(Busy, ident, with_for_update={"of": Busy})
        claiming = Background(lambda: driver.runs.claim(ident))
        wait_until_blocked(bare)
    assert claiming.result() is not None


# --- loader criteria


def hiding(factory: sessionmaker[Session], *entities: type[Any]) -> None:
    """Hide every row of these classes from the ORM, as a tenant or soft-delete filter would."""

    def hide(state: ORMExecuteState) -> None:
        for entity in entities:
            state.statement = state.statement.options(with_loader_criteria(entity, lambda cls: false()))

    event.listen(factory, "do_orm_execute", hide)


def test_hidden_receipts_are_found_all_the_same_and_the_body_runs_once(bare: Engine) -> None:
    driver = driver_of(bare)
    hiding(driver.factory, BusyStep, Line)
    ident = driver.add()
    run = driver.runs.claim(ident)
    assert run.step("only", leave, "a") == "a"
    other = driver.runs.hold(run.lease)
    assert other.step("only", lambda session: pytest.fail("ran again")) == "a"
    run.release()
    assert driver.runs.claim(ident).step("only", lambda session: pytest.fail("ran again")) == "a"


def test_every_verb_under_criteria_that_hide_receipts_and_relations(bare: Engine) -> None:
    factory = sessionmaker(bare)
    hiding(factory, BusyStep, Line, Tag, Customer)
    drive(bare, Busy, BusyStep, busy, factory)


def test_a_hidden_run_is_not_claimed_and_the_error_says_why(bare: Engine) -> None:
    driver = driver_of(bare)
    idents = driver.add(count=2)
    plain = Runs(sessionmaker(bare), Busy, BusyStep)
    run = plain.claim(idents[0])
    assert run is not None
    hiding(driver.factory, Busy)
    with pytest.raises(UsageError, match=r"hidden.*loader criteria"):
        driver.runs.claim(idents[1])
    with pytest.raises(UsageError, match=r"hidden.*loader criteria"):
        driver.runs.claim_due(5)
    with pytest.raises(UsageError, match=r"hidden.*loader criteria"):
        driver.runs.execute(idents[1], lambda run: pytest.fail("ran"))
    assert driver.status(idents[1]) is JobStatus.READY
    assert driver.row(idents[1])["fence"] == 0
    # The fence is asked below the ORM, so a holder is never told that it lost what is merely hidden.
    with driver.factory.begin() as session:
        driver.runs.fence(session, run.lease)
        driver.runs.record(session, run.lease, "own", 1)
    assert run.step("only", leave, "a") == "a"


# --- status values


def test_values_are_stored_and_the_partial_indexes_serve_claim_and_reap(bare: Engine) -> None:
    driver = driver_of(bare)
    driver.add(count=3)
    table: Any = Busy.__table__
    with bare.begin() as connection:
        assert connection.scalar(text("SELECT count(*) FROM busy WHERE status = 'may start'")) == 3
        with pytest.raises(Exception, match="ck_busy_status_values"), connection.begin_nested():
            connection.execute(text("UPDATE busy SET status = 'READY'"))
        connection.execute(text("SET LOCAL enable_seqscan = off"))
        rows = RunRows(Busy)
        for status, column in ((JobStatus.READY, table.c.available_at), (JobStatus.RUNNING, table.c.started_at)):
            query = select(table.c.id).where(rows.in_status(status)).order_by(column).limit(5)
            compiled = query.compile(bare, compile_kwargs={"literal_binds": True})
            plan = "\n".join(connection.scalars(text(f"EXPLAIN {compiled}")))
            assert f"ix_busy_{column.name}" in plan
    with driver.factory() as session:
        assert session.scalars(select(Busy.status)).unique().all() == [JobStatus.READY]


def test_the_runs_statements_name_no_user_column_but_the_key_and_onupdate_ones(bare: Engine) -> None:
    driver = driver_of(bare)
    ident = driver.add()
    with statements(bare) as sent:
        run = driver.runs.claim(ident)
        run.step("only", leave, "a")
        run.renew()
        run.finish()
    writes = [statement for statement in sent if "UPDATE busy SET" in statement]
    assert len(writes) >= 3
    for statement in writes:
        changed = statement.split(" SET ", 1)[1]
        assert "version" not in changed
        assert "note" not in changed
        assert "touched=busy.touched" in changed
