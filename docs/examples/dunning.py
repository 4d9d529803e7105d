# dunning.py
from datetime import timedelta

from pydantic import BaseModel
from sqlalchemy.orm import DeclarativeBase, sessionmaker

from sqla_durable import FunctionMixin, FunctionRun, Functions, ReceiptMixin, SignalMixin, SignalTimeout


class Base(DeclarativeBase):
    pass


class DurableRun(FunctionMixin, Base):
    __tablename__ = "dunning_run"


class DurableStep(ReceiptMixin[DurableRun], Base):
    __tablename__ = "dunning_step"


class DurableSignal(SignalMixin[DurableRun], Base):
    __tablename__ = "dunning_signal"


new_session = sessionmaker()  # the program says which engine at its start: new_session.configure(bind=engine)
functions = Functions(new_session, DurableRun, DurableStep, signals=DurableSignal)


class Invoice(BaseModel):
    address: str
    cents: int


def send_mail(idempotency_key: str, address: str, text: str) -> None: ...  # a mail service is asked here, with the key


@functions.function("collect", max_duration=timedelta(minutes=5))
def collect(run: FunctionRun, invoice: Invoice) -> int:
    run.sleep("a day of grace", timedelta(days=1))
    run.keyed("bill", send_mail, invoice.address, f"You owe us {invoice.cents} cents.")
    try:
        return run.wait("paid", int, timeout=timedelta(days=14))
    except SignalTimeout:
        run.keyed("remind", send_mail, invoice.address, "You have forgotten something.")
        return run.wait("paid", int, key="paid late")
