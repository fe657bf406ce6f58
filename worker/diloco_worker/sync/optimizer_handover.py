"""What a newcomer takes over of its predecessors: the inner optimizer's state. And what it leaves.

Theory of operation
-------------------
In this order (algorithm.md section 8): a healthy peer's, as soon as this learner's
versions are at least the peer's; where no peer has one, the newer of the two that lie
on disks, the job's checkpoint's and the slot's own (``slot_checkpoint``), and if that
does not fit the other; else it begins fresh, with learning-rate warm-up. *Newer* is by
the versions on which a state was made (``recovery.Origin``). The job's was made when
all left together, so right after a suspension it is the newer one, and after a crash
later on the slot's own. A process that has a state in memory, because it lost a slot
and got another, keeps it rather than one from a disk.

Waiting is bounded, and until it is over no step is made. A session that breaks takes
request and answer with it; they are asked for again in the next (``ask_again``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from diloco_protocol.wire import limits
from diloco_worker.core.adoption import Adoption
from diloco_worker.net.client import SyncerClient
from diloco_worker.net.inbox import StateDownloaded
from diloco_worker.sync import optimizer_state
from diloco_worker.sync.optimizer_state import ReceivedState, StateRefused
from diloco_worker.sync.slot_checkpoint import SlotCheckpoint

log = logging.getLogger(__name__)

WAIT_SECONDS = 15.0  # the least time that a state is waited for
PEER, JOB, OWN = "peer", "job's checkpoint", "slot's own checkpoint"
Held = Sequence[tuple[int, int]]  # (epoch, version) per fragment


class OptimizerHandover:
    """Of one learner; only the training thread calls it. ``begin_fresh`` gets the slot's step
    from which on the learning rate is warmed up."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        adoption: Adoption,
        client: SyncerClient,
        checkpoint: SlotCheckpoint,
        begin_fresh: Callable[[int], None],
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._adoption = adoption
        self._client = client
        self._checkpoint = checkpoint
        self._fresh = begin_fresh
        self._limit = optimizer_state.most_bytes(model)
        self._job_has_one = False
        self._from = ""  # what is being waited for: PEER, JOB, OWN, or nothing
        self._here: list[tuple[str, ReceivedState]] = []  # states that came, best first
        self._deadline = 0.0

    # ------------------------------------------------------------------ what it takes

    @property
    def awaited(self) -> bool:
        """Whether a state is being waited for."""
        return self._from != ""

    def want(self, job_has_one: bool) -> None:
        """A newcomer in a job that has trained. ``job_has_one``: the job's checkpoint holds a state."""
        self._here = []
        self._from = PEER
        self._job_has_one = job_has_one
        self.ask_again()

    def ask_again(self) -> None:
        """Ask for what is being waited for, in the session as it is now."""
        if not self._from or self._here:
            return
        self._deadline = time.monotonic() + max(WAIT_SECONDS, limits.transfer_seconds(self._limit) / 2)
        if self._from == PEER:
            self._client.request_peer_state(self._limit)
        elif self._from == JOB:
            self._client.fetch_optimizer(self._limit)

    def receive_state(self, item: StateDownloaded) -> None:
        """An answer came."""
        if self._here or self._from != (PEER if item.peer else JOB):
            return  # too late
        if not item.peer:
            self._choose(item.data, "the job's checkpoint has none to be had")
        elif item.data is not None:
            self._here = [(PEER, ReceivedState(item.data, item.versions))]
        else:
            self._look_on_disks("no peer has one")

    def use(self, held: Held) -> None:
        """At a step boundary: put the state in place if it is here and this learner is ready for it."""
        if not self._from:
            return
        late = time.monotonic() > self._deadline
        if not self._here:
            if late:
                self._next("none came in time", chosen=False)
            return
        if not self._adoption.complete:
            return
        name, state = self._here[0]
        if state.usable(held):
            try:
                optimizer_state.restore(state.data, self._model, self._optimizer)
                log.info("the inner optimizer goes on from the state of the %s", name)
                self._here = []
                self._from = ""
                return
            except StateRefused as error:
                why = str(error)
        elif name == PEER and not late:
            return  # its versions will come
        else:
            why = "it was made on versions that this job has not"
        log.warning("the state of the %s is not used: %s", name, why)
        del self._here[0]
        self._next(why, chosen=name != PEER)

    def _next(self, why: str, chosen: bool) -> None:
        """What was waited for is not to be had: the next best. ``chosen``: the disks were looked at."""
        if self._here:
            self._from = self._here[0][0]
        elif chosen:
            self._begin_fresh(why)
        elif self._from == PEER:
            self._look_on_disks(why)
        else:
            self._choose(None, why)

    def _look_on_disks(self, why: str) -> None:
        if self._optimizer.state:
            self._begin_fresh(why)
        elif self._job_has_one:
            self._from = JOB
            self.ask_again()
        else:
            self._choose(None, why)

    def _choose(self, job: bytes | None, why: str) -> None:
        """Order the job's and the slot's own, the newer first. One that does not say where it was
        made counts as the older."""
        found: list[tuple[tuple[int, int, int], str, ReceivedState]] = []
        if job is not None:
            try:
                origin = optimizer_state.origin_of(job)
                found.append((origin.age if origin else (0, 0, 0), JOB, ReceivedState(job, ())))
            except StateRefused as error:
                why = f"the state of the {JOB} is not used: {error}"
        own = self._checkpoint.load()
        if own is not None:
            found.append((own[1].age, OWN, ReceivedState(own[0], own[1].versions)))
        found.sort(key=lambda one: one[0], reverse=True)
        self._here = [(name, state) for _, name, state in found]
        self._next(why, chosen=True)

    def _begin_fresh(self, why: str) -> None:
        self._here = []
        self._from = ""
        if self._optimizer.state:
            log.info("the inner optimizer goes on with this process's own state: %s", why)
            return
        log.info("the inner optimizer begins fresh, with warm-up: %s", why)
        self._fresh(self._adoption.now.step)

    # ------------------------------------------------------------------ what it leaves

    def give(self, transfer: int, held: Held) -> None:
        """A newcomer, or the job's checkpoint, wants this learner's state."""
        encode = None
        if self._adoption.trained_steps and self._adoption.complete:
            origin = self._checkpoint.origin(self._adoption.now.step, held)
            encode = optimizer_state.snapshot(self._model, self._optimizer, origin)
        if encode is None:
            self._client.decline_state(transfer)
        else:
            self._client.send_state(transfer, encode, held)

    def checkpoint(self, held: Callable[[], Held]) -> None:
        """After a step: the slot's own checkpoint, where one is due."""
        if not self._checkpoint.due or not self._adoption.complete:
            return
        started = time.monotonic()
        origin = self._checkpoint.origin(self._adoption.now.step, held())
        try:
            encode = optimizer_state.snapshot(self._model, self._optimizer, origin)
        except torch.cuda.OutOfMemoryError:
            self._checkpoint.failed("the GPU has no memory for a copy of the optimizer's state")
            return
        if encode is None:
            self._checkpoint.failed("the optimizer has no state, or one that cannot be written")
        else:
            self._checkpoint.keep(encode, time.monotonic() - started)
