"""A worker is woken up by notifications, on a connection of its own; nothing but its haste depends on them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Runs, Worker, listener
from sqla_durable.dispatch import Dispatcher
from sqla_durable.wake import CHANNEL
from tests.support import Background, Plan, PlanStatus, PlanStep, approved_plan, column, eventually, write_entry
from tests.support_jobs import Brief, BriefStep, add_jobs
from tests.support_workers import BOTH, plans_by, working

HOUR = timedelta(hours=1)
LISTENING = "FROM pg_stat_activity WHERE datname = current_database() AND query = 'LISTEN sqla_durable'"


def listeners(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(text(f"SELECT count(*) {LISTENING}")) or 0


def notify(engine: Engine, payload: str = "plan") -> None:
    with engine.begin() as connection:
        connection.execute(text("SELECT pg_notify(:channel, :payload)"), {"channel": CHANNEL, "payload": payload})


def one_step(run: Any) -> None:
    run.step("only", write_entry, str(run.row.id))


def executed(engine: Engine, ident: Any) -> Callable[[], bool]:
    return lambda: column(engine, ident, "status") is PlanStatus.EXECUTED


@pytest.mark.parametrize("form", BOTH)
def test_a_notification_wakes_a_worker_up_that_would_not_look_for_an_hour(
    engine: Engine, session_factory: sessionmaker[Session], form: str
) -> None:
    with working(form, engine, plans_by(one_step), listen=True, poll=HOUR):
        eventually(lambda: listeners(engine), "a listener")
        time.sleep(0.2)  # it has looked once more, right after it began to listen
        for _ in range(3):
            ident = approved_plan(session_factory)
            notify(engine)
            eventually(executed(engine, ident), "the run")


@pytest.mark.parametrize("form", BOTH)
def test_what_was_started_before_the_worker_listened_is_not_missed(
    engine: Engine, session_factory: sessionmaker[Session], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    is_pooled = listener.is_pooled

    def late(connection: Any) -> bool:
        started.append(approved_plan(session_factory))  # and nobody hears of it
        return is_pooled(connection)

    monkeypatch.setattr(listener, "is_pooled", late)
    with working(form, engine, plans_by(one_step), listen=True, poll=HOUR):
        eventually(lambda: started, "a listener")
        eventually(executed(engine, started[0]), "the run")


@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize("listen", [False, True])
def test_without_a_notification_it_polls(
    engine: Engine, session_factory: sessionmaker[Session], form: str, listen: bool
) -> None:
    with working(form, engine, plans_by(one_step), listen=listen):
        eventually(lambda: listeners(engine) == int(listen), "a listener, or none")
        ident = approved_plan(session_factory)
        eventually(executed(engine, ident), "the run")
        assert listeners(engine) == int(listen)


def test_a_notification_of_other_runs_is_not_for_it(
    engine: Engine, session_factory: sessionmaker[Session], caplog: pytest.LogCaptureFixture
) -> None:
    with working("sync", engine, plans_by(one_step), listen=True, poll=HOUR):
        eventually(lambda: listeners(engine), "a listener")
        time.sleep(0.2)
        ident = approved_plan(session_factory)
        notify(engine, "mail")
        notify(engine, "")
        time.sleep(0.3)
        assert not executed(engine, ident)()
        notify(engine)
        eventually(executed(engine, ident), "the run")


@pytest.mark.parametrize("form", BOTH)
def test_a_listener_whose_backend_is_ended_again_and_again_listens_again(
    engine: Engine, session_factory: sessionmaker[Session], form: str, caplog: pytest.LogCaptureFixture
) -> None:
    with working(form, engine, plans_by(one_step), listen=True, poll=HOUR):
        for _ in range(4):
            eventually(lambda: listeners(engine), "a listener")
            with engine.connect() as connection:
                assert connection.scalar(text(f"SELECT pg_terminate_backend(pid, 10000) {LISTENING}"))
        eventually(lambda: listeners(engine), "a listener")
        time.sleep(0.2)
        ident = approved_plan(session_factory)
        notify(engine)
        eventually(executed(engine, ident), "the run")
    # A handler that an earlier test had left behind may end now, and that is reported, too.
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING and record.funcName != "report"]
    assert warned == []


def test_a_listener_survives_whatever_a_users_hook_raises(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    own = create_engine(engine.url)
    refused: list[int] = []

    def no_token(dialect: Any, record: Any, arguments: Any, options: Any) -> None:
        if threading.current_thread().name == "sqla_durable listening" and len(refused) < 3:
            refused.append(1)
            raise LookupError("no token at present")

    event.listen(own, "do_connect", no_token)
    plans: Runs[Plan] = Runs(sessionmaker(own), Plan, PlanStep)
    worker = Worker(plans.handled_by(one_step), poll=HOUR)
    background = Background(worker.run)
    eventually(lambda: len(refused) == 3 and listeners(engine), "a listener")
    worker.stop()
    background.result()
    own.dispose()


def test_a_listener_takes_no_connection_of_the_pool_and_is_gone_with_its_worker(
    engine: Engine, session_factory: sessionmaker[Session]
) -> None:
    options = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 0.1}
    with working("sync", engine, plans_by(one_step), listen=True, concurrency=1, engine_options=options):
        eventually(lambda: listeners(engine), "a listener")
        ident = approved_plan(session_factory)
        eventually(executed(engine, ident), "the run")
    eventually(lambda: not listeners(engine), "the end of its backend")


def test_workers_of_several_classes_of_one_engine_listen_on_one_connection(engine: Engine) -> None:
    add_jobs(engine, Brief, 1)
    with working("sync", engine, plans_by(one_step), (Brief, BriefStep, lambda run: None), listen=True, poll=HOUR):
        eventually(lambda: listeners(engine), "a listener")
        assert listeners(engine) == 1


def test_the_pause_between_polls_varies(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    wait = Dispatcher._wait

    def noted(dispatcher: Dispatcher, *longest: float, **options: Any) -> None:
        waits.extend(longest)
        wait(dispatcher, *longest, **options)

    monkeypatch.setattr(Dispatcher, "_wait", noted)
    with working("sync", engine, plans_by(one_step)):
        eventually(lambda: len(waits) >= 10, "ten polls")
    assert len(set(waits)) == len(waits)
    assert all(0.75 * 0.05 <= each <= 1.25 * 0.05 for each in waits)
