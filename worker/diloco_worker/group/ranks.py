"""The processes of one learner, and the commands that their leader gives between two steps.

Theory of operation
-------------------
Rank 0 leads. At each step boundary all ranks first give their share (``join_step``): tokens, loss, and whether they
were told to end. Then the leader alone runs its boundary as a learner of one process does. Each operation on tensors
that comes of it is *told* before the leader carries it out, so that every rank carries it out in the same order.
RETURN ends the boundary, with what a loop may read. While the leader waits it tells HOLD now and then, and all ranks
say again whether they were told to end: a drain begins at a point that all of them have reached, or not at all.

These commands travel in a process group of their own, over gloo: they never queue behind the collectives of training,
and have a timeout of their own. Each has a number, and one that is out of order ends the learner. A rank that dies ends
its connections, so the next command fails in all others, and they end too: what is one learner is lost as one.

Nothing is pickled: a command is a JSON document and a list of integers.

What is still wrong with it: who has ended is not known by name, only that a connection has. Who hangs is
(``rank_watch``), and who is late (``core.rank_delays``), but not in collectives of the program.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from diloco_protocol.vocabulary import WorkerExit
from diloco_worker.core.rank_delays import RankDelays
from diloco_worker.named_parameters import world_size
from diloco_worker.settings import ConfigurationError, WorkerError

_FRAME = 2048  # bytes that one broadcast carries; what is longer takes a second one
_HEAD = 4  # int64: number, command, bytes of the document, integers
_HOLD_SECONDS = 1.0
_LONGEST_SECONDS = 7200.0  # of a step, where the job bounds none


class GroupBroken(WorkerError):
    """Another process of the group has ended, or is silent: this one ends too."""

    exit_code = WorkerExit.GROUP


class Command(IntEnum):
    """What the leader tells. ``following.operations`` carries out all but the first three."""

    RETURN = 0
    HOLD = 1
    END = 2
    SNAPSHOT = 3
    MOVE = 4
    CLEAR = 5
    STATE_OUT = 6
    STATE_IN = 7
    FROZEN_OUT = 8
    FROZEN_IN = 9


@dataclass(frozen=True, slots=True)
class Told:
    """A command, with its document and its integers, int64[n]."""

    command: Command
    words: Mapping[str, Any]
    items: np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class JoinedStep:
    """A step of all ranks: their tokens, the mean loss per token of those that gave one (None: nobody did), and whether
    some rank was told to end."""

    tokens: int
    loss: float | None
    told: bool


class Ranks:
    """The processes of a learner, seen from one of them: this one alone, whom nobody hears. ``data``: the share of each
    batch that this rank loads, as (index, how many shares)."""

    rank, size = 0, 1
    data = (0, 1)
    # Of several ranks: who comes last to the ends of steps, and by how many seconds after the first.
    slowest: tuple[int, float] | None = None

    @property
    def leads(self) -> bool:
        """Whether this process is the leader."""
        return self.rank == 0

    def join_step(self, tokens: int, loss: float | None, told: bool) -> JoinedStep:
        """Add up the ranks' steps; every rank calls it at each boundary. Raises GroupBroken."""
        return JoinedStep(tokens, loss, told)

    def tell_others(self, command: Command, items: Sequence[int] = (), **words: Any) -> None:
        """As the leader: have the others do this. Of no effect in other ranks. Raises GroupBroken."""

    def hold_others(self, told: bool) -> bool:
        """As the leader, in a wait: keep the others waiting, once a second. Returns whether some rank was told to end,
        as far as is known. Raises GroupBroken."""
        return told

    def close(self) -> None:
        """Break with the others: they end, at the next command at the latest."""


