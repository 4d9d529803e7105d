"""Starts one run for each key, in an order of its own, and says which run each key has."""

from __future__ import annotations

import random
import sys

from sqlalchemy import create_engine

from sqla_durable import TransactionConflict
from tests.support_processes import hear, say
from tests.support_start import Shop


def main() -> None:
    url, level, count = sys.argv[1:]
    store = Shop(create_engine(url, isolation_level=level))
    keys = [f"key {number}" for number in range(int(count))]
    random.shuffle(keys)
    say("ready")
    hear()
    runs: dict[str, int] = {}
    for key in keys:
        while key not in runs:
            try:
                runs[key] = store.start(key=key, code=key).id
            except TransactionConflict:
                continue
    say(runs)


if __name__ == "__main__":
    main()
