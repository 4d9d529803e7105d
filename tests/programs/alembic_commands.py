"""Carries out several ``alembic`` command lines one after the other, as its command does each.

Arguments: the command lines as one JSON list of lists. The models are imported once, as in one process they are.
A line that begins with an exclamation mark is another program, which must succeed.
"""

from __future__ import annotations

import json
import subprocess
import sys

from alembic.config import main

for argv in json.loads(sys.argv[1]):
    if argv[0] == "!":
        subprocess.run(argv[1:], check=True)
        continue
    print("$ alembic", *argv, flush=True)
    main(argv, prog="alembic")
