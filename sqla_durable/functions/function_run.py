"""The run of a function, as its body sees it."""

from __future__ import annotations

from typing import Any, Generic

from typing_extensions import TypeVar

from sqla_durable.functions.model import FunctionMixin
from sqla_durable.functions.verbs import FunctionVerbs
from sqla_durable.holder import Holder
from sqla_durable.stepping import Stepping

RowT = TypeVar("RowT", bound=FunctionMixin, default=Any)


class FunctionRun(Stepping[RowT], Generic[RowT]):
    """A claimed run of a function: what its body is called with.

    Its steps are those of :class:`.Run`. ``FunctionRun[DurableRun]`` says of which class ``run.row`` is.
    """

    def __init__(self, holder: Holder[RowT], verbs: FunctionVerbs[Any]) -> None:
        super().__init__(holder)
        self._verbs = verbs

    def publish(self, state: object) -> None:
        """Make ``state`` known as how far the run has come: what :meth:`.Functions.describe` shows as its ``state``.

        The last one counts; a retry publishes anew, and a requeue clears it. It has no receipt, and belongs outside of
        steps.

        :param state: a JSON value, a pydantic model or a dataclass.
        :raises LostLease: where the fence has moved on; nothing is written.
        :raises ResultError: where PostgreSQL could not store it.
        :raises NestedStep: inside the body of a step, whose transaction holds the row.
        """
        self._verbs.publish(self.holder, state)
