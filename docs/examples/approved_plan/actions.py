"""What an assistant may propose: the actions, as they come by HTTP and as they stand in the plan's row."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter
from sqlalchemy import Dialect, TypeDecorator
from sqlalchemy.dialects.postgresql import JSONB

Line = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^\P{C}+$")]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MoveStock(Strict):
    kind: Literal["move_stock"]
    article: Line
    source: Line
    target: Line
    quantity: Annotated[int, Field(strict=True, gt=0, le=1_000_000)]


class WriteNote(Strict):
    kind: Literal["write_note"]
    text: Line


class Transfer(Strict):
    kind: Literal["transfer"]
    payer: Line
    payee: Line
    amount: Annotated[Decimal, Field(gt=0, max_digits=12, decimal_places=2)]


Action = Annotated[MoveStock | WriteNote | Transfer, Field(discriminator="kind")]
Actions = Annotated[list[Action], Field(min_length=1, max_length=100)]
_actions: TypeAdapter[list[Action]] = TypeAdapter(Actions)


class ActionsType(TypeDecorator[list[Action]]):
    """A list of actions in a column of JSONB."""

    impl = JSONB
    cache_ok = True

    def process_bind_param(self, value: list[Action] | None, dialect: Dialect) -> Any:  # noqa: ARG002
        return None if value is None else _actions.dump_python(value, mode="json")

    def process_result_value(self, value: Any, dialect: Dialect) -> list[Action] | None:  # noqa: ARG002
        return None if value is None else _actions.validate_python(value)
