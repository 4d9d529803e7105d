"""How these pages are built: ``sphinx-build -W -n -b html docs <out>``. No network is needed."""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

DOCS = Path(__file__).parent
PROJECT: dict[str, Any] = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
sys.path.insert(0, str(DOCS.parent))

project = PROJECT["name"]
version = release = PROJECT["version"]
copyright = PROJECT["authors"][0]["name"]  # noqa: A001 - Sphinx's name for it

extensions = ["sphinx.ext.autodoc", "sphinx.ext.intersphinx", "myst_parser"]
exclude_patterns = ["_inventories", "_build"]
html_theme = "furo"
html_title = f"{project} {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 90

# What these pages refer to is listed in files of our own, in the plain format that Sphinx still reads: the pages build
# in the same way with and without a network. A new reference needs a line there.
intersphinx_mapping = {
    "python": ("https://docs.python.org/3/", "_inventories/python.inv"),
    "sqlalchemy": ("https://docs.sqlalchemy.org/en/20/", "_inventories/sqlalchemy.inv"),
}

# SQLAlchemy documents these under another name than that of the module they are defined in.
PUBLIC_NAMES = {
    "Callable": "collections.abc.Callable",
    "Concatenate": "typing.Concatenate",
    "Session": "sqlalchemy.orm.Session",
    "AsyncSession": "sqlalchemy.ext.asyncio.AsyncSession",
    "Coroutine": "collections.abc.Coroutine",
    "Awaitable": "collections.abc.Awaitable",
    "Any": "typing.Any",
    "AsyncFunctions": "sqla_durable.asyncio.AsyncFunctions",
    "StrEnum": "enum.StrEnum",
    "async_sessionmaker": "sqlalchemy.ext.asyncio.async_sessionmaker",
    "sessionmaker": "sqlalchemy.orm.sessionmaker",
    "sqlalchemy.engine.base.Connection": "sqlalchemy.engine.Connection",
    "sqlalchemy.engine.base.Engine": "sqlalchemy.engine.Engine",
    "sqlalchemy.ext.asyncio.scoping.async_scoped_session": "sqlalchemy.ext.asyncio.async_scoped_session",
    "sqlalchemy.ext.asyncio.session.AsyncSession": "sqlalchemy.ext.asyncio.AsyncSession",
    "sqlalchemy.orm.properties.MappedColumn": "sqlalchemy.orm.MappedColumn",
    "sqlalchemy.orm.scoping.scoped_session": "sqlalchemy.orm.scoped_session",
    "sqlalchemy.orm.session.Session": "sqlalchemy.orm.Session",
    "sqlalchemy.sql.elements.ColumnElement": "sqlalchemy.sql.expression.ColumnElement",
    "sqlalchemy.sql.schema.Column": "sqlalchemy.schema.Column",
    "sqlalchemy.sql.schema.Table": "sqlalchemy.schema.Table",
    "sqlalchemy.sql.selectable.FromClause": "sqlalchemy.sql.expression.FromClause",
}

# Type variables and parameter specifications have no page to lead to.
_TYPE_VARIABLES = "P|StatusT|RunT|IdsT|ResultT|WorkT|WorkT_co|InputT|OutputT|ReplyT|PayloadT|FunctionT|[A-F]"
nitpick_ignore_regex = [("py:.*", rf"(.*\.)?({_TYPE_VARIABLES}|P\.args|P\.kwargs)")]


def use_public_names(_: Sphinx, doctree: nodes.document) -> None:
    """Let references lead to the names that SQLAlchemy documents."""
    for reference in doctree.findall(pending_xref):
        reference["reftarget"] = PUBLIC_NAMES.get(reference["reftarget"], reference["reftarget"])


def be_readable(*arguments: Any) -> tuple[str | None, str | None]:
    """Write the signature of a step as its source does: Sphinx gives up on the parameters of its function."""
    *_, signature, returns = arguments
    if signature is not None and "~P" in signature:
        signature = re.sub(r"~(?:\w+\.)+", "", signature)
        signature = signature.replace("*args: ~P", "*args: P.args").replace("**kwargs: ~P", "**kwargs: P.kwargs")
        signature = signature.replace("[~P]", "P").replace("~P", "P")
        signature = re.sub(r"Callable\[\[(Concatenate\[[^\]]*\])\]", r"Callable[\1", signature)
    return signature, returns


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", be_readable)
    app.connect("doctree-read", use_public_names)
