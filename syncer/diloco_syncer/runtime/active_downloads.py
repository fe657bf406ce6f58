"""Which versions of fragments are being downloaded, so that a superseded version is kept for its readers.

Theory of operation. Over a slow link a large fragment takes longer to download than a merge takes, and each of its
parts is fetched by a call of its own. Such a reader would find its version gone again and again if only the newest two
were served. So a download is active from its first part until every byte of the version was sent, or until no part of
it was asked for during ``IDLE_SECONDS``; global_model.py keeps its version, within a bound. A part that broke is asked
for again from the byte at which it broke, so ranges are counted, and not calls. No I/O; the time is an argument.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

IDLE_SECONDS = 30.0  # between two parts of one download
MAX_DOWNLOADS = 4096  # of all readers; the one that was idle longest is dropped


@dataclass(slots=True)
class Download:
    """One reader's download of one version of ``size`` bytes. ``calls``: running now; ``sent``: the ranges that were,
    in order and apart."""

    size: int
    touched: float
    calls: int = 0
    sent: list[tuple[int, int]] = field(default_factory=list)

    def add_range(self, start: int, end: int) -> None:
        """Bytes from ``start`` up to ``end`` were sent."""
        apart = [(a, b) for a, b in self.sent if b < start or end < a]
        near = [one for one in self.sent if one not in apart]
        joined = min([start, *(a for a, _ in near)]), max([end, *(b for _, b in near)])
        self.sent = sorted([*apart, joined])

    @property
    def is_whole(self) -> bool:
        return self.sent == [(0, self.size)]


class ActiveDownloads:
    """Active downloads, by (fragment, version) and by reader."""

    def __init__(self) -> None:
        self._downloads: dict[tuple[int, int], dict[Hashable, Download]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._downloads.values()))

    def begin_part(self, fragment: int, version: int, reader: Hashable, size: int, now: float) -> None:
        """A part is about to be sent. ``size``: bytes of the whole."""
        if reader not in self._downloads.get((fragment, version), {}):
            if len(self) >= MAX_DOWNLOADS:
                self._drop_oldest()
            self._downloads.setdefault((fragment, version), {})[reader] = Download(size, now)
        download = self._downloads[fragment, version][reader]
        download.calls += 1
        download.touched = now

    def end_part(self, fragment: int, version: int, reader: Hashable, sent: tuple[int, int], now: float) -> bool:
        """A part's call is over. ``sent``: from which byte up to which. Returns whether all of the version was sent."""
        download = self._downloads.get((fragment, version), {}).get(reader)
        if download is None:
            return False  # dropped meanwhile
        download.calls -= 1
        download.add_range(*sent)
        download.touched = now
        if not download.is_whole or download.calls:
            return False
        self._remove(fragment, version, reader)
        return True

    def is_active(self, fragment: int, version: int, now: float) -> bool:
        """Whether this version is being downloaded. ``now``: monotonic seconds."""
        found = self._downloads.get((fragment, version), {})
        return any(d.calls or now - d.touched <= IDLE_SECONDS for d in found.values())

    def last_touched(self, fragment: int, version: int) -> float:
        """When a part of this version was last asked for or sent; 0: never."""
        found = self._downloads.get((fragment, version), {})
        return max((d.touched for d in found.values()), default=0.0)

    def drop_idle(self, now: float, kept: Collection[tuple[int, int]]) -> None:
        """Drop what is idle, and downloads of versions that are not ``kept`` any more."""
        for (fragment, version), found in list(self._downloads.items()):
            for reader, download in list(found.items()):
                idle = not download.calls and now - download.touched > IDLE_SECONDS
                if idle or (fragment, version) not in kept:
                    self._remove(fragment, version, reader)

    def _remove(self, fragment: int, version: int, reader: Hashable) -> None:
        found = self._downloads[fragment, version]
        del found[reader]
        if not found:
            del self._downloads[fragment, version]

    def _drop_oldest(self) -> None:
        _, fragment, version, reader = min(
            (
                ((d.calls > 0, d.touched), p, v, reader)
                for (p, v), found in self._downloads.items()
                for reader, d in found.items()
            ),
            key=lambda row: row[0],
        )
        self._remove(fragment, version, reader)
