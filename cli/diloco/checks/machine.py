"""What a job needs of the machine that runs it, other than its model: programs, data, packages of its data source."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from diloco.data_files import is_text_file, refused_data
from diloco.packages import is_installed
from diloco.processes.worker_specs import without_meaning
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import Problem
from diloco_protocol.spec.warnings import spans_clusters

_HARMLESS = frozenset({"test", "this", "antigravity", "turtle", "turtledemo", "idlelib"})
"""Modules of Python's own that no program needs, and whose names people give to files of theirs."""
_NEEDED = frozenset({"diloco_protocol", "diloco_worker", "grpc", "google", "numpy", "safetensors", "torch", "xxhash"})


def is_for_cluster(job: DiLoCoJob) -> bool:
    """Whether the job sets what only a cluster reads: what this machine lacks need not stop it."""
    return spans_clusters(job.spec) or bool(without_meaning(job))


def find_absent(job: DiLoCoJob, directory: Path) -> list[Problem]:
    """What of the job is not on this machine, or cannot be read here. ``directory``: the job file's, where relative
    paths start."""
    return [*refused_data(job, directory), *find_absent_programs(job, directory), *find_absent_modules(job, directory)]


def find_absent_programs(job: DiLoCoJob, directory: Path) -> Iterator[Problem]:
    """Programs of the job's own, or their scripts, that are not there."""
    for role, command in (("learners", job.spec.learners.command), ("evaluator", job.spec.evaluator.command)):
        if command is None:
            continue
        program, script, field = command[0], command[1] if len(command) > 1 else "", f"spec.{role}.command"
        if not (program == "python" or shutil.which(program) or os.access(directory / program, os.X_OK)):
            yield Problem(field, command, f"there is no program {program}: it is looked for on PATH and in {directory}")
        elif script.endswith(".py") and not (directory / script).is_file():
            yield Problem(field, command, f"there is no {script} in {directory}, where the job file is")


def find_shadowing_modules(job: DiLoCoJob, directory: Path) -> Iterator[Problem]:
    """Files beside a program of the job's that are imported in place of a module of Python's own, of a package that
    learners need, or of one that the program imports."""
    for role, command in (("learners", job.spec.learners.command), ("evaluator", job.spec.evaluator.command)):
        script = directory / command[1] if command is not None and len(command) > 1 else None
        if command is None or script is None or script.suffix != ".py" or not script.is_file():
            continue
        names = {path.stem: path.name for path in script.parent.glob("*.py")}
        names |= {path.parent.name: f"{path.parent.name}/" for path in script.parent.glob("*/__init__.py")}
        hidden = names.keys() & (sys.stdlib_module_names - _HARMLESS)
        text = script.read_text(encoding="utf-8", errors="replace")
        imported = set(re.findall(r"^\s*(?:import|from)\s+(\w+)", text, re.M))
        hidden |= {name for name in names.keys() & (_NEEDED | imported) if _is_elsewhere(name, script.parent)}
        if hidden:
            shown = ", ".join(names[name] for name in sorted(hidden))
            what = "has the name of a module that is" if len(hidden) == 1 else "have the names of modules that are"
            message = f"{shown} in {script.parent} {what} installed, and would be imported instead: rename them"
            yield Problem(f"spec.{role}.command", command, message)


def _is_elsewhere(name: str, folder: Path) -> bool:
    """Whether a module of that name is installed, beside that of the folder."""
    found = importlib.machinery.PathFinder.find_spec(name, [path for path in sys.path if Path(path) != folder])
    return found is not None and Path(found.origin or folder).parent not in (folder, folder / name)


def find_absent_modules(job: DiLoCoJob, directory: Path) -> Iterator[Problem]:
    """Modules that the job's data source needs and that cannot be imported here."""
    data = job.spec.training.data
    if data is None:
        return
    if data.source == "datasets" and not is_text_file(data, directory) and not is_installed("datasets"):
        fix = "pip install 'decoupled-diloco[datasets]'"
        yield Problem("spec.training.data.source", "datasets", f"the package datasets is not installed: {fix}")
    if data.source == "python" and data.function is not None:
        module = data.function.partition(":")[0].partition(".")[0]
        if not _is_module(module, directory):
            message = f"there is no module {module}: put {module}.py into {directory}, or install it"
            yield Problem("spec.training.data.function", data.function, message)


def _is_module(name: str, directory: Path) -> bool:
    if (directory / f"{name}.py").is_file() or (directory / name).is_dir():
        return True
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False
