"""Claims what is due of a limited function, says how many that were, and holds them until it is killed.

Arguments: the database's URL.
"""

from __future__ import annotations

import sys
import time

from sqlalchemy import create_engine

from tests.support_limits import claimed, declare, functions_on
from tests.support_processes import say

functions = functions_on(create_engine(sys.argv[1]))
declare(functions, {"mail": {"concurrency": 2}})
say(len(claimed(functions)))
time.sleep(600)
