"""A process killed at every statement and commit of a wait, an answer and a sleep; and everything started anew."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, delete, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, Runs, StepOutcome, embedded
from sqla_durable.testing import lapse, let_pass
from tests import support_embedded
from tests.programs import crash_points
from tests.support import PlanStatus, eventually
from tests.support_processes import Program
from tests.support_signals import (
    Line,
    Order,
    OrderSignal,
    OrderStep,
    lines,
    make_tables,
    new_order,
    of_order,
    orders_on,
    send,
    taken,
)
from tests.support_waits import EXPECTED_LINES, executed, is_over

base = support_embedded.base

# What an operator and the clock do before each of the executions that an undisturbed order takes.
ROUNDS = ["nothing", "paid", "discount", "morning"]


class Ground:
    """The database, and the program that is killed again and again."""

    def __init__(self, engine: Engine, factory: sessionmaker[Session], program: Program) -> None:
        self.engine = engine
        self.orders = orders_on(factory)
        self.program = program

    def new(self) -> UUID:
        with self.engine.begin() as connection:
            connection.execute(delete(Line))
        return new_order(self.orders.session_factory)

    def happens(self, ident: UUID, what: str) -> None:
        """What lets the order go on from where it waits."""
        if what == "morning":
            with self.orders.session_factory.begin() as session:
                let_pass(session, OrderStep, ident, "nap")
        elif what != "nothing":
            send(self.orders, ident, what, {"paid": 7, "discount": 25}[what])

    def until(self, ident: UUID, round_: int) -> None:
        """Carry the order out, here, as far as this execution, which is for the program."""
        for what in ROUNDS[:round_]:
            self.happens(ident, what)
            assert executed(self.orders, ident).ending is Ending.SUSPENDED
        self.happens(ident, ROUNDS[round_])

    def killed(self, form: str, ident: UUID, point: int | None) -> tuple[list[str], str | None]:
        number, labels, ending = self.program.ask([form, str(ident), point])
        assert number == (None if point is None else signal.SIGKILL)
        eventually(self._is_rid_of_the_dead, "the end of the dead process's backends")
        return labels, ending

    def _is_rid_of_the_dead(self) -> bool:
        query = text("SELECT count(*) FROM pg_stat_activity WHERE application_name = :name")
        with self.engine.connect() as connection:
            return connection.scalar(query, {"name": crash_points.NAME}) == 0

    def finish(self, ident: UUID, round_: int) -> None:
        """Let the dead holder's lease lapse, and carry the order out to its end."""
        if of_order(self.engine, ident).status is PlanStatus.EXECUTING:
            with self.orders.session_factory.begin() as session:
                lapse(session, Order, ident)
        if is_over(executed(self.orders, ident)):
            return
        for what in ROUNDS[round_ + 1 :]:
            self.happens(ident, what)
            outcome = executed(self.orders, ident)
        assert is_over(outcome)


@pytest.fixture
def ground(engine: Engine, session_factory: sessionmaker[Session]) -> Iterator[Ground]:
    make_tables(engine)
    with Program("waits", engine.url.render_as_string(hide_password=False)) as program:
        yield Ground(engine, session_factory, program)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["sync", "async"])
@pytest.mark.parametrize("round_", range(len(ROUNDS)), ids=ROUNDS)
def test_an_order_that_is_killed_at_any_point_takes_each_signal_once(ground: Ground, form: str, round_: int) -> None:
    ident = ground.new()
    ground.until(ident, round_)
    points, ending = ground.killed(form, ident, None)
    assert ending == (Ending.LANDED if ROUNDS[round_] == "morning" else Ending.SUSPENDED).value
    for point, label in enumerate(points):
        ident = ground.new()
        ground.until(ident, round_)
        labels, _ = ground.killed(form, ident, point)
        assert labels == points[: point + 1]
        try:
            check_the_dead(ground, ident)
            ground.finish(ident, round_)
            check_the_end(ground, ident)
        except AssertionError as error:
            error.add_note(f"killed at point {point} of {len(points)}, {label!r}")
            raise


