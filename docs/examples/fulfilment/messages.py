"""What the function is given and returns, and what it is told on the way."""

from datetime import timedelta

from pydantic import BaseModel


class FulfilOrder(BaseModel):
    """The input."""

    order_id: int
    article: str
    quantity: int
    cents: int
    pack_within: timedelta
    """For how long the warehouse may be silent."""
    return_within: timedelta
    """For how long a parcel may be sent back."""


class Shipment(BaseModel):
    """The result: what was shipped, and whether it came back."""

    parcel: str
    address: str
    carrier: str
    charge: str
    returned: bool = False


class CalledOff(BaseModel):
    """The other result: nothing was shipped, and what was charged is refunded."""

    reason: str


class Packed(BaseModel):
    """The warehouse has packed the order."""

    parcel: str


class NewAddress(BaseModel):
    """The customer has moved."""

    address: str


class Withdrawal(BaseModel):
    """The customer does not want it any more."""

    reason: str


class Returned(BaseModel):
    """The customer has sent the parcel back."""

    reason: str
