"""The manifests of a job's objects."""

from __future__ import annotations

from .names import (
    FINALIZER,
    GENERATION,
    LABEL_JOB,
    LABEL_REGION,
    LABEL_ROLE,
    MANAGER,
    RENDERED,
    children,
    is_ours,
)

__all__ = [
    "FINALIZER", "GENERATION", "LABEL_JOB", "LABEL_REGION", "LABEL_ROLE", "MANAGER", "RENDERED", "children",
    "is_ours",
]  # fmt: skip
