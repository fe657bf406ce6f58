"""What tests of a syncer with shards share: how its learner begins and comes back, and what holds of its books.

Not a test.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from syncer_client import LAYOUT, Client, SyncerProcess

import tape_reader
from diloco_protocol.wire import limits, sync_pb2
from diloco_syncer.audit.store_audit import audit_store
from diloco_syncer.store.directory import DirectoryStore
from patience import until

TWO = "syncer.shards=2"
PATIENT = "sync.heartbeat.timeoutSeconds=120"  # of a raw client that reports nothing while it waits


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of version 0 is answered when the shards have begun: their processes start meanwhile, which takes long on
    a busy machine. A learner would ask again; the raw client waits."""
    monkeypatch.setattr(limits, "STALL_SECONDS", 250.0)


def said(syncer: SyncerProcess, words: str) -> int:
    """How often the syncer has said it."""
    return syncer.text().count(words)


async def first_learner(syncer: SyncerProcess, client: Client | None = None) -> Client:
    """A learner that has uploaded version 0. ``client``: as who."""
    client = client or Client(syncer)
    await client.join()
    await client.initialise()
    await until(lambda: len(client.of_kind("announcement")) == len(LAYOUT))
    await client.ready()
    return client


def digests(store: Path) -> dict[tuple[int, int], str]:
    """Of all merges, as the tape has them."""
    return {(line["fragment"], line["version"]): line["result"] for line in tape_reader.read(DirectoryStore(store))}


def check_books(syncer: SyncerProcess, tokens: dict[str, int]) -> None:
    assert tokens["trained"] == sum(tokens[name] for name in ("merged", "dropped", "pending")), tokens
    assert audit_store(DirectoryStore(syncer.store), "raw").holds
    assert tape_reader.verify(DirectoryStore(syncer.store))
    assert "Traceback" not in syncer.text()


async def rejoin(client: Client, syncer: SyncerProcess, again: Client | None = None) -> Client:
    """The same process at another life of its syncer. ``again``: it with other credentials."""
    again = again or Client(syncer, client.ordinal, client.process)
    for name in ("sequence", "base", "bases", "steps", "merged_steps", "pushed", "confirmed"):
        setattr(again, name, getattr(client, name))
    seat = client.welcome.seat
    held = [sync_pb2.Held(epoch=epoch, version=version) for epoch, version in client.base]
    await again.join(
        held=held, previous_incarnation=seat.incarnation, tenure=seat.tenure, slot=seat.slot, attempt=again_attempt()
    )
    for fragment, (_, version) in enumerate(client.base):
        await again.adopt(fragment, version)
    await again.report()
    return again


_attempts = iter(range(2, 1 << 20))


def again_attempt() -> int:
    return next(_attempts)
