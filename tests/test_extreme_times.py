"""Instants and durations at the ends of what Python can hold, in the time zones at the ends of the world."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, timezone
from enum import StrEnum
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import (
    ConfigurationError,
    DeadlineMixin,
    Ending,
    ExpiryMixin,
    FunctionRun,
    Functions,
    Lifecycle,
    Pending,
    ReceiptMixin,
    Retry,
    RetryableError,
    RunMixin,
    RunNotLanded,
    Runs,
    SignalMixin,
    StatusMachine,
    UsageError,
    WaitMixin,
    Worker,
)
from tests.support import DEADLINE, Background, eventually
from tests.support_functions import DurableRun, DurableSignal, DurableStep, FunctionBase

EAST, WEST = timezone(timedelta(hours=14)), timezone(timedelta(hours=-12))
INSTANTS = [end.replace(tzinfo=zone) for end in (datetime.max, datetime.min) for zone in (EAST, UTC, WEST)]
DURATIONS = [timedelta.max, timedelta.min]


class Status(StrEnum):
    ASKED = "asked"
    READY = "ready"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    EXPIRED = "expired"


statuses = StatusMachine(
    Status,
    initial=Status.ASKED,
    transitions={
        Status.ASKED: {Status.READY, Status.EXPIRED},
        Status.READY: {Status.RUNNING, Status.EXPIRED},
        Status.RUNNING: {Status.READY, Status.DONE, Status.FAILED, Status.TIMED_OUT},
    },
)


class TaskBase(DeclarativeBase):
    pass


class Task(WaitMixin, ExpiryMixin, DeadlineMixin, RunMixin, TaskBase):
    __tablename__ = "task"
    __lifecycle__ = Lifecycle(
        statuses,
        ready=Status.READY,
        running=Status.RUNNING,
        done=Status.DONE,
        failed=Status.FAILED,
        timed_out=Status.TIMED_OUT,
        expired=Status.EXPIRED,
        requeue={Status.FAILED},
        retry=Retry(on=lambda error: timedelta.max if isinstance(error, RetryableError) else False),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[Status] = statuses.column()


class TaskStep(ReceiptMixin[Task], TaskBase):
    __tablename__ = "task_step"


class TaskSignal(SignalMixin[Task], TaskBase):
    __tablename__ = "task_signal"


class Place:
    """A database in a time zone, with tasks and functions on it."""

    def __init__(self, url: str, zone: str) -> None:
        self.engine = create_engine(url, connect_args={"options": f"-c timezone={zone}"})
        TaskBase.metadata.create_all(self.engine)
        FunctionBase.metadata.create_all(self.engine)
        factory = sessionmaker(self.engine)
        self.tasks = Runs(factory, Task, TaskStep, signals=TaskSignal)

    @property
    def functions(self) -> Functions[DurableRun]:
        return Functions(self.tasks.session_factory, DurableRun, DurableStep, signals=DurableSignal)

    def started(self, **values: Any) -> int:
        with self.tasks.session_factory.begin() as session:
            return self.tasks.start(session, **{"status": Status.READY, **values}).id

    def executed(self, body: Callable[[Any], object]) -> None:
        """Carry a task out twice; it is done, or waits for its time."""
        ident = self.started()
        for _ in range(2):
            outcome = self.tasks.execute(ident, body, run_now=True)
            if isinstance(outcome.exception, UsageError | ConfigurationError):
                raise outcome.exception
            assert outcome.ending in {Ending.LANDED, Ending.SUSPENDED, Ending.INTERRUPTED}, outcome
            assert outcome.status in {Status.DONE, Status.READY}, outcome
        assert len(self.tasks.receipts(ident)) <= 1

    def start(self, **options: Any) -> None:
        def job(run: FunctionRun) -> None:
            run.sleep("nap", timedelta(0))

        limits = {name: options.pop(name) for name in ["max_duration"] if name in options}
        functions = self.functions
        function = functions.function("job", **limits)(job)
        with functions.session_factory.begin() as session:
            handle = functions.start(session, function, **options)
        functions.describe(handle)
        functions.execute(handle, run_now=True)
        functions.describe(handle)

    def set_directly(self, name: str, value: object) -> None:
        with self.tasks.session_factory.begin() as session:
            session.add(Task(status=Status.READY, **{name: value}))

    def approved(self, name: str, value: object) -> None:
        ident = self.started(status=Status.ASKED)
        with self.tasks.session_factory.begin() as session:
            assert statuses.transition(session, (Task, ident), Status.READY, values={name: value})

    def landed(self, timeout: timedelta) -> None:
        functions = self.functions
        function = functions.function("nothing")(lambda run: None)
        with functions.session_factory.begin() as session:
            handle = functions.start(session, function)
        if timeout > timedelta(0):
            functions.execute(handle)
        functions.wait(handle, timeout=timeout)

    def worked(self, **options: Any) -> None:
        """Have a worker carry a task out, wait for more, and stop."""
        reached, worker = threading.Event(), Worker(self.tasks.handled_by(lambda run: reached.set()), **options)
        ident = self.started()
        working = Background(worker.run)
        assert reached.wait(DEADLINE)
        eventually(lambda: self.tasks.describe(ident).status is Status.DONE, "the end of the run")
        worker.stop()
        working.result()


@pytest.fixture(params=["Pacific/Kiritimati", "Etc/GMT+12"])
def place(request: pytest.FixtureRequest, empty_url: str) -> Iterator[Place]:
    place = Place(empty_url, request.param)
    yield place
    place.engine.dispose()


def failing() -> None:
    raise RetryableError("not now")


OF_INSTANTS: dict[str, Callable[[Place, Any], object]] = {
    "sleep": lambda place, value: place.executed(lambda run: run.sleep("nap", value)),
    "available_at": lambda place, value: place.started(available_at=value),
    "expires_at": lambda place, value: place.started(expires_at=value),
    "expires_at on the object": lambda place, value: place.set_directly("expires_at", value),
    "available_at on the object": lambda place, value: place.set_directly("available_at", value),
    "expires_at along with a transition": lambda place, value: place.approved("expires_at", value),
    "available_at along with a transition": lambda place, value: place.approved("available_at", value),
    "run_at": lambda place, value: place.start(run_at=value),
}
OF_DURATIONS: dict[str, Callable[[Place, Any], object]] = {
    "sleep": OF_INSTANTS["sleep"],
    "available_at": OF_INSTANTS["available_at"],
    "expires_at": OF_INSTANTS["expires_at"],
    "run_at": OF_INSTANTS["run_at"],
    "timeout": lambda place, value: place.executed(lambda run: run.wait("paid", timeout=value)),
    "timeout of answer": lambda place, value: place.executed(lambda run: run.answer("paid", print, timeout=value)),
    "max_duration": lambda place, value: place.started(max_duration=value),
    "max_duration of a function": lambda place, value: place.start(max_duration=value),
    "every": lambda place, value: place.executed(
        lambda run: run.operation("o", start=lambda: 1, poll=lambda ids: Pending(), every=value)
    ),
    "Pending": lambda place, value: place.executed(
        lambda run: run.operation("o", start=lambda: 1, poll=lambda ids: Pending(value))
    ),
    "Retry": lambda place, _: place.executed(lambda run: failing()),
    "older_than": lambda place, value: list(place.tasks.find(older_than=value)),
    "newer_than": lambda place, value: list(place.tasks.find(newer_than=value)),
    "older_than of purge": lambda place, value: place.tasks.purge(older_than=value),
    "older_than of requeue_all": lambda place, value: place.tasks.requeue_all(older_than=value),
    "timeout of a handle": lambda place, value: place.landed(value),
    "poll": lambda place, value: place.worked(poll=value),
    "grace": lambda place, value: place.worked(grace=value),
    "budget": lambda place, value: Worker(place.tasks.handled_by(lambda run: None)).run_due(value),
}


def is_lawful(use: str, value: object, call: Callable[[Any], object]) -> None:
    """Whatever was given, it is either refused by its name, or means as far away as there is."""
    refused: Exception | None = None
    try:
        call(value)
    except RunNotLanded:
        pass
    except (UsageError, ConfigurationError) as error:
        refused = error
    except Exception as error:
        error.add_note(f"given {value!r}")
        raise
    assert refused is None or use.partition(" ")[0] in str(refused)


@pytest.mark.parametrize("use", OF_INSTANTS)
def test_an_instant_at_the_end_of_time_is_refused_by_name_or_as_far_away_as_there_is(place: Place, use: str) -> None:
    for value in INSTANTS:
        is_lawful(use, value, lambda value: OF_INSTANTS[use](place, value))
        check(place, value)


@pytest.mark.parametrize("use", OF_DURATIONS)
def test_a_duration_without_end_is_refused_by_name_or_as_long_as_there_is(place: Place, use: str) -> None:
    for value in DURATIONS:
        is_lawful(use, value, lambda value: OF_DURATIONS[use](place, value))
        check(place, value)


def check(place: Place, value: object) -> None:
    """Whatever was written can be read, listed, claimed and reaped, also in this time zone."""
    try:
        with Session(place.engine) as session:
            list(session.query(Task))
            list(session.query(DurableRun))
        list(place.tasks.find())
        list(place.functions.find())
        place.tasks.claim_due(10)
        place.tasks.reap()
    except Exception as error:
        error.add_note(f"given {value!r}")
        raise
