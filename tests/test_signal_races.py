"""Signals raced against the wait, the timeout, the cancel and the takeover: taken once or not at all, never lost."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, func, select, text, update
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import DurableError, LostLease, Run, Runs, SignalTimeout, TransactionConflict
from sqla_durable.testing import lapse
from tests.support import Background, PlanStatus
from tests.support_signals import (
    Line,
    Order,
    OrderSignal,
    OrderStep,
    add_line,
    blocked,
    lines,
    make_tables,
    new_order,
    of_order,
    orders_on,
    send,
    sent_later,
    taken,
)

SEED = 20240229
SECONDS = 6.0
SENDERS = 4


@pytest.fixture
def orders(engine: Engine, session_factory: sessionmaker[Session]) -> Runs[Order]:
    make_tables(engine)
    return orders_on(session_factory)


@pytest.fixture
def ident(orders: Runs[Order], session_factory: sessionmaker[Session]) -> Any:
    return new_order(session_factory)


# --- one race at a time


def test_a_takeover_while_the_parking_waits_for_a_sender_parks_nothing(
    orders: Runs[Order], ident: Any, engine: Engine
) -> None:
    first = orders.claim(ident)
    assert first is not None
    with sent_later(orders, ident, "paid", 7):
        waiting = blocked(engine, lambda: first.wait("paid", int))
        with orders.session_factory.begin() as session:
            lapse(session, Order, ident)
        second = orders.claim(ident)
        assert second is not None
    with pytest.raises(LostLease):
        waiting.result()
    assert taken(engine, ident) == [("paid", 7, None)]
    assert second.wait("paid", int) == 7


def test_a_takeover_waits_for_a_parking_that_has_the_lock_and_then_finds_a_run_that_waits(
    orders: Runs[Order], ident: Any, engine: Engine
) -> None:
    first = orders.claim(ident)
    assert first is not None
    waits = first.holder.steps.waits
    with orders.session_factory.begin() as session:
        lapse(session, Order, ident)
    with orders.session_factory.begin() as session:
        connection = session.connection()
        parameters = waits.store.parameters(
            first.lease, step="paid", name="paid", effect="signal", timeout=None, input_fingerprint=None
        )
        assert waits._locks.first(connection, parameters) is not None
        claiming = blocked(engine, lambda: orders.claim(ident, run_now=True))
        connection.execute(waits._parks, {**parameters, **waits._key(first.lease)}).one()
    second = claiming.result()
    assert second is not None
    send(orders, ident, "paid", 7)
    assert second.wait("paid", int) == 7


@pytest.mark.past_guards
def test_a_signal_that_finds_a_run_claimed_since_it_looked_harms_nothing(
    orders: Runs[Order], ident: Any, engine: Engine
) -> None:
    """The claim has the lock; the signal's look is from before it, and its wake-up waits for it."""
    with pytest.raises(DurableError):
        held(orders, ident).wait("paid", int)
    with engine.begin() as connection:
        claim = text('UPDATE "order" SET note = note WHERE id = :id')
        connection.execute(claim, {"id": ident})
        sending = blocked(engine, lambda: send(orders, ident, "paid", 7))
        connection.execute(
            text(
                "UPDATE \"order\" SET status = 'executing', fence = fence + 1, lease_owner = 'x', waits_for = NULL,"
                " lease_expires_at = now() + interval '1 hour', available_at = now() WHERE id = :id"
            ),
            {"id": ident},
        )
    sending.result()
    row = of_order(engine, ident)
    assert (row.status, row.fence) == (PlanStatus.EXECUTING, 2)
    assert taken(engine, ident) == [("paid", 7, None)]


def held(orders: Runs[Order], ident: UUID) -> Run[Order]:
    run = orders.claim(ident)
    assert run is not None
    return run


def test_a_sender_and_a_step_that_wait_for_each_other_get_the_typed_conflict_at_worst(
    orders: Runs[Order], ident: Any, engine: Engine
) -> None:
    """The sender has a row that the step wants, and then wants the run's row, which the step has."""
    with orders.session_factory.begin() as session:
        session.add(Line(id=1, label="fought over"))
    run = held(orders, ident)

    def body(session: Session) -> None:
        session.execute(update(Line).values(label="of the step"))

    with orders.session_factory() as session:
        session.execute(update(Line).values(label="of the sender"))
        stepping = blocked(engine, lambda: run.step("step", body))
        assert orders.signal(session, ident, "paid", 7), "a signal waits for no step"
        assert orders.signal(session, ident, "paid", 8)
        conflict: TransactionConflict | None = None
        try:
            session.execute(update(Order).where(Order.id == ident).values(note="x"))
        except Exception as error:  # noqa: BLE001 - it is looked at below
            conflict = TransactionConflict(str(error))
            session.rollback()
        else:
            session.commit()
    stepping.result()
    if conflict is None:
        assert lines(engine) == ["of the step"]
    else:
        assert "deadlock" in str(conflict)
    send(orders, ident, "paid", 9)
    assert run.wait("paid", int) in {7, 9}


