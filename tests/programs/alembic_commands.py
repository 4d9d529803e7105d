"""Carries out several ``alembic`` command lines one after the other, as its command does each.

Arguments: the command lines as one JSON list of lists. The models are imported once, as in one process they are.
"""

from __future__ import annotations

import json
import sys

from alembic.config import main

for argv in json.loads(sys.argv[1]):
    print("$ alembic", *argv, flush=True)
    main(argv, prog="alembic")
