"""Every order of what may end a run, between two holders and an operator: it ends once, and by one writer.

The orders are enumerated, and each is carried out on a run of its own beside a model that says what must come of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, create_engine, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Cancelled, Ending, LostLease, Outcome, Run, RunNotFound, Runs, TimedOut, UsageError
from sqla_durable.testing import lapse, overrun
from tests.support_deadline import HOUR, Status, Timed, TimedBase, TimedStep, add

ENDS = {Status.DONE, Status.FAILED, Status.CANCELLED, Status.TIMED_OUT, Status.DEAD}
EVENTS = "ask", "observe", "land", "reclaim", "complete", "fail", "time out"
SHARES = 4
LOST, CANCELLED, TIMED_OUT, SPENT = "lost", "cancelled", "timed out", "spent"


@dataclass
class Model:
    """What a run must look like, and what its holders must have been told."""

    status: Status = Status.RUNNING
    asked: bool = False
    late: bool = False
    fence: int = 1
    writer: str | None = None

    def __post_init__(self) -> None:
        self.told: dict[str, str | None] = {"first": None}

    def event(self, name: str) -> str | bool | None:
        """Take one event in; return what whoever causes it must be told."""
        answer: str | bool | None = getattr(self, f"_{name.replace(' ', '_')}")()
        return answer

    def _ask(self) -> bool:
        if self.status is not Status.RUNNING:
            return False
        self.asked = True
        return True

    def _time_out(self) -> bool:
        self.late = self.status is Status.RUNNING
        return self.late

    def _reclaim(self) -> bool:
        if self.status is not Status.RUNNING:
            return False
        if self.asked:
            self._end(Status.CANCELLED, "reaper")
            return False
        self.fence, self.late = 2, False
        self.told["second"] = None
        return True

    def _observe(self) -> str | None:
        return self._written("first", None)

    def _complete(self) -> str | None:
        return self._written("first", Status.DONE)

    def _fail(self) -> str | None:
        return self._written("second", Status.FAILED) if "second" in self.told else None

    def _land(self) -> str | None:
        return self.conclude("first", done=False)

    def conclude(self, holder: str, *, done: bool) -> str | None:
        """The landing of what a holder has been told, or is told now; where that is nothing, as done if at all."""
        if self.told[holder] in {LOST, SPENT}:
            return self.told[holder]
        if not self._holds(holder):
            self.told[holder] = LOST
        elif self.asked or self.told[holder] == CANCELLED:
            self._end(Status.CANCELLED, holder)
        elif self.late or self.told[holder] == TIMED_OUT:
            self._end(Status.TIMED_OUT, holder)
        elif done:
            self._end(Status.DONE, holder)
        return self.told[holder]

    def _written(self, holder: str, to: Status | None) -> str | None:
        """A write of a holder's, which it knows better than to make where it has been told."""
        if self.told[holder] is None:
            if not self._holds(holder):
                self.told[holder] = LOST
            elif self.asked:
                self.told[holder] = CANCELLED
            elif self.late:
                self.told[holder] = TIMED_OUT
            elif to is not None:
                self._end(to, holder)
                return None
        return self.told[holder]

    def _holds(self, holder: str) -> bool:
        return self.status is Status.RUNNING and self.fence == (1 if holder == "first" else 2)

    def _end(self, to: Status, writer: str) -> None:
        self.status, self.writer = to, writer
        if writer in self.told:
            self.told[writer] = SPENT


class Parties:
    """Two holders and an operator of one run.

    :param engine: that all of them use.
    """

    def __init__(self, engine: Engine) -> None:
        self.factory = sessionmaker(engine)
        self.helpers = {name: Runs(self.factory, Timed, TimedStep, owner=name) for name in ("first", "second")}
        self.engine = engine

    def begin(self) -> None:
        self.ident = add(self.engine, HOUR)
        self.holders: dict[str, Run[Timed]] = {}
        assert self._claim("first")

    def event(self, name: str) -> str | bool | None:
        """Let one event happen; return what whoever causes it is told."""
        verb: Callable[[], str | bool | None] = getattr(self, f"_{name.replace(' ', '_')}")
        return verb()

    def _ask(self) -> bool:
        with self.factory.begin() as session:
            return self.helpers["first"].request_cancel(session, self.ident)

    def _time_out(self) -> bool:
        return self._move(overrun)

    def _reclaim(self) -> bool:
        return self._move(lapse) and self._claim("second")

    def _observe(self) -> str | None:
        return self._told("first", lambda run: run.step("work", work))

    def _complete(self) -> str | None:
        return self._told("first", lambda run: run.finish(note="first"))

    def _fail(self) -> str | None:
        return self._told("second", lambda run: run.fail(ValueError("second"))) if "second" in self.holders else None

    def _land(self) -> str | None:
        """What a heartbeat and, where that has a cancel request to tell of, the end of the handler do."""
        holder = self.holders["first"].holder

        def beat(connection: Connection) -> None:
            if not holder.ended:
                holder.beat(connection)
                holder.overtake(connection)

        holder.store.single(beat)
        if isinstance(holder.lost, Cancelled):
            with suppress(LostLease):
                holder.cancel()
        return self.told("first")

    def conclude(self, name: str) -> Outcome:
        """End the handler of a holder without an error."""
        return self.helpers[name]._verbs.conclude(self.holders[name].holder)

    def told(self, name: str) -> str | None:
        """What a holder knows."""
        holder = self.holders[name].holder
        if holder.ended:
            return SPENT
        kinds = {LostLease: LOST, Cancelled: CANCELLED, TimedOut: TIMED_OUT}
        return None if holder.lost is None else kinds[type(holder.lost)]  # type: ignore[index]

    def row(self) -> Any:
        with self.engine.connect() as connection:
            return connection.execute(
                text("SELECT *, t::text AS all FROM timed t WHERE id = :id"), {"id": self.ident}
            ).one()

    def _told(self, name: str, write: Callable[[Run[Timed]], object]) -> str | None:
        run = self.holders[name]
        try:
            write(run)
        except (LostLease, Cancelled, TimedOut):
            return self.told(name)
        except UsageError:
            assert run.holder.ended
            return SPENT
        return None

    def _claim(self, name: str) -> bool:
        run = self.helpers[name].claim(self.ident)
        if run is not None:
            self.holders[name] = run
        return run is not None

    def _move(self, move: Callable[..., None]) -> bool:
        try:
            with self.factory.begin() as session:
                move(session, Timed, self.ident)
        except RunNotFound:
            return False
        return True


