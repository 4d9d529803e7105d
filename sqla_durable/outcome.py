"""What a receipt says of a step in a word each: how often its effect happens, and how it has ended."""

from __future__ import annotations

from enum import StrEnum


class Effect(StrEnum):
    """How often the effect of a step happens, which its receipt records."""

    TRANSACTIONAL = "transactional"
    """Exactly once: the effect is in the database and commits with its receipt."""
    EXTERNAL = "external"
    """At least once: a call outside any transaction; a crash before the receipt repeats it."""
    KEYED = "keyed"
    """At least once, with the same idempotency key each time: once, where the callee honours it."""
    OPERATION = "operation"
    """At most once: its intent is recorded before it is issued, and then it is only polled."""
    SIGNAL = "signal"
    """Exactly once: the signal is taken as its receipt is recorded, in one transaction."""
    SLEEP = "sleep"
    """None: it only waits until an instant that was recorded at first."""


class StepOutcome(StrEnum):
    """How a step ended, or how far an operation has come."""

    SUCCEEDED = "succeeded"
    """It returned, and its result is recorded."""
    FAILED = "failed"
    """It raised, and its failure is recorded."""
    ISSUED = "issued"
    """An operation's intent is recorded, and nothing after it: whether the service has it is not known."""
    PENDING = "pending"
    """An operation's ids are recorded, or until when a run waits or sleeps, and it has not ended as far as is known."""

    @property
    def terminal(self) -> bool:
        """Whether the step has ended, so that it is answered from its receipt."""
        return self in {StepOutcome.SUCCEEDED, StepOutcome.FAILED}
