"""What the run of a function looks like, for people and for callers that wait for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast
from uuid import UUID

from sqla_durable.functions.handle import FunctionHandle
from sqla_durable.functions.model import FunctionStatus
from sqla_durable.listing import RunConditions, RunSummary


class FunctionConditions(RunConditions, total=False):
    """The conditions of :meth:`.Functions.find`, of which those that are given must all be met."""

    function: Callable[..., Any] | str | None
    tenant: str | None
    waiting: bool | None


@dataclass(frozen=True, slots=True)
class FunctionSummary(RunSummary):
    """What the run of a function looked like at one instant, in plain values.

    :param function: the function's name.
    :param tenant: whose run it is.
    :param priority: its priority.
    :param steps: how many of its steps have succeeded so far.
    :param last_step: the key of the one that succeeded last.
    :param published: what the function has published of its progress, as JSON text.
    """

    function: str
    tenant: str | None
    priority: int
    steps: int
    last_step: str | None
    published: str | None

    @property
    def id(self) -> UUID:
        """The primary key of the run, from which its handle can be rebuilt."""
        key: UUID = self.identity[0]
        return key

    @property
    def handle(self) -> FunctionHandle:
        """The handle of the run."""
        return FunctionHandle(self.function, self.id, self.key, self.tenant)

    @property
    def state(self) -> Any:
        """What the function has published of its progress."""
        return None if self.published is None else json.loads(self.published)

    @property
    def waiting(self) -> bool:
        """Whether it waits: ready, and not due yet when it was read."""
        return (
            cast(FunctionStatus, self.status) is FunctionStatus.READY and self.available_at > self.created_at + self.age
        )

    @property
    def cancellable(self) -> bool:
        """Whether a cancel request can still be made, and has not been."""
        live = self.status in {FunctionStatus.READY, FunctionStatus.RUNNING}
        return live and self.cancel_requested_at is None
