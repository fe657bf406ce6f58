"""Whether the system has killed processes for want of memory, and how much memory a job needs.

The kernel counts what its out-of-memory killer kills, for each control group and for the machine. A count that has
risen says why a process got SIGKILL that nobody here sent. One that has not proves little: a count may be another
namespace's, and daemons that watch memory (systemd-oomd) kill by themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from diloco_protocol.common.format_units import size_text
from diloco_protocol.resources import even_sizes, needs, plan_hint
from diloco_protocol.spec.job_spec import JobSpec

_COUNTS = {"": "memory.events", "memory": "memory.oom_control"}  # of both versions of control groups


def count_memory_kills(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """A number that rises when the kernel kills a process for want of memory, on the machine or in a control group of
    this process. None: nothing of it can be read."""
    own = [group / _COUNTS[kind] for kind, group in memory_groups(groups, proc / "self" / "cgroup")]
    counts = [read_counts(path).get("oom_kill") for path in (proc / "vmstat", *own)]
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def memory_groups(groups: Path, own: Path) -> Iterator[tuple[str, Path]]:
    """The control groups whose memory limits hold for this process, as far as they are shown to it, each with its
    version's folder: none for version 2, ``memory`` for version 1. ``groups``: where they are mounted; ``own``: the
    file that names this process's."""
    found: dict[str, set[PurePosixPath]] = {"": {PurePosixPath()}, "memory": {PurePosixPath()}}
    lines = []
    with contextlib.suppress(OSError):
        lines = own.read_text(encoding="utf-8", errors="replace").splitlines()
    for line in lines:
        _, kind, name = [*line.split(":", 2), "", ""][:3]
        if kind in found and ".." not in name.split("/"):
            path = PurePosixPath(name.lstrip("/"))
            found[kind] |= {path, *path.parents}
    return ((kind, groups / kind / path) for kind, paths in found.items() for path in paths)


def read_counts(path: Path) -> dict[str, int]:
    """What a file counts whose lines are a name and a number each; nothing if it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    return {name: int(count) for name, _, count in (line.partition(" ") for line in lines) if count.isdigit()}


def memory_need_text(spec: JobSpec, parameters: int) -> str:
    """What the job's processes need at the least, in words. ``parameters``: trained ones; 0: not known."""
    if not parameters:
        return plan_hint(spec)
    needed = needs(spec, even_sizes(parameters, max(1, min(spec.sync.fragments, parameters))))
    learners = sum(region.learners + region.spares for region in spec.regions)
    total = learners * needed.learner_memory + needed.syncer_memory
    return (
        f"each learner of this model needs at least {size_text(needed.learner_memory)}, the syncer up to "
        f"{size_text(needed.syncer_memory)}: {size_text(total)} for {learners} learner{'s' * (learners != 1)} on one "
        "machine, besides what the steps' activations take"
    )
