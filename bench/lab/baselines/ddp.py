"""One rank of torch's DistributedDataParallel over gloo, with the job's model, data, batch and inner optimizer.

Each rank takes the job's batch, so the step's batch is that of all ranks together. The state is checkpointed into
memory at Daly's interval. A rank that starts goes on from the newest checkpoint; what was trained after it is lost. A
failing collective ends the process: who started it decides what follows.
"""

from __future__ import annotations

import logging
from datetime import timedelta

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from diloco_protocol.spec.job import DiLoCoJob
from diloco_worker import device
from lab.baselines.link import watch_link
from lab.baselines.rank import Rank
from lab.baselines.settings import BaselineSettings, daly_interval
from lab.baselines.states import TrainState

log = logging.getLogger(__name__)

# Long: a rank that is stopped for a while is waited for, which costs less than a restart of all.
COLLECTIVE_SECONDS = 1800.0


def train_rank(job: DiLoCoJob, settings: BaselineSettings) -> int:
    """Train as one rank, by the environment's RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, until the job has had its
    time. Returns the exit code; raises RuntimeError where a collective fails."""
    device.configure(job.spec)
    watch_link(settings.cut(settings.learner))
    rank = Rank(job, settings)
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    place, world = dist.get_rank(), dist.get_world_size()
    state = rank.states.restore(rank.model, rank.optimizer)
    dist.barrier()  # nobody writes a checkpoint while others read one
    wrapped = wrap_model(rank)
    log.info("rank %d of %d continues from step %d", place, world, state.step)
    if place == 0:
        rank.states.forget_scores_after(state.tokens)
        rank.mark_started()
    checkpoints = DueCheckpoints(rank, settings)
    reduced = rank.gradient_bytes * job.spec.training.batch.accumulation
    while True:
        tokens = rank.make_step(wrapped, state.sequences + place * rank.sequences, state.step, place)
        state.step += 1
        state.sequences += rank.sequences * world
        state.tokens += tokens * world
        rank.record_step(state.step, tokens, world, reduced)
        if place != 0:
            continue
        checkpoints.save_if_due(state)
        rank.keep_state_if_due(state, tokens * world)
        if rank.out_of_time:
            rank.states.keep_for_score(state, rank.model)
            rank.mark_ended()
            return 0


def wrap_model(rank: Rank) -> DistributedDataParallel:
    """The rank's model, whose gradients are averaged over the process group."""
    wrapped = DistributedDataParallel(rank.model)
    wrapped.config = rank.model.config  # where the loss of a mixture of experts looks
    return wrapped


class DueCheckpoints:
    """The first rank's: into memory, at Daly's interval for what the last one cost."""

    def __init__(self, rank: Rank, settings: BaselineSettings) -> None:
        self._rank = rank
        self._settings = settings
        self._since = 0
        self._every = 1  # steps

    def save_if_due(self, state: TrainState) -> None:
        self._since += 1
        if self._since < self._every:
            return
        cost = self._rank.states.save(state, self._rank.model, self._rank.optimizer)
        work = min(daly_interval(cost, self._settings.mtbf_seconds), self._settings.stop_seconds)
        self._since = 0
        self._every = max(1, round(work / (self._rank.pace.step_seconds or max(cost, 1e-3))))
