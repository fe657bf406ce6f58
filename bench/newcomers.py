"""What newcomers cost rounds, on a real hub: how long eight learners need for a version while others join.

The hub is the real program, `python -m diloco_syncer`, in plain text and on this machine, so that the hub's processor
is the bottleneck rather than a link. Eight synthetic learners download a whole version (bfloat16) again and again, each
over four connections. Beside them newcomers download their model, as the worker does. The ratio is the median of these
versions' seconds over the median without newcomers, before, between and after: 1 is undisturbed.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import common
import hub
import programs
from diloco_protocol.arrays import codec
from diloco_protocol.spec.load import parse_job
from diloco_protocol.wire import bulk, sync_pb2

NEWCOMERS = 8
UP, DOWN = "int4", "bfloat16"
MOST = 5  # versions that are timed at a time


class Reader(hub.Learner):
    """A learner that downloads version 0: as a round's, or as a newcomer."""

    def __init__(self, ordinal: int, place: hub.Place) -> None:
        super().__init__(ordinal, place if ordinal == 0 else replace(place, elements=1))  # it pushes nothing
        self._place, self._layout = place, hub.layout_of(place.elements)
        self.ways["version"] = lambda: self._each_fragment(self._read)
        self._catching_up = ordinal >= hub.LEARNERS

    async def _read(self, fragment: int) -> None:
        request = sync_pb2.DownloadRequest(
            job="bench-hub",
            process=self._process,
            what=sync_pb2.DownloadRequest.FULL,
            fragment=fragment,
            epoch=self._epoch,
            catching_up=self._catching_up,
        )
        size = codec.encoded_bytes(DOWN, self._place.elements)
        header, _ = await bulk.download(self._lanes_down, request, size=size)
        if not header.found:
            raise RuntimeError(f"version 0 of fragment {fragment} is not to be had: {header.reason}")


def host_readers(pipe: Connection, ordinals: list[int], place: hub.Place) -> None:
    """A process of some readers, which do together what they are told."""

    async def run() -> None:
        readers = [Reader(ordinal, place) for ordinal in ordinals]
        while (word := await asyncio.to_thread(pipe.recv)) != "end":
            await asyncio.gather(*(reader.ways[word]() for reader in readers))
            pipe.send("")

    asyncio.run(run())


class Hosts:
    """The processes of readers."""

    def __init__(self, place: hub.Place) -> None:
        self._place = place
        self._children: list[Any] = []

    def start(self, ordinals: list[int]) -> Connection:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        child = context.Process(target=host_readers, args=(theirs, ordinals, self._place), daemon=True)
        child.start()
        self._children.append(child)
        return ours

    def end(self, *pipes: Connection) -> None:
        for pipe in pipes:
            pipe.send("end")
        for child in self._children:
            child.join(10)


def await_answer(pipe: Connection) -> None:
    """Raises SystemExit if none comes."""
    if not pipe.poll(hub.WAIT_SECONDS):
        raise SystemExit(f"bench/newcomers: no answer within {hub.WAIT_SECONDS:.0f} s")
    pipe.recv()


def tell(pipe: Connection, word: str) -> float:
    """Say it and wait until it is done; the seconds that it took."""
    began = time.monotonic()
    pipe.send(word)
    await_answer(pipe)
    return time.monotonic() - began


def time_versions(learners: Connection, newcomers: Connection | None = None) -> list[float]:
    """The seconds of versions; beside ``newcomers``, of those in all of which these had no whole model yet, or of the
    one that they had it in."""
    took: list[float] = []
    while len(took) < MOST and not (newcomers and took and newcomers.poll()):
        took.append(tell(learners, "version"))
    return took[:-1] if newcomers and newcomers.poll() and took[1:] else took


def main() -> None:
    common.end_on_sigterm()
    args = common.arguments(__doc__ or "").parse_args()
    elements = 1 << 20 if args.quick else 250_000_000 // hub.FRAGMENTS
    everybody = hub.LEARNERS + 1 + NEWCOMERS
    job = parse_job(hub.JOB.format(fragments=hub.FRAGMENTS, quorum=everybody, up=UP, down=DOWN, shards=1))
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="diloco-bench-") as folder,
        programs.Syncer(Path(folder) / "hub", job) as run,
    ):
        hosts = Hosts(hub.Place(run.address, 0, None, elements=elements, up=UP, down=DOWN))
        learners, one, many = (
            hosts.start(list(range(*ordinals)))
            for ordinals in ((0, hub.LEARNERS), (hub.LEARNERS, hub.LEARNERS + 1), (hub.LEARNERS + 1, everybody))
        )
        for pipe in (learners, one, many):
            tell(pipe, "join")
        tell(learners, "version")
        alone, beside = time_versions(learners), dict[str, list[float]]()
        for name, newcomers in (("a newcomer", one), (f"{NEWCOMERS} newcomers", many)):
            newcomers.send("version")
            beside[name] = time_versions(learners, newcomers)
            await_answer(newcomers)
            alone += time_versions(learners)
        undisturbed = statistics.median(alone)
        for name, seconds in beside.items():
            took = statistics.median(seconds)
            rows.append(common.Row(name, took, "s", "no newcomer", baseline=undisturbed, ratio=took / undisturbed))
        hosts.end(learners, one, many)
    common.show(rows, args.json, f"{hub.LEARNERS} learners, {hub.FRAGMENTS} fragments of {elements} values")


if __name__ == "__main__":
    main()