def work(session: Session) -> None:
    """A body without an effect."""


@pytest.fixture(scope="module")
def parties(database_url: str) -> Iterator[Parties]:
    """All orders share one schema: each has a run of its own."""
    engine = create_engine(database_url)
    TimedBase.metadata.drop_all(engine)
    TimedBase.metadata.create_all(engine)
    yield Parties(engine)
    TimedBase.metadata.drop_all(engine)
    engine.dispose()


def orders() -> list[tuple[str, ...]]:
    """All orders of the events, but one of those that differ only after the end.

    Nor do those differ that have the second holder's failure at different places before there is a second holder.
    """
    found: dict[tuple[str, ...], tuple[str, ...]] = {}
    for order in permutations(EVENTS):
        model = Model()
        passed: list[str] = []
        for event in order:
            if event != "fail" or "second" in model.told:
                passed.append(event)
            model.event(event)
            if model.status in ENDS:
                break
        found.setdefault(tuple(passed), order)
    return list(found.values())


@pytest.mark.parametrize("share", range(SHARES))
def test_in_every_order_a_run_ends_once_and_all_that_it_ends_with_is_of_one_writer(
    parties: Parties, share: int
) -> None:
    mine = orders()[share::SHARES]
    assert len(mine) == 1260 / SHARES
    for order in mine:
        carry_out(parties, order)


def carry_out(parties: Parties, order: tuple[str, ...]) -> None:
    parties.begin()
    model = Model()
    ended: str | None = None
    for event in order:
        told = model.event(event)
        assert parties.event(event) == told, (order, event)
        row = parties.row()
        assert row.status == model.status, (order, event)
        if ended is not None:
            assert row.all == ended, (order, event)  # a terminal run never changes again
        ended = row.all if model.status in ENDS else None
    # Whoever holds the run still ends it now; and whoever does not may try.
    for name in parties.holders:
        told = model.conclude(name, done=True)
        outcome = parties.conclude(name)
        row = parties.row()
        assert row.status == model.status, (order, name)
        if told == SPENT:
            assert (outcome.ending, outcome.status) == (Ending.LANDED, model.status), (order, name)
        else:
            assert outcome.ending is Ending.LOST_LEASE, (order, name)
        if ended is not None:
            assert row.all == ended, (order, name)
        ended = row.all if model.status in ENDS else None
    assert_of_one_writer(parties.row(), model, order)


def assert_of_one_writer(row: Any, model: Model, order: tuple[str, ...]) -> None:
    """Everything that a run ends with is what its one writer has written, at one instant."""
    assert row.finished_at is not None, order
    assert (row.lease_owner, row.lease_expires_at) == (None, None), order
    assert row.fence == model.fence, order
    assert (row.cancel_requested_at is not None) == model.asked, order
    deadline = row.started_at + row.max_duration
    error = None if row.error is None else (row.error["type"], row.error["message"].partition(" ")[0])
    expected: dict[Status, Any] = {
        Status.DONE: None,
        Status.FAILED: ("ValueError", "second"),
        Status.CANCELLED: ("LeaseLapsed", "the") if model.writer == "reaper" else None,
        Status.TIMED_OUT: ("TimedOut", "ran"),
    }
    assert error == expected[model.status], order
    if row.error is not None:
        assert row.failures[-1]["type"] == row.error["type"], order
    if model.status in {Status.DONE, Status.FAILED}:
        assert row.finished_at <= deadline, order
        assert row.cancel_requested_at is None, order
    if model.status is Status.TIMED_OUT:
        assert row.finished_at >= deadline, order
    if row.note is not None:
        assert (row.note, model.status, model.writer) == ("first", Status.DONE, "first"), order
