"""How many runs of a function, or of a tenant, are live at a time, and how many start in a time, in all workers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import Engine, create_engine, event, func, select, text, update
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import (
    ConfigurationError,
    Ending,
    FunctionStatus,
    LostLease,
    Rate,
    RetryableError,
    Runs,
    StepTimeout,
    Worker,
)
from sqla_durable.asyncio import AsyncFunctionRun, AsyncFunctions, AsyncRuns
from sqla_durable.testing import lapse
from tests.support import Background, eventually, wait_until_blocked
from tests.support_limits import (
    LEASE,
    Limited,
    LimitedRun,
    LimitedStep,
    LimitsBase,
    a_moment,
    all_land,
    claimed,
    declare,
    functions_on,
    most_at_once,
    start,
    whose,
    workers,
)
from tests.support_processes import Program
from tests.support_wire import Wire

SECOND = timedelta(seconds=1)
DAY = timedelta(days=1)
ONE = {"mail": {"concurrency": 1}}


@pytest.fixture(autouse=True)
def tables(engine: Engine) -> None:
    LimitsBase.metadata.create_all(engine)


def limited(engine: Engine, declared: Any, **options: Any) -> Limited:
    functions = functions_on(engine, **options)
    declare(functions, declared)
    return functions


def let_lapse(engine: Engine, *idents: Any) -> None:
    with Session(engine) as session, session.begin():
        for ident in idents:
            lapse(session, LimitedRun, ident)


def status_of(engine: Engine, ident: Any) -> FunctionStatus:
    with Session(engine) as session:
        return session.get_one(LimitedRun, ident).status


# races


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"])
def test_eight_workers_never_have_more_live_runs_of_a_function_than_it_may_have(engine: Engine, isolation: str) -> None:
    declared = {"mail": {"concurrency": 3}, "bill": {}}
    start(limited(engine, declared), "mail", 200)
    with workers(engine, 8, lambda own: limited(own, declared), isolation_level=isolation):
        all_land(engine)
    assert most_at_once(engine, "function") == {("mail",): 3}


@pytest.mark.parametrize(
    ("declared", "of_all"),
    [
        ({"mail": {"concurrency_per_tenant": 2}, "bill": {}}, None),
        ({"mail": {"concurrency": 3, "concurrency_per_tenant": 2}, "bill": {"concurrency": 4}}, None),
        ({"mail": {}, "bill": {}}, 3),
        ({"mail": {"concurrency": 2}, "bill": {"concurrency_per_tenant": 1}}, 2),
    ],
    ids=["of a function", "of a function and of it as a whole", "of all functions", "of everything"],
)
def test_eight_workers_never_have_more_live_runs_of_a_tenant_than_it_may_have(
    engine: Engine, declared: Any, of_all: int | None
) -> None:
    functions = limited(engine, declared, concurrency_per_tenant=of_all)
    for name in declared:
        for tenant in ("ada", "ben", "eve", "zoe"):
            start(functions, name, 25, tenant=tenant)
    with workers(engine, 8, lambda own: limited(own, declared, concurrency_per_tenant=of_all)):
        all_land(engine)
    each = most_at_once(engine, "function"), most_at_once(engine, "function", "tenant")
    for name, limits in declared.items():
        assert each[0][name,] <= limits.get("concurrency", 200)
        assert max(n for (of, _), n in each[1].items() if of == name) <= limits.get("concurrency_per_tenant", 200)
    assert max(most_at_once(engine, "tenant").values()) <= (of_all or 200)


@pytest.mark.parametrize("isolation", ["READ COMMITTED", "REPEATABLE READ"])
def test_runs_claimed_by_their_keys_keep_to_the_limit(engine: Engine, isolation: str) -> None:
    handles = start(limited(engine, {"mail": {"concurrency": 2}}), "mail", 40)

    def insist(own: Engine, mine: list[Any]) -> None:
        functions = limited(own, {"mail": {"concurrency": 2}})
        for handle in mine:
            eventually(lambda handle=handle: functions.execute(handle).ending is Ending.LANDED, "a place")

    engines = [create_engine(engine.url, isolation_level=isolation) for _ in range(4)]
    for thread in [Background(lambda own=own, at=at: insist(own, handles[at::4])) for at, own in enumerate(engines)]:
        thread.result()
    for own in engines:
        own.dispose()
    assert most_at_once(engine, "function")[("mail",)] <= 2


def test_a_worker_claims_the_next_run_as_soon_as_one_has_ended(engine: Engine) -> None:
    functions = limited(engine, ONE)
    start(functions, "mail", 20)
    worker = Worker(*functions.works(), poll=timedelta(hours=1), listen=False)
    thread = Background(worker.run)
    all_land(engine)
    worker.stop()
    thread.result()
    assert most_at_once(engine, "function") == {("mail",): 1}


@pytest.mark.slow
def test_nothing_deadlocks_between_claims_of_all_kinds_and_reapers(engine: Engine) -> None:
    functions = limited(engine, MIXED, concurrency_per_tenant=8)
    for name in MIXED:
        for tenant in (None, "ada", "ben"):
            start(functions, name, 100, tenant=tenant)
    before = deadlocks(engine)
    end = time.monotonic() + 10
    for thread in [Background(lambda: disturb(engine, end)) for _ in range(6)]:
        assert thread.result() > 20
    assert deadlocks(engine) == before


MIXED = {"mail": {"concurrency": 5}, "bill": {"concurrency_per_tenant": 2}, "ship": {}}


def disturb(engine: Engine, end: float) -> int:
    """Claim in every way there is, let leases lapse, and reap; return how many runs were claimed."""
    own = create_engine(engine.url)
    verbs: Any = limited(own, MIXED, concurrency_per_tenant=8).works()[0].verbs
    with own.connect() as connection:
        idents = deque(connection.scalars(select(LimitedRun.id).order_by(func.random())))
    count = 0
    while time.monotonic() < end:
        idents.rotate(5)
        some = [idents[at] for at in range(5)]
        held = [*verbs.claim_due(5), *filter(None, (verbs.claim(ident, run_now=True) for ident in some))]
        count += len(held)
        with own.begin() as connection:
            running = update(LimitedRun).where(LimitedRun.status == FunctionStatus.RUNNING, LimitedRun.id.in_(some))
            connection.execute(running.values(lease_expires_at=func.now() - SECOND))
        verbs.reap(5)
        for holder in held:
            with suppress(LostLease):
                holder.release()
    own.dispose()
    return count


def deadlocks(engine: Engine) -> int:
    """How many this database has seen; a backend reports them at the latest when it ends."""
    engine.dispose()
    with engine.connect() as connection:
        query = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        return connection.scalar(text(query)) or 0


# dead and stale holders


def test_a_worker_that_was_killed_frees_its_places_once_its_leases_have_lapsed(engine: Engine) -> None:
    functions = limited(engine, {"mail": {"concurrency": 2}})
    start(functions, "mail", 5)
    with Program("limited", engine.url.render_as_string(hide_password=False)) as program:
        assert program.receive() == 2
        program.kill()
    assert claimed(functions) == []
    since = time.monotonic()
    assert len(eventually(lambda: claimed(functions), "the places of the dead")) == 2
    assert time.monotonic() - since < LEASE.total_seconds() + 5


def test_the_holder_of_a_reaped_run_does_not_take_its_place_back(engine: Engine) -> None:
    functions = limited(engine, ONE)
    start(functions, "mail")
    (stale,) = claimed(functions)
    due_for_longer = start(functions, "mail", run_at=-DAY)[0]
    let_lapse(engine, stale.lease.identity)
    (other,) = claimed(functions)
    assert other.lease.identity == (due_for_longer.id,)
    with pytest.raises(LostLease):
        stale.renew()
    other.renew()
    with engine.connect() as connection:
        live = select(func.count()).where(LimitedRun.status == FunctionStatus.RUNNING)
        assert connection.scalar(live) == 1


@pytest.mark.parametrize(
    ("limits", "resumes"), [({}, True), ({"concurrency": 1}, False), ({"rate": Rate(9, SECOND)}, False)]
)
def test_only_a_run_without_limits_is_resumed(engine: Engine, limits: Any, resumes: bool) -> None:
    functions = limited(engine, {"mail": limits})
    start(functions, "mail")
    (work,) = functions.works()
    (stale,) = claimed(functions)
    let_lapse(engine, stale.lease.identity)
    assert work.verbs.heal(stale.lease.identity)
    if resumes:
        stale.renew()
    else:
        with pytest.raises(LostLease):
            stale.renew()
    expected = FunctionStatus.RUNNING if resumes else FunctionStatus.READY
    assert status_of(engine, stale.lease.identity) is expected


def plain_runs(engine: Engine) -> Runs[LimitedRun]:
    """The core's verbs on the table of functions."""
    return Runs(sessionmaker(engine), LimitedRun, LimitedStep)


