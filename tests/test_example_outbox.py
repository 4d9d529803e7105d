"""The outbox example against a real mail server, a real chat service and real workers that are really killed."""

from __future__ import annotations

import importlib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from email import message_from_bytes
from email.errors import HeaderParseError
from email.policy import default
from typing import Any
from uuid import UUID, uuid4

import pytest
from sqlalchemy import create_engine, func, select, text

from sqla_durable import Ending, FrozenPayload, KeyConflict, Worker
from sqla_durable.testing import lapse
from tests.support import DEADLINE, Background, eventually, wait_until_blocked
from tests.support_cli import answered
from tests.support_outbox import (
    CUT,
    EXAMPLES,
    ChatService,
    Mail,
    MailServer,
    Post,
    Process,
    command,
    open_transactions,
    worker,
)
from tests.support_processes import Program
from tests.support_statements import statements

ADA, BEN, CAROL = "ada@example.org", "ben@example.org", "carol@example.org"
THREE = [f"mail:{address}" for address in (ADA, BEN, CAROL)]
BACKOFF = 0.2


class Shop:
    """The example, on an empty database, between a mail server and a chat service."""

    def __init__(self, mails: MailServer, chat: ChatService) -> None:
        self.mails, self.chat = mails, chat
        for name in "channels", "database", "deliver", "models", "shop":
            setattr(self, name, importlib.import_module(f"outbox.{name}"))

    database: Any
    deliver: Any
    models: Any
    channels: Any
    shop: Any

    @property
    def runs(self) -> Any:
        return self.database.notifications

    def order(self, recipients: list[str], request: UUID | None = None, article: str = "tea tin") -> int:
        """Place an order in a transaction of its own; return the id of its notification."""
        request = request or uuid4()
        with self.database.new_session.begin() as session:
            self.shop.place_order(session, request, article, recipients)
        with self.database.new_session() as session:
            notification = self.models.Notification
            found = session.scalars(select(notification.id).where(notification.idempotency_key == f"order {request}"))
            ident: int = found.one()
        return ident

    def attempt(self, ident: int) -> Any:
        """Let the notification be due, and carry it out once."""
        return self.runs.execute(ident, self.deliver.deliver, run_now=True)

    def status(self, ident: int) -> str:
        return str(self.runs.get(ident, heal=False).status)

    def receipts(self, ident: int) -> dict[str, str]:
        """The outcome of each recipient that has one."""
        return {receipt.step: str(receipt.outcome) for receipt in self.runs.receipts(ident)}

    def count(self, entity: str) -> int:
        with self.database.new_session() as session:
            return int(session.scalar(select(func.count()).select_from(getattr(self.models, entity))) or 0)

    def now(self) -> Any:
        """What time it is in the database."""
        with self.database.engine.connect() as connection:
            return connection.scalar(select(func.clock_timestamp()))

    def forget_the_dead(self, ident: int) -> None:
        """Wait until a killed process's connections are gone, and let its lease have run out."""
        gone = text("SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'doomed'")
        with self.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            eventually(lambda: connection.scalar(gone), "the end of the dead process's backends")
        if self.status(ident) == "processing":
            with self.database.new_session.begin() as session:
                lapse(session, self.models.Notification, ident)

    def work(self) -> Any:
        """Carry out what is due, as a worker does."""
        return Worker(self.runs.handled_by(self.deliver.deliver)).run_due(timedelta(seconds=DEADLINE))

    def eventually(self, ident: int, status: str) -> None:
        eventually(lambda: self.status(ident) == status, f"notification {ident} as {status}")


@pytest.fixture(scope="module")
def others(database_url: str) -> Iterator[tuple[MailServer, ChatService]]:
    """The servers, in the settings of the example."""
    with MailServer() as mails, ChatService() as chat, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DATABASE_URL", database_url)
        patch.setenv("OUTBOX_SMTP_HOST", "127.0.0.1")
        patch.setenv("OUTBOX_SMTP_PORT", str(mails.port))
        patch.setenv("OUTBOX_CHAT_URL", chat.url)
        patch.setenv("OUTBOX_BACKOFF", str(BACKOFF))
        patch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        patch.syspath_prepend(str(EXAMPLES))
        yield mails, chat
        for name in [name for name in sys.modules if name.partition(".")[0] == "outbox"]:
            del sys.modules[name]


