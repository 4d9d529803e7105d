"""One driver that takes any run model through every verb, and the machine those models share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import StrEnum
from typing import Any

import pytest
from sqlalchemy import Engine, Table, event, inspect, select, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import (
    PENDING,
    Ending,
    Lifecycle,
    LostLease,
    NotIssued,
    Retry,
    RunNotFound,
    Runs,
    StatusMachine,
    StepFailed,
    StepReused,
)
from sqla_durable.testing import lapse


class JobStatus(StrEnum):
    """Names and values differ, so that whatever is stored or compared by name shows."""

    WAITING = "not yet"
    READY = "may start"
    RUNNING = "under way"
    DONE = "all done"
    FAILED = "no luck"
    DEAD = "gave up: 100%"
    CANCELLED = "called 'off'"


def job_machine() -> StatusMachine[JobStatus]:
    status = JobStatus
    return StatusMachine(
        JobStatus,
        initial=status.WAITING,
        transitions={
            status.WAITING: {status.READY, status.CANCELLED},
            status.READY: {status.RUNNING, status.CANCELLED},
            status.RUNNING: {status.DONE, status.FAILED, status.DEAD, status.CANCELLED, status.READY},
        },
    )


jobs = job_machine()


def lifecycle(machine: StatusMachine[JobStatus] = jobs, **values: Any) -> Lifecycle[JobStatus]:
    given: dict[str, Any] = {
        "lease": timedelta(seconds=30),
        "retry": Retry(max_attempts=3, backoff=timedelta(0), cap=timedelta(0)),
        "requeue": {JobStatus.FAILED, JobStatus.DEAD},
        **values,
    }
    return Lifecycle(
        machine,
        ready=JobStatus.READY,
        running=JobStatus.RUNNING,
        done=JobStatus.DONE,
        failed=JobStatus.FAILED,
        dead=JobStatus.DEAD,
        cancelled=JobStatus.CANCELLED,
        **given,
    )


# --- the effect of the steps, in a table that no model knows


def make_effects(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE public.effect (label text)"))


def effects(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(text("SELECT label FROM public.effect ORDER BY label")))


def leave(session: Session, label: str) -> str:
    session.execute(text("INSERT INTO public.effect VALUES (:label)"), {"label": label})
    return label


def leave_and_fail(session: Session, label: str) -> None:
    leave(session, label)
    raise ValueError(label)


# --- the driver


class Driver:
    """Takes runs of one model through every verb.

    :param runs: the helper under test, or something that looks like it.
    :param engine: one that sees what was committed, schema translation and all.
    :param factory: of the caller's own sessions.
    :param new: makes an object of the run class, not yet in a session, with the status given.
    """

    def __init__(
        self, runs: Any, engine: Engine, factory: sessionmaker[Session], entity: type[Any], new: Callable[..., Any]
    ) -> None:
        self.runs = runs
        self.engine = engine
        self.factory = factory
        self.entity = entity
        self.new = new

    def add(self, status: JobStatus = JobStatus.READY, count: int = 1) -> Any:
        """The primary key of a new run, or a list of several."""
        with self.factory.begin() as session:
            rows = [self.new(status) for _ in range(count)]
            session.add_all(rows)
            session.flush()
            keys = [tuple(inspect(row).identity) for row in rows]
        idents = [key[0] if len(key) == 1 else key for key in keys]
        return idents[0] if count == 1 else idents

    def row(self, ident: Any) -> dict[str, Any]:
        """The root table's row as it is committed, by attribute; below the ORM."""
        mapper = inspect(self.entity).base_mapper
        table = mapper.local_table
        assert isinstance(table, Table)
        key = ident if isinstance(ident, tuple) else (ident,)
        where = [column == value for column, value in zip(mapper.primary_key, key, strict=True)]
        with self.engine.connect() as connection:
            found = connection.execute(select(table).where(*where)).one()._mapping
        columns = {prop.key: prop.columns[-1] for prop in mapper.column_attrs}
        return {key: found[column] for key, column in columns.items() if column in found}

    def status(self, ident: Any) -> JobStatus:
        found = self.row(ident)["status"]
        assert isinstance(found, JobStatus)
        return found

    def lapse(self, ident: Any) -> None:
        with self.factory.begin() as session:
            lapse(session, self.entity, ident)

    def every_verb(self) -> None:
        """Each verb, with what it must leave behind."""
        for verb in (
            self.starting,
            self.carrying_out,
            self.failing,
            self.operating,
            self.in_the_callers_transaction,
            self.batches,
            self.lapsing,
            self.requeueing,
            self.cancelling,
            self.losing,
            self.missing,
        ):
            verb()

    def starting(self) -> None:
        ident = self.add(JobStatus.WAITING)
        machine = self.entity.__lifecycle__.machine
        assert self.runs.claim(ident) is None
        with self.factory.begin() as session:
            assert machine.transition(session, (self.entity, ident), JobStatus.READY)
            assert not machine.transition(session, (self.entity, ident), JobStatus.READY)
        with self.factory.begin() as session:
            loaded = session.get_one(self.entity, ident)
            assert loaded.status is JobStatus.READY
            assert not machine.transition(session, loaded, JobStatus.READY)
            assert machine.transition(session, loaded, JobStatus.CANCELLED)
            assert loaded.status is JobStatus.CANCELLED
            assert not session.dirty
        assert self.status(ident) is JobStatus.CANCELLED
        assert self.row(ident)["finished_at"] is not None

    def carrying_out(self) -> None:
        ident = self.add()
        before = len(effects(self.engine))

        def carry_out(run: Any) -> None:
            assert isinstance(run.row, self.entity)
            assert run.step(0, leave, "first") == "first"
            run.renew()
            assert run.external("call", lambda: [1, "a"]) == [1, "a"]
            with pytest.raises(StepReused):
                run.step(0, leave, "twice")
            assert run.step("last", leave, "last") == "last"

        outcome = self.runs.execute(ident, carry_out)
        if outcome.exception is not None:
            raise outcome.exception
        assert (outcome.ending, outcome.status) == (Ending.LANDED, JobStatus.DONE)
        assert [receipt.step for receipt in outcome.receipts] == ["0", "call", "last"]
        assert [receipt.effect for receipt in outcome.receipts] == ["transactional", "external", "transactional"]
        assert len(effects(self.engine)) == before + 2
        assert self.status(ident) is JobStatus.DONE
        assert self.row(ident)["lease_owner"] is None
        assert self.runs.receipts(ident) == outcome.receipts
        again = self.runs.execute(ident, lambda run: pytest.fail("a terminal run ran"))
        assert again == outcome
        assert again.replayed
        assert self.runs.get(ident).status is JobStatus.DONE

    def failing(self) -> None:
        ident = self.add()
        before = len(effects(self.engine))
        run = self.runs.claim(ident)
        with pytest.raises(ValueError, match="undone"):
            run.step("fails", leave_and_fail, "undone")
        with pytest.raises(ZeroDivisionError):
            run.external("fails outside", lambda: 1 / 0)
        assert run.step("first", leave, "first") == "first"
        run.release()
        assert self.status(ident) is JobStatus.READY

        def carry_out(run: Any) -> None:
            assert run.step("first", leave, "never") == "first"
            with pytest.raises(StepFailed, match="undone"):
                run.step("fails", leave_and_fail, "never")
            run.fail(ValueError("given up"))

        outcome = self.runs.execute(ident, carry_out)
        assert outcome.status is JobStatus.FAILED
        assert self.row(ident)["error"]["message"] == "given up"
        assert len(self.row(ident)["failures"]) == 1
        assert self.row(ident)["attempts"] == 2
        assert len(effects(self.engine)) == before + 1

    def operating(self) -> None:
        ident = self.add()
        answers: list[Any] = [PENDING, ConnectionError("away"), "done"]

        def poll(ids: Any) -> Any:
            assert ids == {"id": 1}
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        def carry_out(run: Any) -> None:
            assert run.keyed("charge", lambda key: key) == run.idempotency_key("charge")
            assert run.operation("batch", start=lambda: {"id": 1}, poll=poll) == "done"

        for attempts in 0, 0, 1:
            outcome = self.runs.execute(ident, carry_out, run_now=True)
            assert self.row(ident)["attempts"] == attempts, outcome.exception
        assert (outcome.ending, outcome.status) == (Ending.LANDED, JobStatus.DONE)
        assert [failure["step"] for failure in self.row(ident)["failures"]] == ["batch"]
        assert [receipt.effect for receipt in outcome.receipts] == ["keyed", "operation"]
        assert self.runs.receipts(ident) == outcome.receipts
        self.resolving()

    def resolving(self) -> None:
        ident = self.add()
        starts: list[Any] = [TimeoutError("no answer"), NotIssued("refused"), TimeoutError("no answer"), {"id": 2}]

        def start() -> Any:
            answer = starts.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        def carry_out(run: Any) -> None:
            run.operation("batch", start=start, poll=lambda ids: ids)

        def check(status: JobStatus, outcome: str | None) -> None:
            assert self.runs.execute(ident, carry_out).status is status
            assert [receipt.outcome for receipt in self.runs.receipts(ident)] == ([] if outcome is None else [outcome])

        def say(verb: str, *args: Any) -> None:
            with self.factory.begin() as session:
                assert getattr(self.runs, verb)(session, ident, "batch", *args)
            assert self.runs.requeue(ident)

        check(JobStatus.FAILED, "issued")
        say("never_issued")
        check(JobStatus.READY, None)
        check(JobStatus.FAILED, "issued")
        say("attach_ids", {"id": 1})
        check(JobStatus.DONE, "succeeded")
        assert self.runs.receipts(ident)[0].result == {"id": 1}

    def in_the_callers_transaction(self) -> None:
        ident = self.add()
        run = self.runs.claim(ident)
        lease = run.lease
        with self.factory.begin() as session:
            self.runs.fence(session, lease)
            self.runs.record(session, lease, "own", {"a": [1]})
        with self.factory.begin() as session, pytest.raises(StepReused):
            self.runs.record(session, lease, "own", None)
        held = self.runs.hold(lease)
        assert held.lease == lease
        assert held.step("own", lambda session: pytest.fail("ran again")) == {"a": [1]}
        held.finish()
        with self.factory() as session, pytest.raises(LostLease):
            self.runs.fence(session, lease)
        with pytest.raises(LostLease):
            run.finish()
        assert self.status(ident) is JobStatus.DONE

    def batches(self) -> None:
        idents = self.add(count=3)
        claimed = self.runs.claim_due(limit=2)
        assert len(claimed) == 2
        (last,) = self.runs.claim_due(limit=2)
        assert self.runs.claim_due(limit=2) == []
        for run in [*claimed, last]:
            assert isinstance(run.row, self.entity)
            assert self.runs.execute(run, lambda run: run.step("only", leave, "batch")).status is JobStatus.DONE
        assert {self.status(ident) for ident in idents} == {JobStatus.DONE}

    def lapsing(self) -> None:
        ident, other, third = self.add(count=3)
        run = self.runs.claim(ident)
        self.runs.claim(other)
        self.runs.claim(third)
        assert not self.runs.heal(ident)
        assert self.runs.reap(10) == 0
        for lapsed in (ident, other, third):
            self.lapse(lapsed)
        assert run.external("late", lambda: "still held") == "still held"
        run.renew()
        assert not self.runs.heal(ident)
        self.lapse(ident)
        assert self.runs.heal(ident)
        assert self.status(ident) is JobStatus.READY
        assert run.step("resumed", leave, "resumed") == "resumed"
        assert self.status(ident) is JobStatus.RUNNING
        assert self.row(ident)["attempts"] == 1
        assert self.runs.get(other).status is JobStatus.READY
        assert self.runs.reap(10) == 1
        assert self.status(third) is JobStatus.READY
        run.finish()
        for left in (other, third):
            self.runs.execute(left, lambda run: None)

    def requeueing(self) -> None:
        ident = self.add()
        run = self.runs.claim(ident)
        run.step("first", leave, "first")
        with pytest.raises(ValueError, match="undone"):
            run.step("fails", leave_and_fail, "undone")
        run.fail(ValueError("no"))
        fence = self.row(ident)["fence"]
        assert self.runs.requeue(ident)
        assert not self.runs.requeue(ident)
        assert [receipt.step for receipt in self.runs.receipts(ident)] == ["first"]
        row = self.row(ident)
        assert (row["status"], row["attempts"], row["fence"]) == (JobStatus.READY, 0, fence)
        assert (row["error"], row["finished_at"]) == (None, None)
        assert self.runs.execute(ident, lambda run: run.step("first", leave, "no")).status is JobStatus.DONE

    def cancelling(self) -> None:
        ready, running = self.add(count=2)
        run = self.runs.claim(running)
        with self.factory.begin() as session:
            assert self.runs.request_cancel(session, ready)
            assert self.runs.request_cancel(session, running)
        assert self.status(ready) is JobStatus.CANCELLED
        before = len(effects(self.engine))
        outcome = self.runs.execute(run, lambda run: run.step("only", leave, "never"))
        assert outcome.status is JobStatus.CANCELLED
        assert len(effects(self.engine)) == before
        with self.factory.begin() as session:
            assert not self.runs.request_cancel(session, running)

    def losing(self) -> None:
        ident = self.add()
        stale = self.runs.claim(ident)
        self.lapse(ident)
        fresh = self.runs.claim(ident)
        assert fresh.lease.fence == stale.lease.fence + 1
        before = len(effects(self.engine))
        for write in (
            lambda: stale.step("a", leave, "stale"),
            lambda: stale.external("b", lambda: None),
            stale.renew,
            stale.finish,
            lambda: stale.fail(ValueError("stale")),
            stale.release,
        ):
            stale.holder.lost = None  # asked anew each time
            with pytest.raises(LostLease):
                write()
        assert len(effects(self.engine)) == before
        assert self.runs.receipts(ident) == ()
        fresh.finish()

    def missing(self) -> None:
        ident = self.add()
        with self.factory.begin() as session:
            session.delete(session.get_one(self.entity, ident))
        for call in (self.runs.claim, lambda ident: self.runs.execute(ident, lambda run: None)):
            with pytest.raises(RunNotFound):
                call(ident)
        assert self.runs.get(ident) is None
        assert not self.runs.heal(ident)
        assert not self.runs.requeue(ident)
        assert self.runs.receipts(ident) == ()


