"""An expiry that passes while a grant waits for the row, and runs that are granted and expired at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, event, func, select, update
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import FrozenPayload, Runs, TransactionConflict
from sqla_durable.testing import lapse
from tests.support import ROW_BY_ROW, Background, eventually, wait_until_blocked
from tests.support_consent import (
    AHEAD,
    PASSED,
    SECOND,
    Consent,
    ConsentBase,
    ConsentStep,
    Status,
    add_consent,
    consent_statuses,
    database_clock,
    status_of,
    stored,
)

SNAPSHOTS = ["REPEATABLE READ", "SERIALIZABLE"]


@pytest.fixture
def engine(empty_url: str) -> Iterator[Engine]:
    engine = create_engine(empty_url)
    ConsentBase.metadata.create_all(engine)
    yield engine
    engine.dispose()


class Granting:
    """The verbs that let a run leave a status that can expire; each says whether it did."""

    def __init__(self, engine: Engine, isolation: str = "READ COMMITTED") -> None:
        self.engine = create_engine(engine.url, isolation_level=isolation)
        self.factory = sessionmaker(self.engine)
        self.consents: Runs[Consent] = Runs(self.factory, Consent, ConsentStep)

    def approve(self, ident: int) -> bool:
        return self._move(ident, Status.APPROVED)

    def reject(self, ident: int) -> bool:
        return self._move(ident, Status.REJECTED)

    def reject_where_running_too(self, ident: int) -> bool:
        return self._move(ident, Status.CANCELLED, from_={Status.APPROVED, Status.EXECUTING})

    def claim(self, ident: int) -> bool:
        return self.consents.claim(ident) is not None

    def claim_now(self, ident: int) -> bool:
        return self.consents.claim(ident, run_now=True) is not None

    def cancel(self, ident: int) -> bool:
        with self.factory.begin() as session:
            return self.consents.request_cancel(session, ident)

    def _move(self, ident: int, to: Status, **options: Any) -> bool:
        with self.factory.begin() as session:
            return consent_statuses.transition(session, (Consent, ident), to, **options)


GRANTS = {
    "approve": Status.PENDING,
    "reject": Status.PENDING,
    "reject_where_running_too": Status.APPROVED,
    "claim": Status.APPROVED,
    "claim_now": Status.APPROVED,
    "cancel": Status.APPROVED,
}


@pytest.fixture
def granting(engine: Engine) -> Iterator[Granting]:
    granting = Granting(engine)
    yield granting
    granting.engine.dispose()


@contextmanager
def held_up(engine: Engine, ident: int, grant: Callable[[int], bool]) -> Iterator[tuple[Connection, Background]]:
    """A grant that waits for the row, which this connection has locked; it goes on when the block ends."""
    with engine.begin() as connection:
        connection.execute(select(Consent.id).where(Consent.id == ident).with_for_update())
        waiting = Background(lambda: grant(ident))
        wait_until_blocked(engine)
        yield connection, waiting


def let_pass(engine: Engine, ident: int) -> None:
    """Wait until the row's expiry has passed on the database clock."""
    expires_at = stored(engine, ident).expires_at
    eventually(lambda: database_clock(engine) > expires_at, "the expiry")


@pytest.mark.parametrize("verb", GRANTS)
def test_a_grant_that_waited_for_a_row_that_was_only_locked_past_its_expiry_is_refused(
    engine: Engine, granting: Granting, verb: str
) -> None:
    ident = add_consent(engine, GRANTS[verb], expires_at=func.clock_timestamp() + SECOND)
    with held_up(engine, ident, getattr(granting, verb)) as (_, waiting):
        let_pass(engine, ident)
    assert waiting.result() is False
    assert status_of(engine, ident) is (Status.EXPIRED if "claim" in verb else GRANTS[verb])


@pytest.mark.parametrize("verb", GRANTS)
def test_a_grant_that_waited_for_a_row_that_was_updated_past_its_expiry_is_refused(
    engine: Engine, granting: Granting, verb: str
) -> None:
    ident = add_consent(engine, GRANTS[verb], expires_at=func.clock_timestamp() + SECOND)
    with held_up(engine, ident, getattr(granting, verb)) as (connection, waiting):
        connection.execute(update(Consent).where(Consent.id == ident).values(note="touched"))
        let_pass(engine, ident)
    assert waiting.result() is False


@pytest.mark.parametrize("verb", GRANTS)
def test_a_grant_that_waited_for_a_row_whose_expiry_was_moved_to_the_past_is_refused(
    engine: Engine, granting: Granting, verb: str
) -> None:
    ident = add_consent(engine, GRANTS[verb], expires_at=AHEAD)
    with held_up(engine, ident, getattr(granting, verb)) as (connection, waiting):
        connection.execute(update(Consent).where(Consent.id == ident).values(expires_at=PASSED))
    assert waiting.result() is False


