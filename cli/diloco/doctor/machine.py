"""This machine: cores, memory, disk, Python, the packages that commands need, torch and its devices."""

from __future__ import annotations

import functools
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from diloco import packages
from diloco.checks.memory import free_memory
from diloco.doctor.findings import Finding
from diloco_protocol.common.cpu_quota import usable_cores
from diloco_protocol.common.format_units import size_text

_finding = functools.partial(Finding, "machine")
_GIB = 1 << 30
LITTLE_MEMORY, NO_MEMORY = 2 * _GIB, _GIB // 2
LITTLE_DISK, NO_DISK = 5 * _GIB, _GIB // 2
FEW_FILES = 1024
TORCH_SECONDS = 120.0

EXTRAS = {
    "syncer": "`diloco run` and `diloco syncer serve`",
    "worker": "`diloco run` and `diloco learner join`",
    "kube": "clusters: `diloco apply` and the like",
    "datasets": "`source: datasets`, Parquet and Arrow files",
    "tensorboard": "TensorBoard's events",
    "report": "plots in `diloco report --html`",
}
"""Extras of the package, and what needs them. Without the first two no job runs here."""

_TORCH = """
import json, torch
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
devices = [torch.cuda.get_device_properties(n) for n in range(count)]
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda,
    "devices": [{"name": d.name, "memory": d.total_memory} for d in devices],
}))
"""


@dataclass(frozen=True, slots=True)
class Torch:
    """What torch says of itself, asked in a process of its own. ``devices``: name and bytes of each GPU."""

    version: str
    cuda: str | None
    devices: tuple[tuple[str, int], ...]


def check_machine(directory: Path) -> Iterator[Finding]:
    """``directory``: where a run would keep its files."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield _finding("python", "ok", f"{version}, decoupled-diloco {metadata.version('decoupled-diloco')}")
    cores, there = usable_cores(), os.cpu_count() or 1
    said = f"{cores}" + (f" of {there}: what this process may use" if cores < there else "")
    few = cores < 2
    yield _finding(
        "cores",
        "warning" if few else "ok",
        said,
        fix="syncer and learners share one core: expect little" if few else "",
    )
    yield _graded("memory", free_memory(), LITTLE_MEMORY, NO_MEMORY, fix="end other programs, or use a larger machine")
    try:
        free = shutil.disk_usage(directory).free
        yield _graded(
            "disk", free, LITTLE_DISK, NO_DISK, fix=f"make room below {directory}, or run with --workdir elsewhere"
        )
    except OSError as error:
        yield _finding("disk", "error", f"{directory}: {error.strerror}", fix="run from another directory")
    if not os.access(directory, os.W_OK | os.X_OK):
        yield _finding("directory", "error", f"{directory} cannot be written", fix="run with --workdir elsewhere")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < FEW_FILES:
        yield _finding("open files", "warning", f"at most {files}", fix=f"ulimit -n {FEW_FILES} or more")
    try:
        with socket.create_server(("127.0.0.1", 0)):
            pass
    except OSError as error:
        yield _finding(
            "network", "error", f"nothing can listen on 127.0.0.1: {error.strerror}", fix="bring up the loopback device"
        )


def _graded(about: str, free: int, little: int, none: int, fix: str) -> Finding:
    level = "error" if free < none else "warning" if free < little else "ok"
    return _finding(about, level, f"{size_text(free)} free", fix="" if level == "ok" else fix)  # type: ignore[arg-type]


# ------------------------------------------------------------------ packages


def absent_packages() -> dict[str, list[str]]:
    """Packages of each extra that are not installed; extras that are whole have none."""
    return {extra: packages.absent_packages([extra]) for extra in EXTRAS}


def check_packages(absent: Mapping[str, list[str]]) -> Iterator[Finding]:
    """``absent``: of absent_packages."""
    for extra, missing in absent.items():
        use = EXTRAS[extra]
        if not missing:
            yield Finding("packages", extra, "ok", f"installed, for {use}")
            continue
        level = "error" if extra in packages.HERE else "ok"
        said = f"not installed ({', '.join(missing)}); {'needed' if level == 'error' else 'only'} for {use}"
        yield Finding("packages", extra, level, said, fix=f"pip install 'decoupled-diloco[{extra}]'")  # type: ignore[arg-type]


# ------------------------------------------------------------------ torch


def check_torch(installed: bool) -> tuple[Torch | None, list[Finding]]:
    """torch as a learner would find it; None: it is not there or cannot be loaded."""
    cards = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    if not installed:
        return None, []  # the packages say so
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TORCH], capture_output=True, text=True, timeout=TORCH_SECONDS, check=False
        )
        told = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        told, why = None, f"it does not load within {TORCH_SECONDS:.0f} s"
    except (OSError, ValueError, IndexError) as error:
        told, why = None, str(error)
    if told is None:
        return None, [
            Finding("gpu", "torch", "error", f"cannot be loaded: {why}", fix="install torch again, as its page says")
        ]
    devices = tuple((str(one["name"]), int(one["memory"])) for one in told["devices"])
    torch = Torch(told["version"], told["cuda"], devices)
    built = f"built for CUDA {torch.cuda}" if torch.cuda else "built without CUDA"
    found = [Finding("gpu", "torch", "ok", f"{torch.version}, {built}")]
    for name, memory in devices:
        found.append(Finding("gpu", "device", "ok", f"{name}, {size_text(memory)}"))
    if cards and not devices:
        fix = (
            "the driver is too old for this torch, or CUDA_VISIBLE_DEVICES hides them: see nvidia-smi"
            if torch.cuda
            else "install the torch that is built for your CUDA version, as PyTorch's install page says"
        )
        found.append(Finding("gpu", "device", "warning", f"torch does not see {', '.join(cards)}", fix=fix))
    elif not devices:
        found.append(Finding("gpu", "device", "ok", "none: learners train on the CPU"))
    return torch, found
