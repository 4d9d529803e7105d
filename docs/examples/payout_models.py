# payout_models.py
from enum import StrEnum

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from sqla_durable import ExpiryMixin, Lifecycle, ReceiptMixin, RunMixin, StatusMachine


class PayoutStatus(StrEnum):
    PENDING = "pending"
    APPROVED = "approved"
    PAYING = "paying"
    PAID = "paid"
    FAILED = "failed"
    REJECTED = "rejected"
    EXPIRED = "expired"


payout_statuses = StatusMachine(
    PayoutStatus,
    initial=PayoutStatus.PENDING,
    transitions={
        PayoutStatus.PENDING: {PayoutStatus.APPROVED, PayoutStatus.REJECTED, PayoutStatus.EXPIRED},
        PayoutStatus.APPROVED: {PayoutStatus.PAYING, PayoutStatus.EXPIRED},
        PayoutStatus.PAYING: {PayoutStatus.PAID, PayoutStatus.FAILED, PayoutStatus.APPROVED},
    },
)


class Base(DeclarativeBase):
    pass


class Payout(ExpiryMixin, RunMixin, Base):
    __tablename__ = "payout"
    __lifecycle__ = Lifecycle(
        payout_statuses,
        ready=PayoutStatus.APPROVED,
        running=PayoutStatus.PAYING,
        done=PayoutStatus.PAID,
        failed=PayoutStatus.FAILED,
        expired=PayoutStatus.EXPIRED,  # what becomes of a payout whose expires_at has passed
        frozen=("payee", "amount"),  # what nobody changes once it is approved
        requeue={PayoutStatus.EXPIRED},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[PayoutStatus] = payout_statuses.column()
    payee: Mapped[str]
    amount: Mapped[int]
    approved_by: Mapped[str | None]


class PayoutStep(ReceiptMixin[Payout], Base):
    __tablename__ = "payout_step"
