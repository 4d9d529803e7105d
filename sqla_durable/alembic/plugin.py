"""Registers with autogenerate, once."""

from __future__ import annotations

from functools import cache
from typing import Final

from alembic.runtime.plugins import Plugin
from alembic.util import DispatchPriority

from sqla_durable.alembic.block import render_blocks
from sqla_durable.alembic.comparison import compare
from sqla_durable.alembic.defaults import compare_defaults
from sqla_durable.alembic.operation import render_with_whole_text
from sqla_durable.alembic.verbatim import keep_words

_NAME: Final = "sqla_durable"


@cache
def set_up() -> str:
    """Register the comparison, if it is not yet, and return the name of the plugin."""
    render_with_whole_text()
    render_blocks()
    plugin = Plugin(_NAME)
    # Last, so that what Alembic itself has seen is known, and is not said twice.
    plugin.add_autogenerate_comparator(compare, "table", "durable", priority=DispatchPriority.LAST)
    plugin.add_autogenerate_comparator(compare_defaults, "column", "server_default", priority=DispatchPriority.FIRST)
    plugin.add_autogenerate_comparator(keep_words, "schema", "durable", priority=DispatchPriority.LAST)
    return _NAME
