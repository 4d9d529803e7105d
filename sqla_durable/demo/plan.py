"""The plan as people write it: a JSON file of opening stocks and balances, and of the actions to carry out."""

from __future__ import annotations

from decimal import Decimal
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError, model_validator
from pydantic_core import ErrorDetails

from sqla_durable.demo.exc import DemoError

Key = tuple[str, ...]
"""The primary key of a stock, ``(article, site)``, or of an account, ``(name,)``."""
Name = Annotated[str, StringConstraints(min_length=1, max_length=80, pattern=r"^\P{C}+$")]
Pieces = Annotated[int, Field(strict=True, ge=0, le=1_000_000)]
Money = Annotated[Decimal, Field(ge=0, max_digits=12, decimal_places=2, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StockMove(_Strict):
    """Pieces of one article go from one site to another."""

    kind: Literal["stock_move"] = "stock_move"
    article: Name
    source: Name
    target: Name
    quantity: Annotated[Pieces, Field(gt=0)]

    @model_validator(mode="after")
    def _goes_somewhere(self) -> Self:
        if self.source == self.target:
            raise ValueError("source and target are the same site")
        return self

    def __str__(self) -> str:
        return f"{self.quantity} × {self.article}, {self.source} → {self.target}"


class Payment(_Strict):
    """An amount goes from one account to another."""

    kind: Literal["payment"] = "payment"
    payer: Name
    payee: Name
    amount: Annotated[Money, Field(gt=0)]

    @model_validator(mode="after")
    def _goes_somewhere(self) -> Self:
        if self.payer == self.payee:
            raise ValueError("payer and payee are the same account")
        return self

    def __str__(self) -> str:
        return f"{self.amount:.2f} €, {self.payer} → {self.payee}"


class Label(_Strict):
    """A label comes out of a printer, which knows nothing of our transactions."""

    kind: Literal["label"] = "label"
    parcel: Name
    address: Name

    def __str__(self) -> str:
        return f"label for {self.parcel}, {self.address}"


Action = Annotated[StockMove | Payment | Label, Field(discriminator="kind")]
actions: TypeAdapter[list[Action]] = TypeAdapter(list[Action])


class PlanFile(_Strict):
    """What there is at the start, and what is to be done, in this order.

    :param stock: pieces by article and site; what is not named is zero.
    :param balances: euros by account; what is not named is zero.
    :param actions: the actions; their positions are the keys of the steps.
    """

    stock: dict[Name, dict[Name, Pieces]] = Field(default_factory=dict[str, dict[str, int]])
    balances: dict[Name, Money] = Field(default_factory=dict[str, Decimal])
    actions: Annotated[list[Action], Field(min_length=1)]

    def opening_stock(self) -> dict[Key, int]:
        """Return the pieces at the start of every article and site that the plan speaks of."""
        moves = [action for action in self.actions if isinstance(action, StockMove)]
        named: dict[Key, int] = {(move.article, site): 0 for move in moves for site in (move.source, move.target)}
        return named | {(article, site): pieces for article, at in self.stock.items() for site, pieces in at.items()}

    def opening_balances(self) -> dict[Key, Decimal]:
        """Return the balance at the start of every account that the plan speaks of."""
        payments = [action for action in self.actions if isinstance(action, Payment)]
        named: dict[Key, Decimal] = {
            (name,): Decimal(0) for payment in payments for name in (payment.payer, payment.payee)
        }
        return named | {(name,): balance for name, balance in self.balances.items()}


def read_plan(path: Path | None) -> PlanFile:
    """Read and check a plan file.

    :param path: the file; None for the one that comes with the demo.
    :raises DemoError: naming the position of each action, and its field, that is not as it must be.
    """
    name, source = (
        ("plan.json", files("sqla_durable.demo").joinpath("plan.json")) if path is None else (str(path), path)
    )
    try:
        return PlanFile.model_validate_json(source.read_bytes())
    except OSError as error:
        raise DemoError(f"{name}: {error.strerror}") from error
    except ValidationError as error:
        raise DemoError("\n".join(f"{name}: {_fault(detail)}" for detail in error.errors())) from error


def _fault(detail: ErrorDetails) -> str:
    message = detail["msg"].removeprefix("Value error, ")
    match detail["loc"]:
        case ("actions", int(position), *rest):
            # The union's tag comes first: ("actions", 3, "payment", "amount").
            field = ".".join(map(str, rest[1:])) or ("kind" if detail["type"].startswith("union_tag") else "")
            where = f"action {position} (the first is 0)" + (f", field {field!r}" if field else "")
        case ():
            return message
        case path:
            where = f"field {'.'.join(map(str, path))!r}"
    return f"{where}: {message}{_given(detail['input'])}"


def _given(value: Any) -> str:
    return f" (it is {value!r})" if isinstance(value, str | int | float) else ""