@pytest.fixture
def shop(others: tuple[MailServer, ChatService], empty_url: str) -> Iterator[Shop]:
    for other in others:
        other.reset()
    shop = Shop(*others)
    shop.database.create_tables()
    yield shop
    shop.database.engine.dispose()


# the promise


def test_an_order_and_its_notification_exist_if_and_only_if_the_caller_commits(shop: Shop, empty_url: str) -> None:
    with statements(shop.database.engine) as sent, shop.database.new_session() as session:
        shop.shop.place_order(session, uuid4(), "tea tin", THREE)
        session.flush()
        assert (shop.count("Order"), shop.count("Notification")) == (0, 0), "as another session sees it"
        session.rollback()
        shop.work()
        assert (shop.count("Order"), shop.count("Notification")) == (0, 0)
        shop.shop.place_order(session, uuid4(), "tea tin", THREE)
        session.commit()
    assert (shop.count("Order"), shop.count("Notification")) == (1, 1)
    assert not [statement for statement in sent if "SAVEPOINT" in statement]
    assert shop.mails.accepted == []
    shop.work()
    assert shop.mails.counts() == {ADA: 1, BEN: 1, CAROL: 1}


def test_a_request_that_is_made_twice_promises_and_sends_once(shop: Shop) -> None:
    request = uuid4()
    first = shop.order(THREE, request)
    assert shop.order(THREE, request) == first
    shop.work()
    assert shop.order(THREE, request) == first, "also after it was sent"
    shop.work()
    assert (shop.count("Order"), shop.count("Notification")) == (1, 1)
    assert shop.mails.counts() == {ADA: 1, BEN: 1, CAROL: 1}
    with pytest.raises(KeyConflict):
        shop.order(THREE[:1], request)


@pytest.mark.parametrize("first_commits", [True, False])
def test_of_two_requests_at_the_same_moment_the_second_waits_for_the_first(shop: Shop, first_commits: bool) -> None:
    request = uuid4()
    with shop.database.new_session() as session:
        shop.shop.place_order(session, request, "tea tin", THREE)
        session.flush()
        second = Background(lambda: shop.order(THREE, request))
        wait_until_blocked(shop.database.engine)
        if first_commits:
            session.commit()
        else:
            session.rollback()
    second.result()
    assert (shop.count("Order"), shop.count("Notification")) == (1, 1)


def test_what_no_attempt_could_send_is_refused_in_the_request(shop: Shop) -> None:
    for recipient in "mail:ada", "mail:a@b.c, d@e.f", "mail:a@b.c\nBcc: d@e.f", "fax:1", "chat:a/b":
        with pytest.raises((ValueError, HeaderParseError)):
            shop.order([recipient])
    with pytest.raises(ValueError, match="longer than 200"):
        shop.order([f"mail:{'a' * 190}@example.org"])
    with pytest.raises(ValueError, match="one line"):
        shop.order(THREE, article="tea\r\nBcc: eve@example.org")
    assert (shop.count("Order"), shop.count("Notification")) == (0, 0)


def test_the_recipients_cannot_change_once_they_are_promised_a_message(shop: Shop) -> None:
    ident = shop.order(THREE)
    with shop.database.new_session() as session:
        session.get_one(shop.models.Notification, ident).recipients = THREE[:1]
        with pytest.raises(FrozenPayload):
            session.commit()


def test_a_recipient_who_is_named_twice_is_sent_one_message(shop: Shop) -> None:
    assert shop.attempt(shop.order([*THREE, *THREE])).status == "sent"
    assert shop.mails.counts() == {ADA: 1, BEN: 1, CAROL: 1}


