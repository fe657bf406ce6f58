"""Every document that a test reads from a running program is what its model says: no field more, none less."""

from __future__ import annotations

from typing import Any

from diloco_protocol.documents import Document


def conforming(model: type[Document], document: dict[str, Any]) -> dict[str, Any]:
    """The document, unless it breaks its model or has a field that the model lacks (pydantic's error)."""
    model.model_validate(document, extra="forbid")
    return document
