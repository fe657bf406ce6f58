"""What a process gives back to a syncer that has lost it, and what it says that it holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from diloco_protocol.arrays import codec
from diloco_protocol.wire import bulk
from diloco_protocol.wire.records import Announcement, Payload
from diloco_worker.net.fragment_cache import CachedVersion, FragmentCache

VALUES = np.arange(6, dtype=np.float32)
BYTES = codec.encode(VALUES, "float32")


def cached(fragment: int = 0, receipt: bytes = b"receipt") -> CachedVersion:
    full = Payload("float32", BYTES.nbytes, bulk.checksum(BYTES))
    return CachedVersion(Announcement(fragment, 2, 5, full, settled=1), VALUES, receipt)


@pytest.mark.parametrize(
    ("epoch", "version", "receipt", "can"),
    [(2, 5, b"receipt", True), (2, 5, b"", False), (1, 5, b"receipt", False), (2, 4, b"receipt", False)],
)
def test_only_the_version_that_is_named_is_given_back_with_its_receipt(
    epoch: int, version: int, receipt: bytes, can: bool
) -> None:
    assert cached(receipt=receipt).can_return(epoch, version) is can


def test_what_is_given_back_are_the_bytes_of_the_broadcast_or_nothing() -> None:
    assert np.array_equal(cached().encode(), BYTES)
    with pytest.raises(bulk.TransferError, match="not those of the broadcast") as refused:
        replace(cached(), values=VALUES + 1).encode()
    assert not refused.value.retry


def test_a_process_holds_all_fragments_or_none() -> None:
    cache = FragmentCache(2)
    cache.put(cached(1))
    assert cache.held_versions() == []
    cache.put(cached(0))
    assert [(one.epoch, one.version, one.settled) for one in cache.held_versions()] == [(2, 5, 1)] * 2