def test_a_message_of_a_megabyte_wakes_a_listening_worker_and_arrives_whole(shop: Shop) -> None:
    content = "Grüße, " * 150_000
    working = Worker(shop.runs.handled_by(shop.deliver.deliver), poll=timedelta(hours=1))
    background = Background(working.run)
    listens = text("SELECT count(*) FROM pg_stat_activity WHERE query = 'LISTEN sqla_durable'")
    with shop.database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        eventually(lambda: connection.scalar(listens), "a worker that listens")
    with shop.database.new_session.begin() as session:
        shop.runs.start(session, recipients=[f"mail:{ADA}"], subject="Grüße", text=content)
    eventually(lambda: shop.mails.accepted, "the mail")
    working.stop()
    background.result()
    mail: Any = message_from_bytes(shop.mails.accepted[0].content, policy=default)
    assert mail.get_content().strip() == content.strip()
    assert mail["Subject"] == "Grüße"


# sending


def test_no_transaction_is_open_and_no_lock_is_held_while_a_message_is_sent(shop: Shop, empty_url: str) -> None:
    watching = create_engine(empty_url)
    seen: list[tuple[str, list[Any]]] = []

    def look_at_mail(mail: Mail) -> None:
        seen.append((mail.recipient, open_transactions(watching)))

    def look_at_post(post: Post) -> tuple[int, dict[str, str]]:
        seen.append((post.room, open_transactions(watching)))
        return 201, {}

    shop.mails.on_accepted, shop.chat.on_post = look_at_mail, look_at_post
    ident = shop.order([*THREE, "chat:orders"])
    with shop.database.new_session() as session:
        session.get(shop.models.Notification, ident)
        assert open_transactions(watching), "one that is open is seen"
    assert shop.work() == {Ending.LANDED: 1}
    assert seen == [(ADA, []), (BEN, []), (CAROL, []), ("orders", [])]
    assert shop.status(ident) == "sent"
    watching.dispose()


def test_each_recipient_has_a_message_with_an_id_of_its_own(shop: Shop) -> None:
    first, second = (shop.order([*THREE, "chat:orders", "chat:packing"]) for _ in range(2))
    shop.work()
    assert len({mail.message_id for mail in shop.mails.accepted}) == 6
    assert len(shop.chat.messages) == len(shop.chat.posts) == 4
    effects = {receipt.step: str(receipt.effect) for receipt in shop.runs.receipts(first)}
    assert (effects[f"mail:{ADA}"], effects["chat:orders"]) == ("external", "keyed")
    assert shop.receipts(second) == dict.fromkeys([*THREE, "chat:orders", "chat:packing"], "succeeded")


def test_a_recipient_who_cannot_be_reached_now_is_tried_again_and_the_others_are_not(shop: Shop) -> None:
    answers = ["450 mailbox busy", "451 try again later"]
    shop.mails.on_recipient = lambda address: answers.pop(0) if address == BEN and answers else None
    ident = shop.order(THREE)
    assert shop.attempt(ident).ending is Ending.INTERRUPTED
    assert shop.mails.counts() == {ADA: 1, CAROL: 1}
    assert shop.receipts(ident) == {f"mail:{ADA}": "succeeded", f"mail:{CAROL}": "succeeded"}
    assert (shop.status(ident), shop.runs.get(ident).attempts) == ("pending", 1)
    shop.attempt(ident)
    assert shop.attempt(ident).status == "sent"
    assert shop.mails.counts() == {ADA: 1, BEN: 1, CAROL: 1}


def test_a_recipient_who_is_refused_for_good_fails_alone_and_a_requeue_sends_what_is_left(shop: Shop) -> None:
    shop.mails.on_recipient = lambda address: "550 no such user" if address == BEN else None
    ident = shop.order(THREE)
    outcome = shop.attempt(ident)
    assert (outcome.ending, outcome.status) == (Ending.LANDED, "failed")
    assert shop.receipts(ident) == {f"mail:{ADA}": "succeeded", f"mail:{BEN}": "failed", f"mail:{CAROL}": "succeeded"}
    assert shop.work() == {}, "it is over"
    shop.mails.reset()
    assert shop.runs.requeue(ident)
    assert shop.work() == {Ending.LANDED: 1}
    assert shop.mails.counts() == {BEN: 1}
    assert shop.status(ident) == "sent"


