"""Two carriers, which are asked what a parcel would cost; somebody else's computers, really."""

from pydantic import BaseModel


class Quote(BaseModel):
    carrier: str
    cents: int


def ask_bicycle(quantity: int) -> Quote:
    return Quote(carrier="bicycle", cents=250 * quantity)


def ask_van(quantity: int) -> Quote:
    return Quote(carrier="van", cents=500 + 40 * quantity)
