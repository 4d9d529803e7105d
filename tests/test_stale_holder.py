"""A holder that lost its run writes nothing, whichever verb it tries and however the run was lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, delete, event, func, select, update
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Ending, LostLease, Runs
from tests.support import (
    Background,
    Entry,
    Plan,
    PlanStatus,
    PlanStep,
    approved_plan,
    column,
    entries,
    let_lapse,
    plan_statuses,
    wait_until_blocked,
)
from tests.support_forms import FORMS, Form

Verb = Callable[[Form, Any], object]
Loss = Callable[["Runs[Plan]", "sessionmaker[Session]", Any], None]


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Form]:
    form = FORMS[request.param](engine.url.render_as_string(hide_password=False), Plan, PlanStep)
    yield form
    form.close()


@pytest.fixture
def others(session_factory: sessionmaker[Session]) -> Runs[Plan]:
    """What everybody else holds runs with."""
    return Runs(session_factory, Plan, PlanStep, owner="another")


# the ways to lose a run


def claimed_by_another(others: Runs[Plan], factory: sessionmaker[Session], run: Any) -> None:
    let_lapse(factory, run.lease.identity)
    assert others.claim(run.lease.identity) is not None


def landed_by_another(others: Runs[Plan], factory: sessionmaker[Session], run: Any) -> None:
    let_lapse(factory, run.lease.identity)
    outcome = others.execute(run.lease.identity, lambda run: None)
    assert outcome.status is PlanStatus.EXECUTED


def released_by_another(others: Runs[Plan], factory: sessionmaker[Session], run: Any) -> None:
    let_lapse(factory, run.lease.identity)
    other = others.claim(run.lease.identity)
    assert other is not None
    other.release()


def reaped_to_terminal(others: Runs[Plan], factory: sessionmaker[Session], run: Any) -> None:
    with factory.begin() as session:
        session.execute(update(Plan).values(attempts=Plan.__lifecycle__.retry.max_attempts))
    let_lapse(factory, run.lease.identity)
    assert others.reap() == 1
    assert _status(factory, run) is PlanStatus.DEAD


def reaped_to_cancelled(others: Runs[Plan], factory: sessionmaker[Session], run: Any) -> None:
    with factory.begin() as session:
        assert others.request_cancel(session, run.lease.identity)
    let_lapse(factory, run.lease.identity)
    assert others.heal(run.lease.identity)
    assert _status(factory, run) is PlanStatus.CANCELLED


def reaped_then_cancelled(others: Runs[Plan], factory: sessionmaker[Session], run: Any) -> None:
    let_lapse(factory, run.lease.identity)
    assert others.heal(run.lease.identity)
    with factory.begin() as session:
        assert others.request_cancel(session, run.lease.identity)
    assert _status(factory, run) is PlanStatus.CANCELLED


def requeued(others: Runs[Plan], factory: sessionmaker[Session], run: Any) -> None:
    reaped_to_terminal(others, factory, run)
    assert others.requeue(run.lease.identity)
    assert _status(factory, run) is PlanStatus.APPROVED


def requeued_and_claimed(others: Runs[Plan], factory: sessionmaker[Session], run: Any) -> None:
    requeued(others, factory, run)
    assert others.claim(run.lease.identity) is not None


def released_by_a_copy(others: Runs[Plan], factory: sessionmaker[Session], run: Any) -> None:
    others.hold(run.lease).release()


def released_by_a_copy_and_claimed(others: Runs[Plan], factory: sessionmaker[Session], run: Any) -> None:
    others.hold(run.lease).release()
    assert others.claim(run.lease.identity) is not None


def landed_by_a_copy(others: Runs[Plan], factory: sessionmaker[Session], run: Any) -> None:
    others.hold(run.lease).finish()


def deleted(others: Runs[Plan], factory: sessionmaker[Session], run: Any) -> None:
    with factory.begin() as session:
        session.execute(delete(Plan))


def _taken_away(session: Session, run: Any, to: PlanStatus) -> bool:
    return plan_statuses.transition(session, (Plan, run.lease.identity), to, from_=PlanStatus.EXECUTING)


def moved_to_terminal(others: Runs[Plan], factory: sessionmaker[Session], run: Any) -> None:
    with factory.begin() as session:
        assert _taken_away(session, run, PlanStatus.FAILED)


def moved_to_ready(others: Runs[Plan], factory: sessionmaker[Session], run: Any) -> None:
    with factory.begin() as session:
        assert _taken_away(session, run, PlanStatus.APPROVED)


LOSSES: list[Loss] = [
    claimed_by_another,
    landed_by_another,
    released_by_another,
    reaped_to_terminal,
    reaped_to_cancelled,
    reaped_then_cancelled,
    requeued,
    requeued_and_claimed,
    released_by_a_copy,
    released_by_a_copy_and_claimed,
    landed_by_a_copy,
    deleted,
    moved_to_terminal,
    moved_to_ready,
]

VERBS: dict[str, Verb] = {
    "step": lambda form, run: form.step(run, "late", "late"),
    "external": lambda form, run: form.external(run, "late", lambda: None),
    "renew": lambda form, run: form.renew(run),
    "finish": lambda form, run: form.finish(run),
    "fail": lambda form, run: form.fail(run),
    "release": lambda form, run: form.release(run),
    "fence": lambda form, run: form.fence(run.lease, "late"),
    "record": lambda form, run: form.record(run.lease, "late", "late"),
    "hold": lambda form, run: form.hold(run.lease),
}


def _status(factory: sessionmaker[Session], run: Any) -> PlanStatus | None:
    with factory() as session:
        return session.scalar(select(Plan.status).where(Plan.id == run.lease.identity[0]))


def everything(engine: Engine) -> list[Any]:
    """Every column of every row that a holder could have written."""
    with engine.connect() as connection:
        return [connection.execute(select(entity.__table__)).all() for entity in (Plan, PlanStep, Entry)]


def held(form: Form, factory: sessionmaker[Session]) -> Any:
    """A claimed run with one step done."""
    run = form.claim(approved_plan(factory))
    form.step(run, "first", "first")
    return run


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_no_verb_of_a_stale_holder_writes_anything(
    engine: Engine, session_factory: sessionmaker[Session], others: Runs[Plan], form: Form, loss: Loss
) -> None:
    for name, verb in VERBS.items():
        with engine.begin() as connection:
            connection.execute(delete(Plan))
        run = held(form, session_factory)
        loss(others, session_factory, run)
        before = everything(engine)
        with pytest.raises(LostLease) as caught:
            verb(form, run)
        assert caught.value.lease == run.lease, name
        assert everything(engine) == before, name


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_a_stale_handle_is_not_carried_out(
    engine: Engine, session_factory: sessionmaker[Session], others: Runs[Plan], form: Form, loss: Loss
) -> None:
    run = held(form, session_factory)
    loss(others, session_factory, run)
    before = everything(engine)
    outcome = form.execute(run, "late")
    assert outcome.ending is Ending.LOST_LEASE
    assert everything(engine) == before


def test_a_holder_that_knows_of_its_loss_sends_no_statement(
    session_factory: sessionmaker[Session], others: Runs[Plan], form: Form
) -> None:
    run = held(form, session_factory)
    claimed_by_another(others, session_factory, run)
    with pytest.raises(LostLease):
        form.renew(run)
    sent: list[str] = []
    event.listen(form.engine, "before_cursor_execute", lambda _, __, statement, *___: sent.append(statement))
    for name in ("step", "external", "renew", "finish", "fail"):
        with pytest.raises(LostLease):
            VERBS[name](form, run)
    assert sent == []


def test_the_new_holder_is_not_disturbed_by_the_stale_one(
    engine: Engine, session_factory: sessionmaker[Session], others: Runs[Plan], form: Form
) -> None:
    for verb in VERBS.values():
        stale = held(form, session_factory)
        let_lapse(session_factory, stale.lease.identity)
        other = others.claim(stale.lease.identity)
        assert other is not None
        with pytest.raises(LostLease):
            verb(form, stale)
        assert [receipt.step for receipt in other.receipts] == ["first"]
        other.finish(note="by the new holder")
        assert column(engine, stale.lease.identity[0], "note") == "by the new holder"
        assert column(engine, stale.lease.identity[0], "fence") == stale.lease.fence + 1


@pytest.mark.parametrize("loss", [claimed_by_another, released_by_a_copy, deleted], ids=lambda loss: loss.__name__)
def test_a_call_under_way_while_its_run_is_lost_leaves_no_receipt(
    engine: Engine, session_factory: sessionmaker[Session], others: Runs[Plan], form: Form, loss: Loss
) -> None:
    run = held(form, session_factory)
    seen: list[Any] = []

    def call() -> None:
        loss(others, session_factory, run)
        seen.append(everything(engine))

    with pytest.raises(LostLease):
        form.external(run, "late", call)
    assert everything(engine) == seen[0]


# lapsed is not lost


def lapsed(others: Runs[Plan], factory: sessionmaker[Session], run: Any) -> None:
    let_lapse(factory, run.lease.identity)


def reaped_to_ready(others: Runs[Plan], factory: sessionmaker[Session], run: Any) -> None:
    let_lapse(factory, run.lease.identity)
    assert others.reap() == 1
    assert _status(factory, run) is PlanStatus.APPROVED


RENEWING = {"step", "renew", "hold"}
ENDS = {"finish": PlanStatus.EXECUTED, "fail": PlanStatus.FAILED, "release": PlanStatus.APPROVED}


@pytest.mark.parametrize("silence", [lapsed, reaped_to_ready], ids=lambda silence: silence.__name__)
@pytest.mark.parametrize("verb", VERBS)
def test_a_holder_that_nobody_replaced_goes_on_under_its_own_fence(
    engine: Engine, session_factory: sessionmaker[Session], others: Runs[Plan], form: Form, silence: Loss, verb: str
) -> None:
    run = held(form, session_factory)
    ident: UUID = run.lease.identity[0]
    silence(others, session_factory, run)
    VERBS[verb](form, run)
    with session_factory() as session:
        plan = session.get_one(Plan, ident)
        alive = session.scalar(select(Plan.lease_expires_at > func.now()))
    assert plan.status is ENDS.get(verb, PlanStatus.EXECUTING)
    assert (plan.fence, plan.attempts) == (run.lease.fence, run.lease.attempt) == (1, 1)
    assert alive is (None if verb in ENDS else silence is reaped_to_ready or verb in RENEWING)
    assert plan.lease_owner == (None if verb in ENDS else run.lease.owner)
    recorded, written = verb in {"step", "external", "record"}, verb in {"step", "record", "fence"}
    assert [receipt.step for receipt in others.receipts(ident)] == ["first", *(["late"] * recorded)]
    assert entries(engine) == ["first", *(["late"] * written)]


def test_a_resumed_run_can_be_carried_to_its_end(
    engine: Engine, session_factory: sessionmaker[Session], others: Runs[Plan], form: Form
) -> None:
    run = held(form, session_factory)
    reaped_to_ready(others, session_factory, run)
    outcome = form.execute(run, "late")
    assert outcome.ending is Ending.LANDED
    assert [(receipt.step, receipt.fence) for receipt in outcome.receipts] == [("first", 1), ("only", 1)]
    assert entries(engine) == ["first", "late"]


@pytest.mark.parametrize("verb", VERBS)
def test_two_copies_of_a_lease_may_resume_a_reaped_run_at_once(
    engine: Engine, session_factory: sessionmaker[Session], others: Runs[Plan], form: Form, verb: str
) -> None:
    run = held(form, session_factory)
    reaped_to_ready(others, session_factory, run)
    with session_factory.begin() as session:
        others.fence(session, run.lease)
        late = Background(lambda: VERBS[verb](form, run))
        # A heartbeat does not wait, and sees a run that its own lease may still resume.
        wait_until_blocked(engine, 0 if verb == "renew" else 1)
    late.result()
    assert column(engine, run.lease.identity[0], "status") is ENDS.get(verb, PlanStatus.EXECUTING)
    assert column(engine, run.lease.identity[0], "fence") == 1


def test_a_resumed_run_cannot_be_claimed_by_another(
    session_factory: sessionmaker[Session], others: Runs[Plan], form: Form
) -> None:
    run = held(form, session_factory)
    reaped_to_ready(others, session_factory, run)
    form.renew(run)
    assert others.claim(run.lease.identity) is None
    assert others.claim_due(10) == []
    assert others.reap() == 0


def test_a_lapsed_run_is_not_taken_from_a_step_under_way(
    engine: Engine, session_factory: sessionmaker[Session], others: Runs[Plan]
) -> None:
    ident = approved_plan(session_factory)
    run = others.claim(ident)
    assert run is not None

    def body(session: Session) -> str:
        session.execute(update(Plan).values(lease_expires_at=Plan.created_at))
        session.flush()
        rival: Runs[Plan] = Runs(session_factory, Plan, PlanStep)
        assert rival.claim_due(10) == []
        assert rival.reap() == 0
        assert not rival.heal(ident)
        session.add(Entry(label="done"))
        return "done"

    assert run.step("only", body) == "done"
    run.finish()
    assert entries(engine) == ["done"]
