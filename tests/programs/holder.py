"""Carries an errand with a lease of one second out, and stops at a named place until the test says to go on.

Arguments: the database, and the place: ``step`` is inside a step's transaction, after its effect was sent; ``call`` is
inside an external step; ``between`` is after a step and before the next; ``landing`` is after the last step.
A line in is the errand's key, or a pickled lease in hexadecimal; the lines out are the place, and what came of it.
"""

from __future__ import annotations

import pickle
import sys
from typing import Any
from uuid import UUID

from sqlalchemy import create_engine
from sqlalchemy.orm import Session, sessionmaker

from sqla_durable import Run
from tests.support import write_entry
from tests.support_brief import BRIEF
from tests.support_processes import hear, say

NAME = "holder"


def main(url: str, place: str) -> None:
    engine = create_engine(url, connect_args={"application_name": NAME})
    errands = BRIEF.runs(sessionmaker(engine), owner=NAME)

    def stop_at(here: str) -> None:
        if place == here:
            say(here)
            hear()

    def body(session: Session) -> str:
        write_entry(session, NAME)
        session.flush()
        stop_at("step")
        return NAME

    def call() -> str:
        stop_at("call")
        return NAME

    def carry_out(run: Run[Any]) -> None:
        run.step("first", write_entry, f"{NAME}, first")
        stop_at("between")
        run.step("second", body)
        run.external("third", call)
        stop_at("landing")

    message = hear()
    if "lease" in message:
        target: object = errands.hold(pickle.loads(bytes.fromhex(message["lease"])))
    else:
        target = UUID(message["ident"])
    outcome = errands.execute(target, carry_out)
    say([outcome.ending.value, outcome.status.value, type(outcome.exception).__name__])


if __name__ == "__main__":
    main(*sys.argv[1:])