def test_two_senders_that_signal_two_waiting_runs_crosswise_get_the_typed_conflict(
    orders: Runs[Order], engine: Engine
) -> None:
    one, two = new_order(orders.session_factory), new_order(orders.session_factory)
    for ident in (one, two):
        orders.execute(ident, lambda run: run.wait("paid", int))

    def signal_second(session: Session, ident: UUID) -> str:
        try:
            orders.signal(session, ident, "paid", 2)
        except TransactionConflict:
            session.rollback()
            return "conflict"
        session.commit()
        return "sent"

    with orders.session_factory() as first, orders.session_factory() as second:
        orders.signal(first, one, "paid", 1)
        orders.signal(second, two, "paid", 1)
        crossing = blocked(engine, lambda: signal_second(first, two))
        answers = {signal_second(second, one), crossing.result()}
    assert answers == {"conflict", "sent"}
    assert sorted(len(taken(engine, ident)) for ident in (one, two)) == [1, 1]
    for ident in (one, two):
        assert orders.execute(ident, lambda run: run.wait("paid", int)).status is PlanStatus.EXECUTED


@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_a_sender_whose_snapshot_is_older_than_the_parking_is_told_to_retry(
    orders: Runs[Order], ident: Any, engine: Engine, level: str
) -> None:
    strict = sessionmaker(engine.execution_options(isolation_level=level))
    run = held(orders, ident)
    waits = run.holder.steps.waits
    with orders.session_factory.begin() as session:
        connection = session.connection()
        parameters = waits.store.parameters(
            run.lease, step="paid", name="paid", effect="signal", timeout=None, input_fingerprint=None
        )
        waits._locks.first(connection, parameters)

        def sending() -> None:
            with strict.begin() as sender:
                orders.signal(sender, ident, "paid", 7)

        late = blocked(engine, sending)
        connection.execute(waits._parks, {**parameters, **waits._key(run.lease)}).one()
    with pytest.raises(TransactionConflict):
        late.result()
    sending()
    assert of_order(engine, ident).due


# --- all of them at once


class Stress:
    """Senders, cancelling operators, takeovers and workers, all at random, on a few runs."""

    def __init__(self, engine: Engine, seed: int, runs: int = 6) -> None:
        self.engine = create_engine(engine.url, pool_size=30)
        self.orders = orders_on(sessionmaker(self.engine))
        self.idents = [new_order(self.orders.session_factory) for _ in range(runs)]
        self.seed = seed
        self.over = threading.Event()
        self.sent: list[tuple[UUID, str, int]] = []
        self.refused: list[Any] = []

    def run(self) -> None:
        chance = random.Random(self.seed)
        workers = [Background(partial(self.worker, random.Random(f"{self.seed} w {n}"))) for n in range(2)]
        senders = [Background(partial(self.sender, n, random.Random(f"{self.seed} s {n}"))) for n in range(SENDERS)]
        reaper = Background(lambda: self.takeovers(chance))
        time.sleep(SECONDS)
        self.over.set()
        for background in [*senders, reaper, *workers]:
            background.result()

    def sender(self, number: int, chance: random.Random) -> None:
        count = 0
        while not self.over.is_set():
            count += 1
            ident, name = chance.choice(self.idents), chance.choice(["a", "b"])
            payload = number * 1_000_000 + count
            with self.orders.session_factory() as session:
                sent = self.orders.signal(session, ident, name, payload)
                if chance.random() < 0.3:
                    time.sleep(chance.random() / 50)
                if chance.random() < 0.2:
                    session.rollback()
                    continue
                session.commit()
            (self.sent if sent else self.refused).append((ident, name, payload))
            time.sleep(chance.random() / 100)

    def takeovers(self, chance: random.Random) -> None:
        while not self.over.is_set():
            with suppress(DurableError), self.orders.session_factory.begin() as session:
                lapse(session, Order, chance.choice(self.idents))
            time.sleep(chance.random() / 20)

    def worker(self, chance: random.Random) -> None:
        while not self.over.is_set():
            for run in self.orders.claim_due(2):
                self.orders.execute(run, lambda run: self.handler(run, chance))
            time.sleep(chance.random() / 100)

    def handler(self, run: Run[Order], chance: random.Random) -> None:
        """Take turns at two names, for ever; each signal leaves one line."""
        for number in range(1_000_000):
            name = "ab"[number % 2]
            try:
                if number % 3 == 0:
                    run.answer(name, self.note, key=number, timeout=timedelta(seconds=0.05))
                else:
                    payload = run.wait(name, int, key=number, timeout=timedelta(seconds=chance.choice([0.05, 3600])))
                    run.step(f"line {number}", add_line, str(payload))
            except SignalTimeout:
                continue

    @staticmethod
    def note(session: Session, payload: int) -> int:
        add_line(session, str(payload))
        return payload


