"""Notifications that something is due: sent by the transaction that makes it so, and heard when that commits."""

from typing import Final

CHANNEL: Final = "sqla_durable"
