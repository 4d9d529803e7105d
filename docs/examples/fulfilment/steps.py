"""What the steps do in the shop's own tables: each is called in a transaction, together with its receipt."""

from sqlalchemy import update
from sqlalchemy.orm import Session

from .messages import FulfilOrder
from .models import Order, OrderStatus, Stock


class NoAddress(Exception):
    """Nobody could deliver there."""


def reserve(session: Session, order: FulfilOrder) -> bool:
    """Take the articles from the stock, if there are enough."""
    enough = Stock.article == order.article, Stock.quantity >= order.quantity
    taking = update(Stock).where(*enough).values(quantity=Stock.quantity - order.quantity)
    if session.execute(taking.returning(Stock.article)).first() is not None:
        return True
    set_status(session, order.order_id, OrderStatus.REFUSED)
    return False


def give_back(session: Session, order: FulfilOrder, status: OrderStatus) -> None:
    """Put the articles back, and say what became of the order."""
    putting = update(Stock).where(Stock.article == order.article).values(quantity=Stock.quantity + order.quantity)
    session.execute(putting)
    set_status(session, order.order_id, status)


def move(session: Session, order_id: int, address: str) -> None:
    """Have the order go elsewhere."""
    if not any(letter.isdigit() for letter in address):
        raise NoAddress(f"{address!r} has no number")
    session.get_one(Order, order_id).address = address


def ship(session: Session, order_id: int) -> str:
    """Hand the parcel over; return where it goes."""
    order = session.get_one(Order, order_id)
    order.status = OrderStatus.SHIPPED
    return order.address


def set_status(session: Session, order_id: int, status: OrderStatus) -> None:
    session.get_one(Order, order_id).status = status