@pytest.mark.parametrize("reap", [lambda runs, ident: runs.reap(), Runs.heal, Runs.get], ids=["reap", "heal", "get"])
def test_a_run_that_the_cores_verbs_have_reaped_does_not_take_its_place_back(engine: Engine, reap: Any) -> None:
    functions = limited(engine, ONE)
    start(functions, "mail")
    (stale,) = claimed(functions)
    let_lapse(engine, stale.lease.identity)
    assert reap(plain_runs(engine), stale.lease.identity)
    with pytest.raises(LostLease):
        stale.renew()
    assert status_of(engine, stale.lease.identity) is FunctionStatus.READY


@pytest.mark.parametrize(
    "claim",
    [
        lambda runs, ident: runs.claim(ident),
        lambda runs, ident: runs.claim_due(1),
        lambda runs, ident: runs.execute(ident, a_moment),
        lambda runs, ident: runs.handled_by(a_moment),
    ],
    ids=["claim", "claim_due", "execute", "handled_by"],
)
def test_the_cores_verbs_claim_no_run_of_a_function_past_its_limits(engine: Engine, claim: Any) -> None:
    (handle,) = start(limited(engine, ONE), "mail")
    with pytest.raises(ConfigurationError, match=r"LimitedRun .*Functions.execute\(\) or Worker\(functions\)"):
        claim(plain_runs(engine), handle.id)
    assert status_of(engine, handle.id) is FunctionStatus.READY


