"""The page at ``/``: what a person with a browser sees of the job, from its status document.

One file without anything from elsewhere, the same for every job. Its script asks ``/status`` every two seconds and
writes what it reads as text, never as markup: names and messages come from jobs and learners. The page's
Content-Security-Policy allows that one script, its own styles, and connections to where it came from.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from diloco_protocol.common.http_server import Answer


def _read(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


SCRIPT = "\n" + _read("front_page.js")
_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
_POLICY = (
    f"default-src 'none'; script-src 'sha256-{_HASH}'; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)
_STYLE = "\n" + _read("front_page.css")
_PAGE = _read("front_page.html").replace("@POLICY@", _POLICY).replace("@STYLE@", _STYLE)
HTML = _PAGE.replace("@SCRIPT@", SCRIPT).encode()


def front_page() -> Answer:
    return 200, "text/html; charset=utf-8", HTML
