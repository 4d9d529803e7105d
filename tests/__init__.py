"""The tests. With ``--guards`` every run class in them is guarded, in the processes that they start as well."""

import os
import sys

_GUARDS = "SQLA_DURABLE_TESTS_GUARDED"

if "--guards" in sys.argv:
    os.environ[_GUARDS] = "1"

if os.environ.get(_GUARDS):
    from sqla_durable import RunMixin

    RunMixin.__guard__ = True