def drive(
    engine: Engine,
    entity: type[Any],
    receipt: type[Any],
    new: Callable[..., Any] | None = None,
    factory: sessionmaker[Session] | None = None,
) -> Driver:
    """Create the tables, and take the model through every verb."""
    entity.metadata.create_all(engine)
    make_effects(engine)
    factory = factory or sessionmaker(engine)
    driver = Driver(
        Runs(factory, entity, receipt), engine, factory, entity, new or (lambda status: entity(status=status))
    )
    driver.every_verb()
    return driver


# --- what PostgreSQL made of the tables


def definitions(engine: Engine, table: Table) -> dict[str, str]:
    """The constraints and indexes of a table by name, in PostgreSQL's own words."""
    schema, name = table.schema or "public", table.name
    with engine.connect() as connection:
        constraints = connection.execute(
            text(
                "SELECT c.conname, pg_get_constraintdef(c.oid) FROM pg_constraint c"
                " JOIN pg_class t ON t.oid = c.conrelid JOIN pg_namespace n ON n.oid = t.relnamespace"
                " WHERE t.relname = :name AND n.nspname = :schema AND c.contype <> 'n'"
            ),
            {"name": name, "schema": schema},
        ).all()
        indexes = connection.execute(
            text("SELECT indexname, indexdef FROM pg_indexes WHERE tablename = :name AND schemaname = :schema"),
            {"name": name, "schema": schema},
        ).all()
    return {row[0]: row[1] for row in [*indexes, *constraints]}


@contextmanager
def statements(engine: Engine) -> Iterator[Sequence[str]]:
    """The statements that an engine sends meanwhile."""
    sent: list[str] = []

    def note(conn: Any, cursor: Any, statement: str, parameters: Any, context: Any, many: bool) -> None:
        sent.append(statement)

    event.listen(engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(engine, "before_cursor_execute", note)
