"""A worker whose own clock is wrong by as many seconds as it is told; it does what each line says."""

from __future__ import annotations

import datetime as dt
import json
import sys
import threading
import time
from typing import Any

from sqlalchemy import create_engine, event, func, select
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import RetryableError, Run, Runs
from tests.support_consent import Consent, ConsentStep, Status, consent_statuses
from tests.support_deadline import HOUR, Timed, TimedStep
from tests.support_jobs import JobStatus, Patient, PatientStep

_now, _time, _time_ns = dt.datetime, time.time, time.time_ns


def shift_clock(seconds: float) -> None:
    """Let every wall clock of this process be wrong, also where a module has a name of its own for it."""
    shift = dt.timedelta(seconds=seconds)

    class Shifted(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Any:
            return _now.now(tz) + shift

        @classmethod
        def utcnow(cls) -> Any:
            return _now.now(dt.UTC).replace(tzinfo=None) + shift

    wrong: dict[Any, Any] = {
        _now: Shifted,
        _time: lambda: _time() + seconds,
        _time_ns: lambda: _time_ns() + int(seconds * 1e9),
    }
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in {"sqla_durable", "sqlalchemy", "psycopg", "datetime", "time"}:
            for attribute, value in list(vars(module).items()):
                if type(value) in {type, type(_time), type(shift_clock)} and value in wrong:
                    setattr(module, attribute, wrong[value])


class Worker:
    """Its methods are what a line may ask for."""

    def __init__(self, url: str, seconds: float) -> None:
        self.engine = create_engine(url)
        self.factory = sessionmaker(self.engine)
        self.jobs: Runs[Patient] = Runs(self.factory, Patient, PatientStep)
        self.consents: Runs[Consent] = Runs(self.factory, Consent, ConsentStep)
        self.timed: Runs[Timed] = Runs(self.factory, Timed, TimedStep)
        self.found: list[str] = []
        self.run: Run[Patient] | None = None
        with self.engine.connect() as connection:
            self.wrong_now = connection.execute(select(func.now())).scalar_one().timestamp() + seconds
        event.listen(self.engine, "before_cursor_execute", self._note)

    @property
    def held(self) -> Run[Patient]:
        assert self.run is not None
        return self.run

    def _note(self, _: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        """Note a parameter that is nearer to this process's clock than to the database's."""
        for value in parameters.values() if isinstance(parameters, dict) else parameters or ():
            at = value.timestamp() if isinstance(value, dt.date) else value
            if isinstance(at, int | float) and abs(at - self.wrong_now) < 1000:
                self.found.append(f"{value!r} in {statement}")

    def clocks(self, _: None) -> list[float]:
        return [time.time(), dt.datetime.now(dt.UTC).timestamp(), time.time_ns() / 1e9]

    def suspicious(self, _: None) -> list[str]:
        return self.found

    def approve(self, ident: int) -> bool:
        """Approve a consent for half an hour."""
        half_an_hour = {"expires_at": func.now() + dt.timedelta(minutes=30)}
        with self.factory.begin() as session:
            return consent_statuses.transition(session, (Consent, ident), Status.APPROVED, values=half_an_hour)

    def claim_consent(self, ident: int) -> bool:
        return self.consents.claim(ident) is not None

    def sweep(self, _: int) -> int:
        return self.consents.reap()

    def claim(self, ident: int) -> bool:
        self.run = self.jobs.claim(ident)
        return self.run is not None

    def claim_due(self, _: int) -> int:
        return len(self.jobs.claim_due(10))

    def retry(self, ident: int) -> str:
        def handler(_: Run[Patient]) -> None:
            raise RetryableError("not yet")

        return self.jobs.execute(ident, handler, run_now=True).ending

    def reap(self, _: int) -> int:
        return self.jobs.reap()

    def requeue(self, ident: int) -> bool:
        return self.jobs.requeue(ident)

    def transition(self, ident: int) -> bool:
        with self.factory.begin() as session:
            machine = Patient.__lifecycle__.machine
            return machine.transition(session, (Patient, ident), JobStatus.FAILED, from_=JobStatus.RUNNING)

    def renew(self, _: int) -> None:
        self.held.renew()

    def step(self, _: int) -> None:
        self.held.step("only", nothing)

    def external(self, _: int) -> None:
        self.held.external("sent", lambda: 1)

    def finish(self, _: int) -> None:
        self.held.finish()

    def release(self, _: int) -> None:
        self.held.release()

    def carry_out_timed(self, ident: int) -> list[Any]:
        """Block for a while, or until the run has ended; say how it has ended, and whether it had by then."""
        had_ended: list[bool] = []

        def blocks(run: Run[Timed]) -> None:
            for _ in range(40 if run.row.max_duration == HOUR else 400):
                if not run.holder.ended:
                    threading.Event().wait(0.05)
            had_ended.append(run.holder.ended)

        return [self.timed.execute(ident, blocks).status, *had_ended]


def nothing(session: Session) -> None:
    """A body without an effect."""


def main(url: str, seconds: str) -> None:
    worker = Worker(url, float(seconds))
    shift_clock(float(seconds))
    for line in sys.stdin:
        verb, ident = json.loads(line)
        print(json.dumps(getattr(worker, verb)(ident)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