def test_the_cores_verbs_over_asyncio_claim_none_either(engine: Engine) -> None:
    (handle,) = start(limited(engine, ONE), "mail")

    async def nothing(run: Any) -> None: ...

    async def main() -> None:
        async_engine = create_async_engine(engine.url)
        runs = AsyncRuns(async_sessionmaker(async_engine), LimitedRun, LimitedStep)
        for claim in (runs.claim(handle.id), runs.claim_due(1), runs.execute(handle.id, nothing)):
            with pytest.raises(ConfigurationError, match="Functions"):
                await claim
        with pytest.raises(ConfigurationError, match="Functions"):
            runs.handled_by(nothing)
        await async_engine.dispose()

    asyncio.run(main())


def test_the_cores_purge_keeps_the_runs_that_say_how_full_a_bucket_is(engine: Engine) -> None:
    functions = limited(engine, {"mail": {"rate": Rate(1, DAY)}})
    (handle,) = start(functions, "mail")
    assert functions.execute(handle).ending is Ending.LANDED
    assert plain_runs(engine).purge(timedelta(0)) == 0


def test_a_run_that_waits_for_its_next_attempt_has_no_place(engine: Engine) -> None:
    functions = limited(engine, ONE)
    start(functions, "mail", 2)
    (first,) = claimed(functions)
    assert claimed(functions) == []
    first.release(RetryableError("later"), DAY)
    (second,) = claimed(functions)
    assert second.lease.identity != first.lease.identity


def test_a_process_that_hangs_in_its_turn_to_claim_loses_it(engine: Engine) -> None:
    hanging = create_engine(engine.url)
    in_turn, over = threading.Event(), threading.Event()

    def hang(_: Any, __: Any, statement: str, *___: Any) -> None:
        if "pg_advisory_xact_lock" in statement:
            in_turn.set()
            over.wait(20)

    event.listen(hanging, "after_cursor_execute", hang)
    start(limited(engine, ONE), "mail")
    thread = Background(lambda: claimed(limited(hanging, ONE)))
    in_turn.wait(20)
    assert len(claimed(limited(engine, ONE))) == 1
    over.set()
    with pytest.raises((StepTimeout, RetryableError)):
        thread.result()
    hanging.dispose()


# one run by its key


def test_a_run_whose_function_is_at_its_limit_cannot_be_claimed_by_its_key(engine: Engine) -> None:
    functions = limited(engine, ONE)
    one, other = start(functions, "mail", 2)
    (holder,) = claimed(functions, 1)
    (left,) = {one.id, other.id} - {holder.lease.identity[0]}
    assert isinstance(left, UUID)
    outcome = functions.execute(left, run_now=True)
    assert (outcome.ending, outcome.status) == (Ending.NOT_CLAIMABLE, FunctionStatus.READY)
    holder.finish({})
    assert functions.execute(left).ending is Ending.LANDED


