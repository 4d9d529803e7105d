"""Which failures may pass, and when to try again."""

import re
import smtplib
from datetime import timedelta

import httpx


def retryable(error: Exception) -> bool | timedelta:
    """Say whether a failure may pass, or after which delay where the other side names one."""
    match error:
        case httpx.HTTPStatusError():
            return _later(error.response)
        case smtplib.SMTPRecipientsRefused():
            return all(_transient(code) for code, _ in error.recipients.values())
        case smtplib.SMTPResponseException():
            return _transient(error.smtp_code)
        case smtplib.SMTPException():
            return isinstance(error, smtplib.SMTPServerDisconnected)
        case _:  # a refused connection, a timeout, a name that does not resolve
            return isinstance(error, OSError | httpx.TransportError)


def _transient(smtp_code: int) -> bool:
    return str(smtp_code).startswith("4")


def _later(answer: httpx.Response) -> bool | timedelta:
    if not (answer.is_server_error or answer.status_code in {408, 429}):
        return False
    seconds = re.fullmatch(r"[0-9]{1,5}", answer.headers.get("Retry-After", ""))
    return timedelta(seconds=int(seconds[0])) if seconds else True
