"""A process killed in every window of an operation: issued at most once, in a state that can be seen and resolved."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, OperationUnknown, Outcome, Runs, StepOutcome
from tests.programs import operations
from tests.support import Plan, PlanStatus, PlanStep, approved_plan, column, eventually, let_lapse
from tests.support_processes import Program
from tests.support_service import KEY, Batch, Service, state

pytestmark = pytest.mark.slow

FORMS = ["sync", "async"]
IDS = {"number": 1, "queue": ["main"]}
RESULT = {"rows": 3}
START = ["start called", "start issued"]
POLL = ["poll called", "poll answered"]


@dataclass
class Ground:
    """The database, the service, and the program that is killed again and again."""

    engine: Engine
    factory: sessionmaker[Session]
    service: Service
    program: Program
    form: str

    def __post_init__(self) -> None:
        self.plans = Runs(self.factory, Plan, PlanStep)

    def new(self, *, ends: bool) -> UUID:
        """A fresh plan, and a service that knows nothing yet."""
        self.service.reset()
        if ends:
            self.service.finish(RESULT)
        return approved_plan(self.factory)

    def carry_out(self, ident: UUID, kill_at: int | None = None) -> tuple[list[str], dict[str, Any] | None]:
        """Carry the plan out in a process of its own, killed at one of its points; return the points it reached."""
        number, labels, outcome = self.program.ask([self.form, str(ident), kill_at])
        assert number == (None if kill_at is None else signal.SIGKILL)
        eventually(self._is_rid_of_the_dead, "the end of the dead process's backends")
        return labels, outcome

    def _is_rid_of_the_dead(self) -> bool:
        query = text("SELECT count(*) FROM pg_stat_activity WHERE application_name = :name")
        with self.engine.connect() as connection:
            return connection.scalar(query, {"name": operations.NAME}) == 0

    def next_process(self, ident: UUID) -> Outcome:
        """What the next process makes of the plan, once the dead one's lease has lapsed."""
        if column(self.engine, ident, "status") is PlanStatus.EXECUTING:
            let_lapse(self.factory, ident)
        return self.plans.execute(ident, self.service.carry_out, run_now=True)

    def resolve(self, ident: UUID) -> None:
        """Look at the service as an operator does, say what is there, and requeue the plan."""
        with self.factory.begin() as session:
            if self.service.issues:
                assert self.plans.attach_ids(session, ident, KEY, Batch(1), type_=Batch)
            else:
                assert self.plans.never_issued(session, ident, KEY)
        assert self.plans.requeue(ident)


@pytest.fixture(params=FORMS)
def ground(
    engine: Engine, session_factory: sessionmaker[Session], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Ground]:
    url = engine.url.render_as_string(hide_password=False)
    with Program("operations", url, str(tmp_path)) as program:
        yield Ground(engine, session_factory, Service(tmp_path), program, request.param)


def check_the_dead(ground: Ground, ident: UUID) -> str | None:
    """What a killed process left behind says how far the operation has come; return its outcome."""
    left = state(ground.engine, ident)
    issues = ground.service.issues
    assert issues <= 1
    match left:
        case None:
            assert issues == 0
        case ("issued", None, 1):
            pass
        case ("pending" | "succeeded", ids, _):
            assert (ids, issues) == (IDS, 1)
        case _:
            pytest.fail(f"{left} cannot be")
    return None if left is None else left[0]


def check_the_end(ground: Ground, ident: UUID, outcome: Outcome) -> None:
    assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.EXECUTED), outcome
    (receipt,) = outcome.receipts
    assert (receipt.outcome, receipt.ids, receipt.result) == (StepOutcome.SUCCEEDED, IDS, RESULT)
    assert ground.service.issues == 1


def test_a_process_killed_in_any_window_leaves_a_state_from_which_the_run_is_finished(ground: Ground) -> None:
    points, answer = ground.carry_out(ground.new(ends=True))
    assert answer is not None
    assert answer["status"] == PlanStatus.EXECUTED.value
    assert [label for label in points if label in {*START, *POLL}] == START + POLL
    seen = set()
    for point, label in enumerate(points):
        ident = ground.new(ends=True)
        labels, _ = ground.carry_out(ident, kill_at=point)
        assert labels == points[: point + 1]
        try:
            left = check_the_dead(ground, ident)
            seen.add((left, ground.service.issues))
            outcome = ground.next_process(ident)
            if left == "issued":
                assert isinstance(outcome.exception, OperationUnknown)
                assert (outcome.ending, outcome.status) == (Ending.LANDED, PlanStatus.FAILED)
                assert column(ground.engine, ident, "error")["type"].endswith("OperationUnknown")
                ground.resolve(ident)
                outcome = ground.next_process(ident)
            check_the_end(ground, ident, outcome)
        except AssertionError as error:
            error.add_note(f"killed at point {point} of {len(points)}, {label!r}")
            raise
    assert seen == {(None, 0), ("issued", 0), ("issued", 1), ("pending", 1), ("succeeded", 1)}


@pytest.mark.parametrize("ends", [False, True])
def test_a_process_killed_at_any_point_of_a_later_poll_loses_nothing(ground: Ground, ends: bool) -> None:
    def parked() -> UUID:
        ident = ground.new(ends=False)
        assert ground.next_process(ident).ending is Ending.SUSPENDED
        if ends:
            ground.service.finish(RESULT)
        return ident

    points, answer = ground.carry_out(parked())
    assert answer is not None
    assert answer["ending"] == (Ending.LANDED if ends else Ending.SUSPENDED).value
    assert [label for label in points if label in {*START, *POLL}] == POLL
    for point, label in enumerate(points):
        ident = parked()
        ground.carry_out(ident, kill_at=point)
        try:
            assert check_the_dead(ground, ident) in {"pending", "succeeded"}
            ground.service.finish(RESULT)
            check_the_end(ground, ident, ground.next_process(ident))
            assert column(ground.engine, ident, "error") is None
        except AssertionError as error:
            error.add_note(f"killed at point {point} of {len(points)}, {label!r}")
            raise


def test_processes_that_are_killed_in_every_poll_use_the_attempts_up_and_the_ids_stay(ground: Ground) -> None:
    ident = ground.new(ends=False)
    points, _ = ground.carry_out(ident)
    assert column(ground.engine, ident, "attempts") == 0
    polling, _ = ground.carry_out(ident)
    for attempt in 1, 2, 3:
        ground.carry_out(ident, kill_at=polling.index("poll called"))
        assert column(ground.engine, ident, "attempts") == attempt
        let_lapse(ground.factory, ident)
        assert ground.plans.heal(ident)
    assert column(ground.engine, ident, "status") is PlanStatus.DEAD
    assert state(ground.engine, ident) == ("pending", IDS, 1)
    assert "start issued" in points
    ground.service.finish(RESULT)
    assert ground.plans.requeue(ident)
    check_the_end(ground, ident, ground.next_process(ident))
