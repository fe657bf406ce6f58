"""What can go wrong between a program and an API server. Loads no library, so that anyone may import it."""

from __future__ import annotations

import json
import re
from typing import Any

from diloco_operator.model import TERMINATING, Failure

UNREADABLE = "Unreadable"
"""``ApiError.reason`` of a reply that is no JSON object, or too long."""


LONGEST_PAUSE = 30.0
"""No ``Retry-After`` is taken for more seconds than this."""


_WEBHOOK = re.compile(r'failed calling webhook "([^"]{1,253})"')
_DENIED = re.compile(r"denied (the )?request")  # by a webhook, or a ValidatingAdmissionPolicy
_NO_RIGHT = re.compile(r"cannot [a-z]+ resource")


class ConfigError(Exception):
    """There is no way to the API server; the message says what was looked for."""


class ApiError(Exception):
    """A request failed.

    ``verb``, ``resource``: of the request, for messages and metrics. ``status``: the HTTP status, 0 where nobody
    answered (``__cause__`` is then the network's error). ``reason`` and ``document``: the API server's word for it
    and its whole Status object. ``retry_after``: for so many seconds it asks to be left alone.
    """

    def __init__(
        self,
        verb: str,
        resource: str,
        status: int,
        message: str,
        reason: str = "",
        document: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.verb = verb
        self.resource = resource
        self.status = status
        self.reason = reason
        self.document = document or {}
        self.retry_after = 0.0

    @property
    def unreachable(self) -> bool:
        """No answer, or one from something that is not ready: trying again helps. It may be about one object only."""
        return self.status == 0 or self.status == 429 or self.status >= 500

    @property
    def over_quota(self) -> bool:
        """Whether a ResourceQuota refused it, which the API server calls forbidden too."""
        return self.status == 403 and "exceeded quota" in str(self)


def parse_object(data: bytes) -> dict[str, Any] | None:
    """The JSON object in a reply's body, an empty one in an empty body; None: it is something else."""
    try:
        document = json.loads(data) if data else {}
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def refusal(verb: str, resource: str, status: int, body: bytes, retry_after: str | None = None) -> ApiError:
    """The error that a reply with a status of 300 and above stands for. ``retry_after``: its header of that name."""
    document = parse_object(body) or {"message": body[:300].decode("utf-8", "replace").strip()}
    message = str(document.get("message") or f"HTTP status {status}")
    if status == 500 and "failed to create typed patch object" in message:
        status = 422  # how server-side apply says that a field is unknown or of another type
    error = ApiError(verb, resource, status, message, reason=str(document.get("reason") or ""), document=document)
    if status in (429, 503) and retry_after is not None and retry_after.isascii() and retry_after.isdigit():
        error.retry_after = min(float(retry_after), LONGEST_PAUSE)
    return error


def classify_failure(error: ApiError) -> Failure:
    """Which kind of trouble (model.py) a failed write is."""
    message, causes = str(error), (error.document.get("details") or {}).get("causes") or ()
    if error.over_quota:
        return "quota"
    if TERMINATING in message or any(cause.get("reason") == "NamespaceTerminating" for cause in causes):
        return "terminating"
    if failing_webhook(message):
        return "webhook"
    if _DENIED.search(message) or (error.status == 403 and not _NO_RIGHT.search(message)):
        return "policy"
    if error.status in (401, 403):
        return "forbidden"
    if error.status in (400, 422):
        return "invalid"
    return "unavailable" if error.unreachable else "other"


def failing_webhook(message: str) -> str:
    """The name of the webhook that the API server could not call; empty: the message is about something else."""
    found = _WEBHOOK.search(message)
    return found.group(1) if found else ""
