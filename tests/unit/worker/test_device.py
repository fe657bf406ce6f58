"""What a process computes with: the memory that it gives back."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco_worker.device import return_free_memory


def anonymous_bytes() -> int:
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) * 1024


@pytest.mark.promise(
    "A learner's host memory stays within 8 bytes per parameter, 12 with error feedback: memory that the "
    "allocator keeps of freed vectors is returned"
)
def test_what_the_allocator_keeps_of_freed_memory_is_given_back() -> None:
    blocks = [bytearray(100_000) for _ in range(1000)]  # below the size from which each block is mapped by itself
    last = blocks[-1]  # what lies above freed memory keeps the heap from shrinking by itself
    blocks.clear()
    kept = anonymous_bytes()
    return_free_memory()
    assert kept - anonymous_bytes() > 50_000_000
    assert len(last) == 100_000
