"""What differs between a laptop, a test and production."""

import os
from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class Settings:
    """Read from the environment, once."""

    smtp_host: str = os.environ.get("OUTBOX_SMTP_HOST", "localhost")
    smtp_port: int = int(os.environ.get("OUTBOX_SMTP_PORT", "8025"))
    sender: str = os.environ.get("OUTBOX_SENDER", "shop@example.org")
    chat_url: str = os.environ.get("OUTBOX_CHAT_URL", "http://localhost:8026")
    timeout: float = float(os.environ.get("OUTBOX_TIMEOUT", "10"))
    """How many seconds a server may be silent."""
    lease: timedelta = timedelta(seconds=float(os.environ.get("OUTBOX_LEASE", "30")))
    backoff: timedelta = timedelta(seconds=float(os.environ.get("OUTBOX_BACKOFF", "5")))


settings = Settings()
