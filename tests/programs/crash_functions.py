"""Lives the life of a function in a fork of itself, once for each line it reads, and kills that fork at a point.

Arguments: the database, and the file that external effects go to. A line is ``[form, key, point]``; the answer is
``[signal or null, points reached, result or null]``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path

from sqlalchemy.orm import configure_mappers

from tests.programs.crash_points import in_fork
from tests.support_function_points import LIVES
from tests.support_points import Points
from tests.support_processes import hear, say


def killed_at(point: int | None, url: str, ledger: Path, form: str, key: str, pipe: int) -> None:
    """Live, telling ``pipe`` the points and the result, up to the point at which this process dies."""

    def visit(number: int, label: str) -> None:
        os.write(pipe, (json.dumps(label) + "\n").encode())
        if number == point:
            os.kill(os.getpid(), signal.SIGKILL)

    result = LIVES[form](url, ledger, key, Points(visit))
    os.write(pipe, (json.dumps({"result": result}) + "\n").encode())


def main(url: str, ledger: str) -> None:
    configure_mappers()
    while True:
        form, key, point = hear()
        number, heard = in_fork(partial(killed_at, point, url, Path(ledger), form, key))
        labels = [line for line in heard if isinstance(line, str)]
        say([number, labels, next((line["result"] for line in heard if isinstance(line, dict)), None)])


if __name__ == "__main__":
    main(*sys.argv[1:])
