"""Claims one run after another and kills itself in the middle of the first step of each, as a fatal bug would.

Arguments: the database, where, and of which kind the runs are. ``step`` is inside the step's transaction, ``call``
inside an external step, and ``handler`` between the claim and the first step. A line in is the run's key; the line out
is what came of it, if the process lives to tell.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any
from uuid import UUID

from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Run, Runs
from tests.support import Plan, PlanStep, write_entry
from tests.support_brief import SPACED
from tests.support_processes import hear, say


def kill_myself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def body(session: Session) -> None:
    write_entry(session, "before the end")
    session.flush()
    kill_myself()


def main(url: str, place: str, kind: str = "plan") -> None:
    def carry_out(run: Run[Any]) -> None:
        if place == "handler":
            kill_myself()
        elif place == "step":
            run.step("only", body)
        else:
            run.external("only", kill_myself)

    factory = sessionmaker(create_engine(url))
    runs: Runs[Any] = Runs(factory, Plan, PlanStep) if kind == "plan" else SPACED.runs(factory)
    outcome = runs.execute(UUID(hear()["ident"]), carry_out)
    say([outcome.ending.value, outcome.status.value])


if __name__ == "__main__":
    main(*sys.argv[1:])
