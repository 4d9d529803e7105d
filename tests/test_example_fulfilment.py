"""The example of fulfilment: whatever dies, stock is taken once, and a customer charged once and refunded once."""

from __future__ import annotations

import asyncio
import importlib
import random
import re
import sys
import time
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path

import pytest
from sqlalchemy import text

from sqla_durable import Ending, KeyConflict, RunFailed, UpdateFailed
from sqla_durable.testing import let_pass
from tests.support import Background, eventually
from tests.support_branch_reset import EXAMPLES, Process
from tests.support_embedded import base, processes_of
from tests.support_fulfilment import LONG, MODULES, NAME, App, Shell
from tests.test_docs import blocks
from tests.test_docs_command_line import lasting

__all__ = ["base"]
PAGE = EXAMPLES / NAME / "README.md"
SECOND = timedelta(seconds=1)
BOOKS = 20


@pytest.fixture
def app(empty_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    monkeypatch.setenv("DATABASE_URL", empty_url)
    monkeypatch.setenv("PAYMENTS", str(tmp_path / "payments.json"))
    monkeypatch.syspath_prepend(str(EXAMPLES))
    app = App(tmp_path, {name: importlib.import_module(f"{NAME}.{name}") for name in MODULES})
    yield app
    app.close()
    for name in list(sys.modules):
        if name.partition(".")[0] == NAME:
            del sys.modules[name]


def steps(app: App, number: int) -> list[str]:
    return [receipt.step for receipt in app.functions.steps(app.shop.handle_of(number))]


def late(app: App, number: int, step: str) -> None:
    """Let the time that a step waits for be over."""
    with app.session() as session, session.begin():
        let_pass(session, app.models.DurableStep, app.described(number).handle.id, step)


# an order


def test_an_order_and_its_run_exist_if_and_only_if_the_caller_commits(app: App) -> None:
    with app.session() as session:
        handle = app.shop.place_order(session, 1, "book", 2, "1 High Street")
        session.rollback()
    assert app.functions.find() == []
    assert app.order(1, quantity=2) == app.order(1, quantity=2) != handle
    with pytest.raises(KeyConflict):
        app.order(1, quantity=3)
    with app.engine.connect() as connection:
        orders = connection.execute(
            text("SELECT o.quantity, r.id FROM fulfilment_order o JOIN fulfilment_run r ON order_id = o.id")
        )
        assert [tuple(row) for row in orders] == [(2, app.order(1, quantity=2).id)]


def test_an_order_is_charged_packed_shipped_and_closed_when_it_may_not_come_back_any_more(app: App) -> None:
    handle = app.order(1, quantity=2)
    app.work()
    described = app.described(1)
    assert (described.status, described.waits_for, described.state) == ("ready", "said", "it can be packed")
    assert (app.status(1), app.stock(), list(app.book.charges.values())) == ("open", BOOKS - 2, [2400])
    assert app.pack(1)
    app.work()
    assert (app.status(1), app.described(1).waits_for) == ("shipped", "returned")
    late(app, 1, "returned")
    app.work()
    (charge,) = app.book.charges
    shipment = app.messages.Shipment(parcel="P-1", address="1 High Street", carrier="bicycle", charge=charge)
    assert app.functions.result(handle) == shipment
    assert (app.status(1), app.stock(), len(app.book.refunds)) == ("closed", BOOKS - 2, 0)
    assert steps(app, 1) == ["reserve", "charge", *steps(app, 1)[2:4], "said 1", "ship", "returned", "close"]
    assert sorted(steps(app, 1)[2:4]) == ["bicycle", "van"]


def test_what_is_not_there_is_not_sold(app: App) -> None:
    handle = app.order(1, quantity=BOOKS + 1)
    app.work()
    with pytest.raises(RunFailed, match="OutOfStock: there are not 21 of book"):
        app.functions.result(handle)
    assert (app.status(1), app.stock(), len(app.book.charges)) == ("refused", BOOKS, 0)


def test_an_order_or_an_article_that_there_is_not_is_named(app: App) -> None:
    with pytest.raises(app.shop.NotThere, match="there is no article 'teapot'"):
        app.order(1, "teapot")
    with pytest.raises(app.shop.NotThere, match="there is no order 77"):
        app.pack(77)
    with pytest.raises(app.shop.NotThere, match="there is no order 77"):
        app.shop.say(77, app.withdrawal())
    assert app.functions.find() == []


def test_an_order_that_nobody_packs_is_refunded_and_the_stock_is_as_before(app: App) -> None:
    handle = app.order(1)
    app.work()
    late(app, 1, "said 1")
    app.work()
    check_undone(app, 1, "cancelled")
    assert app.functions.result(handle) == app.messages.CalledOff(reason="nobody has packed it")


def test_a_parcel_that_comes_back_is_refunded(app: App) -> None:
    handle = app.order(1)
    app.pack(1)
    app.work()
    assert app.send_back(1)
    app.work()
    check_undone(app, 1, "returned")
    assert app.functions.result(handle).returned


def check_undone(app: App, number: int, status: str) -> None:
    assert (app.status(number), app.stock()) == (status, BOOKS)
    (charge,) = app.book.charges
    assert list(app.book.refunds.values()) == [charge]


# what is said of it


def test_what_is_said_is_heard_in_the_order_in_which_it_was_said(app: App) -> None:
    app.order(1)
    app.order(2)
    app.tell(1, app.new_address())
    app.pack(1)
    app.pack(2)
    app.tell(2, app.withdrawal())
    app.work()
    assert (app.status(1), app.status(2)) == ("shipped", "shipped")
    with app.session() as session:
        assert session.get_one(app.models.Order, 1).address == "2 Low Road"
    with pytest.raises(app.shop.Unfit, match="order 2 is shipped"):
        app.shop.say(2, app.withdrawal())


def test_a_customer_hears_what_came_of_what_they_said(app: App) -> None:
    app.order(1)

    def customer() -> None:
        app.shop.say(1, app.new_address("3 Mill Lane"))
        with pytest.raises(UpdateFailed, match="'nowhere' has no number"):
            app.shop.say(1, app.new_address("nowhere"))
        app.shop.say(1, app.withdrawal())

    customers = Background(customer)
    while customers.is_alive():
        app.work()
    customers.result()
    eventually(lambda: app.work() is not None and app.status(1) == "cancelled", "the end")
    check_undone(app, 1, "cancelled")
    with pytest.raises(app.shop.Unfit, match="order 1 is cancelled"):
        app.pack(1)


# payments


def test_while_the_payment_service_is_down_an_order_waits_for_it(app: App) -> None:
    app.order(1)
    app.behave("down")
    assert app.work()[Ending.INTERRUPTED] >= 1
    described = app.described(1)
    assert (described.status, described.failure.type.rpartition(".")[2]) == ("ready", "PaymentsDown")
    assert (app.stock(), len(app.book.charges)) == (BOOKS - 1, 0)
    app.behave("up")
    eventually(lambda: app.work() is not None and app.described(1).waits_for, "the charge")
    assert app.book.requests.total() == 1


# the report


def test_a_report_is_a_coroutine_function_in_the_same_tables_and_the_same_worker(app: App) -> None:
    app.order(1)
    app.order(2, quantity=BOOKS + 1)
    app.work()

    async def start() -> None:
        async with app.coroutines.session_factory.begin() as session:
            await app.coroutines.start(session, app.modules["report"].report, date(2026, 3, 1), key="over")
            await app.coroutines.start(session, app.modules["report"].report, date(2999, 3, 1), key="later")
        await app.modules["database"].async_engine.dispose()

    asyncio.run(start())
    app.work()
    over, later = (app.functions.find(key=key)[0] for key in ("over", "later"))
    assert (over.status, later.status, later.waiting) == ("done", "ready", True)
    with app.session() as session:
        row = session.get_one(app.models.DurableRun, over.identity[0])
        assert row.output == {"day": "2026-03-01", "orders": {"open": 1, "refused": 1}}


# a worker that is killed


@pytest.mark.slow
@pytest.mark.parametrize("which", ["charges", "refunds"])
def test_a_worker_killed_while_the_payment_service_takes_its_time_leaves_one_payment(app: App, which: str) -> None:
    app.order(1)
    if which == "refunds":
        app.work()
        app.tell(1, app.withdrawal())
    app.behave("slow")
    with app.worker() as worker:
        eventually(lambda: getattr(app.book, which), "a payment that is taken")
        worker.kill()
    app.behave("up")
    before = app.book
    with app.worker():
        if which == "charges":
            eventually(lambda: app.described(1).waits_for, "an order that is charged")
            app.tell(1, app.withdrawal())
        app.wait_for(1, "cancelled")
    check_undone(app, 1, "cancelled")
    assert (getattr(before, which), before.requests.total()) == (
        getattr(app.book, which),
        1 if which == "charges" else 2,
    )
    assert app.book.requests.total() == 3


FATES = "closed", "returned", "withdrawn", "forgotten"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_workers_killed_at_random_moments_take_the_stock_and_the_money_once(app: App, seed: int) -> None:
    chance = random.Random(seed)
    fates = {number: FATES[number % len(FATES)] for number in range(1, 17)}
    waiting = list(fates)
    while waiting:
        with app.worker() as worker:
            eventually(app.is_listening, "a worker that listens")
            for number in [waiting.pop(0) for _ in range(min(4, len(waiting)))]:
                order_with(app, number, fates[number])
            app.behave(chance.choice(["up", "up", "down"]))
            eventually(app.is_working, "a run that is carried out")
            time.sleep(chance.uniform(0, 0.15))
            worker.kill()
        app.behave("up")
    with app.worker() as worker:
        for number, fate in fates.items():
            app.wait_for(number, {"closed": "closed", "returned": "returned"}.get(fate, "cancelled"))
        eventually(app.is_idle, "the end of all runs")
        assert worker.stop() == 0
    with app.engine.connect() as connection:
        assert connection.scalar(text("SELECT count(*) FROM fulfilment_run WHERE attempts > 1")), "none was taken over"
        assert connection.scalar(text("SELECT count(*) FROM fulfilment_run WHERE status <> 'done'")) == 0
    closed = sum(fate == "closed" for fate in fates.values())
    assert app.stock() == BOOKS - closed
    assert len(app.book.charges) == len(fates)
    undone = sorted(app.book.refunds.values())
    assert len(undone) == len(set(undone)) == len(fates) - closed
    kept = [app.functions.result(app.shop.handle_of(number)).charge for number in fates if fates[number] == "closed"]
    assert sorted([*undone, *kept]) == sorted(app.book.charges)


def order_with(app: App, number: int, fate: str) -> None:
    """Place an order, and say at once what is said of it some time."""
    short = timedelta(milliseconds=300)
    times = {"closed": (LONG, short), "forgotten": (short, LONG)}
    pack_within, return_within = times.get(fate, (LONG, LONG))
    app.order(number, pack_within=pack_within, return_within=return_within)
    if fate in {"closed", "returned"}:
        app.tell(number, app.new_address())
        app.pack(number)
    if fate == "returned":
        app.say_that_it_comes_back(number)
    if fate == "withdrawn":
        app.tell(number, app.withdrawal())


@pytest.mark.slow
def test_an_order_waits_while_workers_and_database_are_down(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    shell = Shell(base)
    worker = Process("-m", "sqla_durable.cli", "worker", f"{NAME}.worker:worker", log=base / "log")
    assert shell.type("python -m fulfilment order 1 book 2 --return-within 0.5") == "order 1 is placed\n"
    with worker:
        eventually(lambda: "for 'said'" in shell.type("python -m fulfilment status 1"), "an order that waits")
    eventually(lambda: not processes_of(base), "the end of the database")
    assert shell.type("python -m fulfilment pack 1 P-1001") == "said\n"
    eventually(lambda: not processes_of(base), "the end of the database")
    with worker:
        assert shell.type("python -m fulfilment result 1").startswith("Shipment: parcel='P-1001'")
        assert shell.type("python -m fulfilment payments") == "up: 1 charges and 0 refunds, in 1 requests\n"
        assert shell.type("python -m fulfilment stock") == "18 book, 5 lamp\n"
        assert worker.stop() == 0, worker.log


# the page


def commands() -> list[tuple[str, str]]:
    """Each command of the page but those that install, and what it shows as the output."""
    shown = "\n".join(block.text for block in blocks(PAGE, "console"))
    found = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", shown, re.MULTILINE)
    return [(command, output.rstrip("\n")) for command, output in found if not command.startswith(("pip ", "cd "))]


def same_each_time(output: str) -> list[str]:
    shown = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID", output)
    return lasting(re.sub(r"( ready +)\d+", r"\1ATTEMPTS", shown))


def before(app: App, command: str) -> None:
    """Wait as somebody does who reads and types, which takes longer than what is going on meanwhile."""
    if command.startswith("kill "):
        eventually(lambda: len(app.book.charges) == 4, "a charge that is taken")
    elif "--key order-3" in command:
        eventually(lambda: app.described(3).failure, "a failure")
    elif not re.search(" worker | order | payments ", command):
        eventually(app.is_settled, "orders that have ended, or wait for what is said of them")


@pytest.mark.slow
def test_the_output_of_each_command_is_what_the_page_shows(app: App, tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    typed = 0
    try:
        for command, output in commands():
            before(app, command)
            written = shell.type(command.replace("/tmp/fulfilment.", f"{tmp_path}/fulfilment."))
            assert same_each_time(written) == same_each_time(output), command
            typed += 1
    finally:
        shell.type(f"kill -9 $(cat {tmp_path}/fulfilment.pid)")
    assert typed == len(commands()) == 41
