# paid_orders.py
import os

from pydantic import BaseModel
from sqlalchemy import create_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

from sqla_durable import FunctionMixin, FunctionRun, Functions, ReceiptMixin, SignalMixin


class Base(DeclarativeBase):
    pass


class DurableRun(FunctionMixin, Base):
    __tablename__ = "paid_run"


class DurableStep(ReceiptMixin[DurableRun], Base):
    __tablename__ = "paid_step"


class DurableSignal(SignalMixin[DurableRun], Base):
    __tablename__ = "paid_signal"


class Reservation(Base):
    __tablename__ = "reservation"
    order: Mapped[int] = mapped_column(primary_key=True)


class Payment(BaseModel):
    amount: int


engine = create_engine(os.environ["DATABASE_URL"])
functions = Functions(sessionmaker(engine), DurableRun, DurableStep, signals=DurableSignal)


def reserve(session: Session, order: int) -> str:
    session.add(Reservation(order=order))
    return f"shelf {order}"


@functions.function("sell")
def sell(run: FunctionRun, order: int) -> str:
    shelf = run.step("reserve", reserve, order)
    paid = run.wait("paid", Payment)
    return f"{shelf} is sold for {paid.amount}"


if __name__ == "__main__":
    Base.metadata.create_all(engine)
