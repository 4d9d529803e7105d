"""A long run under all that can go wrong, with a bill at the end.

Run it by hand; it takes a little over five minutes::

    python -m tests.benchmarks.soak [--messages 20000] [--minutes 5] [--seed 1]

Four worker processes deliver an outbox while they are killed at random, frozen for longer than their leases and
continued, while their connections are cut, and while PostgreSQL is stopped (``immediate``) and started again three
times. What is sent is noted outside of the database, as a mail server would. In the end every message must have been
sent, none may have been running beyond its lease for longer than it takes to look, and a message that was sent twice
must have had its first sender disturbed between the sending and the receipt.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, NullPool, create_engine, func, insert, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, sessionmaker

from sqla_durable import Lifecycle, ReceiptMixin, Retry, Run, RunMixin, Runs, StatusMachine, Worker, embedded

WORKERS = 4
CONCURRENCY = 10
LEASE = timedelta(seconds=5)
POLL = timedelta(seconds=0.5)
TO_LOOK = timedelta(seconds=3)
"""How long after a lapse somebody has looked: a poll, a busy machine, a claim that waits for the database."""


class MessageStatus(StrEnum):
    PENDING = "pending"
    SENDING = "sending"
    SENT = "sent"
    FAILED = "failed"
    DEAD = "dead"


message_statuses = StatusMachine(
    MessageStatus,
    initial=MessageStatus.PENDING,
    transitions={
        MessageStatus.PENDING: {MessageStatus.SENDING},
        MessageStatus.SENDING: {
            MessageStatus.SENT,
            MessageStatus.FAILED,
            MessageStatus.DEAD,
            MessageStatus.PENDING,
        },
    },
)


class Base(DeclarativeBase):
    pass


class Message(RunMixin, Base):
    __tablename__ = "message"
    __lifecycle__ = Lifecycle(
        message_statuses,
        ready=MessageStatus.PENDING,
        running=MessageStatus.SENDING,
        done=MessageStatus.SENT,
        failed=MessageStatus.FAILED,
        dead=MessageStatus.DEAD,
        lease=LEASE,
        retry=Retry(max_attempts=50, backoff=timedelta(seconds=0.1), cap=timedelta(seconds=1)),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[MessageStatus] = message_statuses.column()


class MessageStep(ReceiptMixin[Message], Base):
    __tablename__ = "message_step"


# the worker process


def work(url: str, outbox: str) -> None:
    """Deliver until told to stop; each delivery is a line in a file."""
    sent = os.open(outbox, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def send(ident: int) -> int:
        os.write(sent, f"{json.dumps([ident, os.getpid(), time.time()])}\n".encode())
        time.sleep(0.02)
        return os.getpid()

    def deliver(run: Run[Message]) -> None:
        run.external("mail", send, run.row.id)

    engine = create_engine(url, pool_size=CONCURRENCY + 5, connect_args={"application_name": "soak worker"})
    messages: Runs[Message] = Runs(sessionmaker(engine), Message, MessageStep)
    Worker(messages.handled_by(deliver), concurrency=CONCURRENCY, poll=POLL, grace=timedelta(seconds=5)).run()


# the chaos


@dataclass
class Soak:
    """The processes, and the log of what was done to them."""

    server: embedded.EmbeddedServer
    outbox: Path
    messages: int
    minutes: float
    chance: random.Random
    disturbed: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """When each worker was disturbed, by its process number."""
    outages: list[float] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    stuck: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.engine: Engine = create_engine(self.server.url, poolclass=NullPool)
        self.workers = [self.start() for _ in range(WORKERS)]

    def start(self) -> subprocess.Popen[bytes]:
        """Start a worker process."""
        command = [sys.executable, "-m", "tests.benchmarks.soak", "--work", self.server.url, str(self.outbox)]
        return subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        """Kill a worker, and start another in its place."""
        place = self.chance.randrange(WORKERS)
        victim = self.workers[place]
        self.disturbed[victim.pid].append(time.time())
        victim.kill()
        victim.wait()
        self.workers[place] = self.start()
        self.counts["kills"] += 1

    def freeze(self) -> None:
        """Stop a worker for longer than its lease, and let it go on."""
        victim = self.chance.choice(self.workers)
        self.disturbed[victim.pid].append(time.time())
        victim.send_signal(signal.SIGSTOP)
        self.over.wait(LEASE.total_seconds() * self.chance.uniform(0.8, 2))
        victim.send_signal(signal.SIGCONT)
        self.disturbed[victim.pid].append(time.time())
        self.counts["freezes"] += 1

    def cut(self) -> None:
        """End every connection of the workers."""
        query = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'soak worker'"
        self.outages.append(time.time())
        with suppress(SQLAlchemyError), self.engine.begin() as connection:
            self.counts["connections cut"] += len(connection.execute(text(query)).all())

    def restart(self) -> None:
        """Stop the server as a crash would, and start it again."""
        self.outages.append(time.time())
        self.server.restart("immediate")
        self.outages.append(time.time())
        self.counts["restarts"] += 1

    # the bill

    def feed(self) -> None:
        """Put the messages in, evenly over the whole time."""
        began, fed = time.monotonic(), 0
        while fed < self.messages:
            due = min(self.messages, int(self.messages * (time.monotonic() - began) / (self.minutes * 60)) + 1)
            if due > fed:
                rows = [{"id": ident + 1} for ident in range(fed, due)]
                with suppress(SQLAlchemyError), self.engine.begin() as connection:
                    connection.execute(insert(Message.__table__).values(rows))
                fed = self._count()
            self.over.wait(0.1)

    def _count(self) -> int:
        # The outcome of a commit that an outage cut off is in the table.
        while True:
            with suppress(SQLAlchemyError), self.engine.connect() as connection:
                return connection.scalar(select(func.max(Message.id))) or 0
            time.sleep(0.2)

    def watch(self) -> None:
        """Note the longest that a message was running beyond its lease while the server could be asked."""
        overdue = "SELECT extract(epoch FROM max(clock_timestamp() - lease_expires_at)) FROM message"
        up = "clock_timestamp() - pg_postmaster_start_time() > interval '8 seconds'"
        while not self.over.wait(0.5):
            with suppress(SQLAlchemyError), self.engine.connect() as connection:
                worst = connection.scalar(text(f"{overdue} WHERE status = 'sending' AND {up}"))
                self.stuck = max(self.stuck, float(worst or 0))

    def wait_until_all_are_sent(self) -> None:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            with self.engine.connect() as connection:
                if connection.scalar(select(func.count()).where(Message.status == MessageStatus.SENT)) == self.messages:
                    return
            time.sleep(0.5)

    def bill(self) -> bool:
        """Print what came of it; return whether it is as promised."""
        sends: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for line in self.outbox.read_text().splitlines():
            ident, pid, at = json.loads(line)
            sends[ident].append((pid, at))
        with self.engine.connect() as connection:
            rows = connection.execute(text("SELECT status, count(*) FROM message GROUP BY 1")).all()
        statuses = {str(row[0]): int(row[1]) for row in rows}
        twice = {ident: times for ident, times in sends.items() if len(times) > 1}
        unexplained = [ident for ident, times in twice.items() if not all(self.explained(*one) for one in times[:-1])]
        lost = self.messages - len(sends)
        for name, figure in [
            *self.counts.items(),
            *((f"status {status}", count) for status, count in statuses.items()),
            ("messages", self.messages),
            ("never sent", lost),
            ("sent more than once", len(twice)),
            ("sent more than once without a disturbance between sending and receipt", len(unexplained)),
            ("longest beyond a lease, in seconds", round(self.stuck, 1)),
        ]:
            print(f"{name:75}{figure:>10}")
        in_time = self.stuck <= TO_LOOK.total_seconds()
        return not lost and not unexplained and in_time and statuses == {"sent": self.messages}

    def explained(self, pid: int, at: float) -> bool:
        """Whether the sender was disturbed between sending and receipt, which is when a message is sent again.

        That takes the twenty milliseconds of the sending, and as long as the receipt is tried: five seconds.
        """
        disturbances = [*self.disturbed[pid], *self.outages]
        return any(at - 1 <= disturbance <= at + 6 for disturbance in disturbances)


def disturb(soak: Soak) -> None:
    """Disturb until the time is over; the restarts are spread evenly."""
    began = time.monotonic()
    restarts = [soak.minutes * 60 * share for share in (0.25, 0.5, 0.75)]
    disturbances: list[Callable[[], Any]] = [soak.kill, soak.kill, soak.freeze, soak.cut]
    while time.monotonic() - began < soak.minutes * 60:
        soak.over.wait(soak.chance.uniform(1, 4))
        if restarts and time.monotonic() - began > restarts[0]:
            restarts.pop(0)
            soak.restart()
        else:
            soak.chance.choice(disturbances)()


def main() -> None:
    """Run the soak, or one of its workers."""
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:4])
        return
    parser = argparse.ArgumentParser(description="A long run under all that can go wrong.")
    parser.add_argument("--messages", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=1)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, embedded.start(settings={"max_connections": "200"}) as server:
        engine = create_engine(server.url)
        Base.metadata.create_all(engine)
        engine.dispose()
        soak = Soak(server, Path(folder) / "sent", wanted.messages, wanted.minutes, random.Random(wanted.seed))
        threads = [threading.Thread(target=each, daemon=True) for each in (soak.feed, soak.watch)]
        for thread in threads:
            thread.start()
        disturb(soak)
        threads[0].join()
        soak.wait_until_all_are_sent()
        soak.over.set()
        for worker in soak.workers:
            worker.terminate()
        codes = [worker.wait(30) for worker in soak.workers]
        print(f"{'exit statuses of the workers that were told to stop':75}{codes!s:>10}")
        sys.exit(0 if soak.bill() and codes == [0] * WORKERS else 1)


if __name__ == "__main__":
    main()