def test_one_who_is_refused_for_good_does_not_keep_another_from_being_tried_again(shop: Shop) -> None:
    answers = {ADA: ["550 no such user"], BEN: ["450 mailbox busy"], CAROL: []}
    shop.mails.on_recipient = lambda address: answers[address].pop() if answers[address] else None
    ident = shop.order(THREE)
    assert shop.attempt(ident).ending is Ending.INTERRUPTED
    assert shop.attempt(ident).status == "failed"
    assert shop.mails.counts() == {BEN: 1, CAROL: 1}
    assert shop.receipts(ident)[f"mail:{ADA}"] == "failed"


def test_attempts_are_bounded_and_further_and_further_apart(shop: Shop) -> None:
    shop.mails.on_recipient = lambda _: "450 mailbox busy"
    ident = shop.order([f"mail:{ADA}"])
    delays: list[float] = []
    while shop.status(ident) == "pending":
        shop.attempt(ident)
        notification = shop.runs.get(ident)
        delays.append((notification.available_at - shop.now()).total_seconds())
    assert shop.status(ident) == "dead"
    assert [failure["attempt"] for failure in notification.failures] == [1, 2, 3, 4, 5]
    for number, delay in enumerate(delays[:-1]):
        expected = BACKOFF * 4**number
        assert expected * 0.9 - 0.1 < delay < expected * 1.1 + 0.01
    shop.mails.reset()
    assert shop.runs.requeue(ident)
    assert shop.attempt(ident).status == "sent"


