"""Fulfilling an order, from the stock to the end of the time in which it may be sent back."""

from datetime import timedelta
from itertools import count

from sqlalchemy.orm import Session

from sqla_durable import FunctionRun, Retry, SignalTimeout, StepFailed, call

from . import carriers, payments, steps
from .database import functions
from .messages import CalledOff, FulfilOrder, NewAddress, Packed, Returned, Shipment, Withdrawal
from .models import DurableRun, OrderStatus

PATIENCE = Retry(on=payments.PaymentsDown, max_attempts=50, backoff=timedelta(seconds=1), cap=timedelta(minutes=5))


class OutOfStock(Exception):
    """There are not enough articles."""


@functions.function("fulfil-order", retry=PATIENCE)
def fulfil_order(run: FunctionRun[DurableRun], order: FulfilOrder) -> Shipment | CalledOff:
    """Reserve, charge, have it packed, ship; and take it back, or close the order."""
    if not run.step("reserve", steps.reserve, order):
        raise OutOfStock(f"there are not {order.quantity} of {order.article}")
    charge = run.keyed("charge", payments.charge, order.cents)
    quotes = run.gather(
        call("bicycle", carriers.ask_bicycle, order.quantity), call("van", carriers.ask_van, order.quantity)
    )
    run.publish("it can be packed")
    try:
        heard = until_packed(run, order)
    except SignalTimeout:
        heard = Withdrawal(reason="nobody has packed it")
    if isinstance(heard, Withdrawal):
        undo(run, order, charge, OrderStatus.CANCELLED)
        return CalledOff(reason=heard.reason)
    address = run.step("ship", steps.ship, order.order_id)
    run.publish("it is on its way")
    carrier = min(quotes, key=lambda quote: quote.cents).carrier
    shipment = Shipment(parcel=heard.parcel, address=address, carrier=carrier, charge=charge)
    try:
        run.wait("returned", Returned, timeout=order.return_within)
    except SignalTimeout:
        run.step("close", steps.set_status, order.order_id, OrderStatus.CLOSED)
        return shipment
    undo(run, order, charge, OrderStatus.RETURNED)
    return shipment.model_copy(update={"returned": True})


def until_packed(run: FunctionRun[DurableRun], order: FulfilOrder) -> Packed | Withdrawal:
    """Answer whatever is said of the order, until it is packed or withdrawn.

    All of it comes as one signal: so there is an order in which it was said.
    """

    def hear(session: Session, said: Packed | NewAddress | Withdrawal) -> Packed | NewAddress | Withdrawal:
        if isinstance(said, NewAddress):
            steps.move(session, order.order_id, said.address)
        return said

    for number in count(1):
        try:
            heard = run.answer("said", hear, key=f"said {number}", timeout=order.pack_within)
        except (steps.NoAddress, StepFailed):  # the latter where it was known to have failed before
            continue
        if not isinstance(heard, NewAddress):
            return heard
    raise AssertionError


def undo(run: FunctionRun[DurableRun], order: FulfilOrder, charge: str, status: OrderStatus) -> None:
    """Refund the order, and put the articles back."""
    run.keyed("refund", payments.refund, charge)
    run.step("give back", steps.give_back, order, status)