@pytest.mark.slow
def test_every_signal_is_taken_once_and_in_order_or_is_still_there(engine: Engine) -> None:
    make_tables(engine)
    stress = Stress(engine, SEED)
    stress.run()
    finish(stress)
    with engine.connect() as connection:
        found = connection.execute(
            select(OrderSignal.order_id, OrderSignal.name, OrderSignal.payload, OrderSignal.step).order_by(
                OrderSignal.id
            )  # type: ignore[attr-defined]
        ).all()
    assert len(stress.sent) > 200
    assert not stress.refused
    assert Counter((row[0], row[1], row[2]) for row in found) == Counter(stress.sent)
    assert not [row for row in found if row[3] is None], "none of them is left untaken"
    assert Counter(lines(engine)) == Counter(str(payload) for _, _, payload in stress.sent)
    assert len({(row[0], row[3]) for row in found}) == len(found), "each is taken by a step of its own"
    last: dict[Any, int] = {}
    for ident, name, payload, step in found:
        queue = ident, name, payload // 1_000_000
        assert int(step) > last.get(queue, -1), "those of one sender are taken in the order they were sent"
        last[queue] = int(step)
    stress.engine.dispose()


class Once(Stress):
    """Each run is sent one signal by each sender, so that nothing else would wake it."""

    def run(self) -> None:
        workers = [Background(self.serve) for _ in range(3)]
        for background in [Background(partial(self.send_once, number)) for number in range(SENDERS)]:
            background.result()
        self.over.set()
        for background in workers:
            background.result()
        self.drain()

    def send_once(self, number: int) -> None:
        chance = random.Random(f"{self.seed} {number}")
        for ident in chance.sample(self.idents, len(self.idents)):
            with self.orders.session_factory.begin() as session:
                assert self.orders.signal(session, ident, f"from {number}", number)
                time.sleep(chance.random() / 50)

    def serve(self) -> None:
        while not self.over.is_set():
            for run in self.orders.claim_due(2):
                self.orders.execute(run, self.take_each)

    def drain(self) -> None:
        while due := self.orders.claim_due(10):
            for run in due:
                self.orders.execute(run, self.take_each)

    @staticmethod
    def take_each(run: Run[Order]) -> None:
        for number in range(SENDERS):
            assert run.wait(f"from {number}", int) == number
            run.step(number, add_line, str(run.row.id))


@pytest.mark.slow
def test_no_run_is_left_waiting_for_a_signal_that_was_sent_once(engine: Engine) -> None:
    make_tables(engine)
    stress = Once(engine, SEED, runs=100)
    stress.run()
    with engine.connect() as connection:
        assert connection.execute(forgotten()).all() == [], "a run waits for a signal that is there"
    assert stress.orders.counts()[PlanStatus.EXECUTED] == len(stress.idents)
    assert Counter(lines(engine)) == Counter({str(ident): SENDERS for ident in stress.idents})
    stress.engine.dispose()


def finish(stress: Stress) -> None:
    """Go on without disturbance until every signal has been taken."""
    for ident in stress.idents:
        with suppress(DurableError), stress.orders.session_factory.begin() as session:
            lapse(session, Order, ident)
    untaken = select(func.count()).select_from(OrderSignal).where(OrderSignal.step.is_(None))
    for _ in range(10_000):
        while due := stress.orders.claim_due(10):
            for run in due:
                stress.orders.execute(run, lambda run: stress.handler(run, random.Random(1)))
        with stress.engine.begin() as connection:
            assert connection.execute(forgotten()).all() == [], "a run waits for a signal that is there"
            if connection.scalar(untaken) == 0:
                return
            # The other name's turn.
            connection.execute(
                update(OrderStep).where(OrderStep.outcome == "pending").values(ids={"until": "1999-01-01"})
            )
            connection.execute(update(Order).values(available_at=func.now()))
    raise AssertionError("signals are left")


def forgotten() -> Any:
    """Runs that are not due, though the signal that they wait for has been sent."""
    there = select(OrderSignal).where(
        OrderSignal.step.is_(None),
        OrderSignal.name == Order.waits_for,
        OrderSignal.order_id == Order.id,  # type: ignore[attr-defined]
    )
    return select(Order.id, Order.waits_for).where(Order.available_at > func.clock_timestamp(), there.exists())
