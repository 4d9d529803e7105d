"""Sending one notification: each recipient is a step of its own."""

import httpx

from outbox.channels import Message, post_chat, send_mail
from outbox.models import Notification
from outbox.retries import retryable
from sqla_durable import Run, StepFailed


def deliver(run: Run[Notification]) -> None:
    """Send to each recipient who has no receipt; one who cannot be reached does not keep the others waiting."""
    errors: dict[str, Exception] = {}
    for recipient in run.row.recipients:
        try:
            send(run, recipient)
        except (OSError, httpx.HTTPError, StepFailed) as error:
            errors[recipient] = error
    if errors:
        # While one of them may pass, the run is tried again; what has failed for good is on the receipts.
        passing = [error for error in errors.values() if retryable(error) is not False]
        raise ExceptionGroup(f"not delivered to {', '.join(errors)}", passing or list(errors.values()))


def send(run: Run[Notification], recipient: str) -> None:
    channel, _, address = recipient.partition(":")
    message = Message(run.row.subject, run.row.text, run.row.created_at)
    if channel == "mail":
        message_id = f"<{run.idempotency_key(recipient)}@example.org>"
        run.external(recipient, send_mail, message_id, address, message)
    else:
        run.keyed(recipient, post_chat, address, message)
