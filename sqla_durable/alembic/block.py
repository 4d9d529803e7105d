"""A part of a migration that is outside of its transaction: each statement in one of its own."""

from __future__ import annotations

from textwrap import indent
from typing import Final

from alembic.autogenerate import renderers
from alembic.autogenerate.api import AutogenContext
from alembic.autogenerate.render import render_op
from alembic.operations.ops import OpContainer

_INDENTATION: Final = "    "


class AutocommitOp(OpContainer):
    """Operations that are carried out with autocommit, after what is above them was committed."""


def render_blocks() -> None:
    """Have Alembic render the operation."""
    renderers.dispatch_for(AutocommitOp, replace=True)(_render)


def _render(context: AutogenContext, block: AutocommitOp) -> list[str]:
    lines = [line for operation in block.ops for line in render_op(context, operation)]
    opening = f"with {context.opts['alembic_module_prefix']}get_context().autocommit_block():"
    # One text, and not one for each line: of lines Alembic would indent the first alone where one has several.
    return ["\n".join([opening, indent("\n".join(lines), _INDENTATION)])] if lines else []
