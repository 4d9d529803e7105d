"""Delivers a notification of the outbox example in a fork of itself, for each line it reads, and kills that fork.

A line is ``[ident, point]``; the answer is ``[signal or null, points reached, outcome or null]``. The points are those
of :mod:`tests.support_points`. The example takes its settings from the environment.
"""

from __future__ import annotations

from functools import partial

from outbox.database import engine, notifications
from outbox.deliver import deliver
from sqlalchemy.orm import configure_mappers

from sqla_durable import Outcome
from tests.programs.crash_points import in_fork, killed_at
from tests.support_points import Points
from tests.support_processes import hear, say


def carried_out(ident: int, points: Points) -> Outcome:
    with points.of(engine):
        return notifications.execute(ident, deliver, run_now=True)


def main() -> None:
    configure_mappers()
    while True:
        ident, point = hear()
        number, heard = in_fork(partial(killed_at, point, partial(carried_out, ident)))
        labels = [line for line in heard if isinstance(line, str)]
        say([number, labels, next((line for line in heard if isinstance(line, dict)), None)])


if __name__ == "__main__":
    main()
