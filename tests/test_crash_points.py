"""A process killed before and after every statement and commit of a run: the next one finishes it, exactly once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, delete, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, Receipt, Runs
from tests.programs import crash_points
from tests.support import Entry, Plan, PlanStatus, PlanStep, approved_plan, entries, eventually, let_lapse
from tests.support_points import DATABASE_STEPS, EFFECTS, STEPS, carry_out, commits, told
from tests.support_processes import Program

pytestmark = pytest.mark.slow

FORMS = ["sync", "async"]


@dataclass
class Ground:
    """The database, the external ledger, and the program that is killed again and again."""

    engine: Engine
    factory: sessionmaker[Session]
    ledger: Path
    program: Program

    def __post_init__(self) -> None:
        self.plans = Runs(self.factory, Plan, PlanStep)

    def new(self) -> UUID:
        """A fresh plan, with no effect in sight."""
        with self.engine.begin() as connection:
            connection.execute(delete(Entry))
        self.ledger.write_text("")
        return approved_plan(self.factory)

    def carry_out(self, form: str, ident: UUID, kill_at: int | None = None) -> tuple[list[str], dict[str, Any] | None]:
        """Carry the plan out in a process of its own, killed at one of its points; return the points it reached."""
        number, labels, outcome = self.program.ask([form, str(ident), kill_at])
        assert number == (None if kill_at is None else signal.SIGKILL)
        eventually(self._is_rid_of_the_dead, "the end of the dead process's backends")
        return labels, outcome

    def _is_rid_of_the_dead(self) -> bool:
        query = text("SELECT count(*) FROM pg_stat_activity WHERE application_name = :name")
        with self.engine.connect() as connection:
            return connection.scalar(query, {"name": crash_points.NAME}) == 0

    def plan(self, ident: UUID) -> Plan:
        with self.factory() as session:
            return session.get_one(Plan, ident)

    def charges(self) -> int:
        return self.ledger.read_text().count("charged")

    def payments(self) -> list[str]:
        return [line for line in self.ledger.read_text().splitlines() if line.startswith("paid ")]

    def finish(self, ident: UUID) -> dict[str, Any]:
        """Let the dead holder's lease lapse, and carry the plan out here."""
        if self.plan(ident).status is PlanStatus.EXECUTING:
            let_lapse(self.factory, ident)
        return told(self.plans.execute(ident, partial(carry_out, ledger=self.ledger)))


@pytest.fixture
def ground(engine: Engine, session_factory: sessionmaker[Session], tmp_path: Path) -> Iterator[Ground]:
    ledger = tmp_path / "ledger"
    url = engine.url.render_as_string(hide_password=False)
    with Program("crash_points", url, str(ledger)) as program:
        yield Ground(engine, session_factory, ledger, program)


def effects_of(receipts: tuple[Receipt, ...]) -> list[str]:
    return [label for receipt in receipts for label in DATABASE_STEPS.get(receipt.step, [])]


def check_the_dead(ground: Ground, ident: UUID, labels: list[str]) -> None:
    """What a process left behind that was killed at the last of these points is what had been committed by then."""
    stand = commits(labels)
    plan, receipts = ground.plan(ident), ground.plans.receipts(ident)
    claimed, landed = stand > 0, stand == len(STEPS) + 2
    expected = PlanStatus.EXECUTED if landed else PlanStatus.EXECUTING if claimed else PlanStatus.APPROVED
    assert plan.status is expected
    assert (plan.fence, plan.attempts) == (claimed, claimed)
    assert [receipt.step for receipt in receipts] == STEPS[: max(0, stand - 1)]
    assert entries(ground.engine) == effects_of(receipts)


def check_the_end(ground: Ground, ident: UUID, answer: dict[str, Any], expected: dict[str, Any]) -> None:
    """The run ended as an undisturbed one does, and every effect in the database exists once."""
    assert answer == expected
    assert entries(ground.engine) == EFFECTS
    assert ground.plan(ident).note == "x"
    assert ground.plan(ident).status is PlanStatus.EXECUTED
    assert ground.plan(ident).lease_expires_at is None
    assert len(set(ground.payments())) == 1, "however often it was paid, it was by one and the same key"


