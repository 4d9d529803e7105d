"""Uses the table ``plan`` all the time, as an application does that knows nothing of a migration.

Arguments: the database's URL and the number of rows. Says that it has begun; on the next line it ends, and says how
many transactions it has carried out, for how long the slowest statement took in seconds, and what has failed.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from typing import Any

import psycopg

_DSN, _ROWS = sys.argv[1], int(sys.argv[2])
_ended = threading.Event()
_began = threading.Barrier(3)
_slowest: list[float] = []
_counts: list[int] = []
_errors: list[str] = []


def _user(*, writes: bool) -> None:
    slowest, count = 0.0, 0
    with psycopg.connect(_DSN) as connection:

        def timed(statement: Any, *parameters: object) -> None:
            nonlocal slowest
            before = time.perf_counter()
            connection.execute(statement, parameters)
            slowest = max(slowest, time.perf_counter() - before)

        try:
            while not _ended.is_set():
                row = random.randint(1, _ROWS)
                # Read and then written, in one transaction: with a weaker lock a migration could be in a deadlock.
                timed("SELECT note FROM plan WHERE id = %s", row)
                if writes:
                    timed("UPDATE plan SET note = 'written' WHERE id = %s", row)
                    timed("INSERT INTO plan (status, note) VALUES ('pending', 'new')")
                connection.commit()
                count += 1
                if count == 1:
                    _began.wait()
        except psycopg.Error as error:
            _errors.append(str(error))
    _slowest.append(slowest)
    _counts.append(count)


users = [threading.Thread(target=_user, kwargs={"writes": writes}) for writes in (True, False)]
for user in users:
    user.start()
_began.wait()
print(json.dumps("begun"), flush=True)
sys.stdin.readline()
_ended.set()
for user in users:
    user.join()
print(json.dumps({"transactions": min(_counts), "slowest": max(_slowest), "errors": _errors}), flush=True)