@pytest.mark.parametrize("verb", GRANTS)
@pytest.mark.parametrize("expires_at", [None, AHEAD], ids=str)
def test_a_grant_that_waited_for_a_row_that_has_not_expired_is_none_the_worse_for_it(
    engine: Engine, granting: Granting, verb: str, expires_at: Any
) -> None:
    ident = add_consent(engine, GRANTS[verb], expires_at=AHEAD)
    with held_up(engine, ident, getattr(granting, verb)) as (connection, waiting):
        connection.execute(update(Consent).where(Consent.id == ident).values(expires_at=expires_at))
    assert waiting.result() is True


def test_an_approval_sees_that_an_expiry_was_moved_ahead_while_it_waited(engine: Engine, granting: Granting) -> None:
    ident = add_consent(engine, expires_at=PASSED)
    with held_up(engine, ident, granting.approve) as (connection, waiting):
        connection.execute(update(Consent).where(Consent.id == ident).values(expires_at=AHEAD))
    assert waiting.result() is True


def test_a_small_table_is_judged_under_the_lock_however_it_is_joined(engine: Engine, granting: Granting) -> None:
    """Other plans of the outer statement read the table before the CTE has locked its row."""
    for method in ("nestloop", "hashjoin", "mergejoin"):
        ident = add_consent(engine, expires_at=func.clock_timestamp() + SECOND)

        def approve(ident: int, method: str = method) -> bool:
            with granting.factory.begin() as session:
                for other in {"nestloop", "hashjoin", "mergejoin"} - {method}:
                    session.connection().exec_driver_sql(f"SET LOCAL enable_{other} = off")
                session.connection().exec_driver_sql("SET LOCAL enable_indexscan = off")
                return consent_statuses.transition(session, (Consent, ident), Status.APPROVED)

        with held_up(engine, ident, approve) as (_, waiting):
            let_pass(engine, ident)
        assert waiting.result() is False


@pytest.mark.parametrize("isolation", SNAPSHOTS)
def test_under_a_snapshot_a_locked_row_is_judged_after_the_wait_and_an_updated_one_conflicts(
    engine: Engine, isolation: str
) -> None:
    granting = Granting(engine, isolation)
    ident = add_consent(engine, expires_at=func.clock_timestamp() + SECOND)
    with held_up(engine, ident, granting.approve) as (_, waiting):
        let_pass(engine, ident)
    assert waiting.result() is False
    moved = add_consent(engine, expires_at=AHEAD)
    with held_up(engine, moved, granting.approve) as (connection, waiting):
        connection.execute(update(Consent).where(Consent.id == moved).values(expires_at=PASSED))
    with pytest.raises(TransactionConflict):
        waiting.result()
    assert status_of(engine, moved) is Status.PENDING
    claimed = add_consent(engine, Status.APPROVED, expires_at=AHEAD)
    with held_up(engine, claimed, granting.claim) as (connection, waiting):
        connection.execute(update(Consent).where(Consent.id == claimed).values(expires_at=PASSED))
    assert waiting.result() is False, "the claim's transaction is the library's own, to be made again"
    granting.engine.dispose()


# against the sweep


def test_a_locked_run_is_not_expired_and_nobody_waits_for_it(engine: Engine, granting: Granting) -> None:
    ident = add_consent(engine, expires_at=PASSED)
    with engine.begin() as connection:
        connection.execute(select(Consent.id).where(Consent.id == ident).with_for_update())
        assert Background(granting.consents.reap).result() == 0
        assert Background(lambda: granting.consents.heal(ident)).result() is False
    assert granting.consents.reap() == 1


def test_a_run_whose_expiry_was_moved_ahead_before_the_sweep_had_locked_it_is_left_alone(
    engine: Engine,
) -> None:
    """The sweep's snapshot is older than the change, which has committed by the time its row is looked at."""
    first, second = (add_consent(engine, expires_at=PASSED) for _ in range(2))
    with engine.begin() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION hold_up() RETURNS trigger LANGUAGE plpgsql AS"
            " 'BEGIN PERFORM pg_advisory_xact_lock(7302); RETURN NEW; END'"
        )
        connection.exec_driver_sql(
            "CREATE TRIGGER hold_up BEFORE UPDATE ON consent FOR EACH ROW WHEN (starts_with(NEW.status, 'too late'))"
            " EXECUTE FUNCTION hold_up()"
        )
    row_by_row = create_engine(engine.url, connect_args={"options": ROW_BY_ROW})
    sweeper: Runs[Consent] = Runs(sessionmaker(row_by_row), Consent, ConsentStep)
    with engine.connect() as gate, engine.begin() as connection:
        gate.exec_driver_sql("SELECT pg_advisory_xact_lock(7302)")
        connection.execute(update(Consent).where(Consent.id == second).values(expires_at=AHEAD))
        sweeping = Background(sweeper.reap)
        wait_until_blocked(engine)
        connection.commit()
        gate.rollback()
        assert sweeping.result() == 1
    row_by_row.dispose()
    assert (status_of(engine, first), status_of(engine, second)) == (Status.EXPIRED, Status.PENDING)