@pytest.mark.parametrize(
    ("options", "declared"),
    [
        ({}, {"mail": {"concurrency": 2}, "bill": {}}),
        ({}, {"mail": {"concurrency_per_tenant": 2}, "bill": {}}),
        ({"concurrency_per_tenant": 2}, {"mail": {}, "bill": {}}),
    ],
    ids=["function", "tenant of a function", "tenant of all"],
)
def test_a_claim_by_key_takes_the_place_of_a_holder_that_is_dead(engine: Engine, options: Any, declared: Any) -> None:
    functions = limited(engine, declared, **options)
    other = "bill" if options else "mail"
    dead = [start(functions, name, tenant="north")[0].id for name in ("mail", other)]
    elsewhere = start(functions, "bill", tenant="south")[0].id
    assert len(claimed(functions)) == 3
    wanted = start(functions, "mail", tenant="north")[0]
    assert functions.execute(wanted).ending is Ending.NOT_CLAIMABLE
    let_lapse(engine, dead[1], elsewhere)
    assert functions.execute(wanted).ending is Ending.LANDED
    assert [status_of(engine, ident) for ident in (*dead, elsewhere)] == [
        FunctionStatus.RUNNING,
        FunctionStatus.READY,
        FunctionStatus.RUNNING,  # holds nothing that is wanted here, and so is left to a worker
    ]


def test_a_claim_by_key_reaps_none_where_it_has_a_place(engine: Engine) -> None:
    functions = limited(engine, {"mail": {"concurrency": 2}})
    start(functions, "mail")
    (stale,) = claimed(functions)
    let_lapse(engine, stale.lease.identity)
    assert functions.execute(start(functions, "mail")[0]).ending is Ending.LANDED
    assert status_of(engine, stale.lease.identity) is FunctionStatus.RUNNING


def test_a_claim_by_key_waits_for_its_row_without_making_others_wait(engine: Engine) -> None:
    functions = limited(engine, {"mail": {"concurrency": 9}})
    one, _ = start(functions, "mail", 2)
    with engine.connect() as locking:
        locking.execute(select(LimitedRun.id).where(LimitedRun.id == one.id).with_for_update())
        waiting = Background(lambda: functions.execute(one))
        wait_until_blocked(engine)
        assert len(Background(lambda: claimed(functions)).result()) == 1
        locking.rollback()
    assert waiting.result().ending is Ending.LANDED


# which runs


def test_runs_without_a_place_keep_no_others_from_theirs(engine: Engine) -> None:
    functions = limited(engine, {"mail": {"concurrency_per_tenant": 1}, "bill": {"concurrency": 2}, "ship": {}})
    start(functions, "mail", 300, tenant="ada")
    start(functions, "bill", 300)
    for tenant in ("ben", "eve", None, None):
        start(functions, "mail", tenant=tenant)
    start(functions, "ship")
    found = [*claimed(functions, 5), *claimed(functions, 5)]
    expected = [("mail", "ada"), ("mail", "ben"), ("mail", "eve"), ("mail", None), ("mail", None)]
    assert sorted(whose(found), key=str) == sorted([*expected, *[("bill", None)] * 2, ("ship", None)], key=str)
    assert claimed(functions) == []


def test_a_run_that_is_refused_by_its_function_takes_no_place_of_its_tenant(engine: Engine) -> None:
    functions = limited(engine, {"mail": {"concurrency": 1}, "bill": {"concurrency": 5}}, concurrency_per_tenant=2)
    start(functions, "mail", 5, tenant="ada")
    start(functions, "bill", 5, tenant="ada")
    assert sorted(whose(claimed(functions))) == [("bill", "ada"), ("mail", "ada")]


def test_runs_are_claimed_by_priority_and_then_in_due_order(engine: Engine) -> None:
    functions = limited(engine, {"mail": {"concurrency": 3, "concurrency_per_tenant": 2}})
    late = start(functions, "mail", priority=1, tenant="ada", run_at=-SECOND)
    early = start(functions, "mail", priority=1, tenant="ben", run_at=-2 * SECOND)
    start(functions, "mail", run_at=-3 * SECOND, tenant="ada")
    high = start(functions, "mail", priority=9)
    start(functions, "mail", priority=9, run_at=DAY)
    found = [holder.lease.identity[0] for holder in claimed(functions)]
    assert found == [high[0].id, early[0].id, late[0].id]


