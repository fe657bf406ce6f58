"""torchft's DiLoCo: each learner a replica group of one rank, a lighthouse that settles who takes part in a merge.

The whole model is one fragment, merged every ``sync.every`` steps with the job's outer rate and momentum, in float32
and in buckets. A merge that fails discards the steps since the last one; a newcomer takes its state live from a healthy
replica at its first merge. If all were killed within one merge, so that none is left that has a state, training
continues from the last merge's checkpoint in memory, without outer momentum.

Settings are those that lose least: one replica is enough, the lighthouse notices a silent one after ``SILENT_SECONDS``
and waits for all that are not silent. If it waited for less than the time between two merges, a replica that began in
the middle of it would never come into step with the others: of three, two would merge and the third would wait, each in
turn (docs/decisions/066).

The package ``torchft`` has to be installed, with what it needs.
"""

from __future__ import annotations

import json
import logging
import signal
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from diloco_protocol.common.files import write_whole
from diloco_protocol.merging import OuterSettings, outer_settings
from diloco_protocol.spec.job import DiLoCoJob
from diloco_worker import device
from lab.baselines.link import watch_link
from lab.baselines.rank import Rank
from lab.baselines.settings import BaselineSettings
from lab.baselines.states import TrainState

log = logging.getLogger(__name__)

SILENT_SECONDS = 1.0
LATE_SECONDS = 60.0  # torchft's own default
CALL_SECONDS = 20.0
QUORUM_SECONDS = 600.0


def serve_lighthouse(settings: BaselineSettings) -> int:
    """Serve the lighthouse until killed. It stands for a machine that does not fail."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        "127.0.0.1:0",
        1,
        join_timeout_ms=round(LATE_SECONDS * 1000),
        quorum_tick_ms=50,
        heartbeat_timeout_ms=round(SILENT_SECONDS * 1000),
    )
    port = server.address().rpartition(":")[2]
    write_whole(settings.store_address, json.dumps(f"http://127.0.0.1:{port}").encode())
    while True:
        signal.pause()


def train_replica(job: DiLoCoJob, settings: BaselineSettings) -> int:
    """Train as one replica until the job has had its time. Returns the exit code; raises RuntimeError."""
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    device.configure(job.spec)
    watch_link(settings.cut(settings.learner))
    rank = Rank(job, settings)
    every = job.spec.sync.every
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=CALL_SECONDS)),
        load_state_dict=lambda state: _load(rank, state),
        state_dict=lambda: {"model": rank.model.state_dict(), "optimizer": rank.optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        replica_id=f"learner-{settings.learner}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=settings.store,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=CALL_SECONDS),
        connect_timeout=timedelta(seconds=CALL_SECONDS),
        quorum_timeout=timedelta(seconds=QUORUM_SECONDS),
    )
    outer = _outer_optimizer(rank, outer_settings(job.spec.sync.outer, "mean"))
    last = rank.states.restore(rank.model, rank.optimizer)
    if last.step:
        # A step behind, so that whoever is alive counts as ahead and gives its whole state.
        manager.load_state_dict(
            {"step": last.step - 1, "batches_committed": last.sequences // (every * rank.sequences)}
        )
    rank.mark_started()
    within = 0
    with DiLoCo(manager, [rank.model], rank.optimizer, outer, sync_every=every, use_bucketization=True):
        while True:
            before = manager.batches_committed()
            place = manager.participating_rank() or 0
            # Replicas that agree on the merges take sequences of their own.
            first = (before * every + place * every + within) * rank.sequences
            # The job's step, not this process's: a replacement does not warm up again.
            step = manager.current_step() * every + within
            tokens = rank.make_step(rank.model, first, step, settings.learner)
            within = (within + 1) % every
            committed = manager.batches_committed() - before
            rank.record_step(step + 1, tokens, manager.num_participants(), rank.gradient_bytes if within == 0 else 0)
            if committed and manager.participating_rank() == 0:
                steps = manager.batches_committed() * every
                state = TrainState(manager.current_step(), steps * rank.sequences, steps * tokens)
                rank.states.save(state, rank.model, rank.optimizer)
                rank.keep_state_if_due(state, committed * every * tokens)
            if rank.out_of_time:
                rank.mark_ended()
                return 0


def _load(rank: Rank, state: dict[str, Any]) -> None:
    rank.model.load_state_dict(state["model"])
    rank.optimizer.load_state_dict(state["optimizer"])


def _outer_optimizer(rank: Rank, outer: OuterSettings) -> torch.optim.Optimizer:
    """SGD with the job's rate and momentum, or the paper's, whatever the outer optimizer is called."""
    momentum = outer.momentum if outer.optimizer != "sgd" else 0.0
    return torch.optim.SGD(rank.model.parameters(), lr=outer.lr, momentum=momentum, nesterov=momentum > 0)