def undisturbed(ground: Ground, form: str) -> tuple[list[str], dict[str, Any]]:
    """The points of a run that nobody kills, and its answer."""
    ident = ground.new()
    labels, answer = ground.carry_out(form, ident)
    assert answer is not None
    check_the_end(ground, ident, answer, answer)
    assert answer["ending"] == Ending.LANDED.value
    assert [receipt[0] for receipt in answer["receipts"]] == STEPS
    assert commits(labels) == len(STEPS) + 2, "one commit for the claim, for each step, and for the landing"
    assert ground.charges() == 1
    return labels, answer


@pytest.mark.parametrize("form", FORMS)
def test_a_run_killed_at_any_point_is_finished_by_the_next_process(ground: Ground, form: str) -> None:
    points, expected = undisturbed(ground, form)
    for point, label in enumerate(points):
        ident = ground.new()
        labels, _ = ground.carry_out(form, ident, kill_at=point)
        assert labels == points[: point + 1]
        try:
            check_the_dead(ground, ident, labels)
            dead, charged = ground.plan(ident), ground.charges()
            done = {receipt.step for receipt in ground.plans.receipts(ident)}
            recorded = "charge" in done
            paid = len(ground.payments()) + ("pay" not in done)
            check_the_end(ground, ident, ground.finish(ident), expected)
            ended = ground.plan(ident)
            started = 0 if dead.status is PlanStatus.EXECUTED else 1
            assert (ended.fence, ended.attempts) == (dead.fence + started, dead.attempts + started)
            assert [failure["type"] for failure in ended.failures] == ["LeaseLapsed"] * (started * dead.attempts)
            assert ground.charges() == charged + (not recorded), "an external effect happens again if unrecorded"
            assert ground.charges() in {1, 2}
            assert len(ground.payments()) == paid
        except AssertionError as error:
            error.add_note(f"killed at point {point} of {len(points)}, {label!r}")
            raise


def test_a_run_killed_in_two_processes_in_a_row_is_finished_by_the_third(ground: Ground) -> None:
    points, expected = undisturbed(ground, "sync")
    unfinished = [point for point in range(len(points)) if commits(points[: point + 1]) < len(STEPS) + 2]
    for row, first in enumerate(unfinished[::13]):
        for second in range(3 * row, len(points), 17):
            check_two_kills(ground, first, second, expected)


def check_two_kills(ground: Ground, first: int, second: int, expected: dict[str, Any]) -> None:
    ident = ground.new()
    ground.carry_out("sync", ident, kill_at=first)
    if ground.plan(ident).status is PlanStatus.EXECUTING:
        let_lapse(ground.factory, ident)
    # The second process replays what has receipts, so it reaches fewer points, and may get to its end.
    number, _, answer = ground.program.ask(["sync", str(ident), second])
    assert number == signal.SIGKILL or answer == expected
    eventually(ground._is_rid_of_the_dead, "the end of the dead process's backends")
    dead = ground.plan(ident)
    assert entries(ground.engine) == effects_of(ground.plans.receipts(ident))
    check_the_end(ground, ident, ground.finish(ident), expected)
    ended = ground.plan(ident)
    started = 0 if dead.status is PlanStatus.EXECUTED else 1
    assert (ended.fence, ended.attempts) == (dead.fence + started, dead.attempts + started)
    assert ended.attempts == ended.fence <= 3
    assert 1 <= ground.charges() <= 3


def test_the_receipts_of_a_finished_run_say_which_process_did_which_step(ground: Ground) -> None:
    points, _ = undisturbed(ground, "sync")
    three_steps = next(point for point in range(len(points)) if commits(points[: point + 1]) == 4)
    ident = ground.new()
    ground.carry_out("sync", ident, kill_at=three_steps)
    ground.finish(ident)
    receipts = ground.plans.receipts(ident)
    assert [(receipt.step, receipt.fence) for receipt in receipts] == list(
        zip(STEPS, [1, 1, 1, 2, 2, 2, 2], strict=True)
    )