def test_runs_with_and_without_limits_take_turns_to_be_first(engine: Engine) -> None:
    functions = limited(engine, {"mail": {"concurrency": 50}, "ship": {}})
    start(functions, "mail", 10)
    start(functions, "ship", 10)
    found = [claimed(functions, 1)[0].row.function for _ in range(6)]
    assert sorted(found) == ["mail"] * 3 + ["ship"] * 3


def test_a_tenants_limit_is_none_on_runs_without_a_tenant(engine: Engine) -> None:
    functions = limited(engine, {"mail": {"concurrency_per_tenant": 1}}, concurrency_per_tenant=1)
    start(functions, "mail", 5)
    assert len(claimed(functions)) == 5


# rates


def paces(engine: Engine) -> list[tuple[Any, Any]]:
    with engine.connect() as connection:
        order = select(LimitedRun.paced_at, LimitedRun.started_at).order_by(LimitedRun.paced_at)
        return [tuple(row) for row in connection.execute(order)]


@pytest.mark.parametrize("rate", [Rate(70, SECOND, burst=5), Rate(70, SECOND, burst=1), Rate(100, SECOND)], ids=repr)
def test_eight_workers_never_start_more_runs_than_the_rate_allows(engine: Engine, rate: Rate) -> None:
    declared = {"mail": {"rate": rate}}
    start(limited(engine, declared), "mail", 60)
    with workers(engine, 8, lambda own: limited(own, declared)):
        all_land(engine)
    pace = timedelta(microseconds=rate.pace)
    assert pace * 70 >= SECOND or rate.limit == 100
    stamps = paces(engine)
    # Each took a token of its own, and none before there was one.
    assert all(after[0] - before[0] >= pace for before, after in pairwise(stamps))
    assert all(started_at >= paced_at - rate.tokens * pace for paced_at, started_at in stamps)


def test_a_worker_looks_again_when_there_is_a_token(engine: Engine) -> None:
    functions = limited(engine, {"mail": {"rate": Rate(20, SECOND, burst=1)}})
    start(functions, "mail", 10)
    worker = Worker(*functions.works(), poll=timedelta(seconds=1), listen=False)
    thread = Background(worker.run)
    since = time.monotonic()
    all_land(engine)
    assert time.monotonic() - since < 5
    worker.stop()
    thread.result()


def test_a_burst_is_started_at_once_and_then_one_for_each_token(engine: Engine) -> None:
    functions = limited(engine, {"mail": {"rate": Rate(24, DAY, burst=3)}})
    start(functions, "mail", 10)
    assert len(claimed(functions)) == 3
    assert claimed(functions) == []
    with engine.begin() as connection:
        connection.execute(update(LimitedRun).values(paced_at=LimitedRun.paced_at - timedelta(minutes=61)))
    assert len(claimed(functions)) == 1
    assert claimed(functions) == []


def test_a_quiet_time_saves_up_no_more_than_a_burst(engine: Engine) -> None:
    functions = limited(engine, {"mail": {"rate": Rate(24, DAY, burst=3)}})
    start(functions, "mail", 10)
    assert len(claimed(functions)) == 3
    with engine.begin() as connection:
        connection.execute(update(LimitedRun).values(paced_at=LimitedRun.paced_at - 30 * DAY))
    assert len(claimed(functions)) == 3


def test_runs_that_are_gone_give_no_tokens_back_once_their_stamps_have_passed(engine: Engine) -> None:
    functions = limited(engine, {"mail": {"rate": Rate(24, DAY, burst=2)}})
    start(functions, "mail", 10)
    for holder in claimed(functions):
        holder.finish({})
    with engine.begin() as connection:
        connection.execute(update(LimitedRun).values(paced_at=LimitedRun.paced_at - timedelta(minutes=61)))
        connection.execute(text("DELETE FROM limited_run WHERE paced_at <= now()"))
    assert len(claimed(functions)) == 1


