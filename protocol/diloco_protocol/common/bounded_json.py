"""JSON that is nested deeper than anything that makes sense, read without harm.

Theory of operation. The API server stores objects nested thousands deep in fields that keep what they do not know, as a
pod template does. Python's decoder raises RecursionError for these, and whoever lists or watches all jobs then sees
none of them. So the operator has one decoder, which kopf, aiohttp, the official client and this project share
(``json.loads`` without options). It replaces what lies deeper than ``MAX_DEPTH`` by the text ``TOO_DEEP``. The object
can be read, told of and deleted; a job that holds this text in its spec is invalid, by that name.

Example: with a depth of 2, ``{"a": {"b": {"c": 1}}, "d": 2}`` is read as ``{"a": {"b": "…"}, "d": 2}``.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DEPTH = 100
"""A list of pods, with all that was ever managed of them, has about 30. Copying and writing takes Python a few calls a
level, of which there are 1000."""
TOO_DEEP = f"(removed: nested more than {MAX_DEPTH} levels deep)"

_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_NO_BRACKETS = re.compile(rf'{_STRING}|[^"\[\]{{}}]++', re.DOTALL)
_TOKENS = re.compile(rf"{_STRING}|[\[{{]|[\]}}]", re.DOTALL)
_RISE = {"{": 1, "[": 1, "}": -1, "]": -1}


class BoundedDecoder(json.JSONDecoder):
    """Decodes what is not nested too deeply, and of the rest all but what is."""

    def decode(self, s: str, *arguments: Any) -> Any:
        return super().decode(prune(s) if is_deep(s) else s, *arguments)


def is_deep(text: str) -> bool:
    """Whether a JSON text has more than ``MAX_DEPTH`` levels."""
    if text.count("{") + text.count("[") <= MAX_DEPTH:
        return False
    depth = 0
    for bracket in _NO_BRACKETS.sub("", text):
        depth += _RISE.get(bracket, 0)
        if depth > MAX_DEPTH:
            return True
    return False


def prune(text: str) -> str:
    """The JSON text with ``TOO_DEEP`` in place of every array and object below level ``MAX_DEPTH``."""
    kept, depth, copied = [], 0, 0
    for token in _TOKENS.finditer(text):
        rise = _RISE.get(token[0], 0)
        if rise > 0 and depth == MAX_DEPTH:
            kept += [text[copied : token.start()], json.dumps(TOO_DEEP)]
        depth += rise
        if rise < 0 and depth == MAX_DEPTH:
            copied = token.end()
    return "".join(kept) + (text[copied:] if depth <= MAX_DEPTH else "")


def install() -> None:
    """Make ``json.loads`` read so, for the whole process."""
    json._default_decoder = BoundedDecoder()  # type: ignore[attr-defined]
