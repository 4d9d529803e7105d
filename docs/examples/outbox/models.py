"""The tables: what the shop is about, and the outbox."""

from collections.abc import Sequence
from datetime import timedelta
from email.headerregistry import Address
from enum import StrEnum
from uuid import UUID

from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, validates

from outbox.retries import retryable
from outbox.settings import settings
from sqla_durable import KeyMixin, Lifecycle, ReceiptMixin, Retry, RunMixin, StatusMachine

LONGEST = 200  # a recipient is the key of a step


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "outbox_order"

    id: Mapped[UUID] = mapped_column(primary_key=True)
    article: Mapped[str]


class Status(StrEnum):
    PENDING = "pending"
    PROCESSING = "processing"
    SENT = "sent"
    FAILED = "failed"
    DEAD = "dead"


statuses = StatusMachine(
    Status,
    initial=Status.PENDING,
    transitions={
        Status.PENDING: {Status.PROCESSING},
        Status.PROCESSING: {Status.SENT, Status.FAILED, Status.DEAD, Status.PENDING},
    },
)


class Notification(KeyMixin, RunMixin, Base):
    """One message to several recipients, such as ``mail:ada@example.org`` and ``chat:orders``."""

    __tablename__ = "outbox_notification"
    __lifecycle__ = Lifecycle(
        statuses,
        ready=Status.PENDING,
        running=Status.PROCESSING,
        done=Status.SENT,
        failed=Status.FAILED,
        dead=Status.DEAD,
        frozen=("recipients", "subject", "text"),
        lease=settings.lease,
        retry=Retry(on=retryable, max_attempts=5, backoff=settings.backoff, factor=4, cap=timedelta(hours=1)),
        requeue={Status.FAILED, Status.DEAD},
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    status: Mapped[Status] = statuses.column()
    recipients: Mapped[list[str]] = mapped_column(JSONB)
    subject: Mapped[str]
    text: Mapped[str]

    @validates("recipients")
    def _check_recipients(self, _: str, recipients: Sequence[str]) -> list[str]:
        """Refuse in the request what no attempt could send."""
        for recipient in recipients:
            channel, _, address = recipient.partition(":")
            if channel == "mail":
                Address(addr_spec=address)
            elif channel != "chat" or not address.isidentifier():
                raise ValueError(f"{recipient!r} is neither mail:<address> nor chat:<room>")
            if len(recipient) > LONGEST:
                raise ValueError(f"{recipient!r} is longer than {LONGEST} characters")
        return list(dict.fromkeys(recipients))

    @validates("subject")
    def _check_subject(self, _: str, subject: str) -> str:
        if not subject.isprintable():
            raise ValueError(f"the subject {subject!r} is not one line of text")
        return subject


class Delivery(ReceiptMixin[Notification], Base):
    """The receipt of one recipient."""

    __tablename__ = "outbox_delivery"
