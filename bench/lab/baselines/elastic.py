"""Elastic DistributedDataParallel: torchrun's agents, which form a new group at each loss and each return.

An agent for each machine starts one rank for each group (``--nnodes 1:N --nproc-per-node 1``, c10d rendezvous at a
store on a machine that does not fail). When a peer dies, the collective breaks off: each survivor keeps its state and
ends, and its agent meets the others again. When a machine is back, the agents see one waiting and stop their ranks,
which keep their state too. The first rank of the new group takes the most advanced state that anybody kept and sends it
to all, so that no more than the step in flight is lost where a survivor lives. Checkpoints at Daly's interval are for
the case that none does.

Settings are those that lose least (docs/decisions/066). What this works around in torch's rendezvous:

- *A shared store's address is kept over groups* by all but the first rank, and is wrong once the first agent has died:
  each group has a store of its own (``TORCH_DISABLE_SHARE_RDZV_TCP_STORE``).
- *Two groups at once*: agents whose heartbeats all stopped for a while, as paused ones' do, are forgotten, and whoever
  comes then forms a group beside theirs. The group that formed last is written down, and an older one ends itself.
"""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import time
import uuid
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from diloco_protocol.common.files import write_whole
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import read_job
from diloco_worker import device
from lab.baselines.ddp import DueCheckpoints, wrap_model
from lab.baselines.link import watch_link
from lab.baselines.rank import Rank
from lab.baselines.settings import VARIABLE, BaselineSettings
from lab.baselines.states import TrainState, load_checkpoint

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
# What torchrun takes as --rdzv-conf, in whole seconds.
RENDEZVOUS = {
    "is_host": False,
    "last_call_timeout": 2,  # agents look once a second: with 1 a survivor may come too late, and all form again
    "keep_alive_interval": 1,
    "keep_alive_max_attempt": 3,  # the first heartbeat of a group comes after two intervals
    "join_timeout": 600,
}
MONITOR_SECONDS = 0.1
# How long a rank that is stopped is waited for: about what forming a group without it and another with it costs.
COLLECTIVE_SECONDS = 10.0
STOP_SECONDS = 5  # for a rank to end its step and keep its state
ENDLESS = 1_000_000  # restarts


def serve_store(settings: BaselineSettings) -> int:
    """Serve the store where agents meet until killed. It stands for a machine that does not fail."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    write_whole(settings.store_address, json.dumps(f"{HOST}:{store.port}").encode())
    while True:
        signal.pause()


def run_agent(job: DiLoCoJob, settings: BaselineSettings) -> int:
    """Keep a rank in each group that forms, until killed or cut off. Returns the exit code; raises RuntimeError."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.rendezvous import RendezvousParameters, dynamic_rendezvous
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    # A label of events that go nowhere, for which it looks through all loaded modules: seconds for each group.
    dynamic_rendezvous.get_method_name = lambda *_: ""
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    watch_link(settings.cut(settings.learner))
    parameters = RendezvousParameters(
        "c10d", settings.store, job.metadata.name, 1, settings.learners, local_addr=HOST, **RENDEZVOUS
    )
    # Not torchrun's own launcher: as an agent fails, it closes the rendezvous for all.
    spec = WorkerSpec(
        role="rank",
        local_world_size=1,
        rdzv_handler=get_rendezvous_handler(parameters),
        entrypoint=train_member,
        max_restarts=ENDLESS,
        monitor_interval=MONITOR_SECONDS,
        local_addr=HOST,
    )
    logs = Path(settings.directory) / "agents"
    logs.mkdir(exist_ok=True)
    # Ranks are forked with the libraries loaded, as other arms' processes are from the fork server.
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(logs)), "fork", shutdown_timeout=STOP_SECONDS)
    return 1 if agent.run().is_failed() else 0


def train_member() -> None:
    """Train as one rank of the group that the environment names, until it breaks up or the job has had its time."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # there is no state to keep yet
    settings = BaselineSettings.from_json(os.environ[VARIABLE])
    job = read_job(Path(os.environ["DILOCO_JOB_FILE"]))
    watch_link(settings.cut(settings.learner))
    try:
        _train_member(job, settings)
    except (RuntimeError, OSError) as error:  # a group that breaks up is an ordinary event here
        log.warning("the group breaks up: %s: %s", type(error).__name__, str(error).splitlines()[0])
        raise SystemExit(1) from None


def _train_member(job: DiLoCoJob, settings: BaselineSettings) -> None:
    device.configure(job.spec)
    rank = Rank(job, settings, f"-{settings.learner}")
    dist.init_process_group("gloo", timeout=timedelta(seconds=COLLECTIVE_SECONDS))
    place, world = dist.get_rank(), dist.get_world_size()
    if world < settings.learners and not settings.started.exists():
        log.info("waiting for the others before the job's first step")
        while True:
            time.sleep(60.0)  # the agent ends this when another is there
    state = share_state(rank, place)
    stop = _Stop()
    wrapped = wrap_model(rank)
    log.info("rank %d of %d continues from step %d", place, world, state.step)
    group = uuid.uuid4().hex
    if place == 0:
        write_whole(settings.group, json.dumps(group).encode())
        rank.states.forget_scores_after(state.tokens)
        rank.mark_started()
    checkpoints = DueCheckpoints(rank, settings)
    reduced = rank.gradient_bytes * job.spec.training.batch.accumulation
    try:
        while not stop.asked:
            tokens = rank.make_step(wrapped, state.sequences + place * rank.sequences, state.step, place)
            state.step += 1
            state.sequences += rank.sequences * world
            state.tokens += tokens * world
            rank.record_step(state.step, tokens, world, reduced)
            if place != 0:
                continue
            if json.loads(settings.group.read_text(encoding="utf-8")) != group:
                raise RuntimeError("another group has formed since")
            checkpoints.save_if_due(state)
            rank.keep_state_if_due(state, tokens * world)
            if rank.out_of_time:
                rank.states.keep_for_score(state, rank.model)
                rank.mark_ended()
                return
        log.info("asked to stop after step %d", state.step)
        raise SystemExit(1)
    finally:
        # A collective that broke off did so before the optimizer's step: this is the state after the step before.
        rank.states.save(state, rank.model, rank.optimizer)


def share_state(rank: Rank, place: int) -> TrainState:
    """The most advanced state that anybody kept, at all ranks of the group: the first one reads it and sends it."""
    path = rank.states.most_advanced() if place == 0 else None
    content = torch.frombuffer(bytearray(b"" if path is None else path.read_bytes()) or bytearray(1), dtype=torch.uint8)
    size = torch.tensor([0 if path is None else content.numel()])
    dist.broadcast(size, 0)
    if not size.item():
        return TrainState()
    if place != 0:
        content = torch.empty(int(size.item()), dtype=torch.uint8)
    dist.broadcast(content, 0)
    loaded = torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)
    return load_checkpoint(loaded, rank.model, rank.optimizer)


class _Stop:
    """Whether the agent has asked the rank to end, after the step that it is in."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGTERM, self._ask)

    def _ask(self, *_: object) -> None:
        self.asked = True
