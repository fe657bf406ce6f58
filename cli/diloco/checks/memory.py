"""Whether a run fits into this machine's memory, by the arithmetic of ``diloco plan``."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diloco.processes.memory_kills import memory_groups, read_counts
from diloco_protocol.common.format_units import size_text
from diloco_protocol.resources import LOOP_BYTES, library_bytes, model_copies, needs, shared_bytes
from diloco_protocol.spec.job import DiLoCoJob
from diloco_worker.training.findings import ModelFacts

PROCESS_BYTES = 150 << 20
"""Of a learner or evaluator before its model, beside the libraries' pages that the processes of a run share."""


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes that a run takes on its machine, at the least: without activations and batches. ``syncer``: up to.
    ``learner``: each of ``learners``, all its ranks together; of learners of unequal regions the largest.
    ``all_learners``: together. ``evaluator``: 0 where there is none. ``device``: of the GPU of the rank that needs
    most; 0: there is none."""

    syncer: int
    learner: int
    learners: int
    evaluator: int
    all_learners: int
    device: int = 0

    @property
    def whole(self) -> int:
        return self.syncer + self.all_learners + self.evaluator

    def text(self) -> str:
        return f"the job needs at least about {size_text(self.whole)} of memory ({self.parts_text()})"

    def parts_text(self) -> str:
        equal = self.all_learners == self.learner * self.learners
        each = f"{size_text(self.learner)} for each of {self.learners} learners"
        if not equal:
            each = f"{size_text(self.all_learners)} for {self.learners} learners"
        scored = f", {size_text(self.evaluator)} for the evaluator" if self.evaluator else ""
        return f"{size_text(self.syncer)} for the syncer, {each}{scored}, without activations"


def estimate_memory(job: DiLoCoJob, model: ModelFacts, device: str) -> MemoryNeed:
    """What the job's processes take if all of them run on one machine. ``device``: where learners train, cpu or cuda.

    Processes beyond the job's learners and spares (maxLearners) join from other machines."""
    spec = job.spec
    each, devices = list[int](), [0]
    for region in spec.regions:
        ranks, copies = spec.group(region.name).ranks, model_copies(spec, region.name)
        library = library_bytes(spec, model.fragments) + shared_bytes(spec.group(region.name), model.fragments)
        loop = (LOOP_BYTES * model.trained + model.bytes - 4 * model.trained) * copies
        # For a GPU the first rank builds it on the host.
        here = max(library, model.bytes) if device == "cuda" else library + loop
        each += [PROCESS_BYTES * ranks + here] * (region.learners + region.spares)
        devices += [(loop + 8 * max(model.fragments) * copies) // ranks] * (device == "cuda")
    evaluator = PROCESS_BYTES + model.bytes if spec.evaluated and spec.evaluator.command is None else 0
    syncer = needs(spec, model.fragments).syncer_memory
    return MemoryNeed(syncer, max(each), len(each), evaluator, all_learners=sum(each), device=max(devices))


def memory_shortage(need: MemoryNeed, free: int, device_bytes: int = 0) -> str:
    """The sentence that says by how much a run does not fit; empty: it does. ``device_bytes``: of the smallest GPU; 0:
    not known."""
    if device_bytes and need.device > device_bytes:
        return (
            f"a rank needs at least about {size_text(need.device)} of its GPU, which has {size_text(device_bytes)}, "
            "without activations: divide the model among more processes (learners.processes, with a smaller "
            "training.parallel.replicate), or take a smaller model"
        )
    if need.whole <= free:
        return ""
    one = need.syncer + need.learner + need.evaluator
    fewer = "fewer learners (--set regions.0.learners=N), " if need.learners > 1 and one <= free else ""
    return f"{need.text()}, and {size_text(free)} are free on this machine: {fewer}a smaller model, or a larger machine"


def size_line(model: ModelFacts, need: MemoryNeed) -> str:
    """The model's size, and what a process takes with it."""
    whole = model.bytes == 4 * model.parameters
    trained = "" if model.trained == model.parameters else f", {model.trained:,} of them trained"
    return (
        f"parameters {model.parameters:,} ({size_text(model.bytes)}{' float32' if whole else ''}){trained}; "
        f"per learner about {size_text(need.learner)}, syncer about {size_text(need.syncer)}"
    )


# ------------------------------------------------------------------ what is free

_MEMINFO, _CGROUPS, _OWN = Path("/proc/meminfo"), Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_VERSIONS = {
    "": ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}
"""Of both versions of control groups, by their folder: limit, use, and what of it the kernel gives back when asked."""


def free_memory(meminfo: Path = _MEMINFO, cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Bytes that programs can still have: of the machine, or of what its control groups grant this process if that is
    less. What files have cached counts as free."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(encoding="ascii"), re.M)
    free = int(found[1]) * 1024 if found else sys.maxsize
    return max(0, min([free, *_granted(cgroups, own)]))


def _granted(cgroups: Path, own: Path) -> Iterator[int]:
    for version, group in memory_groups(cgroups, own):
        limit, used, cached = _VERSIONS[version]
        try:
            left = int((group / limit).read_text()) - int((group / used).read_text())
        except (OSError, ValueError):  # no such group, or `max`: no limit
            continue
        yield left + sum(count for name, count in read_counts(group / "memory.stat").items() if name in cached)
