"""Starts functions by ten keys many times over, and says which runs they have."""

from __future__ import annotations

import random
import sys

from sqla_durable import TransactionConflict
from tests.support_functions import Order, functions_on
from tests.support_processes import hear, say


def main() -> None:
    with functions_on(sys.argv[1]) as functions:
        say("ready")
        count = hear()
        handles: set[tuple[str, str]] = set()
        for _ in range(count):
            number = random.randrange(10)
            try:
                with functions.session_factory.begin() as session:
                    handle = functions.start(session, "fulfil", Order(id=number), key=f"key {number}")
            except TransactionConflict:
                continue
            handles.add((str(handle.id), str(handle.key)))
        say(sorted(handles))


if __name__ == "__main__":
    main()