def join_ranks(
    environ: Mapping[str, str], data: tuple[int, int] | None = None, step_seconds: float | None = None
) -> Ranks:
    """The processes of this learner: those of torch's default process group, or this one alone. ``data`` and
    ``step_seconds``: as ``Group`` has them. Raises ConfigurationError where torchrun has started several and they have
    no group."""
    if world_size() > 1:
        return Group(data, step_seconds)
    declared = environ.get("WORLD_SIZE", "1")
    if declared.isdecimal() and int(declared) > 1:
        raise ConfigurationError(
            f"WORLD_SIZE is {declared}, and there is no process group: the processes that torchrun starts are one "
            "learner, so call torch.distributed.init_process_group() before the Learner is made. Unset WORLD_SIZE "
            "where each process is a learner of its own"
        )
    return Ranks()


@functools.cache
def _name_process(pid: int) -> str:
    """A name for this process that no other has; ``pid`` tells it from the one that it was forked from."""
    return f"{pid}-{secrets.token_hex(8)}"


def claim_rank(rank: int, store: Any) -> None:
    """Take a rank in ``store``, torch's. Raises GroupBroken if another process has had this rank.

    Then the store is of the learner's former ranks: this process was started anew, as a pod, while the old leader's
    process still ended. It finds their addresses there, and would wait for them, and the new leader for this one."""
    mine = _name_process(os.getpid())
    if store.compare_set(f"diloco/{rank}", "", mine).decode() != mine:
        raise GroupBroken(
            f"another process has been rank {rank} of the ranks that were found at MASTER_ADDR: they are "
            "this learner's former ones, whose leader is still ending. A new start finds the new leader"
        )


