"""How a message leaves: by mail or by chat. Nothing here knows of a database."""

import smtplib
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import EmailMessage
from email.policy import SMTP

import httpx

from outbox.settings import settings


@dataclass(frozen=True)
class Message:
    """What all recipients of a notification are told."""

    subject: str
    text: str
    written_at: datetime


def send_mail(message_id: str, address: str, message: Message) -> str:
    """Hand a mail to the SMTP server; the same one, to the last byte, however often it is called."""
    mail = EmailMessage(policy=SMTP)
    mail["From"] = settings.sender
    mail["To"] = address
    mail["Subject"] = message.subject
    mail["Date"] = message.written_at.astimezone(UTC)
    mail["Message-ID"] = message_id
    mail.set_content(message.text)
    with closing(smtplib.SMTP(settings.smtp_host, settings.smtp_port, timeout=settings.timeout)) as server:
        server.send_message(mail, to_addrs=[address])
        # The server has the mail. SMTP's own `with` would raise a farewell that goes wrong, and the mail be sent again.
        with suppress(smtplib.SMTPException):
            server.quit()
    return message_id


def post_chat(idempotency_key: str, room: str, message: Message) -> int:
    """Post to a chat room; the service has one message for all requests with one key."""
    answer = httpx.post(
        f"{settings.chat_url}/rooms/{room}",
        json={"text": f"{message.subject}\n\n{message.text}"},
        headers={"Idempotency-Key": idempotency_key},
        timeout=settings.timeout,
    )
    return answer.raise_for_status().status_code
