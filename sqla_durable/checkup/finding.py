"""What a check has found: what is wrong, what that means, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, get_args


class Severity(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """A guarantee does not hold, or a verb will fail."""
    WARNING = "warning"
    """It works, but slower than it could, or with less safety."""


Code = Literal[
    "missing-table",
    "missing-column",
    "column-type",
    "column-not-null",
    "column-nullable",
    "column-default",
    "missing-constraint",
    "other-constraint",
    "constraint-name",
    "constraint-not-enforced",
    "constraint-not-valid",
    "disabled-constraint",
    "missing-index",
    "other-index",
    "invalid-index",
    "storage-parameter",
    "missing-guard",
    "other-guard",
    "disabled-guard",
    "left-over-guard",
    "not-partitioned",
    "partitioned",
    "missing-partition",
    "old-server",
    "read-only",
    "synchronous-commit",
    "fsync",
    "full-page-writes",
    "replication-role",
    "short-timeout",
    "clock",
    "pooler",
    "autovacuum-off",
    "autovacuum-behind",
    "long-transaction",
    "prepared-transaction",
    "replication-slot",
]
"""The kinds of findings."""
CODES: Final[tuple[str, ...]] = get_args(Code)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be.

    :param severity: how bad it is.
    :param code: which kind of finding it is, such as ``missing-column``.
    :param subject: what it is about, such as ``plan.lease_owner`` or ``synchronous_commit``.
    :param meaning: what is wrong, and what that leads to.
    :param remedy: what to do, in one line: SQL, or a command.
    """

    severity: Severity
    code: Code
    subject: str
    meaning: str
    remedy: str


def error(code: Code, subject: str, meaning: str, remedy: str) -> Finding:
    """Return a finding that is an error."""
    return Finding(Severity.ERROR, code, subject, meaning, " ".join(remedy.split()))


def warning(code: Code, subject: str, meaning: str, remedy: str) -> Finding:
    """Return a finding that is a warning."""
    return Finding(Severity.WARNING, code, subject, meaning, " ".join(remedy.split()))
