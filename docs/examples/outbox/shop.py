"""What the shop does in a request."""

from collections.abc import Sequence
from uuid import UUID

from sqlalchemy.orm import Session

from outbox.database import notifications
from outbox.models import Order


def place_order(session: Session, request_id: UUID, article: str, recipients: Sequence[str]) -> Order:
    """Add an order, and the promise that its recipients will hear of it, to the caller's transaction.

    A request that comes again, because its answer was lost, gets the same order and promises nothing new.
    """
    notifications.start(
        session,
        key=f"order {request_id}",
        recipients=recipients,
        subject=f"Your order: {article}",
        text=f"Thank you! We have your order {request_id} and are packing: {article}.\n",
    )
    # Of two requests with one key, the second has waited in start() until the first committed or rolled back.
    order = session.get(Order, request_id)
    if order is None:
        order = Order(id=request_id, article=article)
        session.add(order)
    return order
