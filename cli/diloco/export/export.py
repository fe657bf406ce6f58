"""``diloco export``: the merged model of a run as a directory that transformers loads.

Reads the store beside whoever writes it, so a run may be going on: of every fragment it
takes the newest durable version, as a restart of the syncer would, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diloco.console import CommandError
from diloco.export.remote_model import RemoteModelError, fetch_model
from diloco.processes.workdir import Workdir
from diloco_protocol.arrays.layout import Layout
from diloco_protocol.common.files import FileError
from diloco_protocol.spec.job import DiLoCoJob
from diloco_protocol.spec.load import JobError, read_job
from diloco_syncer.server.pages.model_file import NotSafetensors, as_float32, frozen_entries
from diloco_syncer.store.base import ObjectNotFound, Store
from diloco_syncer.store.directory import DirectoryStore
from diloco_syncer.store.records import Damaged, FormatRefused
from diloco_syncer.store.restore import StoreReader, StoreUnusable

TRIES = 5  # a running syncer may remove a version just as it is read


class ExportFailed(CommandError):
    """Nothing was written; the message says why and the cure."""


def export_run(workdir: Workdir, out: Path) -> None:
    """Write the run's merged model to ``out``. Raises ExportFailed."""
    try:
        job = read_job(workdir.job)
        if not (workdir.store / "initial.json").is_file():
            raise ExportFailed(f"{workdir.path} holds no model yet: its run has not got to version 0")
        store = DirectoryStore(workdir.store)
        tensors, versions = read_model(store, job.metadata.name)
    except FileNotFoundError as error:
        raise ExportFailed(f"{workdir.path} is no run's directory: {error.filename} is missing") from error
    except (Damaged, FormatRefused, FileError, JobError, OSError) as error:
        raise ExportFailed(str(error)) from error
    _write_model(job, tensors, versions, out, workdir.job_directory())


def export_url(url: str, out: Path, progress: Callable[[int, int], None]) -> None:
    """The same from a syncer's export listener (remote_model.py). Raises ExportFailed."""
    try:
        job, tensors, versions = fetch_model(url, progress)
    except RemoteModelError as error:
        raise ExportFailed(str(error)) from error
    _write_model(job, tensors, versions, out, None)


def _write_model(
    job: DiLoCoJob, tensors: Mapping[str, NDArray[Any]], versions: Sequence[int], out: Path, directory: Path | None
) -> None:
    """Write a directory that transformers loads, and say so. ``directory``: where the job's relative paths start."""
    from diloco_worker.training.export import ExportError, export

    if job.spec.training.model is None:
        raise ExportFailed("the job has no spec.training.model: only its own program (learners.command) can build it")
    try:
        export(job, tensors, out, directory=directory)
    except (ExportError, JobError) as error:
        raise ExportFailed(str(error)) from error
    print(f"{out}: the merged model, fragments at versions {min(versions)} to {max(versions)}")


def read_model(store: Store, job: str) -> tuple[dict[str, NDArray[Any]], list[int]]:
    """Every parameter of the merged model by name, float32, and the fragments' versions: those that
    a restart of the syncer would go on from.

    Raises ExportFailed, and what the store raises for damaged objects.
    """
    for last in [False] * (TRIES - 1) + [True]:
        reader = StoreReader(store, job)
        try:
            layout = reader.layout()
            if layout is None or reader.initial is None:
                raise ExportFailed("the store has no version 0 yet")
            chains = reader.newest(layout).chains
            if any(chain.unusable for chain in chains) and not last:
                continue  # damaged, or removed by the syncer while we read
            tensors = assemble(layout, [chain.newest.theta for chain in chains])
            if reader.initial["frozen"]:
                tensors |= _frozen(reader.blob(reader.initial["frozen"]))
            return tensors, [chain.newest.version for chain in chains]
        except StoreUnusable as error:
            if last:
                raise ExportFailed(str(error)) from error
        except ObjectNotFound as error:
            if last:
                raise ExportFailed(f"the store lacks {error}: restore it from a copy") from error
    raise AssertionError("unreachable")


def assemble(layout: Layout, fragments: Sequence[NDArray[np.float32]]) -> dict[str, NDArray[Any]]:
    """Tensors by name from the fragments' flat vectors. Raises ExportFailed if a size is off."""
    shapes = {tensor.name: tensor.shape for tensor in layout.tensors}
    flat = {tensor.name: np.empty(tensor.elements, np.float32) for tensor in layout.tensors}
    for index, (pieces, theta) in enumerate(zip(layout.fragments, fragments, strict=True)):
        if theta.size != layout.elements(index):
            raise ExportFailed(f"fragment {index} has {theta.size} elements, the layout says {layout.elements(index)}")
        for piece in pieces:
            flat[piece.tensor][piece.start : piece.stop] = theta[piece.offset : piece.offset + piece.elements]
    return {name: values.reshape(shapes[name]) for name, values in flat.items()}


def _frozen(data: NDArray[np.uint8]) -> dict[str, NDArray[Any]]:
    try:
        entries, begin = frozen_entries(data)
    except NotSafetensors as error:
        raise ExportFailed(f"the store's frozen parameters cannot be read: {error}") from error
    return {
        entry.name: as_float32(data[begin + entry.start : begin + entry.stop].copy(), entry.dtype).reshape(entry.shape)
        for entry in entries
    }
