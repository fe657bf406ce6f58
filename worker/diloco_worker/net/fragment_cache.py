"""What this process has of the job's parameters: the newest broadcast of each fragment.

Kept for three ends: a broadcast that is announced again after a reconnect need not
be downloaded again, a delta applies to it, and a syncer whose store has lost a
version gets it back from here, byte for byte and with its receipt. The values are those that
the training thread adopts, or has adopted, as its base; nobody changes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_protocol.arrays import codec
from diloco_protocol.arrays.kernels import Bytes
from diloco_protocol.wire import bulk, sync_pb2
from diloco_worker.fragments import Floats


@dataclass(frozen=True, slots=True)
class CachedVersion:
    """One version: how it was announced, its values float32[elements], and its receipt, unread."""

    news: sync_pb2.Announcement
    values: Floats
    receipt: bytes

    def is_version(self, epoch: int, version: int) -> bool:
        """Whether it is this one, and complete enough to be given back."""
        return (self.news.epoch, self.news.version) == (epoch, version) and bool(self.receipt)

    def encoded(self) -> Bytes:
        """The broadcast's bytes, uint8. Raises wire.TransferError if the values do not give them back."""
        full = self.news.full
        data = codec.encode(self.values, full.encoding)
        if bulk.checksum(data) != full.checksum:
            raise bulk.TransferError("its bytes are not those of the broadcast", retry=False)
        return data


class FragmentCache:
    """The newest ``CachedVersion`` of each fragment. Belongs to the exchange's thread."""

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self._newest: dict[int, CachedVersion] = {}

    def put(self, holding: CachedVersion) -> None:
        """A version is here; it replaces the one before."""
        self._newest[holding.news.fragment] = holding

    def get(self, fragment: int) -> CachedVersion | None:
        """The newest version of the fragment."""
        return self._newest.get(fragment)

    def versions(self) -> list[sync_pb2.Held]:
        """What is said at Join: every fragment's, as it was announced, or nothing if one is missing."""
        if len(self._newest) < self._fragments:
            return []
        told = [self._newest[p].news for p in range(self._fragments)]
        return [sync_pb2.Held(epoch=news.epoch, version=news.version, settled=news.settled) for news in told]
