"""A digest of Python sources, by which a kept result is known to be of today's code."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Iterable
from pathlib import Path

TRAINING_PACKAGES = ("diloco_protocol", "diloco_syncer", "diloco_worker")  # what decides how a job trains


def source_digest(paths: Iterable[Path]) -> str:
    """SHA-256 of these files, and of the Python files in these folders, in the order of their names."""
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


@functools.cache
def training_digest() -> str:
    """Of protocol, syncer and worker, as they are installed. None of them is imported."""
    found = [importlib.util.find_spec(name) for name in TRAINING_PACKAGES]
    return source_digest(Path(str(spec.origin)).parent for spec in found if spec is not None)
