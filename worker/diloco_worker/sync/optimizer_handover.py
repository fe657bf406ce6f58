"""The inner optimizer's state: where a newcomer takes it from, and what a learner gives of its own.

Theory of operation
-------------------
A newcomer tries the sources in this order (algorithm.md section 8). First a healthy peer's state, used as soon
as this learner's versions are at least the peer's. If no peer has one: the better of two on disks, the job
checkpoint's and the slot's own (``slot_checkpoint``), and if that one does not fit, the other. If there is none, peers
once more, *patiently*, for where all learners were lost at once another one may come back and find its own. If none is
to be had the optimizer starts fresh, with learning-rate warm-up.

A state is *young* if it began fresh within the job and is not beyond the warm-up: it holds fewer steps than that, and
fewer than half of its slot's. Whatever its source, a state with less of the warm-up goes behind one with more. Of those
that are beyond it the better is the newer, by the versions on which it was made (``optimizer_state.Origin``). The job
checkpoint's was made when all learners left together. So right after a suspension it is the newer one, and after a
later crash the slot's own is. A process that lost a slot and got another keeps the state in its memory rather than
one of a disk.

Until the waiting is over no step is made. Within a session an answer always comes: syncer and transfers give up what
does not move any more, and nothing that moves. So only silence is bounded here, ``limits.REJOIN_SECONDS`` of it:
without a session, and without a byte of the versions that a state which is here needs. A session that breaks takes
request and answer with it; they are asked for again in the next (``repeat_request``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from diloco_protocol.arrays.kernels import Bytes
from diloco_protocol.wire import limits
from diloco_worker.core.adoption import Adoption
from diloco_worker.net.client import SyncerClient
from diloco_worker.net.inbox import StateDownloaded
from diloco_worker.settings import WorkerError
from diloco_worker.sync import optimizer_state
from diloco_worker.sync.inner_optimizers import InnerOptimizers
from diloco_worker.sync.optimizer_state import Origin, ReceivedState, StateRefused
from diloco_worker.sync.slot_checkpoint import SlotCheckpoint

log = logging.getLogger(__name__)

PEER, JOB, OWN = "peer", "job's checkpoint", "slot's own checkpoint"
Held = Sequence[tuple[int, int]]  # (epoch, version) per fragment


@dataclass
class OptimizerHandover:
    """The handover of one learner; only the training thread calls it.

    ``warm_up``: steps after which a state that began fresh is as good as any. ``on_fresh(step)`` is called when the
    optimizer starts fresh: the learning rate is warmed up from that slot step.
    """

    inner: InnerOptimizers
    adoption: Adoption
    client: SyncerClient
    checkpoint: SlotCheckpoint
    warm_up: int
    on_fresh: Callable[[int], None]

    def __post_init__(self) -> None:
        self._limit = optimizer_state.max_state_bytes(self.inner.model)
        self._trained = 0  # inner steps since the state began fresh, whoever made them
        self._fresh = ""  # why it began fresh in this tenure; empty: it did not
        self._job_has_one = False
        self._source = ""  # what is waited for: PEER, JOB, OWN, or nothing
        self._candidates: list[tuple[str, ReceivedState]] = []  # states that came, best first
        self._ranked = False  # the candidates are, or were, those of the disks
        self._ask_again = False  # no peer had one
        self._patient = False  # peers are asked for the second time
        self._arrived = -1  # bytes of the session, when they were counted last
        self._deadline = 0.0  # of the silence
        self._told = False  # what is to be known of the state once

    # ------------------------------------------------------------------ what the state holds

    @property
    def is_young(self) -> bool:
        """Whether this learner trains, with a state that began fresh within the job and is not beyond the warm-up."""
        few = min(self.warm_up, self.adoption.now.step / 2)
        return self.adoption.trained_steps > 0 and self._trained < few

    @property
    def fresh(self) -> str:
        """Why the state began fresh in this tenure, while it warms up; empty: it did not, or is warm."""
        return self._fresh if self._trained < self.warm_up else ""

    def count_step(self) -> None:
        """An inner step was made."""
        self._trained += 1

    def _warmed_up(self, trained: int) -> int:
        """How many steps of the warm-up a state holds that was trained for so many."""
        return min(trained, self.warm_up)

    def _trained_of(self, data: Bytes) -> int:
        """The steps since a state began fresh; of one that does not say, the warm-up's."""
        try:
            origin = optimizer_state.origin_of(data)
        except StateRefused:
            origin = None  # ``restore`` will say it
        return self.warm_up if origin is None else origin.trained

    # ------------------------------------------------------------------ taking over

    @property
    def is_waiting(self) -> bool:
        """Whether this learner waits for a state."""
        return self._source != ""

    def request_state(self, job_has_one: bool) -> None:
        """Begin to wait, as a newcomer in a job that has trained. ``job_has_one``: its checkpoint holds a state."""
        self._candidates = []
        self._fresh, self._source = "", PEER
        self._ranked = self._ask_again = self._patient = False
        self._job_has_one = job_has_one
        self.repeat_request()

    def stop_waiting(self) -> None:
        """Wait for no state: there is one now, or none is to be had, or needed."""
        self._candidates, self._source = [], ""

    def repeat_request(self) -> None:
        """Ask for the state that is waited for, in the present session."""
        if not self._source or self._candidates:
            return
        self._deadline = time.monotonic() + limits.REJOIN_SECONDS
        if self._source == PEER:
            self.client.request_peer_state(self._limit, self._patient)
        elif self._source == JOB:
            self.client.fetch_optimizer(self._limit)

    def receive_state(self, item: StateDownloaded) -> None:
        """Take an answer; one that came too late is ignored."""
        if self._candidates or self._source != (PEER if item.peer else JOB):
            return  # too late
        if not item.peer:
            self._rank_stored(item.data, "the job's checkpoint has none to be had")
        elif item.data is not None:
            self._rank_peers(ReceivedState(item.data, item.versions))
        else:
            self._ask_again = not self._patient
            self._try_next("no peer has one")

    def apply_when_ready(self, held: Held) -> None:
        """At a step boundary: put the state in place if it is here and this learner's versions are high enough."""
        if not self._source:
            return
        late = self._is_silent()
        if not self._candidates:
            if late:
                self._try_next("there was no session with the syncer")
            return
        if not self.adoption.complete:
            return
        name, state = self._candidates[0]
        if state.usable(held):
            try:
                optimizer_state.restore(state.data, self.inner)
                self._trained = self._trained_of(state.data)
                log.info("the inner optimizer continues from the state of the %s", name)
                self.stop_waiting()
                return
            except StateRefused as error:
                why = str(error)
            except WorkerError:
                raise  # the ranks have parted
            except Exception as error:  # of whatever kind: somebody else made these bytes
                optimizer_state.clear_state(self.inner)  # it may lie there in part
                self._trained = 0
                why = repr(error)
        elif name == PEER and not late:
            return  # its versions will come
        else:
            why = "it was made on versions that this job has not"
        log.warning("the state of the %s is not used: %s", name, why)
        del self._candidates[0]
        self._try_next(why)

    def _is_silent(self) -> bool:
        """Whether nothing has moved for too long that this learner waits for."""
        now, arrived = time.monotonic(), self.client.bytes_arrived
        owed = not self._candidates and self.client.connected
        if owed or arrived != self._arrived:
            self._arrived, self._deadline = arrived, now + limits.REJOIN_SECONDS
        return now > self._deadline

    def _try_next(self, why: str) -> None:
        """Turn to the next source, for ``why``."""
        if self._candidates:
            self._source = self._candidates[0][0]
        elif self._ranked and self._ask_again and not self.inner.has_state:
            self._source, self._patient, self._ask_again = PEER, True, False
            words = "waiting, at most %g s, for learners that may bring an optimizer state: %s"
            log.info(words, limits.REJOIN_SECONDS, why)
            self.repeat_request()
        elif self._ranked or (self._source == PEER and self.inner.has_state):
            self._begin_fresh(why)
        elif self._source == PEER and self._job_has_one:
            self._source = JOB
            self.repeat_request()
        else:
            self._rank_stored(None, why)

    def _rank_peers(self, state: ReceivedState) -> None:
        """Rank a peer's state before this learner's own, in memory or on disk, unless it holds less of the warm-up."""
        self._candidates = [(PEER, state)]
        warmed_up = self._warmed_up(self._trained_of(state.data))
        if self.inner.has_state:
            if self._warmed_up(self._trained) > warmed_up:
                self._begin_fresh("the peer's is younger")
            return
        own = self.checkpoint.load() if warmed_up < self.warm_up else None
        if own is not None and self._warmed_up(own[1].trained) > warmed_up:
            self._candidates.insert(0, (OWN, ReceivedState(own[0], own[1].versions)))

    def _rank_stored(self, job: Bytes | None, why: str) -> None:
        """Rank the job checkpoint's state (``job``, None: there is none) and the slot's own, the better first. One that
        does not say where it was made counts as the worse."""
        found: list[tuple[tuple[int, ...], str, ReceivedState]] = []
        if job is not None:
            try:
                origin = optimizer_state.origin_of(job)
                found.append((self._rank(origin), JOB, ReceivedState(job, ())))
            except StateRefused as error:
                why = f"the state of the {JOB} is not used: {error}"
        own = self.checkpoint.load()
        if own is not None:
            found.append((self._rank(own[1]), OWN, ReceivedState(own[0], own[1].versions)))
        found.sort(key=lambda one: one[0], reverse=True)
        self._candidates = [(name, state) for _, name, state in found]
        self._ranked = True
        self._try_next(why)

    def _rank(self, origin: Origin | None) -> tuple[int, ...]:
        """A key by which stored states are ordered, the best greatest."""
        return (-1,) if origin is None else (self._warmed_up(origin.trained), *origin.age)

    def _begin_fresh(self, why: str) -> None:
        self.stop_waiting()
        if self.inner.has_state:
            log.info("the inner optimizer continues with this process's own state: %s", why)
            return
        log.info("the inner optimizer begins fresh, with warm-up: %s", why)
        self._fresh = why
        optimizer_state.clear_state(self.inner)
        self._trained = 0
        self.on_fresh(self.adoption.now.step)

    # ------------------------------------------------------------------ giving

    def send_state(self, transfer: int, held: Held) -> None:
        """Answer the request for this learner's state, by a newcomer or for the job's checkpoint. Whatever goes wrong
        (as no memory for the copy) costs the newcomer this state, and this learner nothing."""
        encode = None
        if self.adoption.trained_steps and self.adoption.complete:
            origin = self.checkpoint.origin(self.adoption.now.step, held, self._trained)
            try:
                encode = optimizer_state.snapshot(self.inner, origin, self.checkpoint.folder)
            except WorkerError:
                raise  # the ranks have parted
            except Exception as error:
                log.warning("the optimizer's state is not given to a newcomer: it cannot be copied: %s", error)
        if encode is None:
            self.client.decline_state(transfer)
        else:
            self.client.send_state(transfer, encode, held)

    def write_checkpoint(self, held: Callable[[], Held]) -> None:
        """After a step: start writing the slot's own checkpoint, if one is due."""
        if not self.checkpoint.due or not self.adoption.complete:
            return
        started = time.monotonic()
        origin = self.checkpoint.origin(self.adoption.now.step, held(), self._trained)
        try:
            encode = optimizer_state.snapshot(self.inner, origin, self.checkpoint.folder)
        except WorkerError:
            raise  # the ranks have parted
        except Exception as error:  # of whatever kind, as no memory for the copy: training is worth more
            self.checkpoint.report_failure(f"the optimizer's state cannot be copied: {error}")
            return
        if encode is None:
            self.checkpoint.skip()
            if self.inner.has_state and not self._told:
                log.warning("%s", optimizer_state.UNWRITABLE)
                self._told = True
            return
        self.checkpoint.start_write(encode, time.monotonic() - started)
        if not self.inner.keeps_state and not self._told:
            log.info("the inner optimizer keeps no state: newcomers are told so, and go on without it")
            self._told = True
