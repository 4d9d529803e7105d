"""Carries out a function in one of its versions, and waits in the call of its second step to be told to go on.

Arguments: the database, the form, and the version. A line is ``"start"``, which is answered with the run's id, or an
id, whose run is carried out: the program says what it calls, hears a line in the second call, and says how it ended.
"""

from __future__ import annotations

import sys
from typing import Any
from uuid import UUID

from sqla_durable import OnMismatch
from tests.support_processes import hear, say
from tests.support_versions import Version


def charge(key: str, step: str) -> str:
    say(["charged", step])
    return "charged"


def mail() -> str:
    say(["mailing"])
    hear()
    return "mailed"


def old(run: Any) -> None:
    run.keyed("charge", charge, "charge")
    run.external("mail", mail)


def renamed(run: Any) -> None:
    run.keyed("new-charge", charge, "charge")
    run.external("mail", mail)


def new(run: Any) -> None:
    run.keyed("charge", charge, "new-charge")
    run.external("mail", mail)


def main(url: str, form: str, version: str) -> None:
    program = Version(form, url)
    bodies = {"old": old, "renamed": renamed, "new": new}
    options: dict[str, Any] = {"aliases": {"new-charge": "charge"}} if version == "renamed" else {}
    program.function("job", bodies[version], on_mismatch=OnMismatch.PARK, **options)
    while True:
        heard = hear()
        if heard == "start":
            say(str(program.start("job").id))
            continue
        outcome = program.execute(UUID(heard), run_now=True)
        say([outcome.ending, outcome.status])


if __name__ == "__main__":
    main(*sys.argv[1:])