@pytest.mark.parametrize("verb", GRANTS)
def test_a_run_that_was_being_expired_is_not_granted(engine: Engine, granting: Granting, verb: str) -> None:
    ident = add_consent(engine, GRANTS[verb], expires_at=AHEAD)
    with (
        held_up(engine, ident, getattr(granting, verb)) as (connection, waiting),
        Session(connection, join_transaction_mode="rollback_only") as session,
    ):
        assert consent_statuses.transition(session, (Consent, ident), Status.EXPIRED)
    assert waiting.result() is False
    assert status_of(engine, ident) is Status.EXPIRED


def test_of_an_approval_and_a_sweep_at_the_same_time_one_wins(engine: Engine, granting: Granting) -> None:
    sweeping: Runs[Consent] = Runs(sessionmaker(engine), Consent, ConsentStep)
    won = {True: 0, False: 0}
    for _ in range(100):
        ident = add_consent(engine, expires_at=func.clock_timestamp() + 0.003 * SECOND)
        together = threading.Barrier(2)

        def approve(ident: int = ident, together: threading.Barrier = together) -> bool:
            together.wait(20)
            return granting.approve(ident)

        def sweep(ident: int = ident, together: threading.Barrier = together) -> int:
            together.wait(20)
            return sum(sweeping.reap() for _ in range(3))

        approving, swept = Background(approve), Background(sweep)
        approved = approving.result()
        swept.result()
        status = status_of(engine, ident)
        assert status in ({Status.APPROVED, Status.EXPIRED} if approved else {Status.PENDING, Status.EXPIRED})
        won[approved] += 1
        let_pass(engine, ident)
        sweeping.reap()
        assert status_of(engine, ident) is Status.EXPIRED
        assert not granting.approve(ident)


# all at once


class Crowd:
    """What goes on in a busy table: each method is one turn of one of its users."""

    def __init__(self, engine: Engine) -> None:
        self.factory = sessionmaker(engine)
        self.consents: Runs[Consent] = Runs(self.factory, Consent, ConsentStep)
        self.swept = self.approved = 0

    def sweep(self) -> None:
        self.swept += self.consents.reap(40)

    def claim_and_die(self) -> None:
        self.consents.claim_due(30)
        with self.factory.begin() as session:
            running = select(Consent.id).where(Consent.status == Status.EXECUTING).order_by(Consent.id)
            for ident in session.scalars(running.with_for_update(skip_locked=True)).all():
                lapse(session, Consent, ident)

    def approve(self) -> None:
        with self.factory() as session:
            pending = session.scalars(select(Consent.id).where(Consent.status == Status.PENDING).limit(20)).all()
        for ident in pending:
            with self.factory.begin() as session:
                soon = {"expires_at": func.clock_timestamp() + 0.02 * SECOND}
                target = Consent, ident
                self.approved += consent_statuses.transition(session, target, Status.APPROVED, values=soon)

    def ask_again(self) -> None:
        with self.factory.begin() as session:
            expired = select(Consent.id).where(Consent.status == Status.EXPIRED).with_for_update(skip_locked=True)
            again = {Consent.status: Status.PENDING, Consent.finished_at: None, Consent.expires_at: None}
            session.execute(update(Consent).where(Consent.id.in_(expired)).values(again))

    def edit(self) -> None:
        with self.factory() as session, suppress(FrozenPayload):
            for consent in session.scalars(select(Consent).order_by(Consent.id).limit(20)):
                consent.actions = [*consent.actions[-3:], self.swept]
            session.commit()


@pytest.mark.past_guards
@pytest.mark.parametrize("seconds", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_sweepers_claimers_approvers_and_editors_of_the_same_rows_never_deadlock(
    engine: Engine, seconds: float
) -> None:
    for _ in range(200):
        add_consent(engine)
    busy = create_engine(engine.url, pool_size=8)
    deadlocks: list[Any] = []
    event.listen(busy, "handle_error", lambda context: deadlocks.append(context.original_exception))
    crowd = Crowd(busy)
    until = time.monotonic() + seconds

    def keep(turn: Callable[[], None]) -> None:
        while time.monotonic() < until:
            turn()

    turns = (
        crowd.sweep,
        crowd.sweep,
        crowd.claim_and_die,
        crowd.claim_and_die,
        crowd.approve,
        crowd.ask_again,
        crowd.edit,
    )
    for worker in [Background(lambda turn=turn: keep(turn)) for turn in turns]:
        worker.join(seconds)
        worker.result()
    busy.dispose()
    assert deadlocks == []
    assert crowd.swept > 0
    assert crowd.approved > 0