def test_a_server_that_is_away_or_silent_is_tried_again(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    ident = shop.order([f"mail:{ADA}", "chat:orders"])
    settings = shop.channels.settings
    away = replace(settings, smtp_port=1, chat_url="http://127.0.0.1:1")
    monkeypatch.setattr(shop.channels, "settings", away)
    assert shop.attempt(ident).ending is Ending.INTERRUPTED
    monkeypatch.setattr(shop.channels, "settings", replace(settings, timeout=0.1))
    silent = threading.Event()

    def be_silent(_: object) -> tuple[int, dict[str, str]] | None:
        silent.wait(DEADLINE)
        return None

    shop.mails.on_recipient = lambda _: be_silent(_) and None
    shop.chat.on_post = lambda _: be_silent(_) or (0, {})
    assert shop.attempt(ident).ending is Ending.INTERRUPTED
    silent.set()
    shop.mails.reset()
    shop.chat.reset()
    monkeypatch.setattr(shop.channels, "settings", settings)
    assert shop.attempt(ident).status == "sent"
    assert (shop.mails.counts(), len(shop.chat.messages)) == ({ADA: 1}, 1)


def test_a_farewell_that_goes_wrong_does_not_have_the_mail_sent_again(shop: Shop) -> None:
    shop.mails.farewell = "421 too busy for that"
    assert shop.attempt(shop.order(THREE)).status == "sent"
    assert shop.mails.counts() == {ADA: 1, BEN: 1, CAROL: 1}


def test_a_chat_service_says_itself_when_to_come_again(shop: Shop) -> None:
    answers = [(429, {"Retry-After": "120"}), (503, {"Retry-After": "3600"}), (503, {"Retry-After": "soon"}), (201, {})]
    shop.chat.on_post = lambda _: answers.pop(0)
    ident = shop.order(["chat:orders"])
    for expected in 120, 3600, BACKOFF * 16:
        assert shop.attempt(ident).ending is Ending.INTERRUPTED
        delay = (shop.runs.get(ident).available_at - shop.now()).total_seconds()
        assert expected * 0.9 - 1 < delay < expected * 1.1 + 1
    assert shop.attempt(ident).status == "sent"
    assert len({post.key for post in shop.chat.posts}) == 1


def test_a_chat_service_that_refuses_is_not_asked_again(shop: Shop) -> None:
    shop.chat.on_post = lambda _: (404, {"Retry-After": "1"})
    ident = shop.order(["chat:nowhere", f"mail:{ADA}"])
    assert shop.attempt(ident).status == "failed"
    assert (len(shop.chat.posts), shop.mails.counts()) == (1, {ADA: 1})


# the window


def test_a_mail_whose_acceptance_is_not_heard_of_is_sent_again_as_the_same_mail(shop: Shop) -> None:
    answers: list[str | None] = [CUT]
    shop.mails.on_accepted = lambda mail: answers.pop() if mail.recipient == BEN and answers else None
    ident = shop.order(THREE)
    assert shop.attempt(ident).ending is Ending.INTERRUPTED
    assert shop.attempt(ident).status == "sent"
    assert shop.mails.counts() == {ADA: 1, BEN: 2, CAROL: 1}
    first, second = (mail for mail in shop.mails.accepted if mail.recipient == BEN)
    assert first == second, "to the last byte"


def test_a_chat_message_whose_acceptance_is_not_heard_of_is_posted_again_and_is_there_once(shop: Shop) -> None:
    answers = [0]
    shop.chat.on_post = lambda _: (answers.pop() if answers else 201, {})
    ident = shop.order(["chat:orders"])
    assert shop.attempt(ident).ending is Ending.INTERRUPTED
    assert shop.attempt(ident).status == "sent"
    assert (len(shop.chat.posts), len(shop.chat.messages)) == (2, 1)


def test_a_connection_to_the_database_that_breaks_during_a_send_repeats_nothing(shop: Shop, empty_url: str) -> None:
    breaking = create_engine(empty_url)
    others = text(
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    broken: list[int] = []

    def break_connections(mail: Mail) -> None:
        with breaking.connect() as connection:
            broken.append(connection.scalar(others) or 0)

    shop.mails.on_accepted = break_connections
    ident = shop.order(THREE)
    assert shop.work() == {Ending.LANDED: 1}
    assert all(broken), broken
    assert shop.mails.counts() == {ADA: 1, BEN: 1, CAROL: 1}
    assert shop.status(ident) == "sent"
    breaking.dispose()


@pytest.mark.slow
def test_a_process_killed_at_any_point_repeats_the_mail_without_a_receipt_and_no_other(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setenv("PGAPPNAME", "doomed")
    with Program("deliveries") as program:

        def deliver_in_a_process(ident: int, point: int | None) -> tuple[list[str], Any]:
            number, labels, outcome = program.ask([ident, point])
            assert number == (None if point is None else signal.SIGKILL)
            return labels, outcome

        points, outcome = deliver_in_a_process(shop.order([*THREE, "chat:orders"]), None)
        assert outcome["status"] == "sent"
        repeated: set[str] = set()
        for point, label in enumerate(points):
            shop.mails.reset()
            shop.chat.reset()
            ident = shop.order([*THREE, "chat:orders"])
            deliver_in_a_process(ident, point)
            shop.forget_the_dead(ident)
            kept = shop.receipts(ident)
            sent = [f"mail:{mail.recipient}" for mail in shop.mails.accepted] + ["chat:orders"] * len(shop.chat.posts)
            window = set(sent) - set(kept)
            assert set(kept) <= set(sent), "no receipt without a message"
            if shop.status(ident) != "sent":
                assert shop.attempt(ident).status == "sent"
            expected = {address: 2 if f"mail:{address}" in window else 1 for address in (ADA, BEN, CAROL)}
            assert shop.mails.counts() == expected, f"killed at point {point} of {len(points)}, {label!r}"
            assert len({(mail.recipient, mail.message_id) for mail in shop.mails.accepted}) == 3
            assert (len(shop.chat.posts), len(shop.chat.messages)) == (2 if "chat:orders" in window else 1, 1)
            assert len(window) <= 1
            repeated |= window
    assert repeated == {*THREE, "chat:orders"}, "each window was met"


# workers


def test_a_worker_killed_between_acceptance_and_receipt_sends_that_mail_twice_and_only_that_one(shop: Shop) -> None:
    doomed: list[Process] = []

    def kill(mail: Mail) -> None:
        if mail.recipient == BEN and doomed:
            doomed.pop().kill()

    shop.mails.on_accepted = kill
    with worker(OUTBOX_LEASE="0.5") as first:
        doomed.append(first)
        ident = shop.order(THREE)
        assert first.process.wait(DEADLINE) == -signal.SIGKILL
    assert shop.receipts(ident) == {f"mail:{ADA}": "succeeded"}
    with worker(OUTBOX_LEASE="0.5"):
        shop.eventually(ident, "sent")
    assert shop.mails.counts() == {ADA: 1, BEN: 2, CAROL: 1}
    assert len({mail.message_id for mail in shop.mails.accepted}) == 3


def test_a_worker_killed_before_the_server_has_accepted_sends_once(shop: Shop) -> None:
    doomed: list[Process] = []

    def kill(address: str) -> None:
        if address == BEN and doomed:
            doomed.pop().kill()

    shop.mails.on_recipient = kill
    with worker(OUTBOX_LEASE="0.5") as first:
        doomed.append(first)
        ident = shop.order(THREE)
        assert first.process.wait(DEADLINE) == -signal.SIGKILL
    with worker(OUTBOX_LEASE="0.5"):
        shop.eventually(ident, "sent")
    assert shop.mails.counts() == {ADA: 1, BEN: 1, CAROL: 1}


def test_a_server_that_takes_longer_than_the_lease_is_waited_for_by_one_of_two_workers(shop: Shop) -> None:
    def be_slow(_: Mail) -> None:
        time.sleep(1.5)

    shop.mails.on_accepted = be_slow
    with worker(OUTBOX_LEASE="0.5"), worker(OUTBOX_LEASE="0.5"):
        ident = shop.order(THREE[:1])
        shop.eventually(ident, "sent")
    assert shop.mails.counts() == {ADA: 1}
    assert shop.runs.get(ident).attempts == 1


def test_a_worker_that_was_frozen_past_its_lease_writes_nothing_when_it_thaws(shop: Shop) -> None:
    thawed, answered = threading.Event(), threading.Event()
    frozen: list[Process] = []

    def freeze(_: Mail) -> None:
        if frozen:
            frozen.pop().freeze()
            assert thawed.wait(DEADLINE)
            answered.set()

    shop.mails.on_accepted = freeze
    with worker(OUTBOX_LEASE="0.5") as first:
        frozen.append(first)
        ident = shop.order([f"mail:{ADA}"])
        eventually(lambda: not frozen, "the first worker in the middle of a send")
        with worker(OUTBOX_LEASE="0.5"):
            shop.eventually(ident, "sent")
        before = shop.runs.get(ident), shop.runs.receipts(ident)
        first.thaw()
        thawed.set()
        assert answered.wait(DEADLINE)
        second = shop.order([f"mail:{BEN}"])
        shop.eventually(second, "sent")  # by the one that thawed: there is no other
    after = shop.runs.get(ident), shop.runs.receipts(ident)
    assert (before[0].fence, before[0].finished_at, before[1]) == (after[0].fence, after[0].finished_at, after[1])
    assert len({mail.message_id for mail in shop.mails.accepted if mail.recipient == ADA}) == 1
    assert shop.mails.counts()[ADA] == 2


# what the page shows


def test_the_commands_of_the_page_place_orders_and_look_after_their_notifications(shop: Shop) -> None:
    request = str(uuid4())
    shop.mails.on_recipient = lambda address: "550 no such user" if address == BEN else None
    orders = [Background(lambda: command("-m", "outbox", "tea tin", *THREE, "--request", request)) for _ in range(2)]
    for placed in [order.result() for order in orders]:
        assert (placed.returncode, placed.stdout) == (0, f"order {request}: tea tin\n"), placed.stderr
    with shop.database.new_session() as session:
        ident = session.scalars(select(shop.models.Notification.id)).one()
    shop.work()
    listed = answered("runs", "outbox.database:notifications", "--status", "failed")
    assert f"ExceptionGroup: not delivered to mail:{BEN} (1 sub-exception)" in listed
    shown = answered("show", "outbox.database:notifications", ident)
    assert "550" in shown
    assert all(recipient in shown for recipient in THREE)
    shop.mails.reset()
    requeued = answered("requeue", "outbox.database:notifications", ident)
    assert requeued == f"{ident}: requeued; it is pending\n"
    with worker() as working:
        shop.eventually(ident, "sent")
        working.process.terminate()
        assert working.process.wait(DEADLINE) == 0
    assert shop.mails.counts() == {BEN: 1}