class Group(Ranks):
    """The processes of torch's default process group, which are one learner. ``data``: as ``Ranks`` has it; None: each
    rank loads a share of its own. ``step_seconds``: the longest that a step may take, before the others are lost; None:
    two hours. Every rank makes one, at the same place. Raises ConfigurationError."""

    def __init__(self, data: tuple[int, int] | None = None, step_seconds: float | None = None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.data = (self.rank, self.size) if data is None else data
        index, shares = self.data
        if not 0 <= index < shares <= self.size:
            raise ConfigurationError(
                f"data_rank={self.data}: it is (index, shares) of the batch that this rank loads, the index from 0 and "
                f"below the shares, and at most {self.size} shares, one for each rank"
            )
        claim_rank(self.rank, dist.distributed_c10d._get_default_store())
        seconds = step_seconds if step_seconds is not None else _LONGEST_SECONDS
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        self.number = 0  # of the last command
        self._waited = 0.0  # at the last step's end, seconds
        self._delays = RankDelays(self.size)
        self._held_at = time.monotonic()
        self._frame = np.zeros(_FRAME, np.uint8)
        self._shared_frame = torch.from_numpy(self._frame)
        found = [json.loads(text) for text in self.gather_texts(json.dumps(self.data))]
        if {row[1] for row in found} != {shares} or {row[0] for row in found} != set(range(shares)):
            raise ConfigurationError(
                f"data_rank is {found} in the ranks of this learner: together they must load each share of a batch"
            )
        # Ranks that load the same share (of tensor parallelism) have the same tokens: one of them counts.
        self.counts = found.index([index, shares]) == self.rank

    def join_step(self, tokens: int, loss: float | None, told: bool) -> JoinedStep:
        said = (tokens, 0.0, 0) if loss is None or not tokens else (tokens, loss * tokens, tokens)
        row = said if self.counts else (0, 0.0, 0)
        waits = [self._waited if rank == self.rank else 0.0 for rank in range(self.size)]
        began = time.monotonic()
        joined, losses, weight, ends, *waits = self._sum([*row, float(told), *waits])
        self._waited = time.monotonic() - began
        self._delays.add_step(waits)
        self.slowest = self._delays.slowest
        return JoinedStep(round(joined), losses / weight if weight else None, ends > 0)

    def tell_others(self, command: Command, items: Sequence[int] = (), **words: Any) -> None:
        if not self.leads:
            return
        document = json.dumps(words, separators=(",", ":")).encode() if words else b"{}"
        numbers = np.asarray(items, np.int64)
        body = document + numbers.tobytes()
        self.number += 1
        self._frame[: 8 * _HEAD].view(np.int64)[:] = self.number, command, len(document), len(numbers)
        fits = len(body) <= _FRAME - 8 * _HEAD
        if fits:
            self._frame[8 * _HEAD : 8 * _HEAD + len(body)] = np.frombuffer(body, np.uint8)
        self._broadcast(self._shared_frame)
        if not fits:
            self._broadcast(torch.frombuffer(bytearray(body), dtype=torch.uint8))
        self._held_at = time.monotonic()

    def hear(self) -> Told:
        """As a follower: wait for the next command. Raises GroupBroken."""
        self._broadcast(self._shared_frame)
        number, command, length, count = map(int, self._frame[: 8 * _HEAD].view(np.int64))
        self.number += 1
        if number != self.number:
            raise GroupBroken(f"command {number} came where {self.number} was due: the ranks' loops have parted")
        size = length + 8 * count
        body = self._frame[8 * _HEAD : 8 * _HEAD + size]
        if size > _FRAME - 8 * _HEAD:
            longer = torch.empty(size, dtype=torch.uint8)
            self._broadcast(longer)
            body = longer.numpy()
        words = json.loads(body[:length].tobytes())
        return Told(Command(command), words, np.frombuffer(body[length:].tobytes(), np.int64))

    def hold_others(self, told: bool) -> bool:
        if time.monotonic() - self._held_at < _HOLD_SECONDS:
            return False
        self.tell_others(Command.HOLD)
        return self.agree(told)

    def close(self) -> None:
        with contextlib.suppress(Exception):  # of whatever kind: this process is ending
            dist.destroy_process_group(self._group)

    def agree(self, told: bool) -> bool:
        """Whether some rank was told to end; every rank calls it. Raises GroupBroken."""
        return self._sum([float(told)])[0] > 0

    def wait_for_all(self) -> None:
        """Go on when every rank is here. Raises GroupBroken."""
        self._sum([0.0])

    def send(self, values: torch.Tensor, rank: int) -> None:
        """Send a contiguous tensor on the CPU to one rank, which receives it; nothing is sent of an empty one. Raises
        GroupBroken."""
        if values.numel():
            self._call(lambda: dist.send(values, rank, group=self._group))

    def receive(self, values: torch.Tensor, rank: int) -> None:
        """Receive what one rank sends into a contiguous tensor on the CPU. Raises GroupBroken."""
        if values.numel():
            self._call(lambda: dist.recv(values, rank, group=self._group))

    def gather_texts(self, text: str) -> list[str]:
        """The texts of all ranks, in every rank. Raises GroupBroken."""
        mine = text.encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._call(lambda: dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._group))
        most = max(int(size) for size in sizes)
        rows = [torch.zeros(most, dtype=torch.uint8) for _ in range(self.size)]
        padded = torch.frombuffer(bytearray(mine.ljust(most, b" ")), dtype=torch.uint8)
        self._call(lambda: dist.all_gather(rows, padded, group=self._group))
        return [bytes(row[: int(size)].numpy()).decode() for row, size in zip(rows, sizes, strict=True)]

    def _sum(self, values: Sequence[float]) -> list[float]:
        row = torch.tensor(values, dtype=torch.float64)
        self._call(lambda: dist.all_reduce(row, group=self._group))
        found: list[float] = row.tolist()
        return found

    def _broadcast(self, values: torch.Tensor) -> None:
        self._call(lambda: dist.broadcast(values, 0, group=self._group))

    def _call(self, collective: Any) -> None:
        try:
            collective()
        except RuntimeError as error:  # what torch raises for a broken or silent connection
            reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            raise GroupBroken(
                f"another process of this learner (rank {self.rank} of {self.size} says it) has ended or is silent, "
                f"so all of them end: {reason}"
            ) from error
