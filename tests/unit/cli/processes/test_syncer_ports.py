"""Where a syncer listens: any free ports at first, those of before after a restart, and any again if that fails."""

from __future__ import annotations

import socket

import pytest

from diloco.processes.syncer_ports import ANY, SyncerPorts
from free_ports import free_port


def addresses() -> dict[str, str | int]:
    control, sync, page = (f"127.0.0.1:{free_port()}" for _ in range(3))
    return {"control": control, "sync": sync, "http": page, "epoch": 1}


def test_a_restart_keeps_the_ports_that_are_free() -> None:
    ports, before = SyncerPorts(), addresses()
    ports.recall(None)
    assert (ports.sync, ports.control, ports.http) == (ANY, ANY, ANY) and not ports.forget()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        before["control"] = f"127.0.0.1:{taken.getsockname()[1]}"
        ports.recall(before)
    assert (ports.sync, ports.control, ports.http) == (before["sync"], ANY, before["http"])


@pytest.mark.promise("A syncer that finds the port of its predecessor taken is started with another one")
def test_a_start_that_failed_with_the_ports_of_before_is_followed_by_one_with_any() -> None:
    ports, before = SyncerPorts(), addresses()
    ports.recall(before)
    assert ports.forget()
    ports.recall(before)
    assert (ports.sync, ports.control, ports.http) == (ANY, ANY, ANY)
    assert not ports.forget(), "the next failure is of something else"
    ports.recall(before)
    assert ports.sync == before["sync"], "a restart after that keeps its ports again"


def test_a_sync_port_that_other_machines_know_never_moves() -> None:
    before = addresses()
    ports = SyncerPorts(str(before["sync"]), sync_is_known=True)
    ports.recall(before)
    assert ports.forget() and ports.sync == before["sync"] and ports.control == ANY
