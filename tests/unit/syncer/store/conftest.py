"""Stores of both kinds: a directory, and a bucket of a real S3 service."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_syncer.store.base import Store
from diloco_syncer.store.open import open_store
from s3_service import S3Service, environment, given


@pytest.fixture
def bucket(s3: S3Service) -> Iterator[Store]:
    """An empty store in a bucket."""
    with given(environment(s3.url)):
        yield open_store(f"s3://bucket/{uuid.uuid4().hex}/store")


@pytest.fixture(params=["directory", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of either kind."""
    if request.param == "directory":
        return open_store(str(tmp_path / "store"))
    made: Store = request.getfixturevalue("bucket")
    return made
