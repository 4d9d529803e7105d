"""What is recorded of an exception: always writable, whatever it holds."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from typing import Any

_MESSAGE_LIMIT = 10_000
_TRACEBACK_LIMIT = 50_000
_unstorable = re.compile("[\0\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a step or run.

    JSONB holds neither NUL nor lone surrogates: in each text they become escapes, ``\\x00`` and ``\\udc80``.

    :param type: the exception's class, as ``module.QualName``; without the module for a builtin.
    :param message: ``str()`` of the exception; of a longer one than 10,000 characters the head and the tail.
    :param traceback: the formatted traceback, with causes, contexts and groups; of a longer one than 50,000
     characters the head and the tail. ``None`` when it was not kept.
    """

    type: str
    message: str
    traceback: str | None

    @classmethod
    def of(cls, exc: BaseException) -> Failure:
        """What is to be recorded of ``exc``; raises nothing for any ``Exception`` of the exception itself."""
        return cls(
            _storable(_qualified(type(exc)), _MESSAGE_LIMIT),
            _storable(_message(exc), _MESSAGE_LIMIT),
            _storable(_formatted(exc), _TRACEBACK_LIMIT),
        )

    def to_json(self) -> dict[str, str | None]:
        """The object to store."""
        return {"type": self.type, "message": self.message, "traceback": self.traceback}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Failure:
        """The failure that :meth:`to_json` wrote; keys of a later version are passed over."""
        return cls(stored["type"], stored["message"], stored.get("traceback"))


def _qualified(kind: type) -> str:
    module = str(kind.__module__)
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


def _message(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception as error:  # noqa: BLE001  a failure is recorded even where its text cannot be had
        return f"<str() of it raised {_qualified(type(error))}>"


def _formatted(exc: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(exc))
    except Exception as error:  # noqa: BLE001  as above: a group nested too deeply, a cause that is broken as well
        frames = "".join(traceback.format_tb(exc.__traceback__))
        return f"{frames}<formatting causes and groups raised {_qualified(type(error))}>\n"


def _storable(text: str, limit: int) -> str:
    text = _unstorable.sub(lambda found: ascii(found[0])[1:-1], text)
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters cut ...]\n{text[-half:]}"
