"""Compares a live database with the models, and looks at its server."""

from __future__ import annotations

from sqla_durable.checkup.finding import CODES, Finding, Severity
from sqla_durable.checkup.whole import check

__all__ = ["CODES", "Finding", "Severity", "check"]
