"""What this process has of the job's parameters: the newest version of each fragment that it downloaded.

A version is kept for three uses. If it is announced again after a reconnect it need not be downloaded
again; a delta applies to it; and a syncer whose store has lost the version gets it back from here,
byte for byte and with its receipt (the syncer's own record of what is in it, which is not read here).

The values are those that the training thread adopts, or has adopted, as its base. Nobody changes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from diloco_protocol.arrays import codec
from diloco_protocol.arrays.kernels import Bytes
from diloco_protocol.wire import bulk, sync_pb2
from diloco_protocol.wire.records import Announcement
from diloco_worker.fragments import Floats


@dataclass(frozen=True, slots=True)
class CachedVersion:
    """One version: its announcement, its values float32[elements], and its receipt."""

    announcement: Announcement
    values: Floats
    receipt: bytes

    def can_return(self, epoch: int, version: int) -> bool:
        """Whether this is the version named, and complete enough to be given back to the syncer."""
        return (self.announcement.epoch, self.announcement.version) == (epoch, version) and bool(self.receipt)

    def encode(self) -> Bytes:
        """The broadcast's bytes, uint8. Raises bulk.TransferError if the values do not give them back."""
        full = self.announcement.full
        data = codec.encode(self.values, full.encoding)
        if bulk.checksum(data) != full.checksum:
            raise bulk.TransferError("its bytes are not those of the broadcast", retry=False)
        return data


class FragmentCache:
    """The newest ``CachedVersion`` of each fragment. Only the client's thread uses it. It outlives sessions."""

    def __init__(self, fragments: int) -> None:
        self._fragments = fragments
        self._newest: dict[int, CachedVersion] = {}

    def put(self, version: CachedVersion) -> None:
        """Keep a version in place of the one before."""
        self._newest[version.announcement.fragment] = version

    def get(self, fragment: int) -> CachedVersion | None:
        """The newest version of the fragment."""
        return self._newest.get(fragment)

    def held_versions(self) -> list[sync_pb2.Held]:
        """What a Join names: every fragment's version, as it was announced; nothing if one is missing."""
        if len(self._newest) < self._fragments:
            return []
        announced = [self._newest[p].announcement for p in range(self._fragments)]
        return [sync_pb2.Held(epoch=one.epoch, version=one.version, settled=one.settled) for one in announced]