@pytest.mark.parametrize(
    ("before", "after"), [(Rate(1, 30 * DAY), 4), (Rate(1000, SECOND), 4)], ids=["slower", "faster"]
)
def test_a_rate_that_was_changed_counts_from_then_on(engine: Engine, before: Rate, after: int) -> None:
    functions = limited(engine, {"mail": {"rate": before}})
    start(functions, "mail", 10)
    claimed(functions, 1)
    others = limited(engine, {"mail": {"rate": Rate(4, DAY)}})
    assert len(claimed(others)) == after


def test_a_run_claimed_by_its_key_takes_a_token(engine: Engine) -> None:
    functions = limited(engine, {"mail": {"rate": Rate(2, DAY)}})
    one, two, three = start(functions, "mail", 3)
    assert functions.execute(one).ending is Ending.LANDED
    assert functions.execute(two).ending is Ending.LANDED
    assert functions.execute(three).ending is Ending.NOT_CLAIMABLE


# what it costs


@pytest.fixture
def wire(engine: Engine) -> Iterator[Wire]:
    wire = Wire(engine.url)
    yield wire
    wire.close()


@pytest.mark.parametrize(("limits", "trips"), [({}, 1), ({"concurrency": 1000}, 4)], ids=["without", "with"])
def test_a_claim_is_one_round_trip_without_limits_and_four_with(
    engine: Engine, wire: Wire, limits: Any, trips: int
) -> None:
    own = create_engine(wire.url)
    functions = limited(own, {"mail": limits})
    start(functions, "mail", 40)
    for _ in range(8):
        claimed(functions, 1)
    with wire.counting() as count:
        assert len(claimed(functions, 1)) == 1
    own.dispose()
    assert count.round_trips == trips


# declarations, and asyncio


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"concurrency": 0}, "concurrency=0: a whole number from 1"),
        ({"concurrency": True}, "concurrency=True: a whole number"),
        ({"concurrency_per_tenant": 1.5}, "concurrency_per_tenant=1.5: a whole number"),
        ({"rate": 5}, r"rate=5 is no Rate\(100, per="),
    ],
)
def test_a_limit_that_could_not_work_is_refused(engine: Engine, limits: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match="function 'mail': " + said):
        limited(engine, {"mail": limits})


def test_a_tenants_limit_on_all_functions_that_could_not_work_is_refused(engine: Engine) -> None:
    with pytest.raises(ConfigurationError, match=r"Functions\(concurrency_per_tenant\)=0: a whole number"):
        functions_on(engine, concurrency_per_tenant=0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, SECOND), r"Rate\(limit=0\): a whole number from 1"),
        ((1, SECOND, 0), r"Rate\(burst=0\): a whole number from 1"),
        ((1, 5), r"Rate\(per=5\): a duration is a timedelta"),
        ((5, timedelta(microseconds=4)), "at least a microsecond for each of 5"),
        ((1, DAY, 10**6), "a burst takes over 36500 days"),
    ],
)
def test_a_rate_that_could_not_work_is_refused(arguments: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Rate(*arguments)


def test_coroutine_functions_have_the_same_limits(engine: Engine) -> None:
    async def crowd() -> list[Ending]:
        own = create_async_engine(engine.url)
        functions = AsyncFunctions(async_sessionmaker(own), LimitedRun, LimitedStep, concurrency_per_tenant=1)
        over = asyncio.Event()

        @functions.function("mail", concurrency=2, rate=Rate(1000, SECOND))
        async def mail(run: AsyncFunctionRun) -> None:
            await over.wait()

        async with functions.session_factory.begin() as session:
            handles = [await functions.start(session, mail, tenant=str(at // 2)) for at in range(6)]
        executions = [asyncio.create_task(functions.execute(handle)) for handle in handles]
        async with asyncio.timeout(20):
            while sum(each.done() for each in executions) < 4:
                await asyncio.sleep(0.01)
        over.set()
        outcomes = await asyncio.gather(*executions)
        await own.dispose()
        return [outcome.ending for outcome in outcomes]

    endings = asyncio.run(crowd())
    assert sorted(endings) == [Ending.LANDED] * 2 + [Ending.NOT_CLAIMABLE] * 4
    assert most_at_once_of_landed(engine) <= 1


def most_at_once_of_landed(engine: Engine) -> int:
    with engine.connect() as connection:
        landed = select(func.count()).where(LimitedRun.status == FunctionStatus.DONE).group_by(LimitedRun.tenant)
        return max(connection.scalars(landed))
