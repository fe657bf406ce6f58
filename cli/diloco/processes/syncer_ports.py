"""Where the syncer of a run on this machine listens: any free ports at first, and after a restart the same ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from diloco.processes.launch import check_free

ANY = "127.0.0.1:0"


@dataclass
class SyncerPorts:
    """``HOST:PORT`` for each of the syncer's servers; port 0 is any. ``sync_is_known``: other machines have the address
    of the sync server, so that it never moves."""

    sync: str = ANY
    control: str = ANY
    http: str = ANY
    sync_is_known: bool = False
    _recalled: bool = False
    _forgotten: bool = False  # until the next recall

    def recall(self, address: Mapping[str, str | int] | None) -> None:
        """Take the ports of the syncer that ran before, which ``address`` (its address file's fields) names."""
        if address is None or self._forgotten:
            self._recalled = self._forgotten = False
            return
        self._recalled = True
        self.control, self.http = (_free_or_any(str(address[name])) for name in ("control", "http"))
        self.sync = str(address["sync"]) if self.sync_is_known else _free_or_any(str(address["sync"]))

    def forget(self) -> bool:
        """Take any free ports for the next start; False: those of this one were not an earlier syncer's. A syncer needs
        a while from the look whether its port is free until it listens there, and another program may come first."""
        if not self._recalled:
            return False
        self._forgotten = True
        self.control, self.http = _any_port(self.control), _any_port(self.http)
        if not self.sync_is_known:
            self.sync = _any_port(self.sync)
        return True


def _any_port(address: str) -> str:
    return f"{address.rpartition(':')[0]}:0"


def _free_or_any(address: str) -> str:
    """``address`` if this machine can listen there, else any port of the same host. Another program may have taken the
    port while the syncer was down; workers read the address file anew."""
    try:
        check_free(address)
    except OSError:
        return _any_port(address)
    return address
