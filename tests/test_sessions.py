"""The sessions and engines a user may bring, and those that are refused with a reason."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

from sqla_durable import ConfigurationError, Lease, ReceiptMixin, Run, RunMixin, Runs
from tests.support import Entry, Plan, PlanStatus, PlanStep, approved_plan, entries, plan_statuses, write_entry
from tests.support_models import Driver, JobStatus, jobs, lifecycle, make_effects


class Base(DeclarativeBase):
    pass


class Job(RunMixin, Base):
    __tablename__ = "job"
    __lifecycle__ = lifecycle()
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[JobStatus] = jobs.column()


class JobStep(ReceiptMixin[Job], Base):
    __tablename__ = "job_step"


class Order(Base):
    __tablename__ = "order"
    id: Mapped[int] = mapped_column(primary_key=True)


@pytest.fixture
def bare(empty_url: str) -> Iterator[Engine]:
    """An engine on a database with the tables of this module."""
    engine = create_engine(empty_url)
    Base.metadata.create_all(engine)
    make_effects(engine)
    yield engine
    engine.dispose()


def driver(engine: Engine, factory: sessionmaker[Session]) -> Driver:
    """Takes runs through every verb; rows are made and looked at through a plain session."""
    return Driver(Runs(factory, Job, JobStep), engine, sessionmaker(engine), Job, lambda status: Job(status=status))


class OwnSession(Session):
    """A session class with a constructor and a bind of its own, as multi-tenant applications have."""

    def __init__(self, *, tenant: str, engine: Engine, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.info["tenant"] = tenant
        self._own_engine = engine

    def get_bind(self, *args: Any, **kwargs: Any) -> Engine | Connection:
        return self._own_engine


FACTORIES: dict[str, Callable[[Engine], sessionmaker[Any]]] = {
    "plain": sessionmaker,
    "expire_on_commit=False": lambda engine: sessionmaker(engine, expire_on_commit=False),
    "autoflush=False": lambda engine: sessionmaker(engine, autoflush=False),
    "autobegin=False": lambda engine: sessionmaker(engine, autobegin=False),
    "close_resets_only=False": lambda engine: sessionmaker(engine, close_resets_only=False),
    "join_transaction_mode": lambda engine: sessionmaker(engine, join_transaction_mode="create_savepoint"),
    "binds=": lambda engine: sessionmaker(engine, binds={Base: engine}),
    "binds= of one class": lambda engine: sessionmaker(engine, binds={Job: engine}),
    "own class": lambda engine: sessionmaker(class_=OwnSession, tenant="a", engine=engine),
    "configured later": lambda engine: configured(sessionmaker(), engine),
}


def configured(factory: sessionmaker[Session], engine: Engine) -> sessionmaker[Session]:
    factory.configure(bind=engine)
    return factory


@pytest.mark.parametrize("options", FACTORIES)
def test_every_verb_with_a_sessionmaker_that_is(bare: Engine, options: str) -> None:
    driver(bare, FACTORIES[options](bare)).every_verb()
    assert bare.pool.checkedout() == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
@pytest.mark.parametrize("by", ["create_engine", "execution_options", "server default"])
def test_every_verb_under_an_isolation_level(bare: Engine, level: str, by: str) -> None:
    match by:
        case "create_engine":
            engine = create_engine(bare.url, isolation_level=level)
        case "execution_options":
            engine = bare.execution_options(isolation_level=level)
        case _:
            option = level.replace(" ", "\\ ").lower()
            engine = create_engine(bare.url, connect_args={"options": f"-c default_transaction_isolation={option}"})
    driver(bare, sessionmaker(engine)).every_verb()
    engine.dispose()


def test_a_step_sees_the_isolation_level_that_its_engine_has(bare: Engine) -> None:
    engine = create_engine(bare.url, isolation_level="SERIALIZABLE")
    made = driver(bare, sessionmaker(engine))

    def level(session: Session) -> str:
        return str(session.scalar(text("SHOW transaction_isolation")))

    run = made.runs.claim(made.add())
    run.external("first", lambda: 1)  # by a statement in autocommit, on the same pool
    assert run.step("only", level) == "serializable"
    engine.dispose()


# --- refused with a reason


def runs_for(bind: Any, **kwargs: Any) -> Runs[Job]:
    return Runs(sessionmaker(bind, **kwargs), Job, JobStep)


VERBS: dict[str, Callable[[Runs[Job]], object]] = {
    "claim": lambda runs: runs.claim(1),
    "claim_due": lambda runs: runs.claim_due(1),
    "execute": lambda runs: runs.execute(1, lambda run: None),
    "get": lambda runs: runs.get(1),
    "heal": lambda runs: runs.heal(1),
    "reap": lambda runs: runs.reap(),
    "requeue": lambda runs: runs.requeue(1),
    "receipts": lambda runs: runs.receipts(1),
}
WRITING = [verb for verb in VERBS if verb != "receipts"]


@pytest.mark.parametrize("verb", WRITING)
@pytest.mark.parametrize("by", ["create_engine", "execution_options"])
def test_an_engine_in_autocommit_is_refused(bare: Engine, verb: str, by: str) -> None:
    level = {"isolation_level": "AUTOCOMMIT"}
    engine = create_engine(bare.url, **level) if by == "create_engine" else bare.execution_options(**level)
    with pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
        VERBS[verb](runs_for(engine))
    engine.dispose()


def test_autocommit_is_refused_in_the_callers_transaction_and_for_a_transition_too(bare: Engine) -> None:
    made = driver(bare, sessionmaker(bare))
    run = made.runs.claim(made.add())
    auto = sessionmaker(bare.execution_options(isolation_level="AUTOCOMMIT"))
    for call in (
        lambda session: made.runs.fence(session, run.lease),
        lambda session: made.runs.record(session, run.lease, "own", 1),
        lambda session: made.runs.request_cancel(session, run.row),
    ):
        with auto() as session, pytest.raises(ConfigurationError, match="AUTOCOMMIT"):
            call(session)
    assert made.row(run.row.id)["cancel_requested_at"] is None
    assert made.runs.receipts(run.row.id) == ()


@pytest.mark.parametrize("verb", VERBS)
def test_another_database_gets_a_clear_error_at_the_first_statement(verb: str) -> None:
    runs = runs_for(create_engine("sqlite://"))
    with pytest.raises(ConfigurationError, match=r"not PostgreSQL through psycopg 3.*postgresql\+psycopg://"):
        VERBS[verb](runs)


@pytest.mark.parametrize("verb", ["fence", "record", "request_cancel", "transition"])
def test_another_database_gets_a_clear_error_in_the_callers_session_too(verb: str) -> None:
    engine = create_engine("sqlite://")
    runs = runs_for(engine)
    lease = Lease("job", (1,), 1, 1, "me")
    calls: dict[str, Callable[[Session], object]] = {
        "fence": lambda session: runs.fence(session, lease),
        "record": lambda session: runs.record(session, lease, "own", 1),
        "request_cancel": lambda session: runs.request_cancel(session, 1),
        "transition": lambda session: jobs.transition(session, (Job, 1), JobStatus.READY),
    }
    with Session(engine) as session, pytest.raises(ConfigurationError, match="not PostgreSQL"):
        calls[verb](session)


def test_another_driver_for_postgresql_gets_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in: Any = types.ModuleType("pg8000")
    stand_in.paramstyle, stand_in.__version__, stand_in.Error = "format", "1.31.2", Exception
    monkeypatch.setitem(sys.modules, "pg8000", stand_in)
    engine = create_engine("postgresql+pg8000://nobody@/nowhere", module=stand_in)
    with pytest.raises(ConfigurationError, match=r"psycopg 3.*postgresql\+psycopg://"):
        runs_for(engine).claim(1)


def test_the_asyncio_driver_in_the_synchronous_form_gets_a_clear_error(bare: Engine) -> None:
    from sqlalchemy.ext.asyncio import create_async_engine

    engine = create_async_engine(bare.url)
    with pytest.raises(ConfigurationError, match="AsyncRuns"):
        runs_for(engine.sync_engine).claim(1)


@pytest.mark.parametrize("verb", VERBS)
def test_a_sessionmaker_bound_to_a_connection_is_refused(bare: Engine, verb: str) -> None:
    with bare.connect() as connection, pytest.raises(ConfigurationError, match=r"bound to a Connection"):
        VERBS[verb](runs_for(connection))


def test_a_sessionmaker_without_a_bind_names_what_is_missing() -> None:
    with pytest.raises(Exception, match=r"(?i)bind|engine"):
        runs_for(None).claim(1)


def test_runs_and_receipts_bound_to_different_engines_are_refused(bare: Engine) -> None:
    other = create_engine(bare.url)
    with pytest.raises(ConfigurationError, match="different engines"):
        runs_for(None, binds={Job: bare, JobStep: other}).claim(1)


@pytest.mark.parametrize("misuse", ["scoped_session", "session", "engine", "class"])
def test_what_is_not_a_sessionmaker_is_refused_at_once(bare: Engine, misuse: str) -> None:
    given: dict[str, Any] = {
        "scoped_session": scoped_session(sessionmaker(bare)),
        "session": Session(bare),
        "engine": bare,
        "class": Session,
    }
    with pytest.raises(ConfigurationError, match=r"sessionmaker"):
        Runs(given[misuse], Job, JobStep)


def test_a_scoped_session_serves_as_the_callers_session(engine: Engine, session_factory: sessionmaker[Session]) -> None:
    registry = scoped_session(session_factory)
    plans = Runs(session_factory, Plan, PlanStep)
    waiting, ready = approved_plan(session_factory), approved_plan(session_factory)
    run = plans.claim(ready)
    assert run is not None
    row = registry.get_one(Plan, waiting)
    session: Any = registry
    assert plan_statuses.transition(session, row, PlanStatus.CANCELLED)
    assert row.status is PlanStatus.CANCELLED
    plans.fence(session, run.lease)
    plans.record(session, run.lease, "own", 1)
    registry.commit()
    registry.remove()
    assert [receipt.step for receipt in plans.receipts(ready)] == ["own"]


# --- two engines


def test_a_body_that_reaches_a_second_engine_is_refused_and_nothing_is_committed(bare: Engine) -> None:
    other = create_engine(bare.url)
    made = driver(bare, sessionmaker(bare, binds={Order: other}))
    run = made.runs.claim(made.add())

    def body(session: Session) -> None:
        session.execute(text("INSERT INTO public.effect VALUES ('never')"))
        session.add(Order())
        session.flush()

    with pytest.raises(ConfigurationError, match="second engine"):
        run.step("only", body)

    def late(session: Session) -> None:
        session.execute(text("INSERT INTO public.effect VALUES ('never')"))
        session.add(Order())  # flushed by the step itself

    with pytest.raises(ConfigurationError, match="second engine"):
        run.step("only", late)
    assert made.runs.receipts(run.row.id) == ()
    with bare.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM public.effect")) == 0
        assert connection.scalar(text('SELECT count(*) FROM "order"')) == 0
    other.dispose()


def test_a_body_that_only_reads_from_the_same_engine_by_other_names_is_fine(bare: Engine) -> None:
    made = driver(bare, sessionmaker(bare, binds={Order: bare}))
    run = made.runs.claim(made.add())
    assert run.step("only", lambda session: session.query(Order).count()) == 0
    made.every_verb()


def test_two_engines_in_two_phases_commit_together(bare: Engine) -> None:
    with bare.connect() as connection:
        if connection.scalar(text("SHOW max_prepared_transactions")) == "0":
            pytest.skip("max_prepared_transactions is 0 on this server, so it has no two-phase commit")
    other = create_engine(bare.url)
    made = driver(bare, sessionmaker(bare, binds={Order: other}, twophase=True))
    run = made.runs.claim(made.add())

    def body(session: Session) -> None:
        session.execute(text("INSERT INTO public.effect VALUES ('once')"))
        session.add(Order())

    run.step("only", body)
    with bare.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM public.effect")) == 1
        assert connection.scalar(text('SELECT count(*) FROM "order"')) == 1
    other.dispose()


def test_a_session_whose_bind_changes_from_call_to_call_never_writes_to_the_wrong_database(bare: Engine) -> None:
    """As a router by tenant or by replica does; either every write follows it, or it is refused."""
    other = create_engine(bare.url.update_query_dict({"application_name": "other"}))
    places = {"one": bare, "other": other}
    place = "one"

    class Router(Session):
        def get_bind(self, *args: Any, **kwargs: Any) -> Engine | Connection:
            return places[place]

    runs = Runs(sessionmaker(class_=Router), Job, JobStep)
    used: list[str] = []
    from sqlalchemy import event

    for name, engine in places.items():
        event.listen(engine, "commit", lambda connection, name=name: used.append(name))
        event.listen(engine, "before_cursor_execute", lambda *_, name=name: used.append(name))
    with sessionmaker(bare).begin() as session:
        session.add_all([Job(id=1, status=JobStatus.READY), Job(id=2, status=JobStatus.READY)])
    assert runs.claim(1) is not None
    place = "other"
    used.clear()
    try:
        run = runs.claim(2)
        assert run is not None
        run.external("call", lambda: 1)
        run.renew()
        run.finish()
    except ConfigurationError:
        pass
    else:
        assert set(used) == {"other"}
    other.dispose()


# --- the caller's own session


def test_the_callers_autobegun_session_is_neither_committed_nor_rolled_back(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    plans = Runs(session_factory, Plan, PlanStep)
    ident = approved_plan(session_factory)
    run: Run[Plan] | None = plans.claim(ident)
    assert run is not None
    with session_factory() as session:
        write_entry(session, "mine")
        plans.fence(session, run.lease)
        plans.record(session, run.lease, "own", {"a": 1})
        assert plans.request_cancel(session, ident)
        assert session.in_transaction()
        assert entries(engine) == []
        assert plans.receipts(ident) == ()
        session.rollback()
    assert entries(engine) == []
    assert plans.receipts(ident) == ()
    assert run.step("own", write_entry, "a") == "a"


def test_record_flushes_an_effect_even_where_autoflush_is_off(engine: Engine) -> None:
    factory = sessionmaker(engine, autoflush=False)
    plans = Runs(factory, Plan, PlanStep)
    run = plans.claim(approved_plan(factory))
    assert run is not None
    with factory() as session:
        session.add(Entry(label=None))  # type: ignore[arg-type]
        with pytest.raises(Exception, match="null value"):
            plans.record(session, run.lease, "own", 1)
    assert plans.receipts(run.row.id) == ()
