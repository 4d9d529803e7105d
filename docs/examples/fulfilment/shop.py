"""What the shop does in a request."""

from datetime import timedelta

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from sqla_durable import FunctionHandle

from .database import functions, new_session
from .fulfil import fulfil_order
from .messages import CalledOff, FulfilOrder, NewAddress, Packed, Returned, Shipment, Withdrawal
from .models import Order, OrderStatus, Stock


class NotThere(Exception):
    """There is no such order, or no such article."""


class Unfit(Exception):
    """The order is not in the status for that."""


def handle_of(order_id: int) -> FunctionHandle[Shipment | CalledOff]:
    return functions.handle(fulfil_order, key=f"order-{order_id}")


def place_order(
    session: Session,
    number: int,
    article: str,
    quantity: int,
    address: str,
    *,
    pack_within: timedelta = timedelta(days=3),
    return_within: timedelta = timedelta(days=30),
) -> FunctionHandle[Shipment | CalledOff]:
    """Add an order, and the function that fulfils it, to the caller's transaction.

    :param number: that of the shopping cart; a request that comes again, because its answer was lost, has the same.
    :raises KeyConflict: where it is that of another order.
    :raises NotThere: where the shop does not have the article.
    """
    price = session.scalar(select(Stock.cents).where(Stock.article == article))
    if price is None:
        raise NotThere(f"there is no article {article!r}")
    placing = insert(Order).values(
        id=number, article=article, quantity=quantity, address=address, status=OrderStatus.OPEN
    )
    session.execute(placing.on_conflict_do_nothing())
    given = FulfilOrder(
        order_id=number,
        article=article,
        quantity=quantity,
        cents=price * quantity,
        pack_within=pack_within,
        return_within=return_within,
    )
    return functions.start(session, fulfil_order, given, key=f"order-{number}", order_id=number)


def find(session: Session, number: int) -> Order:
    order = session.get(Order, number)
    if order is None:
        raise NotThere(f"there is no order {number}")
    return order


def require(session: Session, number: int, status: OrderStatus) -> None:
    """Refuse what would not be heard any more, or not yet."""
    order = find(session, number)
    if order.status != status:
        raise Unfit(f"order {number} is {order.status}")


def pack(session: Session, number: int, parcel: str) -> bool:
    """Say that an order is packed: known if, and only if, the caller's transaction commits."""
    require(session, number, OrderStatus.OPEN)
    return functions.signal(session, handle_of(number), "said", Packed(parcel=parcel))


def send_back(session: Session, number: int, reason: str) -> bool:
    """Say that a parcel comes back."""
    require(session, number, OrderStatus.SHIPPED)
    return functions.signal(session, handle_of(number), "returned", Returned(reason=reason))


def say(number: int, what: NewAddress | Withdrawal, timeout: timedelta = timedelta(seconds=10)) -> None:
    """Say something of an order that is not packed yet, and wait until it was heard.

    :raises UpdateFailed: where it was refused.
    :raises UpdateTimeout: where it was not heard in time; it may be later.
    """
    with new_session() as session:
        require(session, number, OrderStatus.OPEN)
    functions.update(handle_of(number), "said", what, timeout=timeout)