@pytest.mark.slow
@pytest.mark.parametrize("form", ["sync", "async"])
def test_whoever_is_killed_at_a_payload_of_another_type_has_not_consumed_it(ground: Ground, form: str) -> None:
    """The one that is right, sent in place of it, is taken as if it had been the first."""

    def wrongly_paid() -> UUID:
        ident = ground.new()
        ground.until(ident, ROUNDS.index("nothing"))
        send(ground.orders, ident, "paid", "seven")
        return ident

    points, ending = ground.killed(form, wrongly_paid(), None)
    assert ending == Ending.LANDED.value
    for point, label in enumerate(points):
        ident = wrongly_paid()
        ground.killed(form, ident, point)
        said = f"killed at point {point} of {len(points)}, {label!r}"
        assert taken(ground.engine, ident) == [("paid", "seven", None)], said
        assert ground.orders.receipts(ident) == (), said
        with ground.engine.begin() as connection:
            connection.execute(delete(OrderSignal).where(OrderSignal.order_id == ident))  # type: ignore[attr-defined]
        ground.orders.requeue(ident)
        send(ground.orders, ident, "paid", 7)
        ground.finish(ident, ROUNDS.index("paid"))
        check_the_end(ground, ident)


def check_the_dead(ground: Ground, ident: UUID) -> None:
    """A signal is marked as taken if, and only if, the receipt of the step that took it stands."""
    done = {receipt.step for receipt in ground.orders.receipts(ident) if receipt.outcome is StepOutcome.SUCCEEDED}
    for name, _, step in taken(ground.engine, ident):
        assert (step is not None) == (name in done)
    row = of_order(ground.engine, ident)
    if row.waits_for is not None:
        assert (row.status, row.attempts, row.lease_owner) == (PlanStatus.APPROVED, 0, None)


def check_the_end(ground: Ground, ident: UUID) -> None:
    assert lines(ground.engine) == EXPECTED_LINES
    assert taken(ground.engine, ident) == [("paid", 7, "paid"), ("discount", 25, "discount")]
    row = of_order(ground.engine, ident)
    assert (row.status, row.waits_for, row.lease_owner) == (PlanStatus.EXECUTED, None, None)
    assert [receipt.outcome for receipt in ground.orders.receipts(ident)] == [StepOutcome.SUCCEEDED] * 5


@pytest.mark.slow
def test_waits_signals_and_sleeps_survive_a_restart_of_the_database_and_the_workers(
    request: pytest.FixtureRequest, base: Path
) -> None:
    """Each execution is one of a process of its own, on a server that was started for it."""
    given = request.config.getoption("--postgres")
    bin_dir = None if given is None else Path(given)
    folder = base / "kept"
    ident: Any = None
    for what in ROUNDS:
        with embedded.start(folder, bin_dir=bin_dir) as server:
            engine = create_engine(server.url)
            make_tables(engine)
            orders = orders_on(sessionmaker(engine))
            if ident is None:
                ident = new_order(orders.session_factory)
            if what == "morning":
                with orders.session_factory.begin() as session:
                    let_pass(session, OrderStep, ident, "nap")
            elif what != "nothing":
                send(orders, ident, what, {"paid": 7, "discount": 25}[what])
            engine.dispose()
        with embedded.start(folder, bin_dir=bin_dir) as server:
            engine = create_engine(server.url)
            assert bool(orders_on(sessionmaker(engine)).claim_due(1)) or what == "nothing"
            lapse_and_release(engine, ident)
            with Program("waits", server.url) as program:
                _, _, ending = program.ask(["sync", str(ident), None])
            if what == "morning":
                assert ending == Ending.LANDED.value
                assert lines(engine) == EXPECTED_LINES
                assert taken(engine, ident) == [("paid", 7, "paid"), ("discount", 25, "discount")]
            else:
                assert ending == Ending.SUSPENDED.value
            engine.dispose()


def lapse_and_release(engine: Engine, ident: UUID) -> None:
    orders: Runs[Order] = orders_on(sessionmaker(engine))
    with orders.session_factory.begin() as session:
        lapse(session, Order, ident)
