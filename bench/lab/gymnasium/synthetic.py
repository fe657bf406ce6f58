"""Learners that hold no model, for models that would not fit several times into this machine.

A synthetic learner is a stand-in whose connection and transfers are the product's, whole. What it sends is made when it
is sent: a push of its seed, fragment, slot and base version, version 0 and its optimizer's state of the seed. So
whoever has the store can make the same pushes again, and compute what the syncer should have merged. Of the versions
that come it keeps their announcements only, once checksums were verified and the values decoded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from diloco_protocol.arrays.kernels import Bytes
from diloco_protocol.spec.load import parse_job
from diloco_protocol.wire import bulk
from diloco_protocol.wire.records import PushPlan
from diloco_worker.fragments import Floats, Vector
from diloco_worker.net import connection as worker_connection
from diloco_worker.net.fragment_cache import CachedVersion, FragmentCache
from diloco_worker.net.inbox import StateDownloaded, StateRequested
from diloco_worker.net.tensor_file import map_new_file
from diloco_worker.net.transfers import Transfers
from lab.gymnasium.stand_in import StandIn, even_layout

SEED = 1
STATE_BYTES = 8  # of a parameter: AdamW's two moments
TELL_SECONDS = 0.25
_START_SCALE, _PUSH_SCALE = 0.02, 0.001
_BLOCK = 1 << 18  # values that are drawn; they repeat
_STATE_BLOCK = 16 << 20


def make_values(elements: int, scale: float, *what: int) -> Floats:
    """float32[elements] of the seed and ``what``."""
    drawn = np.random.default_rng((SEED, *what)).standard_normal(min(_BLOCK, elements), np.float32)
    values: Floats = np.resize(drawn * np.float32(scale), elements)
    return values


def make_start(elements: int, fragment: int) -> Floats:
    """A fragment of version 0."""
    return make_values(elements, _START_SCALE, fragment)


def make_push(elements: int, fragment: int, slot: int, version: int) -> Floats:
    """The outer gradient of a slot's push on a version."""
    return make_values(elements, _PUSH_SCALE, fragment, slot, version)


def make_state(size: int) -> Bytes:
    """An optimizer's state of so many bytes, in a mapped file."""
    data = map_new_file(size)
    block = np.random.default_rng(SEED).integers(0, 256, _STATE_BLOCK, np.uint8)
    for start in range(0, size, _STATE_BLOCK):
        data[start : start + _STATE_BLOCK] = block[: size - start]
    return data


class MadeVector(Vector):
    """Values that are made whenever they are asked for, and that nobody keeps."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], Floats]) -> None:
        super().__init__(torch.empty(0))
        self._make = make

    @property
    def array(self) -> Floats:
        return self._make()


class AnnouncedVersions(FragmentCache):
    """Keeps versions without their values."""

    def put(self, version: CachedVersion) -> None:
        super().put(replace(version, values=np.empty(0, np.float32), receipt=b""))


class SyntheticLearner(StandIn):
    """One learner. ``state``: the seconds that a peer's state took, and its checksum."""

    def __init__(self, *given: Any, ordinal: int) -> None:
        empty = Vector(torch.empty(0))
        with mock.patch.object(worker_connection, "FragmentCache", AnnouncedVersions):
            super().__init__(*given, ordinal=ordinal, to_vector=lambda values: empty)
        self._state_bytes = STATE_BYTES * self._layout.total_elements
        self._asked_at = 0.0
        self.state: tuple[float, int] | None = None

    def ask_for_state(self) -> None:
        self._asked_at = time.monotonic()
        self.connection.request_peer_state(self._state_bytes, False)

    def _read(self, message: object) -> None:
        if isinstance(message, StateRequested):
            versions = [(one.epoch, one.version) for one in self._fragments]
            encode = partial(make_state, self._state_bytes)
            self.connection.start_transfer(
                Transfers.send_state, message.transfer, encode, versions, self.connection.status.epoch
            )
        elif isinstance(message, StateDownloaded):
            seconds = time.monotonic() - self._asked_at
            self.state = seconds, 0 if message.data is None else bulk.checksum(message.data)
        else:
            super()._read(message)

    def _make_start(self, fragment: int) -> Vector:
        return MadeVector(lambda: make_start(self._layout.elements(fragment), fragment))

    def _make_work(self, plan: PushPlan, base: Vector) -> tuple[Vector, Vector]:
        assert self._seat is not None
        elements, slot = self._layout.elements(plan.fragment), self._seat.slot
        zeros = MadeVector(lambda: np.broadcast_to(np.float32(0), elements))
        return zeros, MadeVector(lambda: -make_push(elements, plan.fragment, slot, plan.base_version))


@dataclass
class Told:
    """What a process of learners says of itself. ``ready``: when each had the whole model, by time.monotonic().
    ``state``: of the one that asked for a peer's."""

    ready: list[float | None] = field(default_factory=list)
    state: tuple[float, int] | None = None
    error: str = ""


def run_learners(
    pipe: Connection, folder: Path, addresses: Sequence[tuple[int, str]], elements: int, pace: float
) -> None:
    """A process of learners, by ordinal and the syncer's address, until it is told "end"."""
    asyncio.run(_run(pipe, folder, addresses, elements, pace=pace))


async def _run(
    pipe: Connection, folder: Path, addresses: Sequence[tuple[int, str]], elements: int, *, pace: float
) -> None:
    layout = even_layout(parse_job((folder / "job.json").read_text(encoding="utf-8")), elements)
    executor = ThreadPoolExecutor(2)
    learners = [
        SyntheticLearner(folder, address, layout, pace, executor, ordinal=ordinal) for ordinal, address in addresses
    ]
    running = [asyncio.create_task(one.run()) for one in learners]
    word = ""
    while word != "end":
        ended = [task for task in running if task.done()]
        error = repr(ended[0].exception()) if ended else ""
        pipe.send(Told([one.ready_at for one in learners], learners[-1].state, error))
        await asyncio.sleep(TELL_SECONDS)
        while pipe.poll():
            word = pipe.recv()
            if word == "state":
                learners[-1].ask_for_state()
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
