"""What keeps an embedded server from being used."""

from __future__ import annotations


class EmbeddedError(Exception):
    """The server, its folder or its programs cannot be used; the message says why and what to do."""


class FolderRemovedError(EmbeddedError):
    """The folder is gone: the last user of a temporary folder removes it."""
