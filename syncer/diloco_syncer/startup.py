"""From the store to a syncer that can begin: the epoch claimed, everything restored, the core brought up to date.

Order, after ``service.py`` has bound the ports: the store is opened and a newer pod is looked for, kernels are loaded,
the epoch is claimed (a store that cannot be used costs no epoch), the newest state and the records and offers after it
are read, the tape gets the lines that a crash took, and the core is told of what is newer than its state.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import platform
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from diloco_protocol.arrays import codec
from diloco_protocol.common.reach import is_loopback
from diloco_protocol.security.credentials import Credentials
from diloco_protocol.spec.job import DiLoCoJob, immutable_digests, json_digest
from diloco_protocol.vocabulary import EventKind
from diloco_syncer.core.books.clock import LONGEST_DOWN
from diloco_syncer.core.books.deterministic import make_mode
from diloco_syncer.core.config import CoreConfig
from diloco_syncer.core.core import Core
from diloco_syncer.core.events import InitialModelStored, ReleasePush
from diloco_syncer.numerics.warm_up import warm_up
from diloco_syncer.runtime.global_model import GlobalModel
from diloco_syncer.server.tls.listener import PortListener
from diloco_syncer.store.base import HigherEpoch
from diloco_syncer.store.checkpoint import Checkpoints, Restored, offer_name
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.epochs import Epoch, find_successor
from diloco_syncer.store.open import open_store
from diloco_syncer.store.replay import replay_records, take_back_versions
from diloco_syncer.store.tape import DISCARDED, Tape
from diloco_syncer.syncer import Syncer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """What the program was called with; addresses are host:port, port 0 for any."""

    job: DiLoCoJob
    store: str
    listen: str
    control: str
    http: str
    address_file: Path | None
    control_key: bytes
    credentials: Credentials
    threads: int
    export: str | None = None  # where the merged model is served; a loopback address
    stay: bool = False  # after the job's end serve on, until told to stop
    min_epoch: int = 0  # claim a higher epoch than this
    began_again: str = ""  # why the life before this one ended, in this process
    pod: str = ""  # the UID of the pod that it runs in, if it does
    command: tuple[str, ...] = ()  # this program with its arguments, for shards
    shards_listen: str = ""  # where shards that are pods connect; empty: they are processes beside the syncer
    shard_host: str = ""  # of such a shard, for learners of this cluster; its number stands for {}


def restore(
    options: Options, loop: asyncio.AbstractEventLoop, listener: PortListener | None = None
) -> tuple[Syncer, Restored]:
    """Open the store, claim an epoch, and build a syncer from what is found; blocks.

    Raises ``HigherEpoch``, ``StoreUnusable``, ``FormatRefused``, ``outer.OuterError``, OSError.
    """
    job = options.job
    store = open_store(options.store)
    if options.pod and (taken := find_successor(store, options.pod, time.time())):
        raise HigherEpoch(f"{taken}: this one leaves it alone")
    warm_up(job, options.threads)
    if isinstance(store, DirectoryStore):
        store.remove_leftovers()
    claimant = {"pid": os.getpid(), "host": os.uname().nodename, "time": time.time()}
    claimant |= {"pod": options.pod} if options.pod else {}
    epoch = Epoch.claim(store, json.dumps(claimant).encode(), options.min_epoch)
    sharded = job.spec.syncer.shards > 1
    checkpoints = Checkpoints(store, epoch, job.metadata.name, job.spec.syncer.checkpoint.keep, forget_arrays=sharded)
    checkpoints.identify(immutable_digests(job) | _fixed_digests(job))
    restored = checkpoints.load()
    for problem in restored.problems:
        log.error("restoring: %s", problem)
    tape = Tape(store)
    if tape.damage:
        log.error(
            "the tape is damaged (%s): that segment is in discarded/, and the tape continues without it", tape.damage
        )
    complete_tape(tape, checkpoints, restored)
    core_state = restored.core["core"] if restored.core is not None else None
    now = time.monotonic()
    _tell_of_a_clock_ahead(core_state)
    core = Core(CoreConfig.from_job(job), core_state, epoch.number, now, wall=time.time())
    restored.newest = take_back_versions(core, restored.newest)
    model = GlobalModel(job, options.threads, control_key=options.control_key)
    if restored.layout is not None and not sharded:
        model.begin(restored.layout, restored.newest, restored.frozen, restored.frozen_digest)
    # A port that the system is yet to choose is one at which no learner can be trying to join.
    expected = options.listen.rpartition(":")[2] not in ("", "0")
    syncer = Syncer(
        job,
        core,
        model,
        checkpoints,
        tape=tape,
        restored=restored,
        loop=loop,
        listener=listener,
        stay=options.stay,
        plaintext=options.credentials,
        expected=expected,
        one_machine=is_loopback(options.listen.rpartition(":")[0]),
        shard_host=options.shard_host if options.shards_listen else "",
    )
    syncer.durability.settings = settings_line(job, epoch.number, restored)
    return syncer, restored


def _tell_of_a_clock_ahead(saved: dict[str, Any] | None) -> None:
    """Log it where the newest state is so old that not all of the time since counts (core/books/clock.py)."""
    clock = saved["job"]["clock"] if saved is not None else {"running": False}
    if clock["running"] and (down := time.time() - clock["wall"]) > LONGEST_DOWN:
        days = (down / 86_400, LONGEST_DOWN / 86_400)
        log.error("the newest state is %.1f days old by this machine's clock; %.0f of them count as elapsed", *days)


def _fixed_digests(job: DiLoCoJob) -> dict[str, str]:
    """Digests of what else may not change, because learners and data would not fit any more.

    These are how the layout was made, and what the job's mode needs.
    """
    fixed = {"sync.merge.meanTensors": job.spec.sync.merge.mean_tensors, **make_mode(job).fixed_fields(job)}
    return {name: json_digest(value) for name, value in fixed.items()}


def complete_tape(tape: Tape, checkpoints: Checkpoints, restored: Restored) -> None:
    """Append the lines that a crash took, and write down where the tape is ahead of the store."""
    versions = [record.version for record in restored.newest]
    for record in checkpoints.newer_than(tape.newest, versions):
        tape.append(record, late=True)
    reasons = {fragment: why for fragment, _, why in restored.discarded}
    for fragment, version in enumerate(versions):
        if tape.newest.get(fragment, 0) > version:
            restored.behind = True
            why = reasons.get(fragment, "newer records are not in the store")
            body = {"fragment": fragment, "epoch": checkpoints.epoch.number, "version": version, "reason": why}
            tape.append_note(DISCARDED, time.time(), body)
    tape.flush()


def settings_line(job: DiLoCoJob, epoch: int, restored: Restored) -> dict[str, Any]:
    """What the tape says of a start: by which rules, release and processor merges are made from now on."""
    return {
        "epoch": epoch,
        "release": metadata.version("decoupled-diloco"),
        "machine": f"{platform.machine()}, numpy {np.__version__}",
        "layout": restored.layout.digest if restored.layout is not None else "",
        "learners": {region.name: region.learners for region in job.spec.regions},
        "sync": job.spec.sync.model_dump(mode="json"),
        "max_steps": job.spec.max_steps_alone,
    }


def replay(syncer: Syncer, restored: Restored) -> None:
    """Tell the core what is newer than its state: records, then offers. Call it in the event loop."""
    core = syncer.core
    if syncer.model.outer_state_reset:
        optimizer = syncer.job.spec.sync.outer.optimizer
        core.record_event(EventKind.OUTER_RESTART, f"the outer optimizer is {optimizer} now: its state begins anew")
    if restored.layout is not None and not core.initialised:
        layout = restored.layout
        syncer.driver.handle(InitialModelStored(layout.digest, tuple(layout.elements(p) for p in range(len(layout)))))
    replay_records(core, restored.newer, [offer.header for offer in restored.offers])
    for offer in restored.offers:
        try:
            handle = syncer.offers.restore_offer(offer)
        except codec.CodecError as error:
            log.error("spooled offer %s cannot be used: %s", offer_name(offer.header), error)
            continue
        if not core.restore_offer(offer.header, handle, offer.norm):
            syncer.offers.release(ReleasePush(handle))
    if restored.core is not None:
        merges, offers = len(restored.newer), len(restored.offers)
        log.info("restored: versions %s, %d merges after the state, %d offers", core.versions, merges, offers)
        log.info("merges: %s", syncer.model.merging)
